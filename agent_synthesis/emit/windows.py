"""What a window does to a nest's axes, and the loops over one window: shared by the window schedules of both targets.

The one idea: a window that slides over a dimension ties an output axis and a window axis to one position in it. Where
every index can be written in positions, columns of the data can be reduced before rows are: a `Tiling`. Where not, each
output walks its own window. Nothing here knows threads or memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit import shape
from agent_synthesis.emit.expression import Function, Scope
from agent_synthesis.emit.spelling import literal
from agent_synthesis.nests.ir import (
    Axis,
    Bound,
    Index,
    Nest,
    Reduced,
    Reduction,
    Windowed,
    walk,
)

_POSITIONS = ("w", "h", "d")
"""Names of positions along the last dimensions, the last first."""


@dataclass(frozen=True)
class Slide:
    """One dimension of the data, and how the window moves over it.

    Element `k` of output `o` lies at `o · stride + k · dilation − padding`, inside where that is 0 … data − 1.
    """

    position: str
    """Name of the position as an axis."""
    data: int
    """Extent of the data."""
    output: Axis | None
    """The axis of outputs; None where there is one only."""
    element: Axis | None
    """The axis of the window's elements; None where there is one only."""
    stride: int
    dilation: int
    padding: int

    @property
    def outputs(self) -> int:
        """Number of outputs along the dimension."""
        return self.output.extent if self.output else 1

    @property
    def size(self) -> int:
        """Elements of a window along the dimension."""
        return self.element.extent if self.element else 1

    @property
    def reach(self) -> int:
        """Distance from a window's first element to its last."""
        return (self.size - 1) * self.dilation

    @property
    def may_be_outside(self) -> bool:
        """Whether some window hangs over an edge."""
        return self.padding > 0 or (self.outputs - 1) * self.stride + self.reach - self.padding >= self.data

    def span(self, outputs: int) -> int:
        """Positions from the first element of the first window to the last of the last, over neighbouring outputs."""
        return (outputs - 1) * self.stride + self.reach + 1


@dataclass(frozen=True)
class Tiling:
    """A nest whose windows can be reduced along columns first and along rows then."""

    nest: Nest
    """With the positions as further parallel axes, and the values of reductions written in them."""
    outer: tuple[Slide, ...]
    """Dimensions that the window slides over, outermost first, without the row's."""
    row: Slide
    """The dimension of the innermost output axis; a window of one element where none slides over it."""

    @property
    def outputs(self) -> list[Axis]:
        """Axes of outputs without the row's, outermost first."""
        positions = {slide.position for slide in (*self.outer, self.row)}
        row = self.row.output.name if self.row.output else ""
        return [axis for axis in self.nest.parallel if axis.name not in positions | {row}]


def is_window(nest: Nest) -> bool:
    """Whether it is a reduction over sliding windows that a window schedule can run."""
    return (
        bool(nest.windows)
        and all(_is_left_in_a_loop(nest, bound) for window in nest.windows for bound in window.positions)
        and all(reduction.operation in ("max", "min", "sum") for reduction in nest.reductions)
        and not nest.scans
        and not any(nest.is_element_store(store) for store in nest.stores)
        and shape.is_safe_in_place(nest)
    )


def _is_left_in_a_loop(nest: Nest, bound: Bound) -> bool:
    """Whether a position that may be outside moves with an element of the window."""
    low, high = bound.index.bounds(nest.extents)
    within = low >= 0 and high < bound.extent
    return within or bool(bound.index.axes() & {axis.name for axis in nest.reduced})


def tiling(nest: Nest) -> Tiling | None:
    """The simplified nest for reducing along columns first; None where indices or other reductions forbid it."""
    positions = nest.windows[0].positions
    uniform = all(isinstance(r, Windowed) and r.positions == positions for r in nest.reductions)
    dependent = any(isinstance(part, Reduced) for r in nest.reductions for part in walk(r.value))
    if not uniform or dependent or not nest.parallel:
        return None
    slides = [_slide(nest, bound, name) for bound, name in zip(reversed(positions), _POSITIONS, strict=False)]
    found = [slide for slide in reversed(slides) if slide is not None]
    covered = {axis.name for slide in found if (axis := slide.element)}
    if len(found) != len(positions) or covered != {axis.name for axis in nest.reduced if axis.extent > 1}:
        return None
    inner = nest.parallel[-1]
    row = next((slide for slide in found if slide.output and slide.output.name == inner.name), None)
    outer = tuple(slide for slide in found if slide is not row)
    if row is None:
        row = Slide(inner.name, inner.extent, inner, None, 1, 1, 0)
    moved = {index: _moved(index, found) for index in shape.indices(replace(nest, stores=()))}
    if None in moved.values():
        return None
    values = shape.reindexed(replace(nest, stores=()), lambda index: moved[index] or index, (), ()).reductions
    reductions = tuple(Reduction(r.name, r.operation, r.value, r.type) for r in values)
    added = tuple(Axis(slide.position, slide.data) for slide in found)
    return Tiling(replace(nest, parallel=nest.parallel + added, reductions=reductions), outer, row)


def position_of(slide: Slide) -> Index:
    """The position as an index over the output's and the window's axes."""
    index = Index(-slide.padding)
    if slide.output:
        index = index + Index.axis(slide.output.name, slide.stride)
    if slide.element:
        index = index + Index.axis(slide.element.name, slide.dilation)
    return index


def _slide(nest: Nest, bound: Bound, name: str) -> Slide | None:
    """The slide that a position describes; None where it mixes several axes."""
    names = bound.index.axes()
    outputs = [axis for axis in nest.parallel if axis.name in names]
    elements = [axis for axis in nest.reduced if axis.name in names]
    if len(outputs) > 1 or len(elements) > 1:
        return None
    stride = bound.index.coefficient(outputs[0].name) if outputs else 1
    dilation = bound.index.coefficient(elements[0].name) if elements else 1
    if stride is None or dilation is None or stride < 1 or dilation < 1 or not (outputs or elements):
        return None
    return Slide(
        name, bound.extent, outputs[0] if outputs else None, elements[0] if elements else None,
        stride, dilation, -bound.index.offset,
    )  # fmt: skip


def _moved(index: Index, slides: Sequence[Slide]) -> Index | None:
    """The index with output and window axes replaced by positions; None where it depends on them otherwise."""
    for slide in slides:
        outputs = index.coefficient(slide.output.name) if slide.output else None
        elements = index.coefficient(slide.element.name) if slide.element else None
        if (slide.output and outputs is None) or (slide.element and elements is None):
            return None
        step = outputs // slide.stride if outputs is not None else (elements or 0) // slide.dilation
        if outputs not in (None, step * slide.stride) or elements not in (None, step * slide.dilation):
            return None
        gone = {axis.name for axis in (slide.output, slide.element) if axis}
        kept = Index(index.offset, tuple(term for term in index.terms if term[0] not in gone))
        index = kept + Index.axis(slide.position, step).shifted(step * slide.padding)
    return index


# ---- text ----------------------------------------------------------------------------------------------


def name_elements(function: Function, window: Windowed) -> None:
    """Takes identifiers for the window's axes, after the positions that they move."""
    elements = {axis.name for axis in function.nest.reduced}
    for bound, position in zip(reversed(window.positions), _POSITIONS, strict=False):
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
