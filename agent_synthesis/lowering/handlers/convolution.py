"""Handlers of convolutions: sums over windows, as pooling's, of products with a weight, over a group's channels too.

The one idea: output channel o sees the channels of its group, and in each of them the window that pooling would see;
elements outside of the data are skipped, so padding is never there. A transposed convolution is one as well: an output
meets every `stride`-th element of the weight, and those backwards are a window that slides by one. Nothing scatters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_synthesis.lowering.handlers.windows import Window
from agent_synthesis.nests.ir import Bound, Expression, Index
from agent_synthesis.nests.symbolic import (
    Indices,
    Ref,
    Refused,
    Sliding,
    Symbol,
    Tracer,
    cast,
    handles,
    op,
    type_of,
)


@dataclass(frozen=True)
class _Phases:
    """A dimension of a transposed convolution: datum `i` meets element `w` at `i · stride + w · dilation − padding`.

    So output `o` meets the elements of which `w · dilation` and `o + padding` are alike modulo the stride, if there are
    any: the first, and each `every`-th from there on, the greatest first.
    """

    data: int
    weights: int
    """Elements of the weight."""
    stride: int
    dilation: int
    padding: int
    extents: Mapping[str, int]
    """Of axes."""

    @property
    def common(self) -> int:
        """What divides stride and dilation: an output between its multiples meets no element."""
        return math.gcd(self.stride, self.dilation)

    @property
    def every(self) -> int:
        """Elements from one that an output meets to the next."""
        return self.stride // self.common

    @property
    def size(self) -> int:
        """Elements that an output meets at most."""
        return -(-self.weights // self.every)

    def _met(self, output: Index) -> tuple[Index, Index]:
        """(the datum that the first element meets, that element)."""
        step, place = self.dilation // self.common, output.shifted(self.padding).divided(self.common, self.extents)
        inverse = pow(step, -1, self.every) if self.every > 1 else 0
        first = place.scaled(inverse).modulo(self.every, self.extents)
        datum = place if step == 1 else place + first.scaled(-step)
        return datum.divided(self.every, self.extents), first

    def at(self, output: Index, element: Index) -> Index:
        """The position that is met."""
        return self._met(output)[0] + element.shifted(1 - self.size).scaled(self.dilation // self.common)

    def weight_at(self, output: Index, element: Index) -> Index:
        """The element of the weight that is met; for some outputs the first lies behind its end."""
        return self._met(output)[1] + element.shifted(1 - self.size).scaled(-self.every)

    def between(self, output: Index) -> Bound:
        """Inside where the output meets any element."""
        return Bound(output.shifted(self.padding).modulo(self.common, self.extents), 1)


@handles("convolution")
def _convolution(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Any,
    padding: Any, dilation: Any, transposed: Any, _: Any, groups: int,
) -> Symbol:  # fmt: skip
    type_ = type_of(out.dtype)
    if not type_.is_float:
        raise Refused(f"a convolution of {type_.value} is not lowered")
    rank = x.dim() - 2
    strides, paddings, dilations = (_each(values, rank) for values in (stride, padding, dilation))
    sizes = zip(x.shape[2:], out.shape[2:], weight.shape[2:], strides, dilations, paddings, strict=True)
    windows = [_phases(tracer, *each) if transposed else Window(*each) for each in sizes]
    values, weights = tracer.symbol(x), tracer.symbol(weight)
    channels, made = x.shape[1] // groups, out.shape[1] // groups

    def product(outer: Indices, inner: Indices) -> Expression:
        channel = outer[1].divided(made, tracer.extents).scaled(channels) + inner[0]
        own = (channel, outer[1].modulo(made, tracer.extents)) if transposed else (outer[1], inner[0])
        met = list(zip(windows, outer[2:], inner[1:], strict=True))
        seen = values.at((outer[0], channel, *(window.at(o, k) for window, o, k in met)))
        weighted = weights.at((*own, *(window.weight_at(o, k) for window, o, k in met)))
        return op("mul", cast(seen, type_.compute), cast(weighted, type_.compute))

    def bounds(outer: Indices, inner: Indices) -> tuple[Bound, ...]:
        met = list(zip(windows, outer[2:], inner[1:], strict=True))
        found = [Bound(window.at(o, k), window.data) for window, o, k in met]
        behind = (Bound(window.weight_at(o, k), window.weights) for window, o, k in met)
        found += [bound for bound in behind if bound.index.bounds(tracer.extents)[1] >= bound.extent]
        found += [window.between(o) for window, o, _ in met if isinstance(window, _Phases)]
        return tuple(bound for bound in found if bound.index != Index())

    extents = (channels, *(window.size for window in windows))
    fold = Sliding("sum", extents, product, type_.compute, bounds, is_weighted=True)
    one = math.prod(extents) == 1
    if one and any((transposed, *paddings)):
        raise Refused("a window of one element that may lie outside is not lowered")
    added = None if bias is None else tracer.symbol(bias)

    def at(index: Indices) -> Expression:
        leaf: Any = Ref(fold, index, type_.compute)  # it stands in for an expression until the loops are known
        total: Expression = product(index, (Index(),) * len(extents)) if one else leaf
        return total if added is None else op("add", total, cast(added.at((index[1],)), type_.compute))

    return Symbol(tuple(out.shape), type_, at)


def _phases(tracer: Tracer, data: int, _: int, size: int, stride: int, dilation: int, padding: int) -> _Phases:
    return _Phases(data, size, stride, dilation, padding, tracer.extents)


def _each(values: Sequence[int] | int, rank: int) -> list[int]:
    given = [values] if isinstance(values, int) else list(values)
    return given * rank if len(given) == 1 else given
