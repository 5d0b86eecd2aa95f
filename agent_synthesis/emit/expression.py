"""Expressions and indices as C-like text, for C++ and CUDA alike through a small `Dialect`.

The one idea: a `Scope` is a block of the generated function. Asking a scope for the text of an expression places every
part of it in the outermost block that can compute it, names what is used twice, and inlines the rest, so that
the result reads as written by hand. Nothing here knows loops, threads or vectors.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent_synthesis.ir import (
    AxisValue,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Nest,
    Quotient,
    Reduced,
    Remainder,
    Store,
    Type,
)


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


_SHARED_NAMES = {
    Type.F64: "double",
    Type.F32: "float",
    Type.I32: "std::int32_t",
    Type.I16: "std::int16_t",
    Type.I8: "std::int8_t",
    Type.U8: "std::uint8_t",
    Type.BOOL: "bool",
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
    },
    "ws::int64",
)
CUDA_FAST_EXP = replace(CUDA, functions={"exp": "fast_exp"})
"""With the approximate exponential."""

EXPENSIVE = frozenset(
    "exp exp2 expm1 log log2 log1p sin cos tan asin acos atan sinh cosh tanh erf erfc sigmoid pow atan2".split()
)
"""Operations that cost more than reading their result back from a cache would."""

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&&", "or": "||", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
}  # fmt: skip
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_WRAPPING = {"add": "wrap_add", "sub": "wrap_sub", "mul": "wrap_mul", "div": "trunc_div"}
_FUNCTIONS = {"abs": "fabs", "fmod": "fmod_any"}
_LONGEST_INLINE = 72
"""Characters of an inlined expression; a longer one gets a name."""

_RESERVED = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const constexpr
    continue count default delete do double else enum explicit export extern false float for friend goto half if inline
    int lane long main mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public
    register requires return short signed sizeof static std struct switch template this thread throw true try typedef
    typeid typename union unsigned using virtual void volatile while ws xor xor_eq y0 y1 yn j0 j1 jn exp log
    arguments""".split()
)


class Names:
    """Identifiers of one function: legal, unique, as close as possible to what the nest calls things."""

    def __init__(self) -> None:
        self._taken = set(_RESERVED)

    def take(self, wanted: str) -> str:
        """The wanted name, or the wanted name with a number when it is taken or reserved."""
        stem = re.sub(r"\W", "_", wanted) or "value"
        stem = f"v{stem}" if stem[0].isdigit() or stem.startswith("_") else stem
        name, number = stem, 2
        while name in self._taken:
            name, number = f"{stem}{'_' if stem[-1].isdigit() else ''}{number}", number + 1
        self._taken.add(name)
        return name


