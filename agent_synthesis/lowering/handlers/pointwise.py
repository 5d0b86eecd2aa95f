"""Handlers of elementwise operations: one formula each, over operands brought to PyTorch's computation type.

Formulas are those of PyTorch's own kernels, so that rounding and special values agree. Results of 16-bit
operations stay in f32 until they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Kind
from torch._prims_common import elementwise_dtypes

from agent_synthesis.nests.ir import Expression, Literal, Type
from agent_synthesis.nests.symbolic import (
    Indices,
    Refused,
    Symbol,
    Tracer,
    broadcast,
    cast,
    handles,
    literal,
    op,
    type_of,
)

Formula = Callable[..., Expression]


def elementwise(operand_count: int, kind: Kind, formula: Formula) -> Callable[..., Symbol]:
    """A handler of an elementwise operation.

    `formula` gets `operand_count` expressions of the type that PyTorch computes in, which `kind` says, then the call's
    other arguments as they are.
    """

    def handler(tracer: Tracer, out: torch.Tensor, *args: Any, **kwargs: Any) -> Symbol:
        operands, rest = list(args[:operand_count]), args[operand_count:]
        compute, _ = elementwise_dtypes(*operands, type_promotion_kind=kind)
        type_, out_type = type_of(compute).compute, type_of(out.dtype)
        symbols = [_operand(tracer, operand, out) for operand in operands]

        def at(index: Indices) -> Expression:
            values = [
                cast(value.at(index), type_) if isinstance(value, Symbol) else literal(value, type_)
                for value in symbols
            ]
            return cast(formula(*values, *rest, **kwargs), out_type.compute)

        return Symbol(tuple(out.shape), out_type, at)

    return handler


def _register(names: str, operand_count: int, kind: Kind, formula: Formula) -> None:
    handles(*names.split())(elementwise(operand_count, kind, formula))


def _operand(tracer: Tracer, operand: Any, out: torch.Tensor) -> Any:
    if isinstance(operand, torch.Tensor):
        return broadcast(tracer.symbol(operand), out.shape)
    if isinstance(operand, bool | int | float):
        return operand
    raise Refused(f"an operand is a {type(operand).__name__}")


def _float(names: str, formula: Formula, operand_count: int = 1) -> None:
    _register(names, operand_count, Kind.INT_TO_FLOAT, formula)


def _number(names: str, formula: Formula, operand_count: int = 1) -> None:
    _register(names, operand_count, Kind.DEFAULT, formula)


def _test(names: str, formula: Formula, operand_count: int = 2) -> None:
    _register(names, operand_count, Kind.ALWAYS_BOOL, formula)


def _like(value: Expression, number: float) -> Expression:
    return literal(number, value.type)


for _name in (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "erf", "erfc", "sigmoid",
):  # fmt: skip
    _float(_name, lambda x, _name=_name: op(_name, x))
for _name in ("neg", "floor", "ceil", "trunc", "sign"):
    _number(_name, lambda x, _name=_name: op(_name, x))
_number("abs", lambda x: op("abs", x))
_number("square", lambda x: op("mul", x, x))
_number("sgn", lambda x: op("sign", x))
_number("positive", lambda x: x)
_float("log10", lambda x: op("div", op("log", x), _like(x, math.log(10.0))))


def _round(x: Expression, decimals: int = 0) -> Expression:
    if decimals:
        raise Refused("round to decimals is not lowered")
    return op("round", x)


_number("round", _round)

# ---- arithmetic ----------------------------------------------------------------------------------------


def _scaled(value: Expression, factor: float) -> Expression:
    return value if factor == 1 else op("mul", value, _like(value, factor))


_number("add", lambda a, b, alpha=1: op("add" if a.type is not Type.BOOL else "or", a, _scaled(b, alpha)), 2)
_number("sub", lambda a, b, alpha=1: op("sub", a, _scaled(b, alpha)), 2)
_number("rsub", lambda a, b, alpha=1: op("sub", b, _scaled(a, alpha)), 2)
_number("mul", lambda a, b: op("mul" if a.type is not Type.BOOL else "and", a, b), 2)


def _divide(tracer: Tracer, out: torch.Tensor, a: Any, b: Any, *, rounding_mode: str | None = None) -> Symbol:
    """True division makes floats of integers; the rounding modes keep integers."""
    return _DIVISIONS[rounding_mode](tracer, out, a, b)


_DIVISIONS = {
    None: elementwise(2, Kind.INT_TO_FLOAT, lambda a, b: op("div", a, b)),
    "floor": elementwise(2, Kind.DEFAULT, lambda a, b: op("floor_div", a, b)),
    "trunc": elementwise(2, Kind.DEFAULT, lambda a, b: op("trunc_div", a, b)),
}
handles("div", "divide", "true_divide")(_divide)
_number("floor_divide", lambda a, b: op("floor_div", a, b), 2)
for _name in ("fmod", "remainder", "atan2"):
    _register(
        _name,
        2,
        Kind.INT_TO_FLOAT if _name == "atan2" else Kind.DEFAULT,
        lambda a, b, _name=_name: op(_name, a, b),
    )
_number("maximum", lambda a, b: op("max", a, b), 2)
_number("minimum", lambda a, b: op("min", a, b), 2)
_number("fmax", lambda a, b: op("where", op("isnan", a), b, op("where", op("isnan", b), a, op("max", a, b))), 2)
_number("fmin", lambda a, b: op("where", op("isnan", a), b, op("where", op("isnan", b), a, op("min", a, b))), 2)


def _pow(base: Expression, exponent: Expression) -> Expression:
    if isinstance(exponent, Literal) and base.type.is_float:
        match exponent.value:
            case 0.5:
                return op("sqrt", base)
            case 1.0:
                return base
            case 2.0:
                return op("mul", base, base)
            case 3.0:
                return op("mul", op("mul", base, base), base)
            case -1.0:
                return op("reciprocal", base)
            case -0.5:
                return op("rsqrt", base)
    return op("pow", base, exponent)


_register("pow", 2, Kind.BOOL_TO_LONG, _pow)


def _logaddexp(a: Expression, b: Expression) -> Expression:
    greater = op("max", a, b)
    soft = op("add", greater, op("log1p", op("exp", op("neg", op("abs", op("sub", a, b))))))
    return op("where", op("and", op("isinf", a), op("eq", a, b)), a, soft)


_float("logaddexp", _logaddexp, 2)
_number("addcmul", lambda a, b, c, value=1: op("add", a, _scaled(op("mul", b, c), value)), 3)
_float("addcdiv", lambda a, b, c, value=1: op("add", a, _scaled(op("div", b, c), value)), 3)
_number("lerp", lambda a, b, w: op("add", a, op("mul", w, op("sub", b, a))), 3)

# ---- tests and choices ---------------------------------------------------------------------------------

for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _test(_name, lambda a, b, _name=_name: op(_name, a, b))
_test("isnan", lambda x: op("isnan", x), 1)
_test("isinf", lambda x: op("isinf", x), 1)


def _truth(x: Expression) -> Expression:
    return x if x.type is Type.BOOL else op("ne", x, _like(x, 0))


_test("logical_not", lambda x: op("not", _truth(x)), 1)
_test("logical_and", lambda a, b: op("and", _truth(a), _truth(b)))
_test("logical_or", lambda a, b: op("or", _truth(a), _truth(b)))
_test("logical_xor", lambda a, b: op("xor", _truth(a), _truth(b)))
_number("bitwise_not", lambda x: op("not" if x.type is Type.BOOL else "bitwise_not", x))
for _name in ("and", "or", "xor"):
    _number(
        f"bitwise_{_name}",
        lambda a, b, _name=_name: op(_name if a.type is Type.BOOL else f"bitwise_{_name}", a, b),
        2,
    )
for _names, _shift in (
    ("__lshift__ bitwise_left_shift", "shift_left"),
    ("__rshift__ bitwise_right_shift", "shift_right"),
):
    _number(_names, lambda a, b, _shift=_shift: op(_shift, a, b), 2)


def _choose(tracer: Tracer, out: torch.Tensor, condition: Any, yes: Any, no: Any) -> Symbol:
    type_ = type_of(out.dtype)
    test, first, second = (_operand(tracer, operand, out) for operand in (condition, yes, no))

    def branch(value: Any, index: Indices) -> Expression:
        if isinstance(value, Symbol):
            return cast(value.at(index), type_.compute)
        return literal(value, type_.compute)

    return Symbol(
        tuple(out.shape),
        type_,
        lambda index: op("where", cast(test.at(index), Type.BOOL), branch(first, index), branch(second, index)),
    )


handles("where")(_choose)
handles("masked_fill")(lambda tracer, out, x, mask, value: _choose(tracer, out, mask, value, x))

# ---- activations ---------------------------------------------------------------------------------------


def _clamp(x: Expression, low: float | None = None, high: float | None = None) -> Expression:
    if low is not None:
        x = op("max", x, _like(x, low))
    return op("min", x, _like(x, high)) if high is not None else x


@handles("clamp", "clip")
def _clamp_handler(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, low: Any = None, high: Any = None, **named: Any
) -> Symbol:
    """Bounds, numbers or tensors, take part in the promotion: a bool between integers is an integer."""
    type_ = type_of(out.dtype)
    bounds = {"max": named.get("min", low), "min": named.get("max", high)}
    operands = {name: _operand(tracer, bound, out) for name, bound in bounds.items() if bound is not None}
    value = _operand(tracer, x, out)

    def at(index: Indices) -> Expression:
        result = cast(value.at(index), type_.compute)
        for name, bound in operands.items():
            limit = cast(bound.at(index), type_.compute) if isinstance(bound, Symbol) else _like(result, bound)
            result = op(name, result, limit)
        return result

    return Symbol(tuple(out.shape), type_, at)


_number("clamp_min", lambda x, low: op("max", x, low), 2)
_number("clamp_max", lambda x, high: op("min", x, high), 2)
_number("hardtanh", lambda x, min_val=-1.0, max_val=1.0: _clamp(x, min_val, max_val))
_number("relu", lambda x: op("max", x, _like(x, 0)))
_number("relu6", lambda x: _clamp(x, 0, 6))
_number("leaky_relu", lambda x, slope=0.01: op("where", op("gt", x, _like(x, 0)), x, _scaled(x, slope)))
_number("threshold", lambda x, limit, value: op("where", op("le", x, _like(x, limit)), _like(x, value), x))
_number("_prelu_kernel", lambda x, w: op("where", op("gt", x, _like(x, 0)), x, op("mul", w, x)), 2)


def _elu(x: Expression, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expression:
    negative = _scaled(op("expm1", _scaled(x, input_scale)), alpha * scale)
    return op("where", op("gt", x, _like(x, 0)), _scaled(x, scale), negative)


def _celu(x: Expression, alpha: float = 1) -> Expression:
    negative = _scaled(op("expm1", op("div", x, _like(x, alpha))), alpha)
    return op("where", op("gt", x, _like(x, 0)), x, negative)


def _softshrink(x: Expression, limit: float = 0.5) -> Expression:
    outside = op("sub", x, op("mul", op("sign", x), _like(x, limit)))
    return op("where", op("gt", op("abs", x), _like(x, limit)), outside, op("mul", x, _like(x, 0)))


def _gelu(x: Expression, approximate: str = "none") -> Expression:
    half = op("mul", x, _like(x, 0.5))
    if approximate == "tanh":
        cubic = op("mul", op("mul", op("mul", x, x), x), _like(x, 0.044715))
        inner = op("mul", op("add", x, cubic), _like(x, math.sqrt(2.0 / math.pi)))
        return op("mul", half, op("add", _like(x, 1), op("tanh", inner)))
    return op("mul", half, op("add", _like(x, 1), op("erf", op("mul", x, _like(x, math.sqrt(0.5))))))


def _softplus(x: Expression, beta: float = 1, threshold: float = 20) -> Expression:
    scaled = _scaled(x, beta)
    soft = op("log1p", op("exp", scaled))
    return op(
        "where",
        op("gt", scaled, _like(x, threshold)),
        x,
        soft if beta == 1 else op("div", soft, _like(x, beta)),
    )


def _silu(x: Expression) -> Expression:
    return op("div", x, op("add", _like(x, 1), op("exp", op("neg", x))))


_number("elu", _elu)
_number("celu", _celu)
_number("softshrink", _softshrink)
_number("gelu", _gelu)
_number("softplus", _softplus)
_number("silu", _silu)
_number("mish", lambda x: op("mul", x, op("tanh", op("log1p", op("exp", x)))))
_number("hardsigmoid", lambda x: op("div", _clamp(op("add", x, _like(x, 3)), 0, 6), _like(x, 6)))
_number("hardswish", lambda x: op("div", op("mul", x, _clamp(op("add", x, _like(x, 3)), 0, 6)), _like(x, 6)))
_number(
    "hardshrink",
    lambda x, limit=0.5: op("where", op("le", op("abs", x), _like(x, limit)), _like(x, 0), x),
)


@handles("log_sigmoid_forward")
def _log_sigmoid(tracer: Tracer, _: Any, x: torch.Tensor) -> Any:
    value = tracer.symbol(x)

    def at(index: Indices) -> Expression:
        element = value.at(index)
        tail = op("log1p", op("exp", op("neg", op("abs", element))))
        return op("sub", op("min", element, _like(element, 0)), tail)

    return Symbol(value.shape, value.type, at), None
