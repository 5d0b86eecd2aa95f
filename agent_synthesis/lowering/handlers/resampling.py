"""Handlers of what reads around a place that is computed: interpolation, and pooling whose windows differ in size.

The one idea: where an output element looks follows from its place by arithmetic, in PyTorch's own formulas and
roundings, so that each of the few elements that it looks at is a lookup, brought into range.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agent_synthesis.lowering.handlers.lookups import looked_up, within
from agent_synthesis.nests.ir import AxisValue, Expression, Index, Type
from agent_synthesis.nests.symbolic import (
    Indices,
    Refused,
    Symbol,
    Tracer,
    cast,
    fold,
    handles,
    literal,
    op,
    type_of,
)

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
