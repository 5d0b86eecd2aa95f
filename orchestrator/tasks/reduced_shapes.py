"""Makes a module small by rewriting the numbers that its author wrote, and says which.

The one idea: a size is a whole number in a module-level assignment or in `get_inputs`; each is halved until it fits,
so that what divides what mostly stays so. A module that does not run at one step is tried at the next. The module's
code is neither touched nor run here.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from warpsmith.sandbox import python_text


@dataclass(frozen=True)
class Step:
    """How far sizes are reduced. Numbers up to a limit stay as they are."""

    extent: int
    """Most that an extent keeps."""
    batch: int
    """Most that a name with "batch" in it keeps; at least 2, for batch norm in train mode."""
    literals: bool = True
    """Whether numbers inside get_inputs are sizes too."""


PARTS: Final = 8
"""Most that a number of groups or heads keeps, so that each still holds several elements."""
UNLIMITED: Final = 1 << 62

STEPS: Final = (
    Step(512, 16), Step(128, 16), Step(64, 8), Step(32, 4), Step(16, 2),
    Step(64, 8, literals=False), Step(32, 4, literals=False), Step(128, 128), Step(UNLIMITED, 2),
    Step(UNLIMITED, UNLIMITED),
)  # fmt: skip
"""What is tried in turn: a batch as large as an extent, for modules in which one meets the other; then the batch alone
reduced; last, nothing."""


@dataclass(frozen=True)
class Reduced:
    """A module's source with smaller numbers."""

    source: str
    changes: tuple[str, ...]
    """Each number that changed, as "batch_size 4096 → 16"; a name that occurs twice is listed twice."""


@dataclass(frozen=True)
class _Number:
    """A whole number in the source, and where it stands."""

    node: ast.expr
    name: str
    value: int


def reduce(source: str, step: Step) -> Reduced:
    """The source with sizes reduced as far as a step says. Raises SyntaxError for what is no Python."""
    lines = source.encode().splitlines(keepends=True)
    changes = []
    found = _numbers(python_text.parse(source), step)
    numbers = sorted(found, key=lambda number: (number.node.lineno, number.node.col_offset))
    for number in reversed(numbers):  # from the end, so that places before stay right
        value = _fitting(number, step)
        if value == number.value:
            continue
        node = number.node
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [before + str(value).encode() + after]
        changes.append(f"{number.name} {number.value} → {value}")
    return Reduced(b"".join(lines).decode(), tuple(reversed(changes)))


def _fitting(number: _Number, step: Step) -> int:
    lowered = number.name.lower()
    if "batch" in lowered:
        return min(number.value, step.batch)  # nothing divides a batch
    if step.extent < UNLIMITED and any(part in lowered for part in ("group", "head")):
        return _halved(number.value, PARTS)
    return _halved(number.value, step.extent)


def _halved(value: int, most: int) -> int:
    """The value divided by a power of two until it fits; odd numbers stay odd."""
    reduced = value
    while reduced > most:
        reduced //= 2
    return reduced - 1 if value % 2 and reduced % 2 == 0 else reduced


def _numbers(tree: ast.Module, step: Step) -> Iterator[_Number]:
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=targets, value=value):
                yield from _of_value(value, targets)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _of_value(value, [target])
            case ast.FunctionDef(name="get_inputs", body=body) if step.literals:
                for inner in body:
                    yield from _inside(inner, "get_inputs")


def _of_value(value: ast.expr, targets: Sequence[ast.expr]) -> Iterator[_Number]:
    target = targets[-1]
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for each, to in zip(value.elts, target.elts, strict=False):
            yield from _of_value(each, [to])
        return
    yield from _inside(value, ", ".join(ast.unparse(each) for each in targets))


def _inside(node: ast.AST, name: str) -> Iterator[_Number]:
    """The largest expressions of literal numbers at or below a node: `8192 * 2` is one number."""
    if isinstance(node, ast.expr):
        value = _value(node)
        if value is not None:
            yield _Number(node, name, value)
            return
    for child in ast.iter_child_nodes(node):
        yield from _inside(child, name)


_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip


def _value(node: ast.expr) -> int | None:
    """What an expression of whole-number literals stands for; None for any other."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            values = _value(left), _value(right)
            if values[0] is not None and values[1] is not None:
                return _OPERATIONS[type(op)](values[0], values[1])
    return None