class Interner:
    """Gives equal expressions one number, in time linear in the shared graph rather than in the tree."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._by_identity: dict[int, tuple[Expression, int]] = {}
        self._needs: dict[int, frozenset[str]] = {}

    def number(self, expression: Expression) -> int:
        """The number that all expressions equal to this one share."""
        known = self._by_identity.get(id(expression))
        if known is not None:
            return known[1]
        key: object
        match expression:
            case Call(operation, arguments, type_):
                key = ("call", operation, type_, *(self.number(argument) for argument in arguments))
            case Literal(value, type_):
                key = ("literal", type_, repr(value))
            case _:
                key = expression
        number = self._numbers.setdefault(key, len(self._numbers))
        self._by_identity[id(expression)] = (expression, number)
        return number

    def needs(self, expression: Expression) -> frozenset[str]:
        """What must be known to compute it: axes by name, reductions by name with a leading '%'."""
        number = self.number(expression)
        if number not in self._needs:
            match expression:
                case Call(_, arguments, _):
                    found = frozenset[str]().union(*(self.needs(argument) for argument in arguments))
                case Load(_, index, _) | AxisValue(index, _):
                    found = index.axes()
                case Reduced(reduction, _):
                    found = frozenset({f"%{reduction}"})
                case _:
                    found = frozenset()
            self._needs[number] = found
        return self._needs[number]

    def parts(self, roots: Iterable[Expression]) -> dict[int, Expression]:
        """Every distinct expression at or below the roots, by number."""
        found: dict[int, Expression] = {}
        pending = list(roots)
        while pending:
            expression = pending.pop()
            number = self.number(expression)
            if number not in found:
                found[number] = expression
                if isinstance(expression, Call):
                    pending.extend(expression.arguments)
        return found

    def uses(self, roots: Iterable[Expression]) -> Counter[int]:
        """How many times each distinct expression is used by the others and as a root."""
        roots = list(roots)
        counts = Counter(self.number(root) for root in roots)
        for expression in self.parts(roots).values():
            if isinstance(expression, Call):
                counts.update(self.number(argument) for argument in expression.arguments)
        return counts


@dataclass(frozen=True)
class Text:
    """A piece of source: the text, and whether it needs parentheses as an operand."""

    text: str
    is_atom: bool = True

    @property
    def operand(self) -> str:
        """The text as part of a larger expression."""
        return self.text if self.is_atom else f"({self.text})"


@dataclass
class Function:
    """What all scopes of one generated function share."""

    dialect: Dialect
    nest: Nest
    names: Names = field(default_factory=Names)
    interner: Interner = field(default_factory=Interner)
    axes: dict[str, str] = field(default_factory=dict)
    """Axis name → identifier that holds it."""
    buffers: dict[str, str] = field(default_factory=dict)
    """Buffer name → identifier of its pointer."""
    reductions: dict[str, str] = field(default_factory=dict)
    """Reduction name → text of its value."""

    def index(self, index: Index, instead: Mapping[str, str] | None = None) -> str:
        """The index as text; `instead` gives other identifiers for some axes."""
        return _index_text(index, {**self.axes, **(instead or {})}, self.nest.extents)

    def load(self, load: Load) -> str:
        """An element, widened."""
        element = f"{self.buffers[load.buffer]}[{self.index(load.index)}]"
        narrow = self.nest.buffer(load.buffer).type in (Type.F16, Type.BF16)
        return f"ws::widen({element})" if narrow else element


class Scope:
    """A block of the function: statements so far, and what is known inside.

    `known` holds axis names and '%reduction' names that this block adds to its parent's.
    """

    def __init__(self, function: Function, parent: Scope | None, known: Iterable[str] = (), depth: int = 1):
        self.function = function
        self.parent = parent
        self.known = frozenset(known) | (parent.known if parent else frozenset())
        self.depth = depth
        self.lines: list[str] = []
        self._values: dict[int, Text] = {}
        self._uses: Counter[int] = Counter()

    def learn(self, names: Iterable[str]) -> None:
        """From here on these axes or '%reductions' are known too."""
        self.known |= frozenset(names)

    def line(self, text: str) -> None:
        """Adds a statement."""
        self.lines.append("  " * self.depth + text if text else "")

    def child(self, known: Iterable[str] = (), deeper: int = 1) -> Scope:
        """An inner block, to be closed with `absorb`."""
        return Scope(self.function, self, known, self.depth + deeper)

    def absorb(self, inner: Scope) -> None:
        """Puts the statements of a finished inner block here."""
        self.lines.extend(inner.lines)

    def define(self, expression: Expression, text: str) -> None:
        """From here on the expression is known to be held by `text`."""
        self._values[self.function.interner.number(expression)] = Text(text)

    def expect(self, roots: Iterable[Expression]) -> None:
        """Announces what will be asked for, so that parts used twice get names."""
        self._uses += self.function.interner.uses(roots)

    def value(self, expression: Expression, uses: Counter[int] | None = None) -> Text:
        """The expression as text usable in this block; adds statements here or further out as needed."""
        uses = self._uses if uses is None else uses
        interner = self.function.interner
        number = interner.number(expression)
        scope: Scope | None = self
        while scope is not None:
            if number in scope._values:
                return scope._values[number]
            scope = scope.parent
        match expression:
            case Literal(value, type_):
                return Text(literal(value, type_, self.function.dialect))
            case Reduced(reduction, _):
                return Text(self.function.reductions[reduction])
        home = self._home(interner.needs(expression))
        return home._place(expression, number, uses, hoisted=home is not self)

    def converted(self, expression: Expression, target: Type) -> str:
        """The value as text, converted to a type; 16-bit floats come widened."""
        return convert(self.value(expression).text, expression.type, target.compute, self.function.dialect)

    def store(self, store: Store, place: str | None = None) -> None:
        """Adds the assignment of a store: to its buffer, or to a place of the buffer's type instead."""
        storage = self.function.nest.buffer(store.buffer).type
        text = convert(
            self.value(store.value).text, store.value.type, storage, self.function.dialect, store=True
        )
        place = place or f"{self.function.buffers[store.buffer]}[{self.function.index(store.index)}]"
        self.line(f"{place} = {text};")

    def enclose(self, loops: Sequence[str], inner: Scope) -> None:
        """Puts a finished inner block here, inside the given loop heads (outermost first)."""
        for deeper, head in enumerate(loops):
            self.line("  " * deeper + f"{head} {{".strip())
        self.absorb(inner)
        for deeper in reversed(range(len(loops))):
            self.line("  " * deeper + "}")

    def _home(self, needs: frozenset[str]) -> Scope:
        """The outermost block, from here, in which all of that is known."""
        home = self
        while home.parent is not None and needs <= home.parent.known:
            home = home.parent
        return home

    def _place(self, expression: Expression, number: int, uses: Counter[int], *, hoisted: bool) -> Text:
        function = self.function
        match expression:
            case Load():
                text, stem = Text(function.load(expression)), f"{function.buffers[expression.buffer]}_at"
                named = hoisted or uses[number] > 1
            case AxisValue(index, _):
                text, stem = Text(function.index(index), is_atom=False), "position"
                kind = function.dialect.compute(expression.type)
                text, named = Text(f"static_cast<{kind}>({text.text})"), False
            case Call():
                if _repeats_base(expression):
                    uses[function.interner.number(expression.arguments[0])] += 1
                arguments = [self.value(argument, uses) for argument in expression.arguments]
                text = call_text(expression, arguments, function.dialect)
                stem = _stem(expression)
                named = hoisted or uses[number] > 1 or len(text.text) > _LONGEST_INLINE
            case _:
                raise AssertionError(f"nothing to place: {expression}")
        if named:
            name = function.names.take(stem)
            self.line(f"const {function.dialect.compute(expression.type)} {name} = {text.text};")
            text = Text(name)
            self._values[number] = text
        return text


