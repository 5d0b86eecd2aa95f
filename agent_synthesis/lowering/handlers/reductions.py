"""Handlers of reductions and of what is built from them: softmax, norms.

Sums accumulate in f32 or wider. Variances take two steps, the mean and then the squares around it, because
`E[x²] − E[x]²` loses every digit where the mean is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agent_synthesis.nests.ir import Expression, Index, Type
from agent_synthesis.nests.symbolic import (
    Symbol,
    Tracer,
    broadcast,
    cast,
    common_shape,
    fold,
    handles,
    literal,
    op,
    reshaped,
    type_of,
)


def combine(formula: Callable[..., Expression], *operands: Symbol) -> Symbol:
    """An elementwise formula over symbols of one type, broadcast against each other."""
    shape = common_shape(operand.shape for operand in operands)
    spread = [broadcast(operand, shape) for operand in operands]
    return Symbol(tuple(shape), operands[0].type, lambda index: formula(*(s.at(index) for s in spread)))


def typed(value: Symbol, type_: Type) -> Symbol:
    """The symbol with its elements in what a type computes in."""
    if value.type is type_:
        return value
    return Symbol(value.shape, type_, lambda index: cast(value.at(index), type_.compute))


def _dims(value: torch.Tensor, dims: Any) -> list[int]:
    if dims is None or dims == []:
        return list(range(value.dim()))
    return [dims] if isinstance(dims, int) else list(dims)


def as_result(tracer: Tracer, value: Symbol, out: torch.Tensor) -> Symbol:
    """The folded symbol under the result's shape (with or without the kept dimensions) and type."""
    return typed(reshaped(value, out.shape, tracer.extents), type_of(out.dtype))


def _accumulator(value: Symbol, out: torch.Tensor) -> Type:
    compute = type_of(out.dtype).compute
    return (
        compute
        if compute.is_float
        else Type.I64
        if value.type is not Type.BOOL or compute is not Type.BOOL
        else Type.BOOL
    )


def sum_over(value: Symbol, dims: Sequence[int], type_: Type) -> Symbol:
    """The sum over dimensions, which keep extent 1."""
    return fold("sum", value, dims, type_)


def _mean(value: Symbol, dims: Sequence[int], type_: Type) -> Symbol:
    total = sum_over(value, dims, type_)
    count = math.prod(value.shape[dim] for dim in dims) if value.shape else 1
    return combine(lambda x: op("div", x, literal(count, type_)), total)


@handles("sum")
def _sum_handler(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any = None, _keepdim: bool = False, **__: Any
) -> Symbol:
    value = tracer.symbol(x)
    return as_result(tracer, sum_over(value, _dims(x, dim), _accumulator(value, out)), out)


@handles("mean")
def _mean_handler(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any = None, _keepdim: bool = False, **__: Any
) -> Symbol:
    value = tracer.symbol(x)
    return as_result(tracer, _mean(value, _dims(x, dim), _accumulator(value, out)), out)


@handles("prod")
def _prod_handler(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any = None, _keepdim: bool = False, **__: Any
) -> Symbol:
    value = tracer.symbol(x)
    return as_result(tracer, fold("prod", value, _dims(x, dim), _accumulator(value, out)), out)


def _logical(operation: str) -> Callable[..., Symbol]:
    def handler(
        tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any = None, _keepdim: bool = False, **__: Any
    ) -> Symbol:
        value = tracer.symbol(x)
        truth = Symbol(value.shape, Type.BOOL, lambda index: _truth(value.at(index)))
        return as_result(tracer, fold(operation, truth, _dims(x, dim), Type.I32), out)

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
    wide = typed(value, type_)
    folded = {dim % max(1, len(value.shape)) for dim in dims}
    first = Symbol(
        tuple(1 if dim in folded else extent for dim, extent in enumerate(value.shape)),
        type_,
        lambda index: wide.at(tuple(Index() if dim in folded else at for dim, at in enumerate(index))),
    )
    if mean_of_infinite:
        first = combine(_zero_where_infinite, first)
    shifted = combine(lambda x, origin: op("sub", x, origin), wide, first)
    wide_mean = _mean(typed(shifted, Type.F64), dims, Type.F64) if exact_mean else _mean(shifted, dims, type_)
    mean = typed(wide_mean, type_)
    distance = typed(combine(lambda x, m: op("sub", x, m), shifted, mean), squares or type_)
    squared = combine(lambda d: op("mul", d, d), distance)
    count = math.prod(value.shape[dim] for dim in dims) if value.shape else 1
    divisor = literal(max(0.0, count - correction), distance.type)
    variance = combine(lambda s: op("div", s, divisor), sum_over(squared, dims, distance.type))
    total = combine(lambda origin, m: op("add", origin, m), typed(first, wide_mean.type), wide_mean)
    return variance, typed(total, type_)


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
    return as_result(tracer, _variance_of(tracer, out, x, args, kwargs)[0], out)


