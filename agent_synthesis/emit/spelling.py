"""How an operation, a constant, a conversion or an index is spelled in C++ and in CUDA.

Pure functions from text to text, with PyTorch's semantics for each type; the `Dialect` holds what differs between
the languages. Where a piece of text goes is decided in `expression`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from agent_synthesis.nests.ir import ARG_REDUCTIONS, Call, Index, Literal, Quotient, Reduction, Remainder, Type


@dataclass(frozen=True)
class Dialect:
    """How one language spells types; the functions of `ws` have the same names in both."""

    name: str
    storage: Mapping[Type, str]
    """Type of an element in memory."""
    index: str
    """Signed 64-bit type of offsets."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """Operation → function of `ws`, where it differs from the usual one."""

    def compute(self, type_: Type) -> str:
        """Type of a value in a register."""
        return self.storage[type_.compute]


_SATURATES = bool(torch.isfinite(torch.tensor(1e4).to(torch.float8_e4m3fn).float()))
_E4M3 = f"ws::float8_e4m3<{str(_SATURATES).lower()}>"
"""What is too large for it becomes what this version of PyTorch makes of it."""
_SHARED_NAMES = {
    Type.F64: "double",
    Type.F32: "float",
    Type.I32: "std::int32_t",
    Type.I16: "std::int16_t",
    Type.I8: "std::int8_t",
    Type.U8: "std::uint8_t",
    Type.BOOL: "bool",
    Type.E4M3: _E4M3,
    Type.E5M2: "ws::float8_e5m2",
}

CPP = Dialect(
    "cpp",
    {**_SHARED_NAMES, Type.F16: "ws::half", Type.BF16: "ws::bfloat16", Type.I64: "std::int64_t"},
    "long",
)
CUDA = Dialect(
    "cuda",
    {
        Type.F64: "double",
        Type.F32: "float",
        Type.F16: "ws::half",
        Type.BF16: "ws::bfloat16",
        Type.I64: "ws::int64",
        Type.I32: "int",
        Type.I16: "short",
        Type.I8: "ws::int8",
        Type.U8: "ws::uint8",
        Type.BOOL: "bool",
        Type.E4M3: _E4M3,
        Type.E5M2: "ws::float8_e5m2",
    },
    "ws::int64",
)
CUDA_FAST_EXP = replace(CUDA, functions={"exp": "fast_exp"})
"""With the approximate exponential."""
CUDA_SHORT_ERFC = replace(CUDA, functions={"erfc": "short_erfc"})
"""With an `erfc` for what is rounded to 16 bits."""

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&&", "or": "||", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
}  # fmt: skip
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_WRAPPING = {"add": "wrap_add", "sub": "wrap_sub", "mul": "wrap_mul", "div": "trunc_div"}
_FUNCTIONS = {"abs": "fabs", "fmod": "fmod_any"}
_OF_A_TYPE = frozenset({
    "max", "min", "floor_div", "trunc_div", "fmod", "remainder", "sign", "shift_left", "shift_right",
})  # fmt: skip
"""Whose functions are told the type."""


@dataclass(frozen=True)
class Text:
    """A piece of source: the text, and whether it needs parentheses as an operand."""

    text: str
    is_atom: bool = True

    @property
    def operand(self) -> str:
        """The text as part of a larger expression."""
        return self.text if self.is_atom else f"({self.text})"


def literal(value: float | int | bool, type_: Type, dialect: Dialect) -> str:
    """A constant as text of the type's compute type."""
    kind = dialect.compute(type_)
    if type_ is Type.BOOL:
        return "true" if value else "false"
    if not type_.is_float:
        whole = int(value)
        if whole == -(2**63):
            return f"static_cast<{kind}>(-9223372036854775807LL - 1)"
        digits = f"{whole}LL" if abs(whole) > 2**31 - 1 else str(whole)
        return digits if type_ is Type.I32 and whole >= 0 else f"{kind}({digits})"
    number = float(value)
    if math.isnan(number):
        return f"ws::quiet_nan<{kind}>()"
    if math.isinf(number):
        return f"{'-' if number < 0 else ''}ws::infinity<{kind}>()"
    text = repr(number)
    text = text if any(mark in text for mark in ".en") else f"{text}.0"
    text = f"{text}f" if kind == "float" else text
    return f"({text})" if text.startswith("-") else text


