"""Convolutions among nests: recognised, and put into what is seen, what weights it, and how windows slide.

The one idea: a nest that sums, over windows that slide and perhaps over channels, products of something that lies at
positions of the data with something that does not know them is a convolution. What is seen can be brought on chip
once, with padding around it, and every output walks its window there. Nothing here knows threads or memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space, sliding_window
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    Call,
    Expression,
    Load,
    Nest,
    Reduction,
    Windowed,
    remembered,
)
from agent_synthesis.nests.sliding_window import Slide
from agent_synthesis.nests.tailed import Tailed

MOST_MULTIPLY_ADDS = 16
"""For each byte of the data and the result, up to which a convolution of ours is worth a try: about twice what a GPU's
plain floats make in the time in which a byte is moved (51 Tflop/s and 4.3 TB/s on an H200). Libraries take several
times what memory would, up to there."""
FEW_CHANNELS = 16
"""Of a group, with fewer of which, seen or made, a library's tiles of both operands stay empty for the most part."""


@dataclass(frozen=True)
class Convolution:
    """sum over `channels` and the slides' elements of seen · weight, at every output; then the nest's stores."""

    nest: Nest
    """Simplified, with the positions as further parallel axes."""
    outer: tuple[Slide, ...]
    """Dimensions that the window slides over, outermost first, without the row's."""
    row: Slide
    """The dimension of the innermost output axis; a window of one element where none slides over it."""
    channels: tuple[Axis, ...]
    """Reduced axes that move no window."""
    reduction: Reduction
    """Named as in the nest."""
    seen: Expression
    """What lies at a position, in a channel."""
    weight: Expression
    """Of an element, in a channel; may know axes of outputs that no window slides over."""
    window: Windowed
    """What the nest has in the place of `reduction`."""

    @property
    def down(self) -> Slide | None:
        """The slide next to the row's."""
        return self.outer[-1] if self.outer else None

    @property
    def others(self) -> list[Axis]:
        """Axes of outputs but those of the row and of `down`, outermost first."""
        near = [self.row, *self.outer[-1:]]
        gone = {slide.position for slide in (*self.outer, self.row)} | {s.output.name for s in near if s.output}
        return [axis for axis in self.nest.parallel if axis.name not in gone]

    @property
    def made(self) -> Axis | None:
        """An axis of outputs that see the same by weights of their own, without the row's."""
        own = axes_of(self.weight) - axes_of(self.seen)
        return next((axis for axis in reversed(self.others) if axis.name in own), None)

    @property
    def weight_varies_along_row(self) -> bool:
        """Whether neighbouring outputs of a row have weights of their own."""
        return self.row.output is not None and self.row.output.name in axes_of(self.weight)


def convolves(nest: Nest) -> bool:
    """Whether it weights the elements of windows, in any form."""
    if isinstance(nest, Tailed):
        return True
    return any(window.is_weighted for window in nest.windows)


@remembered
def is_hopeful(nest: Nest) -> bool:
    """Whether memory, rather than arithmetic, bounds what it convolves; true of a nest that convolves nothing."""
    for seen, weight in (factors(window) for window in nest.windows if window.is_weighted):
        moving = {axis for window in nest.windows for bound in window.positions for axis in bound.index.axes()}
        summed = math.prod(axis.extent for axis in nest.reduced if axis.name not in moving)
        own = axes_of(weight) - axes_of(seen) - moving
        made = math.prod(axis.extent for axis in nest.parallel if axis.name in own)
        read = {part.buffer for part in Interner().parts([seen]).values() if isinstance(part, Load)}
        moved = sum(b.element_count * b.type.size_bytes for b in nest.buffers if b.written or b.name in read)
        few = summed < FEW_CHANNELS or made < FEW_CHANNELS
        if not few or nest.row_count * nest.column_count > MOST_MULTIPLY_ADDS * moved:
            return False
    return True


def is_one_left(nest: Nest, taken: Callable[[Nest], bool]) -> bool:
    """Whether it is one convolution, worth a try, that a schedule for those does not take; several walk apart."""
    return len(nest.reductions) == 1 and is_hopeful(nest) and not taken(nest)


@remembered
def convolution(nest: Nest) -> Convolution | None:
    """The nest as one convolution; None where it has another form, or indices that no slides describe."""
    simple = iteration_space.narrowed(iteration_space.simplified(nest))
    if len(simple.reductions) != 1 or not simple.windows or not simple.parallel:
        return None
    (window,) = simple.windows
    found = sliding_window.slides(simple, window)
    if found is None or not window.is_weighted or any(simple.is_element_store(store) for store in simple.stores):
        return None
    moving = {axis.name for slide in found for axis in (slide.output, slide.element) if axis}
    seen, weight = factors(window)
    alone = replace(simple, stores=(), reductions=(Reduction(window.name, "sum", seen, window.type),))
    moved = {index: sliding_window.in_positions(index, found) for index in iteration_space.indices(alone)}
    if None in moved.values() or axes_of(weight) & {slide.output.name for slide in found if slide.output}:
        return None
    row, outer = sliding_window.row_and_others(simple, found)
    placed = iteration_space.reindexed(alone, lambda index: moved[index] or index, (), ()).reductions[0].value
    value = Call("mul", (placed, weight), window.type)
    reduction = Reduction(window.name, "sum", value, window.type)
    added = tuple(Axis(slide.position, slide.data) for slide in found)
    nest = replace(simple, parallel=simple.parallel + added, reductions=(reduction,))
    channels = tuple(axis for axis in simple.reduced if axis.name not in moving and axis.extent > 1)
    return Convolution(nest, outer, row, channels, reduction, placed, weight, window)


def factors(window: Windowed) -> tuple[Expression, Expression]:
    """What is seen of a weighted window's element, and its weight."""
    match window.value:
        case Call("mul", (seen, weight)):
            return seen, weight
    raise AssertionError(f"{window.name} is weighted and no product: {window.value}")


def axes_of(expression: Expression) -> frozenset[str]:
    """Axes that a value depends on."""
    parts = Interner().parts([expression]).values()
    return frozenset(axis for part in parts if isinstance(part, Load | AxisValue) for axis in part.index.axes())
