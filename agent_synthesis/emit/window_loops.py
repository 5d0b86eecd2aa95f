"""What the window schedules of both targets share: names of a window's elements, and which of them are left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from agent_synthesis.emit.expression import Function, Scope
from agent_synthesis.emit.spelling import literal
from agent_synthesis.nests.ir import Bound, Reduction, Windowed
from agent_synthesis.nests.sliding_window import POSITIONS

Reuse = StrEnum("Reuse", "COLUMNS NONE")
"""What windows share: columns that are joined once, or nothing."""


def name_elements(function: Function, window: Windowed) -> None:
    """Takes identifiers for the window's axes, after the positions that they move."""
    elements = {axis.name for axis in function.nest.reduced}
    for bound, position in zip(reversed(window.positions), POSITIONS, strict=False):
        for name in bound.index.axes() & elements:
            function.axes[name] = function.names.take(f"k{position}")


@dataclass(frozen=True)
class Join:
    """How one reduction of a window is written."""

    reduction: Reduction
    operation: str
    """Functor of `ws`."""
    kind: str
    """Type of the accumulator."""
    neutral: str

    def step(self, accumulator: str, value: str) -> str:
        """The statement that takes one more value in."""
        if self.operation == "Sum" and self.reduction.type.is_float:
            return f"{accumulator} += {value};"
        return f"{accumulator} = ws::joined<ws::{self.operation}, {self.kind}>({accumulator}, {value});"


def joins(function: Function) -> list[Join]:
    """The reductions in order."""
    return [_join(function, reduction) for reduction in function.nest.reductions]


def _join(function: Function, reduction: Reduction) -> Join:
    type_ = reduction.type.compute
    neutral: float | int = 0
    if reduction.operation != "sum":
        largest = math.inf if type_.is_float else 2 ** (8 * type_.size_bytes - 1) - 1
        neutral = largest if reduction.operation == "min" else -largest - (0 if type_.is_float else 1)
    functor = {"sum": "Sum", "max": "Maximum", "min": "Minimum"}[reduction.operation]
    return Join(reduction, functor, function.dialect.storage[type_], literal(neutral, type_, function.dialect))


def walk_windows(scope: Scope, *, unroll: str, kind: str) -> None:
    """The reductions of one output, one after the other, in a scope that knows its axes; their names hold the results.

    `unroll`: the line over loops that the compiler should unroll. `kind`: type of loop variables.
    """
    function, axes = scope.function, scope.function.nest.reduced
    for join in joins(function):
        reduction, name = join.reduction, function.reductions[join.reduction.name]
        scope.line(f"{join.kind} {name} = {join.neutral};")
        tests = dict(left_out(function, reduction)) if isinstance(reduction, Windowed) else {}
        blocks = [scope]
        for depth, axis in enumerate(axes):
            blocks.append(blocks[-1].child([axis.name]))
            if depth in tests:
                blocks[-1].line(f"if ({tests[depth]}) continue;")
        blocks[-1].expect([reduction.value])
        blocks[-1].line(join.step(name, blocks[-1].converted(reduction.value, reduction.type)))
        for around, block, axis in reversed(list(zip(blocks, blocks[1:], axes, strict=False))):
            place = function.axes[axis.name]
            if unroll:
                around.line(unroll)
            around.enclose([f"for ({kind} {place} = 0; {place} < {axis.extent}; ++{place})"], block)
        scope.learn([f"%{reduction.name}"])


def left_out(function: Function, window: Windowed) -> Iterator[tuple[int, str]]:
    """Number of the reduced axis from which on a position is known → the condition under which it is outside."""
    waiting, known = list(window.positions), set(function.axes) - {axis.name for axis in function.nest.reduced}
    for depth, axis in enumerate(function.nest.reduced):
        known.add(axis.name)
        found = [bound for bound in waiting if bound.index.axes() <= known]
        waiting = [bound for bound in waiting if bound not in found]
        tests = [_outside(bound, function.nest.extents, f"({function.index(bound.index)})") for bound in found]
        if any(tests):
            yield depth, " || ".join(test for test in tests if test)


def _outside(bound: Bound, extents: Mapping[str, int], name: str) -> str:
    """The condition under which a position, held by `name`, is outside; empty where it never is."""
    low, high = bound.index.bounds(extents)
    tests = [f"{name} < 0"] * (low < 0) + [f"{name} >= {bound.extent}"] * (high >= bound.extent)
    return " || ".join(tests)
