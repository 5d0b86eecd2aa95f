"""Handlers of operations that move no value: views, broadcasts, copies and tensors made from nothing.

Each answers with a new index, never with arithmetic. What needs a bounds test or a position from data is in
`lookups`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agent_synthesis.nests.ir import AxisValue, Index, Type
from agent_synthesis.nests.symbolic import (
    Indices,
    Refused,
    Symbol,
    Tracer,
    broadcast,
    cast,
    constant_symbol,
    handles,
    literal,
    op,
    reshaped,
    type_of,
)


@handles("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "flatten")
def _reshape(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Symbol:
    return reshaped(tracer.symbol(value), out.shape, tracer.extents)


@handles("clone", "contiguous", "alias", "detach", "lift_fresh_copy", "lift_fresh", "view_as")
def _same(tracer: Tracer, _: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any) -> Symbol:
    return tracer.symbol(value)


@handles("copy")
def _copy(tracer: Tracer, out: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any) -> Symbol:
    symbol, type_ = broadcast(tracer.symbol(value), out.shape), type_of(out.dtype)
    return Symbol(symbol.shape, type_, lambda index: cast(symbol.at(index), type_.compute))


@handles("_to_copy", "to")
def _to_copy(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Symbol:
    symbol, type_ = tracer.symbol(value), type_of(out.dtype)
    if symbol.type is type_:
        return symbol
    # A cast that the user wrote rounds, even where arithmetic goes on in a wider type.
    return Symbol(symbol.shape, type_, lambda index: cast(cast(symbol.at(index), type_), type_.compute))


@handles("convert_element_type")
def _convert(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, _: torch.dtype) -> Symbol:
    """Decompositions widen for arithmetic and narrow after it; the narrowing is left to the store."""
    symbol, type_ = tracer.symbol(value), type_of(out.dtype)
    return Symbol(symbol.shape, type_, lambda index: cast(symbol.at(index), type_.compute))


@handles("expand", "broadcast_to")
def _expand(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Symbol:
    return broadcast(tracer.symbol(value), out.shape)


@handles("as_strided")
def _as_strided(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, *_: Any) -> Symbol:
    """Of extents of one alone, whose strides pooling to a point sets."""
    pairs = zip(value.shape, value.stride(), out.stride(), strict=False)
    if out.shape != value.shape or out.storage_offset() != value.storage_offset():
        raise Refused("it looks at memory by strides")
    if any(extent > 1 and own != wanted for extent, own, wanted in pairs):
        raise Refused("it looks at memory by strides")
    return tracer.symbol(value)


@handles("permute")
def _permute(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, dims: Sequence[int]) -> Symbol:
    symbol = tracer.symbol(value)
    places = [dim % len(dims) for dim in dims]

    def at(index: Indices) -> Any:
        return symbol.at(tuple(index[places.index(dim)] for dim in range(len(places))))

    return Symbol(tuple(out.shape), symbol.type, at)


@handles("transpose")
def _transpose(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, first: int, second: int) -> Symbol:
    dims = list(range(value.dim()))
    if dims:
        dims[first], dims[second] = dims[second], dims[first]
    result: Symbol = _permute(tracer, out, value, dims)
    return result


@handles("t", "numpy_T", "mT")
def _t(tracer: Tracer, out: torch.Tensor, value: torch.Tensor) -> Symbol:
    result: Symbol = _transpose(tracer, out, value, -1, -2) if value.dim() > 1 else tracer.symbol(value)
    return result


@handles("slice")
def _slice(
    tracer: Tracer,
    out: torch.Tensor,
    value: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    _end: int | None = None,
    step: int = 1,
) -> Symbol:
    extent = value.shape[dim]
    first = 0 if start is None else max(0, min(start + extent if start < 0 else start, extent))
    return _moved(tracer.symbol(value), out, dim % value.dim(), first, step)


@handles("flip")
def _flip(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, dims: Sequence[int]) -> Symbol:
    symbol = tracer.symbol(value)
    for dim in {d % value.dim() for d in dims} if value.dim() else ():
        symbol = _moved(symbol, out, dim, value.shape[dim] - 1, -1)
    return symbol


def _moved(symbol: Symbol, out: torch.Tensor, dim: int, first: int, step: int) -> Symbol:
    def at(index: Indices) -> Any:
        place = index[dim].scaled(step).shifted(first)
        return symbol.at((*index[:dim], place, *index[dim + 1 :]))

    return Symbol(tuple(out.shape), symbol.type, at)


@handles("select")
def _select(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, dim: int, index: int) -> Symbol:
    dim %= value.dim()
    return _selected(tracer.symbol(value), out, dim, index % value.shape[dim])


def _selected(symbol: Symbol, out: torch.Tensor, dim: int, place: int) -> Symbol:
    return Symbol(tuple(out.shape), symbol.type, lambda index: symbol.at((*index[:dim], Index(place), *index[dim:])))


@handles("unbind")
def _unbind(tracer: Tracer, out: Sequence[torch.Tensor], value: torch.Tensor, dim: int = 0) -> list[Symbol]:
    symbol = tracer.symbol(value)
    return [_selected(symbol, part, dim % value.dim(), place) for place, part in enumerate(out)]


@handles("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split")
def _split(tracer: Tracer, out: Sequence[torch.Tensor], value: torch.Tensor, _: Any, dim: int = 0) -> list[Symbol]:
    symbol, dim, parts, first = tracer.symbol(value), dim % value.dim(), [], 0
    for part in out:
        parts.append(_moved(symbol, part, dim, first, 1))
        first += part.shape[dim]
    return parts


# ---- tensors made from nothing -------------------------------------------------------------------------


@handles("full", "new_full", "full_like")
def _full(_: Tracer, out: torch.Tensor, __: Any, *rest: Any, **kwargs: Any) -> Symbol:
    value = rest[-1] if rest else kwargs["fill_value"]
    return constant_symbol(value, type_of(out.dtype), out.shape)


@handles("zeros", "zeros_like", "new_zeros")
def _zeros(_: Tracer, out: torch.Tensor, *__: Any, **___: Any) -> Symbol:
    return constant_symbol(0, type_of(out.dtype), out.shape)


@handles("ones", "ones_like", "new_ones")
def _ones(_: Tracer, out: torch.Tensor, *__: Any, **___: Any) -> Symbol:
    return constant_symbol(1, type_of(out.dtype), out.shape)


@handles("scalar_tensor")
def _scalar_tensor(_: Tracer, out: torch.Tensor, value: float, **__: Any) -> Symbol:
    return constant_symbol(value, type_of(out.dtype), out.shape)


@handles("empty", "empty_like", "empty_permuted", "new_empty")
def _empty(_: Tracer, out: torch.Tensor, *__: Any, **___: Any) -> Symbol:
    """Memory that composite operations make for results that are not used."""

    def at(_: Indices) -> Any:
        raise Refused("it reads uninitialised memory")

    return Symbol(tuple(out.shape), type_of(out.dtype), at)


@handles("arange")
def _arange(_: Tracer, out: torch.Tensor, *bounds: float, **__: Any) -> Symbol:
    start = bounds[0] if len(bounds) > 1 else 0
    step = bounds[2] if len(bounds) > 2 else 1
    type_ = type_of(out.dtype)

    def at(index: Indices) -> Any:
        if isinstance(start, int) and isinstance(step, int):
            return cast(AxisValue(index[0].scaled(step).shifted(start)), type_.compute)
        scaled = op("mul", cast(AxisValue(index[0]), Type.F64), literal(step, Type.F64))
        return cast(op("add", scaled, literal(start, Type.F64)), type_.compute)

    return Symbol(tuple(out.shape), type_, at)


def _triangle(lower: bool) -> Any:
    def handler(tracer: Tracer, out: torch.Tensor, value: torch.Tensor, diagonal: int = 0) -> Symbol:
        symbol = tracer.symbol(value)

        def at(index: Indices) -> Any:
            distance = AxisValue(index[-1] + index[-2].scaled(-1))
            inside = op("le" if lower else "ge", distance, literal(diagonal, Type.I64))
            return op("where", inside, symbol.at(index), literal(0, symbol.type.compute))

        return Symbol(tuple(out.shape), symbol.type, at)

    return handler


handles("tril")(_triangle(lower=True))
handles("triu")(_triangle(lower=False))