@handles("std")
def _std(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Symbol:
    """A deviation of 1e-30 is a float32, its square is none: squares are summed in float64, as PyTorch does."""
    variance = _variance_of(tracer, out, x, args, kwargs, squares=Type.F64)[0]
    return as_result(tracer, combine(lambda v: op("sqrt", v), variance), out)


@handles("var_mean")
def _var_mean(tracer: Tracer, out: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Symbol, Symbol]:
    variance, mean = _variance_of(tracer, out[0], x, args, kwargs, exact_mean=True)
    return as_result(tracer, variance, out[0]), as_result(tracer, mean, out[1])


@handles("linalg_vector_norm")
def _vector_norm(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, order: float = 2, dim: Any = None, *_: Any, **__: Any
) -> Symbol:
    type_ = type_of(out.dtype).compute
    value = typed(tracer.symbol(x), type_)
    dims = _dims(x, dim)
    sizes = combine(lambda v: op("abs", v), value)
    if order == 2:
        squares = combine(lambda v: op("mul", v, v), value)
        return as_result(tracer, combine(lambda s: op("sqrt", s), sum_over(squares, dims, type_)), out)
    if order == 1:
        return as_result(tracer, sum_over(sizes, dims, type_), out)
    if abs(order) == math.inf:
        return as_result(tracer, fold("max" if order > 0 else "min", sizes, dims, type_), out)
    if order == 0:
        count = combine(lambda v: cast(op("ne", v, literal(0.0, v.type)), type_), value)
        return as_result(tracer, sum_over(count, dims, type_), out)
    powers = combine(lambda v: op("pow", v, literal(order, type_)), sizes)
    root = literal(1.0 / order, type_)
    return as_result(tracer, combine(lambda s: op("pow", s, root), sum_over(powers, dims, type_)), out)


def _normalized(
    x: Symbol, mean: Symbol, variance: Symbol, eps: float, weight: Symbol | None, bias: Symbol | None
) -> tuple[Symbol, Symbol]:
    """((x − mean) · rstd · weight + bias, rstd)."""
    rstd = combine(lambda v: op("rsqrt", op("add", v, literal(eps, v.type))), variance)
    result = combine(lambda v, m, r: op("mul", op("sub", v, m), r), x, mean, rstd)
    return _affine(result, weight, bias), rstd


def _affine(value: Symbol, weight: Symbol | None, bias: Symbol | None) -> Symbol:
    type_ = value.type
    if weight is not None:
        value = combine(lambda v, w: op("mul", v, w), value, typed(weight, type_))
    if bias is not None:
        value = combine(lambda v, b: op("add", v, b), value, typed(bias, type_))
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
    value = typed(tracer.symbol(x), type_)
    dims = list(range(x.dim() - len(shape), x.dim()))
    variance, mean = _moments(value, dims, type_, 0, exact_mean=_gives_mean(tracer))
    result, rstd = _normalized(value, mean, variance, eps, _optional(tracer, weight), _optional(tracer, bias))
    return [as_result(tracer, part, tensor) for part, tensor in zip((result, mean, rstd), out, strict=True)]


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
    value = reshaped(typed(tracer.symbol(x), type_), split, tracer.extents)
    variance, mean = _moments(value, [2, 3], type_, 0, exact_mean=_gives_mean(tracer))
    per_channel = (groups, channels // groups, 1)
    scale, shift = (_optional(tracer, part, per_channel) for part in (weight, bias))
    result, rstd = _normalized(value, mean, variance, eps, scale, shift)
    return [as_result(tracer, part, tensor) for part, tensor in zip((result, mean, rstd), out, strict=True)]


@handles("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def _batch_norm(tracer: Tracer, out: Any, x: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> list[Symbol | None]:
    """By the statistics of the batch, which update the running ones where there are some, or by the stored ones."""
    tensors = [part for part in rest if isinstance(part, torch.Tensor)]
    numbers = [part for part in rest if isinstance(part, bool | float)]
    training = numbers[0] if isinstance(numbers[0], bool) else False
    eps = numbers[-1]
    type_ = type_of(x.dtype).compute
    value = typed(tracer.symbol(x), type_)
    shape = (1, -1, *([1] * (x.dim() - 2)))
    wide = tuple(x.shape[1] if extent == -1 else extent for extent in shape)
    if training:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = _moments(value, dims, type_, 0, mean_of_infinite=bool(tensors), exact_mean=bool(tensors))
        if tensors:
            count = x.numel() // x.shape[1]
            unbiased = combine(lambda v: op("mul", v, literal(count / max(1, count - 1), type_)), variance)
            for running, fresh in zip(tensors, (mean, unbiased), strict=True):
                tracer.bind(running, _moved_average(tracer, running, fresh, momentum=numbers[-2]))
    else:
        mean, variance = (typed(_kept(tracer, part, wide), type_) for part in tensors[:2])
    scale, shift = (_optional(tracer, part, wide) for part in (weight, bias))
    result, rstd = _normalized(value, mean, variance, eps, scale, shift)
    saved = (mean, rstd) if training else (None, None)  # of the stored statistics, none are given
    return [as_result(tracer, result, out[0]), *(each and as_result(tracer, each, out[1]) for each in saved)]


def _moved_average(tracer: Tracer, running: torch.Tensor, fresh: Symbol, momentum: float) -> Symbol:
    """The running statistic after a batch."""
    old = typed(tracer.symbol(running), fresh.type)
    new = reshaped(fresh, running.shape, tracer.extents)
    keep, take = literal(1 - momentum, fresh.type), literal(momentum, fresh.type)
    return typed(
        combine(lambda o, n: op("add", op("mul", n, take), op("mul", o, keep)), old, new), type_of(running.dtype)
    )


def _kept(tracer: Tracer, tensor: torch.Tensor, shape: Sequence[int]) -> Symbol:
    return reshaped(tracer.symbol(tensor), shape, tracer.extents)


@handles("_fused_rms_norm")
def _rms_norm(
    tracer: Tracer, out: Any, x: torch.Tensor, shape: Sequence[int], weight: Any, eps: float | None
) -> list[Symbol]:
    type_ = type_of(x.dtype).compute
    small = torch.finfo(x.dtype).eps if eps is None else eps
    value = typed(tracer.symbol(x), type_)
    dims = list(range(x.dim() - len(shape), x.dim()))
    squares = combine(lambda v: op("mul", v, v), value)
    rstd = combine(lambda v: op("rsqrt", op("add", v, literal(small, v.type))), _mean(squares, dims, type_))
    result = _affine(combine(lambda v, r: op("mul", v, r), value, rstd), _optional(tracer, weight), None)
    return [as_result(tracer, part, tensor) for part, tensor in zip((result, rstd), out, strict=True)]


# ---- softmax and kin -----------------------------------------------------------------------------------


def _shifted_exponentials(value: Symbol, dims: Sequence[int]) -> tuple[Symbol, Symbol, Symbol]:
    """(x − max, exp of it, its sum)."""
    greatest = fold("max", value, dims, value.type)
    shifted = combine(lambda x, m: op("sub", x, m), value, greatest)
    raised = combine(lambda x: op("exp", x), shifted)
    return shifted, raised, sum_over(raised, dims, value.type)


@handles("_softmax")
def _softmax(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: int, _: bool) -> Symbol:
    value = typed(tracer.symbol(x), type_of(x.dtype).compute)
    _shift, raised, total = _shifted_exponentials(value, [dim] if x.dim() else [])
    return as_result(tracer, combine(lambda e, s: op("div", e, s), raised, total), out)


@handles("_log_softmax")
def _log_softmax(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: int, _: bool) -> Symbol:
    value = typed(tracer.symbol(x), type_of(x.dtype).compute)
    shifted, _raised, total = _shifted_exponentials(value, [dim] if x.dim() else [])
    return as_result(tracer, combine(lambda d, s: op("sub", d, op("log", s)), shifted, total), out)


@handles("logsumexp")
def _logsumexp(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: Any, _keepdim: bool = False) -> Symbol:
    value = typed(tracer.symbol(x), type_of(out.dtype).compute)
    dims = _dims(x, dim)
    greatest = fold("max", value, dims, value.type)
    finite = combine(_zero_where_infinite, greatest)
    raised = combine(lambda v, m: op("exp", op("sub", v, m)), value, finite)
    total = sum_over(raised, dims, value.type)
    return as_result(tracer, combine(lambda s, m: op("add", op("log", s), m), total, finite), out)


def _zero_where_infinite(x: Expression) -> Expression:
    return op("where", op("isinf", x), literal(0.0, x.type), x)
