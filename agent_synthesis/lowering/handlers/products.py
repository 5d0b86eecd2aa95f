"""Handlers of products: of matrices, of a matrix and a vector, and of floats of 8 bits with scales.

The one idea: a product is a sum over the depth of products of elements, a reduction like others; what two matrices make
of it `nests.product` sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from agent_synthesis.lowering.handlers.reductions import as_result, combine, sum_over, typed
from agent_synthesis.nests.ir import Expression, Load, Type
from agent_synthesis.nests.symbolic import (
    Indices,
    Refused,
    Symbol,
    Tracer,
    broadcast,
    cast,
    constant_symbol,
    handles,
    op,
    reshaped,
    type_of,
)


def _product(tracer: Tracer, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Symbol:
    """Sum over k of left[..., m, k] · right[..., k, n]: a row reduction where m or n is 1, else what `product` sees."""
    type_ = type_of(out.dtype).compute
    a, b = typed(tracer.symbol(left), type_), tracer.symbol(right)
    b = _weight(b, type_) if min(out.shape[-2:]) > 1 else typed(b, type_)
    lead = tuple(left.shape[:-2])
    terms = Symbol((*lead, left.shape[-2], right.shape[-1], left.shape[-1]), type_, _terms(a, b))
    return as_result(tracer, sum_over(terms, [len(lead) + 2], type_), out)


def _weight(symbol: Symbol, type_: Type) -> Symbol:
    """The right factor of a product of matrices in the type that its products have.

    One that is computed in 16 bits is rounded to them, as the library has it: tensor cores multiply nothing else.
    """

    def at(index: Indices) -> Expression:
        value = symbol.at(index)
        is_stored = isinstance(value, Load) or symbol.type not in (Type.F16, Type.BF16)
        return cast(value if is_stored else cast(value, symbol.type), type_)

    return Symbol(symbol.shape, type_, at)


def _terms(a: Symbol, b: Symbol) -> Callable[[Indices], Expression]:
    def at(index: Indices) -> Expression:
        *lead, m, n, k = index
        return op("mul", a.at((*lead, m, k)), b.at((*lead, k, n)))

    return at


@handles("mm", "bmm")
def _mm(tracer: Tracer, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *_: Any) -> Symbol:
    return _product(tracer, out, left, right)


def _in_blocks(tracer: Tracer, scale: Symbol, shape: Sequence[int]) -> Symbol:
    """The scale of each element, one for each of equal blocks of them."""
    if len(scale.shape) != 2 or any(size % count for size, count in zip(shape, scale.shape, strict=True)):
        raise Refused("a scaled product whose scales are of blocks that are not equal is not lowered")
    sizes = [size // count for size, count in zip(shape, scale.shape, strict=True)]

    def at(index: Indices) -> Expression:
        return scale.at(tuple(i.divided(size, tracer.extents) for i, size in zip(index, sizes, strict=True)))

    return Symbol(tuple(shape), scale.type, at)


@handles("_scaled_mm")
def _scaled_mm(
    tracer: Tracer,
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    scale_left: torch.Tensor,
    scale_right: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Symbol:
    """Scales of both as a whole, of the left's rows and of the right's columns, or of equal blocks of either."""
    if scale_result is not None:
        raise Refused("a scaled product whose result is scaled is not lowered")
    m, n = out.shape
    factors, outside = list[Symbol](), list[Symbol]()
    for factor, scale, whole in ((left, scale_left, (m, 1)), (right, scale_right, (1, n))):
        values, each = (typed(tracer.symbol(tensor), Type.F32) for tensor in (factor, scale))
        if scale.numel() == 1 or tuple(scale.shape) == whole:
            shape = whole if scale.numel() > 1 else (1, 1)
            outside.append(broadcast(reshaped(each, shape, tracer.extents), out.shape))
        else:
            values = combine(lambda v, f: op("mul", v, f), values, _in_blocks(tracer, each, factor.shape))
        factors.append(values)
    terms = Symbol((m, n, left.shape[1]), Type.F32, _terms(*factors))
    value = reshaped(sum_over(terms, [2], Type.F32), out.shape, tracer.extents)
    for each in outside:
        value = combine(lambda v, f: op("mul", v, f), value, each)
    if bias is not None:
        shift = broadcast(typed(tracer.symbol(bias), Type.F32), out.shape)
        value = combine(lambda v, b: op("add", v, b), value, shift)
    return as_result(tracer, value, out)


@handles("mv", "dot", "vdot")
def _mv(tracer: Tracer, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Symbol:
    type_ = type_of(out.dtype).compute
    terms = combine(lambda a, b: op("mul", a, b), typed(tracer.symbol(left), type_), typed(tracer.symbol(right), type_))
    return as_result(tracer, sum_over(terms, [left.dim() - 1], type_), out)


@handles("addmm", "addmv", "baddbmm")
def _addmm(
    tracer: Tracer,
    out: torch.Tensor,
    bias: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *_: Any,
    beta: float = 1,
    alpha: float = 1,
) -> Symbol:
    handler = _mv if right.dim() == 1 else _product
    value: Symbol = handler(tracer, out, left, right)
    type_ = value.type.compute
    shift = broadcast(typed(tracer.symbol(bias), value.type), out.shape)
    scaled = value if alpha == 1 else combine(lambda v, s: op("mul", v, s), value, constant_symbol(alpha, type_, ()))
    if beta == 0:
        return scaled
    added = shift if beta == 1 else combine(lambda v, s: op("mul", v, s), shift, constant_symbol(beta, type_, ()))
    return combine(lambda v, s: op("add", v, s), scaled, added)
