"""Convolutions as matrix products: rows are positions of outputs, columns the channels that are made.

The one idea: every parallel axis of a convolution is a window's output, or known to what is seen, to the weight, or to
both: images, made channels, groups. The depth is the window's elements times the channels of a group. A transposed one
with a stride is several, one for each phase of its outputs (`phases`). Nothing here knows threads or memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis import convolution
from agent_synthesis.nests.analysis.convolution import Convolution, axes_of
from agent_synthesis.nests.analysis.products.phases import Phases, phased
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import Axis, Load, Nest, Type, Windowed, remembered
from agent_synthesis.nests.sliding_window import POSITIONS, STILL, Slide

T = TypeVar("T")


@dataclass(frozen=True)
class ConvolutionProduct:
    """sums[groups, images and outputs, made] = Σ over the window and `channels` of seen · weight."""

    convolution: Convolution
    slides: tuple[Slide, Slide, Slide]
    """Dimensions that the window slides over, outermost first; `STILL` before those that there are."""
    images: tuple[Axis, ...]
    """Axes that what is seen knows alone."""
    groups: tuple[Axis, ...]
    """Axes that both factors know."""
    made: tuple[Axis, ...]
    """Axes that the weight knows alone."""
    type: Type
    """Storage type of all that is multiplied."""
    window: Windowed
    """The window, whose positions are those of phase 0."""
    outputs: tuple[Axis, ...]
    """Axes of the nest's outputs along the slides."""
    phases: tuple[Phases | None, Phases | None, Phases | None] = (None, None, None)
    """Of a transposed convolution, along the slides: of which the slide has the first, with no outputs but its own."""

    @property
    def elements(self) -> int:
        """Of a window."""
        return math.prod(slide.size for slide in self.slides)

    @property
    def channels(self) -> int:
        """Of a group."""
        return points(self.convolution.channels)

    @property
    def is_along_channels(self) -> bool:
        """Whether channels of what is seen are neighbours in memory, rather than positions."""
        axes = {axis.name for axis in self.convolution.channels}
        loads = [part for part in Interner().parts([self.convolution.seen]).values() if isinstance(part, Load)]
        return any(load.index.coefficient(axis) == 1 for load in loads for axis in axes)


def points(axes: tuple[Axis, ...]) -> int:
    """Points of some axes."""
    return math.prod(axis.extent for axis in axes)


@remembered
def convolution_product(nest: Nest) -> ConvolutionProduct | None:
    """The nest as a product; None where it is no convolution of loads of one type that makes several channels."""
    if (found := convolution.convolution(nest)) is not None:
        return _product(found, iteration_space.simplified(nest), {})
    simple = iteration_space.simplified(nest)
    parts = phased(simple)
    found = convolution.convolution(parts.nest) if parts is not None else None
    if parts is None or found is None:
        return None
    kept = {axis.name: axis.extent for axis in found.nest.parallel}
    if any(kept.get(each.axis.name) != each.axis.extent for each in parts.phases.values()):
        return None  # merged with another axis
    return _product(found, simple, parts.phases)


def _product(found: Convolution, simple: Nest, phases: Mapping[int, Phases]) -> ConvolutionProduct | None:
    """`simple`: the nest whose stores are made."""
    slides = [slide for slide in (*found.outer, found.row) if slide.position in POSITIONS]
    gone = {slide.position for slide in slides} | {slide.output.name for slide in slides if slide.output}
    gone |= {each.axis.name for each in phases.values()}
    seen, weighted = axes_of(found.seen), axes_of(found.weight)
    rest = [axis for axis in found.nest.parallel if axis.name not in gone]
    images = tuple(axis for axis in rest if axis.name not in weighted)
    groups = tuple(axis for axis in rest if axis.name in weighted & seen)
    made = tuple(axis for axis in rest if axis.name in weighted - seen)
    types = {
        found.nest.buffer(part.buffer).type
        for part in Interner().parts([found.seen, found.weight]).values()
        if isinstance(part, Load)
    }
    if not made or len(types) != 1 or len(slides) > len(POSITIONS):
        return None
    still = (STILL,) * (len(POSITIONS) - len(slides))
    last = len(found.window.positions) - 1
    of_slides = [phases.get(last - POSITIONS.index(slide.position)) for slide in slides]
    known = {axis.name: axis for axis in simple.parallel}
    outputs = tuple(
        known[name]
        for slide, each in zip(slides, of_slides, strict=True)
        for name in (each.outputs if each else [slide.output.name] if slide.output else [])
        if name in known
    )
    if {axis.name for axis in (*images, *groups, *made, *outputs)} != known.keys():
        return None  # merged otherwise with phases apart
    return ConvolutionProduct(
        found, _three((*still, *slides)), images, groups, made, types.pop(), found.window, outputs,
        _three((*(None for _ in still), *of_slides)),
    )  # fmt: skip


def _three(each: tuple[T, ...]) -> tuple[T, T, T]:
    outer, middle, row = each
    return outer, middle, row
