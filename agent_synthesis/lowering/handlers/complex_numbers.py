"""Handlers of complex numbers: two formulas each, for the real and the imaginary part.

Products are those of PyTorch's own kernels, (ac - bd) + (ad + bc)i, a real factor being one without an imaginary part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from agent_synthesis.nests.element_types import PART_OF_COMPLEX
from agent_synthesis.nests.ir import Expression, Index, Type
from agent_synthesis.nests.symbolic import (
    Indices,
    Refused,
    Symbol,
    Tracer,
    broadcast,
    cast,
    handles_complex,
    interleaved,
    literal,
    op,
)

Parts = tuple[Symbol, Symbol]
Number = tuple[Expression, Expression]


def _arithmetic(name: str, formula: Callable[[Number, Number], Number]) -> None:
    """Registers an operation on two numbers, of which one may be real."""

    def handler(
        tracer: Tracer, out: torch.Tensor, first: Any, second: Any, *_: Any, alpha: Any = 1, **__: Any
    ) -> Parts:
        if alpha != 1:
            raise Refused(f"{name} of complex numbers with a factor is not lowered")
        operands = [_parts(tracer, operand, out) for operand in (first, second)]

        def at(part: int) -> Callable[[Indices], Expression]:
            return lambda index: formula(*((real.at(index), imaginary.at(index)) for real, imaginary in operands))[part]

        type_ = PART_OF_COMPLEX[out.dtype]
        return Symbol(tuple(out.shape), type_, at(0)), Symbol(tuple(out.shape), type_, at(1))

    handles_complex(name)(handler)


def _parts(tracer: Tracer, operand: Any, out: torch.Tensor) -> Parts:
    """An operand's parts, of the result's type and shape."""
    type_ = PART_OF_COMPLEX[out.dtype]
    if isinstance(operand, torch.Tensor):
        if not operand.is_complex():
            return _converted(broadcast(tracer.symbol(operand), out.shape), type_), _number(0.0, type_, out)
        real, imaginary = (_converted(broadcast(part, out.shape), type_) for part in tracer.parts(operand))
        return real, imaginary
    if isinstance(operand, bool | int | float | complex):
        return _number(complex(operand).real, type_, out), _number(complex(operand).imag, type_, out)
    raise Refused(f"an operand is a {type(operand).__name__}")


def _converted(symbol: Symbol, type_: Type) -> Symbol:
    return symbol if symbol.type is type_ else Symbol(symbol.shape, type_, lambda index: cast(symbol.at(index), type_))


def _number(value: float, type_: Type, out: torch.Tensor) -> Symbol:
    return Symbol(tuple(out.shape), type_, lambda _: literal(value, type_))


_arithmetic("add", lambda x, y: (op("add", x[0], y[0]), op("add", x[1], y[1])))
_arithmetic("sub", lambda x, y: (op("sub", x[0], y[0]), op("sub", x[1], y[1])))
_arithmetic(
    "mul",
    lambda x, y: (
        op("sub", op("mul", x[0], y[0]), op("mul", x[1], y[1])),
        op("add", op("mul", x[0], y[1]), op("mul", x[1], y[0])),
    ),
)


@handles_complex("neg")
def _neg(tracer: Tracer, _: torch.Tensor, value: torch.Tensor) -> Parts:
    real, imaginary = tracer.parts(value)
    return _negative(real), _negative(imaginary)


@handles_complex("conj_physical")
def _conjugate(tracer: Tracer, _: torch.Tensor, value: torch.Tensor) -> Parts:
    real, imaginary = tracer.parts(value)
    return real, _negative(imaginary)


def _negative(symbol: Symbol) -> Symbol:
    return Symbol(symbol.shape, symbol.type, lambda index: op("neg", symbol.at(index)))


@handles_complex("abs")
def _length(tracer: Tracer, out: torch.Tensor, value: torch.Tensor) -> Symbol:
    """The length, of which no square overflows or vanishes; infinite where a part is, whatever the other."""
    real, imaginary = tracer.parts(value)

    def at(index: Indices) -> Expression:
        first, second = op("abs", real.at(index)), op("abs", imaginary.at(index))
        longer, shorter = op("max", first, second), op("min", first, second)
        ratio = op("div", shorter, longer)
        one, zero, infinity = (literal(value, real.type) for value in (1.0, 0.0, math.inf))
        length = op("mul", longer, op("sqrt", op("add", one, op("mul", ratio, ratio))))
        is_infinite = op("or", op("isinf", first), op("isinf", second))
        return op("where", is_infinite, infinity, op("where", op("eq", longer, zero), zero, length))

    return Symbol(tuple(out.shape), real.type, at)


@handles_complex("angle")
def _angle(tracer: Tracer, out: torch.Tensor, value: torch.Tensor) -> Symbol:
    real, imaginary = tracer.parts(value)
    return Symbol(tuple(out.shape), real.type, lambda index: op("atan2", imaginary.at(index), real.at(index)))


@handles_complex("complex")
def _complex(tracer: Tracer, out: torch.Tensor, real: torch.Tensor, imaginary: torch.Tensor) -> Parts:
    return broadcast(tracer.symbol(real), out.shape), broadcast(tracer.symbol(imaginary), out.shape)


@handles_complex("polar")
def _polar(tracer: Tracer, out: torch.Tensor, length: torch.Tensor, angle: torch.Tensor) -> Parts:
    lengths, angles = (broadcast(tracer.symbol(each), out.shape) for each in (length, angle))

    def part(function: str) -> Symbol:
        return Symbol(lengths.shape, lengths.type, lambda i: op("mul", lengths.at(i), op(function, angles.at(i))))

    return part("cos"), part("sin")


@handles_complex("view_as_real")
def _as_real(tracer: Tracer, _: torch.Tensor, value: torch.Tensor) -> Symbol:
    return interleaved(*tracer.parts(value))


@handles_complex("view_as_complex")
def _as_complex(tracer: Tracer, out: torch.Tensor, value: torch.Tensor) -> Parts:
    symbol = tracer.symbol(value)

    def part(which: int) -> Symbol:
        return Symbol(tuple(out.shape), symbol.type, lambda index: symbol.at((*index, Index(which))))

    return part(0), part(1)
