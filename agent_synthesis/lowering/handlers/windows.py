"""Handlers of pooling: reductions over windows that slide over the last dimensions of a tensor.

The one idea: a window is a fold of a few elements, each at output index x stride + window index x dilation - padding;
elements that this puts outside are skipped. A maximum's position is a second fold, and a mean's divisor is arithmetic
on the output index. Windows that cover a dimension once and hang over no edge are plain reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_synthesis.lowering.handlers.resampling import Uneven
from agent_synthesis.nests.ir import AxisValue, Bound, Expression, Index, Type
from agent_synthesis.nests.symbolic import (
    Fold,
    Indices,
    Ref,
    Refused,
    Sliding,
    Symbol,
    Tracer,
    cast,
    flatten,
    handles,
    literal,
    op,
    type_of,
)


@dataclass(frozen=True)
class Window:
    """One dimension that windows slide over: output `o` looks at the elements `o · stride + k · dilation − padding`."""

    data: int
    """Extent of the data along the dimension."""
    outputs: int
    """Extent of the result."""
    size: int
    stride: int
    dilation: int = 1
    padding: int = 0

    def at(self, output: Index, element: Index) -> Index:
        """The position of an element of the window."""
        return output.scaled(self.stride) + element.scaled(self.dilation).shifted(-self.padding)

    @property
    def weights(self) -> int:
        """Elements of what weights the window's."""
        return self.size

    def weight_at(self, _: Index, element: Index) -> Index:
        """Which of them weights an element."""
        return element


class Pooling:
    """Windows over the last dimensions of a tensor; results have the outputs' extents there."""

    def __init__(self, value: Symbol, windows: Sequence[Window]) -> None:
        self.value = value
        self.windows = windows
        self.lead = len(value.shape) - len(windows)
        self.shape = (*value.shape[: self.lead], *(window.outputs for window in windows))

    def fold(self, operation: str, of: Callable[[Indices, Indices], Expression], type_: Type) -> Symbol:
        """A reduction of each window: of a formula of the output's index and the element's place in the data."""
        extents = tuple(window.size for window in self.windows)

        def body(outer: Indices, inner: Indices) -> Expression:
            return of(outer, self._place(outer, inner))

        def positions(outer: Indices, inner: Indices) -> tuple[Bound, ...]:
            place = self._place(outer, inner)[self.lead :]
            bounds = (Bound(index, window.data) for index, window in zip(place, self.windows, strict=True))
            return tuple(bound for bound in bounds if bound.index != Index())

        plain = all(w.outputs == 1 and not w.padding and (w.size - 1) * w.dilation < w.data for w in self.windows)
        made = Fold(operation, extents, body, type_) if plain else Sliding(operation, extents, body, type_, positions)
        if math.prod(extents) == 1 and not any(window.padding for window in self.windows):
            return Symbol(self.shape, type_, lambda index: body(index, (Index(),) * len(extents)))

        def refer(index: Indices) -> Expression:
            leaf: Any = Ref(made, index, type_)
            return leaf  # type: ignore[no-any-return]  # it stands in for an expression until the loops are known

        return Symbol(self.shape, type_, refer)

    def extreme(self) -> Symbol:
        """The greatest element of each window; NaN where it has one."""
        type_ = self.value.type.compute
        return self.fold("max", lambda _, place: cast(self.value.at(place), type_), type_)

    def extreme_place(self, extreme: Symbol) -> Symbol:
        """Row-major number, in the data, of each window's last NaN, or else of its first greatest element."""
        data = [window.data for window in self.windows]
        key = Type.I32 if math.prod(data) < 2**31 else Type.I64

        def formula(output: Indices, place: Indices) -> Expression:
            value = self.value.at(place)
            position = flatten(place[self.lead :], data)
            backwards = AxisValue(position.scaled(-1).shifted(-1), key)
            other = literal(-(2 ** (8 * key.size_bytes - 1)), key)
            first = op("where", op("eq", value, extreme.at(output)), backwards, other)
            return op("where", op("isnan", value), AxisValue(position, key), first)

        found = self.fold("max", formula, key)

        def at(index: Indices) -> Expression:
            place = found.at(index)
            forwards = op("sub", literal(-1, key), place)
            return cast(op("where", op("ge", place, literal(0, key)), place, forwards), Type.I64)

        return Symbol(self.shape, Type.I64, at)

    def mean(self, type_: Type, count_padding: bool, divisor: int | None) -> Symbol:
        """Sum of each window over its number of elements: those inside, or with the padding, or a given number."""
        total = self.fold("sum", lambda _, place: cast(self.value.at(place), type_), type_)

        def at(index: Indices) -> Expression:
            count: Expression = literal(divisor, type_) if divisor is not None else self.count(index, count_padding)
            return op("div", total.at(index), cast(count, type_))

        return Symbol(self.shape, type_, at)

    def count(self, index: Indices, count_padding: bool) -> Expression:
        """Elements of a window that count: with the padding, but never beyond it."""
        constant, varying = 1, list[Expression]()
        for window, output in zip(self.windows, index[self.lead :], strict=True):
            low, high = (-window.padding, window.data + window.padding) if count_padding else (0, window.data)
            first, last = -window.padding, (window.outputs - 1) * window.stride - window.padding
            if first >= low and last + window.size <= high:
                constant *= window.size
                continue
            begin = AxisValue(output.scaled(window.stride).shifted(-window.padding), Type.I32)
            end = AxisValue(begin.index.shifted(window.size), Type.I32)
            least: Expression = begin if first >= low else op("max", begin, literal(low, Type.I32))
            most: Expression = end if last + window.size <= high else op("min", end, literal(high, Type.I32))
            varying.append(op("sub", most, least))
        result: Expression = literal(constant, Type.I32)
        for part in varying:
            result = part if result == literal(1, Type.I32) else op("mul", result, part)
        return result

    def _place(self, output: Indices, element: Indices) -> Indices:
        lead = self.lead
        moved = (w.at(o, k) for w, o, k in zip(self.windows, output[lead:], element, strict=True))
        return (*output[:lead], *moved)


