"""Which operands of a convolution tensor cores can be given as they lie in memory, so that nothing is laid out anew.

The one idea: the copy engine walks five dimensions with any steps of whole 16 bytes, and what lies outside of a tensor
comes as zeros: padding need not be there. Where channels are neighbours, that is all that laying out does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.nests.analysis.products.convolution_product import ConvolutionProduct, points
from agent_synthesis.nests.ir import Axis, Expression, Index, Load

_WHOLE_BYTES = 16
"""Steps of a tensor map are multiples of it."""


@dataclass(frozen=True)
class Lying:
    """A tensor in memory, the innermost dimension first, whose elements are neighbours."""

    buffer: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    """Of all dimensions but the first, in elements."""


def seen_as_it_lies(product: ConvolutionProduct, row_depth: int) -> Lying | None:
    """What is seen, as (channels of all groups, three dimensions, images); None where it is laid out first.

    `row_depth`: channels of a box, of which the last must not reach into another group.
    """
    if any(slide.stride > 1 for slide in product.slides):
        return None
    channels, groups = product.channels, points(product.groups)
    index = _index(product.convolution.seen, [product.convolution.channels, product.images, product.groups])
    if index is None or (groups > 1 and channels % row_depth):
        return None
    along = [(slide.position, slide.data) for slide in reversed(product.slides)]
    dimensions = [*along, (_name(product.images), points(product.images))]
    steps = [_step(index, name) for name, _ in dimensions]
    if _step(index, _name(product.convolution.channels)) != 1 or _step(index, _name(product.groups)) not in (
        0,
        channels,
    ):
        return None
    extents = (channels * groups, *(extent for _, extent in dimensions))
    return _lying(product, product.convolution.seen, extents, steps)


def weight_as_it_lies(product: ConvolutionProduct) -> Lying | None:
    """The weights of windows of one element, as (channels, made channels, 1, groups); None where they are laid out."""
    own = [product.convolution.channels, product.made, product.groups]
    index = _index(product.convolution.weight, own)
    if product.elements > 1 or any(product.phases) or index is None:
        return None
    channels, made, groups = own
    steps = [_step(index, _name(made)), 0, _step(index, _name(groups))]
    if _step(index, _name(channels)) != 1:
        return None
    return _lying(product, product.convolution.weight, (product.channels, points(made), 1, points(groups)), steps)


def rows_as_they_lie(product: ConvolutionProduct) -> Lying | None:
    """What is seen as rows of whole 16 bytes whose elements are neighbours, as (row, two dimensions, channels, groups,
    images): what lays it out reads them in vectors. None where it computes or finds elements one by one."""
    kinds = [product.convolution.channels, product.groups, product.images]
    index = _index(product.convolution.seen, kinds)
    *outer, row = product.slides
    whole = _WHOLE_BYTES // product.type.size_bytes
    if index is None or any(slide.stride > 1 for slide in product.slides) or row.data % whole:
        return None
    dimensions = [(slide.position, slide.data) for slide in reversed(outer)]
    dimensions += [(_name(axes), points(axes)) for axes in kinds]
    if index.coefficient(row.position) != 1:
        return None
    extents = (row.data, *(extent for _, extent in dimensions))
    return _lying(product, product.convolution.seen, extents, [_step(index, name) for name, _ in dimensions])


def _index(value: Expression, axes: Sequence[tuple[Axis, ...]]) -> Index | None:
    """Where it is loaded, if it is what is in memory, and each kind of axis is one axis at most."""
    if not isinstance(value, Load) or value.index.offset or any(len(each) > 1 for each in axes):
        return None
    is_linear = all(isinstance(atom, str) for atom, _ in value.index.terms)
    return value.index if is_linear else None


def _lying(
    product: ConvolutionProduct, value: Expression, extents: tuple[int, ...], steps: Sequence[int]
) -> Lying | None:
    assert isinstance(value, Load)
    size = product.type.size_bytes
    if any(
        extent > 1 and (step <= 0 or step * size % _WHOLE_BYTES)
        for extent, step in zip(extents[1:], steps, strict=True)
    ):
        return None
    whole = _WHOLE_BYTES // size
    strides, end = list[int](), -(-extents[0] // whole) * whole
    for extent, step in zip(extents[1:], steps, strict=True):
        strides.append(step if extent > 1 else end)  # of one element any step will do: as if it lay behind
        end = max(end, strides[-1] * extent)
    return Lying(value.buffer, extents, tuple(strides))


def _name(axes: tuple[Axis, ...]) -> str:
    return axes[0].name if axes else ""


def _step(index: Index, name: str) -> int:
    return index.coefficient(name) or 0
