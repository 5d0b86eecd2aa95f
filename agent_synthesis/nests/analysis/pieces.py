"""A nest taken apart along an axis by which it chooses among tensors: the parts of a concatenation.

The one idea: inside a stretch of the axis the choice is made and no place hangs over an end, so what was looked up at a
place worked out for each element lies where an index says, and each part is a nest like any other. Parts that read the
same, as the halves of a rotary embedding do, are one nest, so that memory is read once.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Memory,
    Nest,
    Type,
    remembered,
    with_value,
)

MOST_PIECES = 8
"""Of a nest: each is a kernel."""
_LEAST_SHARE = 64
"""A part has one in so many elements at least: what is less, as a padding is, is not worth a kernel."""
_LEAST_RUN_BYTES = 128
"""What a part stores of a row at least where the parts of a row follow each other in memory: a line of the caches."""


@remembered
def pieces(nest: Nest) -> Sequence[Nest]:
    """The parts, which store all that the nest stores; none where it has one, too many, one that is small, or one that
    looks up as much as it does, or reads nothing."""
    axis, cuts = _cuts(nest)
    if axis is None or len(cuts) >= MOST_PIECES or not all(axis.name in store.index.axes() for store in nest.stores):
        return ()
    found = [_Piece(nest, axis, *ends).nest(k) for k, ends in enumerate(itertools.pairwise([0, *cuts, axis.extent]))]
    looked_up = _look_ups(nest)
    if not all(_look_ups(piece) < looked_up and _reads(piece) for piece in found):
        return ()
    if not nest.reductions:
        found = _joined(found)
    stores = [store for store in nest.stores if nest.is_element_store(store) or not nest.reductions]
    along = [nest.buffer(s.buffer).type.size_bytes for s in stores if s.index.coefficient(axis.name) == 1]
    least = max([axis.extent / _LEAST_SHARE, *(_LEAST_RUN_BYTES / size for size in along)])
    return () if len(found) > 1 and min(piece.extents[axis.name] for piece in found) < least else found


def _joined(found: Sequence[Nest]) -> list[Nest]:
    """Those of equal size of which the later reads at least half from where the earlier does are one nest, which stores
    for both at each point."""
    made: list[Nest] = []
    for piece in found:
        reads = _bytes_read(piece)
        for number, other in enumerate(made):
            shared = sum(reads[key] for key in reads.keys() & _bytes_read(other).keys())
            if other.parallel == piece.parallel and 2 * shared >= sum(reads.values()):
                names = {buffer.name for buffer in other.buffers}
                buffers = (*other.buffers, *(buffer for buffer in piece.buffers if buffer.name not in names))
                made[number] = replace(other, stores=(*other.stores, *piece.stores), buffers=buffers)
                break
        else:
            made.append(piece)
    return made


def _bytes_read(nest: Nest) -> dict[tuple[str, Index], int]:
    """Of each element that a point loads, what all points read there."""
    loads = [part for part in Interner().parts(iteration_space.roots(nest)).values() if isinstance(part, Load)]
    return {
        (load.buffer, load.index): nest.buffer(load.buffer).type.size_bytes
        * math.prod(axis.extent for axis in nest.parallel if axis.name in load.index.axes())
        for load in loads
    }


def _cuts(nest: Nest) -> tuple[Axis | None, list[int]]:
    """The parallel axis of most choices, and where they change."""
    found: dict[str, set[int]] = defaultdict(set)
    extents = {axis.name: axis.extent for axis in nest.parallel}
    for part in Interner().parts(iteration_space.roots(nest)).values():
        match part:
            case Call("lt" | "ge", (AxisValue(Index(offset, ((str(name), 1),)), _), Literal(value, Type.I64)), _):
                cut = int(value) - offset
                if 0 < cut < extents.get(name, 0):
                    found[name].add(cut)
    if not found:
        return None, []
    name = max(found, key=lambda each: len(found[each]))
    return next(axis for axis in nest.parallel if axis.name == name), sorted(found[name])


def _look_ups(nest: Nest) -> int:
    parts = Interner().parts(iteration_space.roots(nest)).values()
    return sum(isinstance(part, Call) and part.operation == "gather" for part in parts)


def _reads(nest: Nest) -> bool:
    parts = Interner().parts(iteration_space.roots(nest)).values()
    return any(isinstance(part, Load | Memory) for part in parts)


class _Piece:
    """A stretch of an axis."""

    def __init__(self, nest: Nest, axis: Axis, begin: int, end: int) -> None:
        self._nest, self._axis = nest, replace(axis, extent=end - begin)
        self._moved = {axis.name: Index.axis(axis.name).shifted(begin)}
        self._extents = {**nest.extents, axis.name: end - begin}
        self._known: dict[int, tuple[Expression, Expression]] = {}

    def nest(self, number: int) -> Nest:
        nest, name = self._nest, self._axis.name
        made = replace(
            nest,
            name=f"{nest.name}_piece{number}",
            parallel=tuple(self._axis if axis.name == name else axis for axis in nest.parallel),
            reductions=tuple(with_value(r, self._renewed(r.value), self._index) for r in nest.reductions),
            stores=tuple(
                replace(store, index=self._index(store.index), value=self._renewed(store.value))
                for store in nest.stores
            ),
        )
        parts = Interner().parts(iteration_space.roots(made)).values()
        used = {part.buffer for part in parts if isinstance(part, Load | Memory)} | {s.buffer for s in made.stores}
        return replace(made, buffers=tuple(buffer for buffer in nest.buffers if buffer.name in used))

    def _index(self, index: Index) -> Index:
        return index.substituted(self._moved, self._extents)

    def _renewed(self, expression: Expression) -> Expression:
        if id(expression) not in self._known:
            self._known[id(expression)] = (expression, self._made(expression))
        return self._known[id(expression)][1]

    def _made(self, expression: Expression) -> Expression:
        match expression:
            case Load() | AxisValue():
                return replace(expression, index=self._index(expression.index))
            case Call("where", (test, yes, no), _):
                decided = self._renewed(test)
                if isinstance(decided, Literal):
                    return self._renewed(yes if decided.value else no)
            case Call(operation, arguments, _):
                fresh = replace(expression, arguments=tuple(map(self._renewed, arguments)))
                return self._decided(operation, fresh)
            case _:
                return expression
        return replace(expression, arguments=tuple(map(self._renewed, expression.arguments)))

    def _decided(self, operation: str, call: Call) -> Expression:
        """What the stretch decides of a comparison, a bound or a place."""
        places = [_place(argument) for argument in call.arguments]
        if operation == "gather" and places[1] is not None and isinstance(memory := call.arguments[0], Memory):
            low, high = places[1].bounds(self._extents)
            if low >= 0 and high < self._nest.buffer(memory.buffer).element_count:
                return Load(memory.buffer, places[1], call.type)
        known = [argument for argument in call.arguments if isinstance(argument, Literal)]
        if operation in ("and", "or") and known and call.type is Type.BOOL:
            other = next((each for each in call.arguments if each is not known[0]), known[0])
            return other if bool(known[0].value) == (operation == "and") else known[0]
        if operation not in ("lt", "ge", "min", "max"):
            return call
        first, second = places
        if first is None or second is None:
            return call
        low, high = (first + second.scaled(-1)).bounds(self._extents)
        if operation in ("lt", "ge"):
            return call if low < 0 <= high else Literal((high < 0) == (operation == "lt"), Type.BOOL)
        if low < 0 < high:
            return call
        return call.arguments[0 if (high <= 0) == (operation == "min") else 1]


def _place(expression: Expression) -> Index | None:
    """A whole number as an index; None where it is no sum of multiples of axes."""
    match expression:
        case AxisValue(index, _):
            return index
        case Literal(value, Type.I64):
            return Index(int(value))
        case Call("add", (left, right), Type.I64):
            one, other = _place(left), _place(right)
            return one + other if one is not None and other is not None else None
        case Call("mul", (left, Literal(factor, Type.I64)), Type.I64):
            one = _place(left)
            return one.scaled(int(factor)) if one is not None else None
    return None
