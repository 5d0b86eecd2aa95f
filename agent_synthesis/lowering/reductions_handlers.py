"""Handlers of reductions and of what is built from them: softmax, norms, products with a vector.

Sums accumulate in f32 or wider. Variances take two steps, the mean and then the squares around it, because
`E[x²] − E[x]²` loses every digit where the mean is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agent_synthesis.nests.ir import Expression, Index, Load, Type
from agent_synthesis.nests.symbolic import (
    Indices,
    Refused,
    Symbol,
    Tracer,
    broadcast,
    cast,
    common_shape,
    constant_symbol,
    fold,
    handles,
    literal,
    op,
    reshaped,
    type_of,
)


def _combine(formula: Callable[..., Expression], *operands: Symbol) -> Symbol:
    """An elementwise formula over symbols of one type, broadcast against each other."""
    shape = common_shape(operand.shape for operand in operands)
    spread = [broadcast(operand, shape) for operand in operands]
    return Symbol(tuple(shape), operands[0].type, lambda index: formula(*(s.at(index) for s in spread)))


def _typed(value: Symbol, type_: Type) -> Symbol:
    if value.type is type_:
        return value
    return Symbol(value.shape, type_, lambda index: cast(value.at(index), type_.compute))


def _dims(value: torch.Tensor, dims: Any) -> list[int]:
    if dims is None or dims == []:
        return list(range(value.dim()))
    return [dims] if isinstance(dims, int) else list(dims)


def _result(tracer: Tracer, value: Symbol, out: torch.Tensor) -> Symbol:
    """The folded symbol under the result's shape (with or without the kept dimensions) and type."""
    return _typed(reshaped(value, out.shape, tracer.extents), type_of(out.dtype))


def _accumulator(value: Symbol, out: torch.Tensor) -> Type:
    compute = type_of(out.dtype).compute
    return (
        compute
        if compute.is_float
        else Type.I64
        if value.type is not Type.BOOL or compute is not Type.BOOL
        else Type.BOOL
    )


def _sum(value: Symbol, dims: Sequence[int], type_: Type) -> Symbol:
    return fold("sum", value, dims, type_)


def _mean(value: Symbol, dims: Sequence[int], type_: Type) -> Symbol:
    total = _sum(value, dims, type_)
    count = math.prod(value.shape[dim] for dim in dims) if value.shape else 1
    return _combine(lambda x: op("div", x, literal(count, type_)), total)


@handles("sum")
def _sum_handler(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any = None, _keepdim: bool = False, **__: Any
) -> Symbol:
    value = tracer.symbol(x)
    return _result(tracer, _sum(value, _dims(x, dim), _accumulator(value, out)), out)


@handles("mean")
def _mean_handler(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any = None, _keepdim: bool = False, **__: Any
) -> Symbol:
    value = tracer.symbol(x)
    return _result(tracer, _mean(value, _dims(x, dim), _accumulator(value, out)), out)


@handles("prod")
def _prod_handler(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any = None, _keepdim: bool = False, **__: Any
) -> Symbol:
    value = tracer.symbol(x)
    return _result(tracer, fold("prod", value, _dims(x, dim), _accumulator(value, out)), out)


def _logical(operation: str) -> Callable[..., Symbol]:
    def handler(
        tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any = None, _keepdim: bool = False, **__: Any
    ) -> Symbol:
        value = tracer.symbol(x)
        truth = Symbol(value.shape, Type.BOOL, lambda index: _truth(value.at(index)))
        return _result(tracer, fold(operation, truth, _dims(x, dim), Type.I32), out)

    return handler


def _truth(x: Expression) -> Expression:
    return x if x.type is Type.BOOL else op("ne", x, literal(0, x.type))


handles("any")(_logical("max"))
handles("all")(_logical("min"))

# ---- variance and norms --------------------------------------------------------------------------------