def each_dimension(value: Sequence[int] | int, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def pooling(
    value: Symbol, out: torch.Tensor, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1
) -> Pooling:
    rank = len(size)
    sizes, paddings, dilations = (
        each_dimension(size, rank),
        each_dimension(padding, rank),
        each_dimension(dilation, rank),
    )
    strides = each_dimension(stride, rank) if stride else sizes
    data = value.shape[len(value.shape) - rank :]
    outputs = tuple(out.shape)[out.dim() - rank :]
    if not value.type.is_float:
        raise Refused(f"pooling of {value.type.value} is not lowered")
    return Pooling(
        value, [Window(*each) for each in zip(data, outputs, sizes, strides, dilations, paddings, strict=True)]
    )


def _typed(value: Symbol, type_: Type) -> Symbol:
    return Symbol(value.shape, type_, lambda index: cast(value.at(index), type_.compute))


def _max_pool(rank: int) -> Callable[..., list[Symbol]]:
    def handler(
        tracer: Tracer, out: Sequence[torch.Tensor], x: torch.Tensor, size: Any, stride: Any = (), padding: Any = 0,
        dilation: Any = 1, _ceil: bool = False,
    ) -> list[Symbol]:  # fmt: skip
        made = pooling(tracer.symbol(x), out[0], each_dimension(size, rank), stride, padding, dilation)
        extreme = made.extreme()
        return [_typed(extreme, type_of(out[0].dtype)), made.extreme_place(extreme)]

    return handler


def _average_pool(rank: int) -> Callable[..., Symbol]:
    def handler(
        tracer: Tracer, out: torch.Tensor, x: torch.Tensor, size: Any, stride: Any = (), padding: Any = 0,
        _ceil: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Symbol:  # fmt: skip
        made = pooling(tracer.symbol(x), out, each_dimension(size, rank), stride, padding)
        type_ = type_of(out.dtype)
        return _typed(made.mean(type_.compute, count_include_pad, divisor_override), type_)

    return handler


def even_windows(x: torch.Tensor, out: torch.Tensor, rank: int) -> list[int]:
    """Sizes of the windows of an adaptive pooling, where they are all alike."""
    pairs = list(zip(x.shape[x.dim() - rank :], out.shape[out.dim() - rank :], strict=True))
    if any(data % outputs for data, outputs in pairs):
        raise Refused("its windows differ in size")
    return [data // outputs for data, outputs in pairs]


def _is_even(x: torch.Tensor, out: torch.Tensor, rank: int) -> bool:
    return not any(data % outputs for data, outputs in zip(x.shape[-rank:], out.shape[-rank:], strict=True))


def _adaptive_max_pool(rank: int) -> Callable[..., list[Symbol]]:
    def handler(tracer: Tracer, out: Sequence[torch.Tensor], x: torch.Tensor, _: Any) -> list[Symbol]:
        if _is_even(x, out[0], rank):
            return _max_pool(rank)(tracer, out, x, even_windows(x, out[0], rank))

        def place(_: Indices) -> Expression:
            raise Refused("positions in windows that differ in size are not lowered")

        extreme = Uneven(tracer, tracer.symbol(x), out[0].shape[out[0].dim() - rank :]).extreme()
        return [_typed(extreme, type_of(out[0].dtype)), Symbol(tuple(out[1].shape), Type.I64, place)]

    return handler


def _adaptive_average_pool(rank: int) -> Callable[..., Symbol]:
    def handler(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, _: Any) -> Symbol:
        if _is_even(x, out, rank):
            return _average_pool(rank)(tracer, out, x, even_windows(x, out, rank))
        return _typed(Uneven(tracer, tracer.symbol(x), out.shape[out.dim() - rank :]).mean(), type_of(out.dtype))

    return handler


for _rank in (2, 3):
    handles(f"max_pool{_rank}d_with_indices")(_max_pool(_rank))
    handles(f"avg_pool{_rank}d")(_average_pool(_rank))
    handles(f"adaptive_max_pool{_rank}d")(_adaptive_max_pool(_rank))
    handles(f"_adaptive_avg_pool{_rank}d")(_adaptive_average_pool(_rank))
    handles(f"adaptive_avg_pool{_rank}d")(_adaptive_average_pool(_rank))