def _repeats_base(call: Call) -> bool:
    """Whether the operation's text has its first argument more than once."""
    exponent = call.arguments[-1]
    return call.operation == "pow" and isinstance(exponent, Literal) and exponent.value in (2, 3, -2)


def _stem(call: Call) -> str:
    """What to call the result of an operation."""
    stems = {"div": "ratio", "mul": "product", "add": "total", "sub": "difference", "where": "chosen"}
    stem = stems.get(call.operation, call.operation)
    return f"{stem}_value" if stem in _RESERVED or len(stem) < 5 else stem


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
    """A value converted as `torch.Tensor.to` does; 16-bit floats stay widened unless they are stored."""
    if target in (Type.F16, Type.BF16):
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


def call_text(call: Call, arguments: list[Text], dialect: Dialect) -> Text:
    """An operation on arguments that are already text, with PyTorch's semantics for its type."""
    operation, type_ = call.operation, call.type
    if operation == "cast":
        return Text(convert(arguments[0].text, call.arguments[0].type, type_, dialect))
    sources = [argument.type for argument in call.arguments]
    if operation == "where":
        chosen = [
            convert(a.operand, s, type_.compute, dialect)
            for a, s in zip(arguments[1:], sources[1:], strict=True)
        ]
        return Text(f"{_truth(arguments[0], sources[0])} ? {chosen[0]} : {chosen[1]}", is_atom=False)
    if operation not in _COMPARISONS and operation not in ("and", "or", "xor", "not", "isnan", "isinf"):
        arguments = [
            a if s.compute is type_.compute else Text(convert(a.text, s, type_.compute, dialect))
            for a, s in zip(arguments, sources, strict=True)
        ]
        sources = [type_.compute] * len(arguments)
    text = _operation_text(operation, type_.compute, arguments, sources, call, dialect)
    if type_ in (Type.F16, Type.BF16):
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
    explicit = (
        f"<{kind}>"
        if operation in ("max", "min", "floor_div", "trunc_div", "fmod", "remainder", "sign")
        else ""
    )
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


def _index_text(index: Index, axes: Mapping[str, str], extents: Mapping[str, int]) -> str:
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


def _divided_text(
    value: Index, divisor: int, sign: str, axes: Mapping[str, str], extents: Mapping[str, int]
) -> str:
    """A quotient or remainder; in 32-bit unsigned arithmetic where it fits, which vectorises and 64-bit does not."""
    low, high = value.bounds(extents)
    inner = _index_text(value, axes, extents)
    if 0 <= low and high < 2**31:
        return f"static_cast<int>(static_cast<unsigned>({inner}) {sign} {divisor}u)"
    if low >= 0:
        return f"(({inner}) {sign} {divisor})"
    # C truncates towards zero; shift up by whole divisors so that it floors.
    shift = -(low // divisor)
    if sign == "%":
        return f"(({inner} + {shift * divisor}) % {divisor})"
    return f"(({inner} + {shift * divisor}) / {divisor} - {shift})"