def _moments(
    value: Symbol,
    dims: Sequence[int],
    type_: Type,
    correction: float,
    *,
    mean_of_infinite: bool = False,
    squares: Type | None = None,
    exact_mean: bool = False,
) -> tuple[Symbol, Symbol]:
    """(variance, mean), both with kept dimensions; summed about the first element of each slice.

    The shift makes slices of one constant exact, as PyTorch's running (Welford) mean has them, and keeps the digits of
    data far from zero. `mean_of_infinite`: the mean of a slice that begins with an infinity is what a plain sum gives,
    not NaN. `squares`: the type of the variance and of the squares that it is made of, where that is a wider one.
    `exact_mean`: the mean is a result, so it is summed and shifted back in float64: of data about zero, a float32 would
    keep an error in proportion to the first element, thousands of times as large as the mean of millions.
    """
    wide = _typed(value, type_)
    folded = {dim % max(1, len(value.shape)) for dim in dims}
    first = Symbol(
        tuple(1 if dim in folded else extent for dim, extent in enumerate(value.shape)),
        type_,
        lambda index: wide.at(tuple(Index() if dim in folded else at for dim, at in enumerate(index))),
    )
    if mean_of_infinite:
        first = _combine(_zero_where_infinite, first)
    shifted = _combine(lambda x, origin: op("sub", x, origin), wide, first)
    wide_mean = _mean(_typed(shifted, Type.F64), dims, Type.F64) if exact_mean else _mean(shifted, dims, type_)
    mean = _typed(wide_mean, type_)
    distance = _typed(_combine(lambda x, m: op("sub", x, m), shifted, mean), squares or type_)
    squared = _combine(lambda d: op("mul", d, d), distance)
    count = math.prod(value.shape[dim] for dim in dims) if value.shape else 1
    divisor = literal(max(0.0, count - correction), distance.type)
    variance = _combine(lambda s: op("div", s, divisor), _sum(squared, dims, distance.type))
    total = _combine(lambda origin, m: op("add", origin, m), _typed(first, wide_mean.type), wide_mean)
    return variance, _typed(total, type_)