def convert(value: str, source: Type, target: Type, dialect: Dialect, *, store: bool = False) -> str:
    """A value converted as `torch.Tensor.to` does; short floats stay widened unless they are stored."""
    if target.is_widened:
        single = convert(value, source, Type.F32, dialect)
        if store:
            return f"ws::narrow<{dialect.storage[target]}>({single})"
        return single if source is target else f"ws::rounded_to<{dialect.storage[target]}>({single})"
    if source.compute is target:
        return value
    kind = dialect.storage[target]
    if target is Type.BOOL:
        return f"(({value}) != 0)"
    if source.is_float and not target.is_float:
        return f"ws::to_integer<{kind}>({value})"
    return f"static_cast<{kind}>({value})"


def accumulator(reduction: Reduction, dialect: Dialect) -> str:
    """Type of what a reduction accumulates: a value, or a value with its position."""
    kind = dialect.compute(reduction.type)
    return kind if reduction.operation not in ARG_REDUCTIONS else f"ws::At<{kind}, {dialect.compute(reduction.result)}>"


def call_text(call: Call, arguments: list[Text], dialect: Dialect) -> Text:
    """An operation on arguments that are already text, with PyTorch's semantics for its type."""
    operation, type_ = call.operation, call.type
    if operation == "cast":
        return Text(convert(arguments[0].text, call.arguments[0].type, type_, dialect))
    sources = [argument.type for argument in call.arguments]
    if operation == "at":
        kinds = ", ".join(dialect.compute(source) for source in sources)
        return Text(f"ws::At<{kinds}>{{{', '.join(argument.text for argument in arguments)}}}")
    if operation == "where":
        chosen = [
            convert(a.operand, s, type_.compute, dialect) for a, s in zip(arguments[1:], sources[1:], strict=True)
        ]
        return Text(f"{_truth(arguments[0], sources[0])} ? {chosen[0]} : {chosen[1]}", is_atom=False)
    if operation not in _COMPARISONS and operation not in ("and", "or", "xor", "not", "isnan", "isinf"):
        arguments = [
            a if s.compute is type_.compute else Text(convert(a.text, s, type_.compute, dialect))
            for a, s in zip(arguments, sources, strict=True)
        ]
        sources = [type_.compute] * len(arguments)
    text = _operation_text(operation, type_.compute, arguments, sources, call, dialect)
    if type_.is_widened:
        return Text(f"ws::rounded_to<{dialect.storage[type_]}>({text.text})")
    if type_ is not Type.BOOL and operation in _COMPARISONS | {"and", "or", "xor", "not", "isnan", "isinf"}:
        return Text(f"static_cast<{dialect.storage[type_]}>({text.text})")
    return text


