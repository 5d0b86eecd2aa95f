"""What a window does to a nest's axes.

The one idea: a window that slides over a dimension ties an output axis and a window axis to one position in it. Where
every index can be written in positions, columns of the data can be reduced before rows are: a `Tiling`. Where not, each
output walks its own window. Nothing here knows threads or memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.ir import Axis, Bound, Index, Nest, Reduced, Reduction, Windowed, walk

POSITIONS = ("w", "h", "d")
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

    @property
    def fields(self) -> dict[str, int]:
        """Its numbers by name."""
        return {name: getattr(self, name) for name in ("data", "outputs", "size", "stride", "dilation", "padding")}

    def span(self, outputs: int) -> int:
        """Positions from the first element of the first window to the last of the last, over neighbouring outputs."""
        return (outputs - 1) * self.stride + self.reach + 1


STILL = Slide("", 1, None, None, 1, 1, 0)
"""Stands for a dimension that is not there."""


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
        and all(reduction.operation in ("max", "min", "sum") for reduction in nest.reductions)
        and not nest.scans
        and not any(nest.is_element_store(store) for store in nest.stores)
        and iteration_space.is_safe_in_place(nest)
    )


def tiling(nest: Nest) -> Tiling | None:
    """The simplified nest for reducing along columns first; None where indices or other reductions forbid it."""
    positions = nest.windows[0].positions
    uniform = all(isinstance(r, Windowed) and r.positions == positions for r in nest.reductions)
    dependent = any(isinstance(part, Reduced) for r in nest.reductions for part in walk(r.value))
    if not uniform or dependent or not nest.parallel:
        return None
    found = slides(nest, nest.windows[0])
    covered = {axis.name for slide in found or () if (axis := slide.element)}
    if found is None or covered != {axis.name for axis in nest.reduced if axis.extent > 1}:
        return None
    row, outer = row_and_others(nest, found)
    moved = {index: in_positions(index, found) for index in iteration_space.indices(replace(nest, stores=()))}
    if None in moved.values():
        return None
    values = iteration_space.reindexed(replace(nest, stores=()), lambda index: moved[index] or index, (), ()).reductions
    reductions = tuple(Reduction(r.name, r.operation, r.value, r.type) for r in values)
    added = tuple(Axis(slide.position, slide.data) for slide in found)
    return Tiling(replace(nest, parallel=nest.parallel + added, reductions=reductions), outer, row)


def slides(nest: Nest, window: Windowed) -> list[Slide] | None:
    """How a window moves over each dimension of its data, outermost first; None where a position mixes several axes."""
    positions = zip(reversed(window.positions), POSITIONS, strict=False)
    found = [slide for bound, name in positions if (slide := _slide(nest, bound, name)) is not None]
    return found[::-1] if len(found) == len(window.positions) else None


def row_and_others(nest: Nest, found: Sequence[Slide]) -> tuple[Slide, tuple[Slide, ...]]:
    """The slide along the innermost output axis, of one element where no window slides there, and the others."""
    inner = nest.parallel[-1]
    row = next((slide for slide in found if slide.output and slide.output.name == inner.name), None)
    others = tuple(slide for slide in found if slide is not row)
    return row or Slide(inner.name, inner.extent, inner, None, 1, 1, 0), others


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


def in_positions(index: Index, slides: Sequence[Slide]) -> Index | None:
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