def _correction(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """From `unbiased` (a bool, positional) or `correction` (a keyword, None meaning 1)."""
    if "correction" in kwargs:
        return 1.0 if kwargs["correction"] is None else float(kwargs["correction"])
    flags = [argument for argument in args if isinstance(argument, bool)]
    return 1.0 if not flags or flags[0] else 0.0


def _variance_of(
    tracer: Tracer,
    out: torch.Tensor,
    x: torch.Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    squares: Type | None = None,
    exact_mean: bool = False,
) -> tuple[Symbol, Symbol]:
    dim = next((a for a in args if not isinstance(a, bool)), kwargs.get("dim"))
    type_ = type_of(out.dtype).compute
    correction = _correction(args, kwargs)
    return _moments(tracer.symbol(x), _dims(x, dim), type_, correction, squares=squares, exact_mean=exact_mean)


@handles("var")
def _var(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Symbol:
    return _result(tracer, _variance_of(tracer, out, x, args, kwargs)[0], out)


@handles("std")
def _std(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Symbol:
    """A deviation of 1e-30 is a float32, its square is none: squares are summed in float64, as PyTorch does."""
    variance = _variance_of(tracer, out, x, args, kwargs, squares=Type.F64)[0]
    return _result(tracer, _combine(lambda v: op("sqrt", v), variance), out)


@handles("var_mean")
def _var_mean(tracer: Tracer, out: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Symbol, Symbol]:
    variance, mean = _variance_of(tracer, out[0], x, args, kwargs, exact_mean=True)
    return _result(tracer, variance, out[0]), _result(tracer, mean, out[1])


@handles("linalg_vector_norm")
def _vector_norm(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, order: float = 2, dim: Any = None, *_: Any, **__: Any
) -> Symbol:
    type_ = type_of(out.dtype).compute
    value = _typed(tracer.symbol(x), type_)
    dims = _dims(x, dim)
    sizes = _combine(lambda v: op("abs", v), value)
    if order == 2:
        squares = _combine(lambda v: op("mul", v, v), value)
        return _result(tracer, _combine(lambda s: op("sqrt", s), _sum(squares, dims, type_)), out)
    if order == 1:
        return _result(tracer, _sum(sizes, dims, type_), out)
    if abs(order) == math.inf:
        return _result(tracer, fold("max" if order > 0 else "min", sizes, dims, type_), out)
    if order == 0:
        count = _combine(lambda v: cast(op("ne", v, literal(0.0, v.type)), type_), value)
        return _result(tracer, _sum(count, dims, type_), out)
    powers = _combine(lambda v: op("pow", v, literal(order, type_)), sizes)
    root = literal(1.0 / order, type_)
    return _result(tracer, _combine(lambda s: op("pow", s, root), _sum(powers, dims, type_)), out)


def _normalized(
    x: Symbol, mean: Symbol, variance: Symbol, eps: float, weight: Symbol | None, bias: Symbol | None
) -> tuple[Symbol, Symbol]:
    """((x − mean) · rstd · weight + bias, rstd)."""
    rstd = _combine(lambda v: op("rsqrt", op("add", v, literal(eps, v.type))), variance)
    result = _combine(lambda v, m, r: op("mul", op("sub", v, m), r), x, mean, rstd)
    return _affine(result, weight, bias), rstd


def _affine(value: Symbol, weight: Symbol | None, bias: Symbol | None) -> Symbol:
    type_ = value.type
    if weight is not None:
        value = _combine(lambda v, w: op("mul", v, w), value, _typed(weight, type_))
    if bias is not None:
        value = _combine(lambda v, b: op("add", v, b), value, _typed(bias, type_))
    return value


def _optional(tracer: Tracer, tensor: torch.Tensor | None, shape: Sequence[int] | None = None) -> Symbol | None:
    if tensor is None:
        return None
    symbol = tracer.symbol(tensor)
    return symbol if shape is None else reshaped(symbol, shape, tracer.extents)


def _gives_mean(tracer: Tracer) -> bool:
    """Whether the mean of the norm that is traced now is read, as a backward reads it."""
    return len(tracer.is_wanted) > 1 and tracer.is_wanted[1]


@handles("native_layer_norm")
def _layer_norm(
    tracer: Tracer, out: Any, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> list[Symbol]:
    type_ = type_of(x.dtype).compute
    value = _typed(tracer.symbol(x), type_)
    dims = list(range(x.dim() - len(shape), x.dim()))
    variance, mean = _moments(value, dims, type_, 0, exact_mean=_gives_mean(tracer))
    result, rstd = _normalized(value, mean, variance, eps, _optional(tracer, weight), _optional(tracer, bias))
    return [_result(tracer, part, tensor) for part, tensor in zip((result, mean, rstd), out, strict=True)]


@handles("native_group_norm")
def _group_norm(
    tracer: Tracer,
    out: Any,
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    batch: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> list[Symbol]:
    type_ = type_of(x.dtype).compute
    split = (batch, groups, channels // groups, inner)
    value = reshaped(_typed(tracer.symbol(x), type_), split, tracer.extents)
    variance, mean = _moments(value, [2, 3], type_, 0, exact_mean=_gives_mean(tracer))
    per_channel = (groups, channels // groups, 1)
    scale, shift = (_optional(tracer, part, per_channel) for part in (weight, bias))
    result, rstd = _normalized(value, mean, variance, eps, scale, shift)
    return [_result(tracer, part, tensor) for part, tensor in zip((result, mean, rstd), out, strict=True)]


@handles("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def _batch_norm(tracer: Tracer, out: Any, x: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> list[Symbol | None]:
    """By the statistics of the batch, which update the running ones where there are some, or by the stored ones."""
    tensors = [part for part in rest if isinstance(part, torch.Tensor)]
    numbers = [part for part in rest if isinstance(part, bool | float)]
    training = numbers[0] if isinstance(numbers[0], bool) else False
    eps = numbers[-1]
    type_ = type_of(x.dtype).compute
    value = _typed(tracer.symbol(x), type_)
    shape = (1, -1, *([1] * (x.dim() - 2)))
    wide = tuple(x.shape[1] if extent == -1 else extent for extent in shape)
    if training:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = _moments(value, dims, type_, 0, mean_of_infinite=bool(tensors), exact_mean=bool(tensors))
        if tensors:
            count = x.numel() // x.shape[1]
            unbiased = _combine(lambda v: op("mul", v, literal(count / max(1, count - 1), type_)), variance)
            for running, fresh in zip(tensors, (mean, unbiased), strict=True):
                tracer.bind(running, _moved_average(tracer, running, fresh, momentum=numbers[-2]))
    else:
        mean, variance = (_typed(_kept(tracer, part, wide), type_) for part in tensors[:2])
    scale, shift = (_optional(tracer, part, wide) for part in (weight, bias))
    result, rstd = _normalized(value, mean, variance, eps, scale, shift)
    saved = (mean, rstd) if training else (None, None)  # of the stored statistics, none are given
    return [_result(tracer, result, out[0]), *(each and _result(tracer, each, out[1]) for each in saved)]


def _moved_average(tracer: Tracer, running: torch.Tensor, fresh: Symbol, momentum: float) -> Symbol:
    """The running statistic after a batch."""
    old = _typed(tracer.symbol(running), fresh.type)
    new = reshaped(fresh, running.shape, tracer.extents)
    keep, take = literal(1 - momentum, fresh.type), literal(momentum, fresh.type)
    return _typed(
        _combine(lambda o, n: op("add", op("mul", n, take), op("mul", o, keep)), old, new), type_of(running.dtype)
    )


def _kept(tracer: Tracer, tensor: torch.Tensor, shape: Sequence[int]) -> Symbol:
    return reshaped(tracer.symbol(tensor), shape, tracer.extents)


@handles("_fused_rms_norm")
def _rms_norm(
    tracer: Tracer, out: Any, x: torch.Tensor, shape: Sequence[int], weight: Any, eps: float | None
) -> list[Symbol]:
    type_ = type_of(x.dtype).compute
    small = torch.finfo(x.dtype).eps if eps is None else eps
    value = _typed(tracer.symbol(x), type_)
    dims = list(range(x.dim() - len(shape), x.dim()))
    squares = _combine(lambda v: op("mul", v, v), value)
    rstd = _combine(lambda v: op("rsqrt", op("add", v, literal(small, v.type))), _mean(squares, dims, type_))
    result = _affine(_combine(lambda v, r: op("mul", v, r), value, rstd), _optional(tracer, weight), None)
    return [_result(tracer, part, tensor) for part, tensor in zip((result, rstd), out, strict=True)]


# ---- softmax and kin -----------------------------------------------------------------------------------


def _shifted_exponentials(value: Symbol, dims: Sequence[int]) -> tuple[Symbol, Symbol, Symbol]:
    """(x − max, exp of it, its sum)."""
    greatest = fold("max", value, dims, value.type)
    shifted = _combine(lambda x, m: op("sub", x, m), value, greatest)
    raised = _combine(lambda x: op("exp", x), shifted)
    return shifted, raised, _sum(raised, dims, value.type)


@handles("_softmax")
def _softmax(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: int, _: bool) -> Symbol:
    value = _typed(tracer.symbol(x), type_of(x.dtype).compute)
    _shift, raised, total = _shifted_exponentials(value, [dim] if x.dim() else [])
    return _result(tracer, _combine(lambda e, s: op("div", e, s), raised, total), out)


@handles("_log_softmax")
def _log_softmax(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: int, _: bool) -> Symbol:
    value = _typed(tracer.symbol(x), type_of(x.dtype).compute)
    shifted, _raised, total = _shifted_exponentials(value, [dim] if x.dim() else [])
    return _result(tracer, _combine(lambda d, s: op("sub", d, op("log", s)), shifted, total), out)


@handles("logsumexp")
def _logsumexp(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any, _keepdim: bool = False) -> Symbol:
    value = _typed(tracer.symbol(x), type_of(out.dtype).compute)
    dims = _dims(x, dim)
    greatest = fold("max", value, dims, value.type)
    finite = _combine(_zero_where_infinite, greatest)
    raised = _combine(lambda v, m: op("exp", op("sub", v, m)), value, finite)
    total = _sum(raised, dims, value.type)
    return _result(tracer, _combine(lambda s, m: op("add", op("log", s), m), total, finite), out)


def _zero_where_infinite(x: Expression) -> Expression:
    return op("where", op("isinf", x), literal(0.0, x.type), x)


# ---- products with a vector ----------------------------------------------------------------------------


def _product(tracer: Tracer, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Symbol:
    """Sum over k of left[..., m, k] · right[..., k, n]: a row reduction where m or n is 1, else what `product` sees."""
    type_ = type_of(out.dtype).compute
    a, b = _typed(tracer.symbol(left), type_), tracer.symbol(right)
    b = _weight(b, type_) if min(out.shape[-2:]) > 1 else _typed(b, type_)
    lead = tuple(left.shape[:-2])
    terms = Symbol((*lead, left.shape[-2], right.shape[-1], left.shape[-1]), type_, _terms(a, b))
    return _result(tracer, _sum(terms, [len(lead) + 2], type_), out)


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
    """Scales of both as a whole, of the left's rows and of the right's columns."""
    m, n = out.shape
    if scale_result is not None:
        raise Refused("a scaled product whose result is scaled is not lowered")
    kinds = [(scale_left, (m, 1)), (scale_right, (1, n))]
    if any(scale.numel() != 1 and tuple(scale.shape) != shape for scale, shape in kinds):
        raise Refused("a scaled product whose scales are of blocks is not lowered")
    factors = [_typed(tracer.symbol(factor), Type.F32) for factor in (left, right)]
    terms = Symbol((m, n, left.shape[1]), Type.F32, _terms(*factors))
    value = reshaped(_sum(terms, [2], Type.F32), out.shape, tracer.extents)
    for scale, shape in kinds:
        each = _typed(reshaped(tracer.symbol(scale), shape if scale.numel() > 1 else (1, 1), tracer.extents), Type.F32)
        value = _combine(lambda v, f: op("mul", v, f), value, broadcast(each, out.shape))
    if bias is not None:
        shift = broadcast(_typed(tracer.symbol(bias), Type.F32), out.shape)
        value = _combine(lambda v, b: op("add", v, b), value, shift)
    return _result(tracer, value, out)


@handles("mv", "dot", "vdot")
def _mv(tracer: Tracer, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Symbol:
    type_ = type_of(out.dtype).compute
    terms = _combine(
        lambda a, b: op("mul", a, b), _typed(tracer.symbol(left), type_), _typed(tracer.symbol(right), type_)
    )
    return _result(tracer, _sum(terms, [left.dim() - 1], type_), out)


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
    shift = broadcast(_typed(tracer.symbol(bias), value.type), out.shape)
    scaled = value if alpha == 1 else _combine(lambda v, s: op("mul", v, s), value, constant_symbol(alpha, type_, ()))
    if beta == 0:
        return scaled
    added = shift if beta == 1 else _combine(lambda v, s: op("mul", v, s), shift, constant_symbol(beta, type_, ()))
    return _combine(lambda v, s: op("add", v, s), scaled, added)
