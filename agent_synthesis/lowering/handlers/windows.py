"""Handlers of pooling, reductions over windows that slide over the last dimensions of a tensor, and of interpolation.

The one idea: a window is a fold of a few elements, each at output index x stride + window index x dilation - padding;
elements that this puts outside are skipped. A maximum's position is a second fold, and a mean's divisor is arithmetic
on the output index. Windows that cover a dimension once and hang over no edge are plain reductions. Those that differ
in size, and what an interpolation looks at, are lookups at a place that is computed by PyTorch's own formulas.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_synthesis.lowering.handlers.lookups import looked_up, within
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
    fold,
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


class Uneven:
    """Windows over the last dimensions of a tensor that begin and end where PyTorch's adaptive pooling says: of
    `outputs` along an extent of `data`, number o from `o · data / outputs`, rounded down, to
    `(o + 1) · data / outputs`, rounded up."""

    def __init__(self, tracer: Tracer, value: Symbol, outputs: Sequence[int]) -> None:
        self._tracer, self._value, self._outputs = tracer, value, outputs
        self._lead = len(value.shape) - len(outputs)
        self._data = value.shape[self._lead :]
        self._shape = (*value.shape[: self._lead], *outputs)
        sizes = tuple(
            max(-(-(o + 1) * data // count) - o * data // count for o in range(count))
            for data, count in zip(self._data, outputs, strict=True)
        )
        self._with_windows = (*self._shape, *sizes)

    def reduced(self, operation: str, outside: float) -> Symbol:
        """A reduction of each window; what its place in the largest one has beyond it counts as `outside`."""
        type_, rank = self._value.type.compute, len(self._outputs)

        def place(index: Indices, dim: int) -> Index:
            return self._begin(index, dim) + index[len(self._shape) + dim]

        positions = {
            self._lead + dim: lambda index, dim=dim: within(AxisValue(place(index, dim)), self._data[dim])
            for dim in range(rank)
        }
        seen = looked_up(
            self._tracer, self._value, positions, lambda index: index[: len(self._shape)], self._with_windows
        )

        def at(index: Indices) -> Expression:
            inside = [op("lt", AxisValue(place(index, dim)), AxisValue(self._end(index, dim))) for dim in range(rank)]
            is_inside = functools.reduce(lambda one, other: op("and", one, other), inside)
            return op("where", is_inside, cast(seen.at(index), type_), literal(outside, type_))

        values = Symbol(self._with_windows, self._value.type, at)
        made = fold(operation, values, range(len(self._shape), len(self._with_windows)), type_)
        return Symbol(self._shape, type_, lambda index: made.at((*index, *(Index(),) * rank)))

    def mean(self) -> Symbol:
        """The mean of each window."""
        total = self.reduced("sum", 0.0)

        def at(index: Indices) -> Expression:
            counts = (
                op("sub", AxisValue(self._end(index, dim)), AxisValue(self._begin(index, dim)))
                for dim in range(len(self._outputs))
            )
            count = functools.reduce(lambda one, other: op("mul", one, other), counts)
            return op("div", total.at(index), cast(count, total.type))

        return Symbol(self._shape, total.type, at)

    def extreme(self) -> Symbol:
        """The greatest element of each window; NaN where it has one."""
        return self.reduced("max", -math.inf)

    def _begin(self, index: Indices, dim: int) -> Index:
        scaled = index[self._lead + dim].scaled(self._data[dim])
        return scaled.divided(self._outputs[dim], self._tracer.extents)

    def _end(self, index: Indices, dim: int) -> Index:
        data, count = self._data[dim], self._outputs[dim]
        return index[self._lead + dim].scaled(data).shifted(data + count - 1).divided(count, self._tracer.extents)


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


# ---- interpolation: the few elements around a place ------------------------------------------------------

_CUBIC = -0.75
"""PyTorch's, of Keys' cubic convolution (1981)."""
_Tap = tuple[Callable[[Index], Expression], Callable[[Index], Expression]]
"""Where an output element looks along a dimension, and what weighs what is there, by its place in the result."""


def _sources(data: int, outputs: int, scale: float | None, align: bool, type_: Type) -> Callable[[Index], Expression]:
    """Where an output element lies between those of the data, by its place (`area_pixel_compute_source_index`)."""
    if align:
        step = (data - 1) / (outputs - 1) if outputs > 1 else 0.0
        return lambda place: op("mul", AxisValue(place, type_), literal(step, type_))
    step = 1 / scale if scale else data / outputs

    def at(place: Index) -> Expression:
        middle = op("add", AxisValue(place, type_), literal(0.5, type_))
        return op("sub", op("mul", literal(step, type_), middle), literal(0.5, type_))

    return at


def _linear(data: int, outputs: int, source: Callable[[Index], Expression], type_: Type) -> list[_Tap]:
    """The element before and the one behind; what lies before the first is the first. Where there are as many as
    before, both are the element itself: a neighbour may be infinite."""
    if data == outputs:
        return [(AxisValue, lambda _: literal(1.0, type_)), (AxisValue, lambda _: literal(0.0, type_))]

    @functools.cache
    def real(place: Index) -> Expression:
        return op("max", source(place), literal(0.0, type_))

    @functools.cache
    def before(place: Index) -> Expression:
        return within(real(place), data)

    def behind(place: Index) -> Expression:
        return op("min", op("add", before(place), literal(1, Type.I64)), literal(data - 1, Type.I64))

    @functools.cache
    def rest(place: Index) -> Expression:
        share = op("sub", real(place), cast(before(place), type_))
        return op("min", op("max", share, literal(0.0, type_)), literal(1.0, type_))

    return [(before, lambda place: op("sub", literal(1.0, type_), rest(place))), (behind, rest)]


def _cubic(data: int, _: int, source: Callable[[Index], Expression], type_: Type) -> list[_Tap]:
    """Two elements before and two behind, each brought into the data."""

    @functools.cache
    def rest(place: Index) -> Expression:
        real = source(place)
        return op("sub", real, op("floor", real))

    def tap(number: int) -> _Tap:
        def position(place: Index) -> Expression:
            moved = op("add", cast(op("floor", source(place)), Type.I64), literal(number - 1, Type.I64))
            return within(moved, data)

        def weight(place: Index) -> Expression:
            share = rest(place)
            before, behind = literal(1.0 - number, type_), literal(number - 1.0, type_)
            away = op("add", share, before) if number < 2 else op("sub", behind, share)
            near = number in (1, 2)
            powers = (_CUBIC + 2, -(_CUBIC + 3), 0.0, 1.0) if near else (_CUBIC, -5 * _CUBIC, 8 * _CUBIC, -4 * _CUBIC)
            total: Expression = literal(powers[0], type_)
            for power in powers[1:]:
                total = op("add", op("mul", total, away), literal(power, type_))
            return total

        return position, weight

    return [tap(number) for number in range(4)]


def _interpolated(rank: int, taps_of: Callable[..., list[_Tap]]) -> Callable[..., Symbol]:
    def handler(
        tracer: Tracer, out: torch.Tensor, x: torch.Tensor, _: Any, align: bool, *scales: Any, **named: Any
    ) -> Symbol:
        value, type_ = tracer.symbol(x), type_of(out.dtype)
        if not type_.is_float:
            raise Refused(f"interpolation of {type_.value} is not lowered")
        given: Sequence[Any] = [*scales, *named.values()]
        given = given[0] if given and isinstance(given[0], list | tuple) else given
        lead, wide = out.dim() - rank, type_.compute
        factors = [*given] if any(given) else [None] * rank
        taps = []
        for dim, factor in zip(range(lead, out.dim()), factors, strict=True):
            source = _sources(x.shape[dim], out.shape[dim], factor, align, wide)
            taps.append(taps_of(x.shape[dim], out.shape[dim], source, wide))

        def at(index: Indices) -> Expression:
            total = None
            places = index[lead:]
            looks = [
                [(where(place), weight(place)) for where, weight in each]
                for each, place in zip(taps, places, strict=True)
            ]
            for chosen in itertools.product(*looks):
                positions = {lead + dim: lambda _, where=where: where for dim, (where, _) in enumerate(chosen)}
                term = cast(looked_up(tracer, value, positions, lambda index: index, out.shape).at(index), wide)
                for _, weight in chosen:
                    term = op("mul", term, weight)
                total = term if total is None else op("add", total, term)
            assert total is not None
            return total

        return Symbol(tuple(out.shape), type_, at)

    return handler


for _rank, _name in enumerate(("linear1d", "bilinear2d", "trilinear3d"), 1):
    handles(f"upsample_{_name}")(_interpolated(_rank, _linear))
handles("upsample_bicubic2d")(_interpolated(2, _cubic))
