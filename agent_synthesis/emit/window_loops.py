"""The loops over one window, shared by the window schedules of both targets. Nothing here knows threads or memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from agent_synthesis.emit.expression import Function, Scope
from agent_synthesis.emit.spelling import literal
from agent_synthesis.nests.ir import Axis, Bound, Reduction, Windowed
from agent_synthesis.nests.sliding_window import POSITIONS, Slide, position_of

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
    function = scope.function
    for join in joins(function):
        name = function.reductions[join.reduction.name]
        scope.line(f"{join.kind} {name} = {join.neutral};")
        _walk_window(scope, join, name, unroll, kind)
        scope.learn([f"%{join.reduction.name}"])


def _walk_window(scope: Scope, join: Join, name: str, unroll: str, kind: str) -> None:
    """Loops over the window's elements, each left early where its position is outside."""
    function, reduction = scope.function, join.reduction
    waiting = list(reduction.positions) if isinstance(reduction, Windowed) else []
    loops = Loops(scope)
    for axis in function.nest.reduced:
        loops.enter(axis, kind, unroll)
        for bound in [bound for bound in waiting if bound.index.axes() <= loops.inner.known]:
            waiting.remove(bound)
            if test := outside(bound, function.nest.extents, f"({function.index(bound.index)})"):
                loops.inner.line(f"if ({test}) continue;")
    loops.inner.expect([reduction.value])
    loops.inner.line(join.step(name, loops.inner.converted(reduction.value, reduction.type)))
    loops.close()


class Loops:
    """Nested loops: entered from the outside in, closed from the inside out, so that inner values may move out."""

    def __init__(self, scope: Scope) -> None:
        self.inner = scope
        """The innermost block so far."""
        self._open: list[tuple[Scope, list[str]]] = []

    def enter(self, axis: Axis, kind: str, before: str = "") -> None:
        """A loop over a whole axis, after a line such as a request to unroll it."""
        name = self.inner.function.axes[axis.name]
        head = f"for ({kind} {name} = 0; {name} < {axis.extent}; ++{name}) {{"
        self._open.append((self.inner, [before] * bool(before) + [head]))
        self.inner = self.inner.child([axis.name])

    def slide(self, slide: Slide, kind: str, offset: str) -> None:
        """A loop over the window's elements along a dimension, with their position; those outside are skipped."""
        function = self.inner.function
        if slide.element:
            self.enter(slide.element, kind)
        index, name = position_of(slide), function.axes[slide.position]
        self.inner.line(f"const {offset} {name} = {function.index(index)};")
        if test := outside(Bound(index, slide.data), function.nest.extents, name):
            self.inner.line(f"if ({test}) continue;")
        self.inner.learn([slide.position])

    def close(self) -> None:
        """Writes them all."""
        for around, head in reversed(self._open):
            for line in head:
                around.line(line)
            around.absorb(self.inner)
            around.line("}")
            self.inner = around
        self._open = []


def outside(bound: Bound, extents: Mapping[str, int], name: str) -> str:
    """The condition under which a position, held by `name`, is outside; empty where it never is."""
    low, high = bound.index.bounds(extents)
    tests = [f"{name} < 0"] * (low < 0) + [f"{name} >= {bound.extent}"] * (high >= bound.extent)
    return " || ".join(tests)
