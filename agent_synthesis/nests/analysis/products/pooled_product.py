"""Convolutions whose result is pooled where it is made: windows over its dimensions, and what is reduced in them.

The one idea: what is pooled of a position is a function of the convolution's own axes, so that it is computed once for
all windows that see it. A transposed convolution's phases are pooled one after the other, where windows have them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space, sliding_window
from agent_synthesis.nests.analysis.products.convolution_product import ConvolutionProduct, convolution_product
from agent_synthesis.nests.analysis.products.product_end import over_axes
from agent_synthesis.nests.analysis.products.tailed_product import (
    alone,
    axes_of_result,
    digits_of,
    extents_of_result,
    index_of_result,
    with_sums,
)
from agent_synthesis.nests.ir import Axis, Index, Memory, Nest, Reduction, Type, remembered, walk
from agent_synthesis.nests.sliding_window import Slide
from agent_synthesis.nests.tailed import Tailed


@dataclass(frozen=True)
class Pool:
    """Windows along a dimension of the convolution's positions, of which those of phases are one each."""

    outputs: int
    size: int
    stride: int
    dilation: int
    padding: int

    @property
    def span(self) -> int:
        """Positions from the first element of a window to its last."""
        return (self.size - 1) * self.dilation + 1

    def of_tile(self, positions: int) -> int:
        """Whole windows among so many positions, the first of which begins at the first."""
        return (positions - self.span) // self.stride + 1


@dataclass(frozen=True)
class PooledProduct:
    """A convolution, one reduction over windows of its positions, and what becomes of that."""

    product: ConvolutionProduct
    pools: tuple[Pool | None, Pool | None, Pool | None]
    """By the dimensions of the product."""
    values: Nest
    """Over `batch`, `m` and `n`: its reduction is what is pooled, of `SUMS`. It stores nothing."""
    stored: Nest
    """The stores of pooled values, over `batch`, `m` (images and outputs of windows) and `n`. It reduces nothing."""


@remembered
def pooled_product(nest: Nest) -> PooledProduct | None:
    """What is pooled; None where the tail is anything else."""
    found = convolution_product(nest.convolution) if isinstance(nest, Tailed) else None
    if not isinstance(nest, Tailed) or found is None:
        return None
    tail = iteration_space.narrowed(iteration_space.simplified(nest.tail))
    if len(tail.reductions) != 1 or not tail.windows or any(tail.is_element_store(store) for store in tail.stores):
        return None
    (window,) = tail.windows
    slides = sliding_window.slides(tail, window)
    if slides is None or window.type is not Type.F32 or window.value.type is not Type.F32 or window.is_weighted:
        return None
    if any(isinstance(part, Memory) for value in iteration_space.roots(tail) for part in walk(value)):
        return None
    pooled = replace(tail, stores=(), reductions=(Reduction(window.name, window.operation, window.value, Type.F32),))
    moved = {index: sliding_window.in_positions(index, slides) for index in iteration_space.indices(pooled)}
    if None in moved.values():
        return None
    pooled = iteration_space.reindexed(pooled, lambda index: moved[index] or index, (), ())
    own = {slide.output.name for slide in slides if slide.output}
    others = tuple(axis for axis in tail.parallel if axis.name not in own)
    walked = (*others, *(Axis(slide.position, slide.data) for slide in slides))
    digits = digits_of(nest, index_of_result(nest, pooled), walked)
    if digits is None or (by_dimension := _by_dimension(found, slides, digits)) is None:
        return None
    gone = {axis.name for d in by_dimension for axis in _outputs(found)[d]}
    if any(digits[axis.name].axes() & gone for axis in others):
        return None
    pools = tuple(_pool(by_dimension.get(d), each.axis.extent if each else 1) for d, each in enumerate(found.phases))
    if any(pool is None and each is not None for pool, each in zip(pools, found.phases, strict=True)):
        return None
    joined = with_sums(
        alone(nest),
        iteration_space.reindexed(pooled, lambda index: index.substituted(digits, extents_of_result(nest)), (), ()),
    )
    groups = {"batch": found.groups, "m": (*found.images, *found.outputs), "n": found.made}
    values = over_axes(replace(joined, parallel=axes_of_result(nest)), groups, ())
    first, second, third = pools
    stored = _stored(nest, found, tail, by_dimension, {axis.name: digits[axis.name] for axis in others})
    return PooledProduct(found, (first, second, third), values, stored)


def _outputs(found: ConvolutionProduct) -> list[tuple[Axis, ...]]:
    """Axes of the result along each dimension."""
    known = {axis.name: axis for axis in found.outputs}
    named = (
        each.outputs if each else (slide.output.name,) if slide.output else ()
        for slide, each in zip(found.slides, found.phases, strict=True)
    )  # fmt: skip
    return [tuple(known[name] for name in names) for names in named]


def _by_dimension(
    found: ConvolutionProduct, slides: Sequence[Slide], digits: Mapping[str, Index]
) -> dict[int, Slide] | None:  # fmt: skip
    """The slides by the dimensions of the product that they are over; None where one is over anything else."""
    made = dict[int, Slide]()
    for slide in slides:
        for d, axes in enumerate(_outputs(found)):
            number, step = Index(), 1
            for axis in reversed(axes):
                number, step = number + Index.axis(axis.name, step), step * axis.extent
            if axes and digits[slide.position] == number:
                made[d] = slide
    return made if len(made) == len(slides) else None


def _pool(slide: Slide | None, phases: int) -> Pool | None:
    """The windows along a dimension; None where there are none, or of some phases alone."""
    if slide is None or (phases > 1 and slide.dilation > 1):
        return None
    numbers = (slide.size, slide.stride, slide.padding)
    if any(number % phases for number in numbers):
        return None
    size, stride, padding = (number // phases for number in numbers)
    return Pool(slide.outputs, size, stride, slide.dilation, padding)


def _stored(
    nest: Tailed, found: ConvolutionProduct, tail: Nest, by_dimension: Mapping[int, Slide], others: Mapping[str, Index]
) -> Nest:
    """The stores of what windows come to."""
    instead, windows = dict(others), dict[int, tuple[Axis, ...]]()
    for d, slide in by_dimension.items():
        windows[d] = (Axis(f"{slide.position}_window", slide.outputs),)
        if slide.output:
            instead[slide.output.name] = Index.axis(windows[d][0].name)
    extents = extents_of_result(nest) | {axis.name: axis.extent for axes in windows.values() for axis in axes}
    along = [axis for d, axes in enumerate(_outputs(found)) for axis in windows.get(d, axes)]
    pointwise = replace(tail, reductions=())
    moved = iteration_space.reindexed(
        pointwise,
        lambda index: index.substituted(instead, extents),
        (*found.groups, *found.images, *along, *found.made),
        (),
    )
    groups = {"batch": found.groups, "m": (*found.images, *along), "n": found.made}
    return iteration_space.touching(over_axes(moved, groups, ()))
