"""Handlers of windows that are laid beside each other (`unfold`), and of such that are added up again (`fold`).

The one idea: nothing is copied for its own sake. An element of a patch is the element of the image that it shows, or
zero outside, so whoever reads patches reads the image; an element of an image is the sum of those that show it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from agent_synthesis.lowering.handlers.coverings import covering, require_few, total
from agent_synthesis.lowering.handlers.lookups import clamped
from agent_synthesis.lowering.handlers.windows import Window, each_dimension
from agent_synthesis.nests.ir import AxisValue, Expression, Index, Type
from agent_synthesis.nests.symbolic import Indices, Symbol, Tracer, cast, flatten, handles, literal, op, type_of


def _windows(
    data: Sequence[int], size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> list[Window]:
    made = []
    for extent, *each in zip(data, *(each_dimension(g, 2) for g in (size, stride, dilation, padding)), strict=True):
        length, step, apart, around = each
        outputs = (extent + 2 * around - apart * (length - 1) - 1) // step + 1
        made.append(Window(extent, outputs, length, step, apart, around))
    return made


def _split(tracer: Tracer, index: Index, sizes: Sequence[int]) -> list[Index]:
    """A row-major number's coordinates; the first is not bounded by its size."""
    found = []
    for size in reversed(sizes[1:]):
        found.append(index.modulo(size, tracer.extents))
        index = index.divided(size, tracer.extents)
    return [index, *reversed(found)]


@handles("im2col")
def _unfold(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, size: Sequence[int], dilation: Sequence[int],
    padding: Sequence[int], stride: Sequence[int],
) -> Symbol:  # fmt: skip
    """[…, channels, height, width] → […, channels · elements of a window, windows]."""
    type_, windows = type_of(out.dtype), _windows(x.shape[-2:], size, dilation, padding, stride)
    inner = clamped(tracer, tracer.symbol(x), dict.fromkeys((x.dim() - 2, x.dim() - 1), 0))

    def at(index: Indices) -> Expression:
        channel, *elements = _split(tracer, index[-2], (0, *(w.size for w in windows)))
        outputs = _split(tracer, index[-1], [w.outputs for w in windows])
        places = [w.at(output, element) for w, output, element in zip(windows, outputs, elements, strict=True)]
        tests = []
        for place, window in zip(places, windows, strict=True):
            low, high = place.bounds(tracer.extents)
            tests += [op("ge", AxisValue(place), literal(0, Type.I64))] if low < 0 else []
            tests += [op("lt", AxisValue(place), literal(window.data, Type.I64))] if high >= window.data else []
        found = cast(inner.at((*index[:-2], channel, *places)), type_.compute)
        if not tests:
            return found
        return op("where", functools.reduce(functools.partial(op, "and"), tests), found, literal(0, type_.compute))

    return Symbol(tuple(out.shape), type_, at)


@handles("col2im")
def _fold(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, data: Sequence[int], size: Sequence[int],
    dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int],
) -> Symbol:  # fmt: skip
    """[…, channels · elements of a window, windows] → […, channels, height, width]."""
    type_, windows = type_of(out.dtype), _windows(data, size, dilation, padding, stride)
    require_few(windows)
    sizes, outputs = [w.size for w in windows], [w.outputs for w in windows]
    apart = tracer.symbol(x)
    lead = x.dim() - 2
    shape = (*x.shape[:lead], x.shape[lead] // math.prod(sizes), *sizes, *outputs)

    def split(index: Indices) -> Expression:
        row = flatten(index[lead : lead + 3], shape[lead : lead + 3])
        return apart.at((*index[:lead], row, flatten(index[lead + 3 :], outputs)))

    inner = clamped(tracer, Symbol(shape, apart.type, split), dict.fromkeys(range(lead + 1, len(shape)), 0))

    def terms(place: Indices) -> Iterator[tuple[Sequence[Expression], Expression]]:
        each = [list(covering(tracer, w, p)) for w, p in zip(windows, place[-2:], strict=True)]
        for found in itertools.product(*each):
            index = (*place[:-2], *(element for _, element, _ in found), *(output for output, _, _ in found))
            yield [test for _, _, tests in found for test in tests], cast(inner.at(index), type_.compute)

    return Symbol(tuple(out.shape), type_, lambda place: total(terms(place)))
