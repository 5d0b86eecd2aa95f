"""Handlers of what sums over the windows that cover an element: derivatives of pooling and of repeating elements.

The one idea: which windows cover an element follows from its place, and they are few. So each element adds up what
comes to it, in a fixed order, instead of every window adding to many elements at once: no atomics, the same bits each
time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from agent_synthesis.lowering.handlers.lookups import clamped
from agent_synthesis.lowering.handlers.windows import Pooling, Window, each_dimension, even_windows, pooling
from agent_synthesis.nests.ir import AxisValue, Expression, Index, Type
from agent_synthesis.nests.symbolic import (
    Indices,
    Refused,
    Symbol,
    Tracer,
    cast,
    flatten,
    handles,
    literal,
    op,
    type_of,
)

MOST_COVERING = 16
"""Windows that cover an element: 3 x 3 with a stride of one have nine."""

Term = Callable[[Indices, Indices, Symbol], tuple[Expression | None, Expression]]
"""From an element's place and a window's to whether the window's gradient comes to it, and how much of it does."""


def covering(tracer: Tracer, window: Window, place: Index) -> Iterator[tuple[Index, Index, list[Expression]]]:
    """The windows that may cover a place along a dimension, the element of each that does, and what has to hold for
    one to exist and to do so."""
    extents, span = tracer.extents, (window.size - 1) * window.dilation + 1
    moved = place.shifted(window.padding)
    for back in range(-(-span // window.stride)):
        output = moved.divided(window.stride, extents).shifted(-back)
        offset = moved.modulo(window.stride, extents).shifted(back * window.stride)
        tests = []
        if offset.bounds(extents)[1] >= span:
            tests.append(op("lt", AxisValue(offset), literal(span, Type.I64)))
        if window.dilation > 1:
            tests.append(op("eq", AxisValue(offset.modulo(window.dilation, extents)), literal(0, Type.I64)))
        low, high = output.bounds(extents)
        if low < 0:
            tests.append(op("ge", AxisValue(output), literal(0, Type.I64)))
        if high >= window.outputs:
            tests.append(op("lt", AxisValue(output), literal(window.outputs, Type.I64)))
        yield output, offset.divided(window.dilation, extents), tests


def require_few(windows: Sequence[Window]) -> None:
    """Raises Refused where more windows cover an element than are added up one by one."""
    if math.prod(-(-((w.size - 1) * w.dilation + 1) // w.stride) for w in windows) > MOST_COVERING:
        raise Refused(f"its windows overlap so that more than {MOST_COVERING} cover an element")


def total(terms: Iterable[tuple[Sequence[Expression], Expression]]) -> Expression:
    """The sum of values, each where all of its tests hold."""
    added: Expression | None = None
    for tests, value in terms:
        own = value
        if tests:
            holds = functools.reduce(functools.partial(op, "and"), tests)
            own = op("where", holds, value, literal(0, value.type))
        added = own if added is None else op("add", added, own)
    assert added is not None
    return added


def _summed(tracer: Tracer, out: torch.Tensor, gradient: Symbol, made: Pooling, term: Term) -> Symbol:
    """At each element, the sum of what comes from the windows that cover it."""
    windows, lead = made.windows, made.lead
    require_few(windows)
    type_ = type_of(out.dtype)
    inside = clamped(tracer, gradient, dict.fromkeys(range(lead, len(gradient.shape)), 0))

    def terms(place: Indices) -> Iterator[tuple[Sequence[Expression], Expression]]:
        each = [list(covering(tracer, w, p)) for w, p in zip(windows, place[lead:], strict=True)]
        for found in itertools.product(*each):
            holds, value = term(place, (*place[:lead], *(output for output, _, _ in found)), inside)
            tests = [test for _, _, tests in found for test in tests]
            yield tests + ([holds] if holds is not None else []), value

    def at(place: Indices) -> Expression:
        return cast(total(terms(place)), type_.compute)

    return Symbol(tuple(out.shape), type_, at)


def _max_pool(rank: int) -> Callable[..., Symbol]:
    def handler(
        tracer: Tracer, out: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, size: Any, stride: Any,
        padding: Any, dilation: Any, _ceil: bool, places: torch.Tensor,
    ) -> Symbol:  # fmt: skip
        made = pooling(tracer.symbol(x), gradient, each_dimension(size, rank), stride, padding, dilation)
        greatest = clamped(tracer, tracer.symbol(places), dict.fromkeys(range(made.lead, x.dim()), 0))
        data = [window.data for window in made.windows]

        def term(place: Indices, output: Indices, inside: Symbol) -> tuple[Expression, Expression]:
            own = AxisValue(flatten(place[made.lead :], data))
            return op("eq", greatest.at(output), own), _compute(inside.at(output))

        return _summed(tracer, out, tracer.symbol(gradient), made, term)

    return handler


def _average_pool(rank: int) -> Callable[..., Symbol]:
    def handler(
        tracer: Tracer, out: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, size: Any, stride: Any,
        padding: Any, _ceil: bool, count_include_pad: bool, divisor: int | None,
    ) -> Symbol:  # fmt: skip
        made = pooling(tracer.symbol(x), gradient, each_dimension(size, rank), stride, padding)

        def term(_: Indices, output: Indices, inside: Symbol) -> tuple[None, Expression]:
            value = _compute(inside.at(output))
            count = literal(divisor, value.type) if divisor is not None else made.count(output, count_include_pad)
            return None, op("div", value, cast(count, value.type))

        return _summed(tracer, out, tracer.symbol(gradient), made, term)

    return handler


def _adaptive_max_pool(rank: int) -> Callable[..., Symbol]:
    def handler(
        tracer: Tracer, out: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, places: torch.Tensor
    ) -> Symbol:
        sizes = even_windows(x, gradient, rank)
        return _max_pool(rank)(tracer, out, gradient, x, sizes, (), 0, 1, False, places)

    return handler


def _adaptive_average_pool(rank: int) -> Callable[..., Symbol]:
    def handler(tracer: Tracer, out: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor) -> Symbol:
        sizes = even_windows(x, gradient, rank)
        return _average_pool(rank)(tracer, out, gradient, x, sizes, (), 0, False, True, None)

    return handler


def _nearest(rank: int) -> Callable[..., Symbol]:
    def handler(
        tracer: Tracer, out: torch.Tensor, gradient: torch.Tensor, output_size: Sequence[int],
        input_size: Sequence[int], *scales: float | None,
    ) -> Symbol:  # fmt: skip
        """An element comes as often as it is repeated, side by side."""
        lead, type_ = len(input_size) - rank, type_of(out.dtype)
        times = [large // small for large, small in zip(output_size, input_size[lead:], strict=True)]
        even = [small * count for small, count in zip(input_size[lead:], times, strict=True)]
        if even != list(output_size) or any(s not in (None, float(t)) for s, t in zip(scales, times, strict=False)):
            raise Refused("its elements are repeated unequally often")
        if math.prod(times) > MOST_COVERING:
            raise Refused(f"its elements are repeated more than {MOST_COVERING} times")
        value = tracer.symbol(gradient)

        def at(place: Indices) -> Expression:
            numbers = itertools.product(*map(range, times))
            moved = (
                tuple(p.scaled(t).shifted(n) for p, t, n in zip(place[lead:], times, each, strict=True))
                for each in numbers
            )
            parts = [_compute(value.at((*place[:lead], *inner))) for inner in moved]
            return cast(functools.reduce(functools.partial(op, "add"), parts), type_.compute)

        return Symbol(tuple(out.shape), type_, at)

    return handler


def _compute(value: Expression) -> Expression:
    return cast(value, value.type.compute)


for _rank in (2, 3):
    handles(f"max_pool{_rank}d_with_indices_backward")(_max_pool(_rank))
    handles(f"avg_pool{_rank}d_backward")(_average_pool(_rank))
    handles(f"adaptive_max_pool{_rank}d_backward")(_adaptive_max_pool(_rank))
    handles(f"_adaptive_avg_pool{_rank}d_backward")(_adaptive_average_pool(_rank))
for _rank in (1, 2, 3):
    handles(f"upsample_nearest{_rank}d_backward")(_nearest(_rank))
