"""Handlers of maxima and minima: values over dimensions, and the positions where they stand.

A position is a reduction of pairs (value, position): of equal values the least position wins, and the first NaN beats
all, as PyTorch has it. `max` over one dimension is two reductions of one sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agent_synthesis.nests.ir import AxisValue, Call, Expression, Type
from agent_synthesis.nests.symbolic import (
    Fold,
    Indices,
    Ref,
    Refused,
    Symbol,
    Tracer,
    cast,
    flatten,
    fold,
    handles,
    literal,
    reshaped,
    type_of,
)


def _dims(value: torch.Tensor, dims: Any) -> list[int]:
    if dims is None or dims == []:
        return list(range(value.dim()))
    return [dims] if isinstance(dims, int) else list(dims)


def _result(tracer: Tracer, value: Symbol, out: torch.Tensor) -> Symbol:
    """The folded symbol under the result's shape and type."""
    shaped, type_ = reshaped(value, out.shape, tracer.extents), type_of(out.dtype)
    return Symbol(shaped.shape, type_, lambda index: cast(shaped.at(index), type_.compute))


def _value(operation: str, value: Symbol, dims: Sequence[int]) -> Symbol:
    type_ = value.type.compute
    return fold(operation, value, dims, Type.I32 if type_ is Type.BOOL else type_)


def _place(operation: str, value: Symbol, dims: Sequence[int]) -> Symbol:
    """Row-major number, among the elements of the dimensions, of the first greatest or least; those keep extent 1."""
    folded = tuple(sorted(dim % max(1, len(value.shape)) for dim in dims)) if value.shape else ()
    kept = tuple(dim for dim in range(len(value.shape)) if dim not in folded)
    shape = tuple(1 if dim in folded else extent for dim, extent in enumerate(value.shape))
    extents = tuple(value.shape[dim] for dim in folded)
    count = math.prod(extents)
    position = Type.I32 if count < 2**31 else Type.I64
    if count == 1:
        return Symbol(shape, position, lambda _: literal(0, position))
    compared = Type.I32 if value.type is Type.BOOL else value.type.compute

    def body(outer: Indices, inner: Indices) -> Expression:
        places = dict(zip(kept, outer, strict=True)) | dict(zip(folded, inner, strict=True))
        element = cast(value.at(tuple(places[dim] for dim in range(len(value.shape)))), compared)
        return Call("at", (element, AxisValue(flatten(inner, extents), position)), compared)

    made = Fold(f"arg{operation}", extents, body, compared)

    def at(index: Indices) -> Expression:
        leaf: Any = Ref(made, tuple(index[dim] for dim in kept), position)
        return leaf  # type: ignore[no-any-return]  # it stands in for an expression until the loops are known

    return Symbol(shape, position, at)


def _arg(operation: str) -> Callable[..., Symbol]:
    def handler(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any = None, *_: Any, **__: Any) -> Symbol:
        return _result(tracer, _place(operation, tracer.symbol(x), _dims(x, dim)), out)

    return handler


def _extreme(operation: str) -> Callable[..., Any]:
    """Values over all dimensions or some; with positions, where the result is a pair."""

    def handler(tracer: Tracer, out: Any, x: torch.Tensor, dim: Any = None, *_: Any, **__: Any) -> Any:
        if isinstance(dim, torch.Tensor):
            raise Refused(f"{operation} of two tensors is not lowered here")
        value, dims = tracer.symbol(x), _dims(x, dim)
        if isinstance(out, torch.Tensor):
            return _result(tracer, _value(operation, value, dims), out)
        values, places = out
        return [
            _result(tracer, _value(operation, value, dims), values),
            _result(tracer, _place(operation, value, dims), places),
        ]

    return handler


for _operation in ("max", "min"):
    handles(_operation, f"a{_operation}")(_extreme(_operation))
    handles(f"arg{_operation}")(_arg(_operation))
