"""Handlers of sums of rows that are looked up, in bags: an embedding bag, and the gradient of any lookup.

The one idea: rows are read in the order of a list, each bag is a part of it, and where a part begins is data too. So a
bag is a reduction from one position to another.
"""

from __future__ import annotations

from typing import Any

import torch

from agent_synthesis.lowering.handlers.lookups import clamped, looked_up, within
from agent_synthesis.nests.ir import AxisValue, Expression, Index, Type
from agent_synthesis.nests.symbolic import (
    Between,
    Indices,
    Ref,
    Refused,
    Symbol,
    Tracer,
    cast,
    handles,
    literal,
    op,
    type_of,
)

_SUM, _MEAN = 0, 1


@handles("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    tracer: Tracer, out: Any, x: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, _scales: bool = False,
    mode: int = _SUM, _sparse: bool = False, weights: torch.Tensor | None = None, has_end: bool = False,
    padding: int = -1,
) -> list[Symbol | None]:  # fmt: skip
    """The sum (or mean) of the rows of `x` that each bag names; how long it is, and not what else the call returns."""
    if mode not in (_SUM, _MEAN):
        raise Refused("the greatest of rows that are looked up is not lowered")
    count, (bags, columns), type_ = rows.shape[0], out[0].shape, type_of(x.dtype)
    row, first, width = tracer.symbol(rows), tracer.symbol(offsets), type_.compute

    def row_of(at: Indices) -> Expression:
        return within(row.at(at[:1]), x.shape[0])

    def begin(at: Indices) -> Expression:
        return within(first.at(at[:1]), count + 1)

    def end(at: Indices) -> Expression:
        after = within(clamped(tracer, first, {0: 1}).at(at[:1]), count + 1)
        is_inner = op("lt", AxisValue(at[0]), literal(bags - 1, Type.I64))
        return after if has_end else op("where", is_inner, after, literal(count, Type.I64))

    def is_counted(place: Index) -> Expression:
        return op("ne", cast(row.at((place,)), Type.I64), literal(padding, Type.I64))

    value = looked_up(tracer, tracer.symbol(x), {0: row_of}, lambda at: at, (count, columns))

    def element(outer: Indices, inner: Indices) -> Expression:
        found = cast(value.at((*inner, outer[1])), width)
        if weights is not None:
            found = op("mul", found, cast(tracer.symbol(weights).at(inner), width))
        return op("where", is_counted(inner[0]), found, literal(0, width)) if padding >= 0 else found

    total = Between("sum", (count,), element, width, begin, end)
    of_bag = Between("sum", (count,), lambda _, inner: cast(is_counted(inner[0]), width), width, begin, end)

    def length(at: Indices) -> Expression:
        if padding >= 0:
            leaf: Any = Ref(of_bag, at[:1], width)
            return leaf  # type: ignore[no-any-return]
        return op("sub", end(at), begin(at))

    def sum_at(at: Indices) -> Expression:
        leaf: Any = Ref(total, at, width)
        if mode == _SUM:
            return leaf  # type: ignore[no-any-return]
        return op("div", leaf, op("max", cast(length(at), width), literal(1, width)))

    def length_at(at: Indices) -> Expression:
        return cast(length(at), type_of(out[2].dtype))

    return [Symbol((bags, columns), type_, sum_at), None, Symbol((bags,), type_of(out[2].dtype), length_at), None]
