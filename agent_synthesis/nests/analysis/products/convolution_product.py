"""Convolutions as matrix products: rows are positions of outputs, columns the channels that are made.

The one idea: every parallel axis of a convolution is a window's output, or known to what is seen, to the weight, or to
both: images, made channels, groups. The depth is the window's elements times the channels of a group. Nothing here
knows threads or memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agent_synthesis.nests.analysis import convolution
from agent_synthesis.nests.analysis.convolution import Convolution, axes_of
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import Axis, Load, Nest, Type, remembered
from agent_synthesis.nests.sliding_window import POSITIONS, STILL, Slide


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

    @property
    def outputs(self) -> tuple[Axis, ...]:
        """Axes of outputs along the slides."""
        return tuple(slide.output for slide in self.slides if slide.output)

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
    found = convolution.convolution(nest)
    if found is None:
        return None
    slides = [slide for slide in (*found.outer, found.row) if slide.position in POSITIONS]
    gone = {slide.position for slide in slides} | {slide.output.name for slide in slides if slide.output}
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
    outer, middle, row = (*still, *slides)
    return ConvolutionProduct(found, (outer, middle, row), images, groups, made, types.pop())