def _operation_text(
    operation: str, type_: Type, arguments: list[Text], sources: list[Type], call: Call, dialect: Dialect
) -> Text:
    kind = dialect.storage[type_]
    first = arguments[0]
    if operation in ("and", "or", "xor"):
        left, right = (_truth(a, s) for a, s in zip(arguments, sources, strict=True))
        # Bitwise on truth values: no branch, so that loops vectorise.
        sign = {"and": "&", "or": "|", "xor": "!="}[operation]
        return Text(f"{left} {sign} {right}", False)
    if operation == "not":
        return Text(f"!{_truth(first, sources[0])}", False)
    if type_ is Type.BOOL and operation in (
        "add",
        "mul",
        "max",
        "min",
        "bitwise_or",
        "bitwise_and",
        "bitwise_xor",
    ):
        sign = {"add": "|", "max": "|", "bitwise_or": "|", "bitwise_xor": "!="}.get(operation, "&")
        return Text(f"{first.operand} {sign} {arguments[1].operand}", False)
    if type_ is Type.BOOL and operation == "bitwise_not":
        return Text(f"!{first.operand}", False)
    if operation in ("neg", "abs") and not type_.is_float:
        if type_ is Type.U8 and operation == "abs":
            return first
        return Text(f"ws::wrap_{operation}<{kind}>({first.text})")
    if operation == "neg":
        return Text(f"-{first.operand}", False)
    if operation == "bitwise_not":
        return Text(f"static_cast<{kind}>(~{first.operand})")
    if operation == "reciprocal":
        return Text(f"{literal(1.0, type_, dialect)} / {first.operand}", False)
    if operation in ("floor", "ceil", "round", "trunc") and not type_.is_float:
        return first
    if operation == "pow":
        return _power_text(arguments, type_, call, dialect)
    if operation in _WRAPPING and not type_.is_float:
        return Text(f"ws::{_WRAPPING[operation]}<{kind}>({first.text}, {arguments[1].text})")
    if operation in _INFIX:
        text = f"{first.operand} {_INFIX[operation]} {arguments[1].operand}"
        narrow_bits = operation.startswith("bitwise") and type_ in (Type.I8, Type.I16, Type.U8)
        return Text(f"static_cast<{kind}>({text})") if narrow_bits else Text(text, False)
    name = dialect.functions.get(operation) or _FUNCTIONS.get(operation, operation)
    explicit = f"<{kind}>" if operation in _OF_A_TYPE else ""
    return Text(f"ws::{name}{explicit}({', '.join(a.text for a in arguments)})")


def _power_text(arguments: list[Text], type_: Type, call: Call, dialect: Dialect) -> Text:
    """`pow`, with the constant exponents that PyTorch computes by products and roots."""
    base, exponent = arguments
    if not type_.is_float:
        return Text(f"ws::integer_pow<{dialect.storage[type_]}>({base.text}, {exponent.text})")
    constant = call.arguments[1].value if isinstance(call.arguments[1], Literal) else None
    simple = base.is_atom and re.fullmatch(r"\w+", base.text) is not None
    one = literal(1.0, type_, dialect)
    b = base.text
    match constant:
        case 0.5:
            return Text(f"ws::sqrt({b})")
        case -0.5:
            return Text(f"ws::rsqrt({b})")
        case 1:
            return base
        case -1:
            return Text(f"{one} / {base.operand}", False)
        case 2 if simple:
            return Text(f"{b} * {b}", False)
        case 3 if simple:
            return Text(f"{b} * {b} * {b}", False)
        case -2 if simple:
            return Text(f"{one} / ({b} * {b})", False)
    return Text(f"ws::pow({b}, {exponent.text})")


def _truth(argument: Text, source: Type) -> str:
    return argument.operand if source is Type.BOOL else f"({argument.operand} != 0)"


def index_text(index: Index, axes: Mapping[str, str], extents: Mapping[str, int]) -> str:
    """The index as text; `axes` gives the identifier that holds each axis."""
    parts: list[str] = []
    for atom, coefficient in index.terms:
        match atom:
            case str():
                text = axes[atom]
            case Quotient(value, divisor):
                text = _divided_text(value, divisor, "/", axes, extents)
            case Remainder(value, divisor):
                text = _divided_text(value, divisor, "%", axes, extents)
        if coefficient != 1:
            text = f"{coefficient} * {text}" if coefficient != -1 else f"-{text}"
        parts.append(text)
    if index.offset or not parts:
        parts.append(str(index.offset))
    return " + ".join(parts).replace("+ -", "- ")


def _divided_text(value: Index, divisor: int, sign: str, axes: Mapping[str, str], extents: Mapping[str, int]) -> str:
    """A quotient or remainder; in 32-bit unsigned arithmetic where it fits, which vectorises and 64-bit does not."""
    low, high = value.bounds(extents)
    inner = index_text(value, axes, extents)
    if low >= 0 and high < 2**31:
        return f"static_cast<int>(static_cast<unsigned>({inner}) {sign} {divisor}u)"
    if low >= 0:
        return f"(({inner}) {sign} {divisor})"
    # C truncates towards zero; shift up by whole divisors so that it floors.
    shift = -(low // divisor)
    if sign == "%":
        return f"(({inner} + {shift * divisor}) % {divisor})"
    return f"(({inner} + {shift * divisor}) / {divisor} - {shift})"
