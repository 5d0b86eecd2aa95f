"""Expressions as C-like text in the right places, for C++ and CUDA alike.

The one idea: a `Scope` is a block of the generated function. Asking a scope for the text of an expression places every
part of it in the outermost block that can compute it, names what is used twice, and inlines the rest, so that
the result reads as written by hand. How one operation is spelled is in `spelling`; nothing here knows loops or threads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent_synthesis.emit.spelling import CPP, Dialect, Text, call_text, convert, index_text, literal
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    AxisValue,
    BufferRef,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Memory,
    Nest,
    Reduced,
    Store,
    Type,
)

_LONGEST_INLINE = 72
"""Characters of an inlined expression; a longer one gets a name."""

_RESERVED = frozenset({
    "alignas", "alignof", "and", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "break", "case", "catch",
    "char", "class", "compl", "concept", "const", "constexpr", "continue", "count", "default", "delete", "do",
    "double", "else", "enum", "explicit", "export", "extern", "false", "float", "for", "friend", "goto", "half",
    "if", "inline", "int", "lane", "long", "main", "mutable", "namespace", "new", "noexcept", "not", "not_eq",
    "nullptr", "operator", "or", "or_eq", "private", "protected", "public", "register", "requires", "return",
    "short", "signed", "sizeof", "static", "std", "struct", "switch", "template", "this", "thread", "throw",
    "true", "try", "typedef", "typeid", "typename", "union", "unsigned", "using", "virtual", "void", "volatile",
    "while", "ws", "xor", "xor_eq", "y0", "y1", "yn", "j0", "j1", "jn", "exp", "log", "arguments",
})  # fmt: skip


class Names:
    """Identifiers of one function: legal, unique, as close as possible to what the nest calls things."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = {*_RESERVED, *reserved}

    def take(self, wanted: str) -> str:
        """The wanted name, or the wanted name with a number when it is taken or reserved."""
        stem = re.sub(r"\W", "_", wanted) or "value"
        stem = f"v{stem}" if stem[0].isdigit() or stem.startswith("_") else stem
        name, number = stem, 2
        while name in self._taken:
            name, number = f"{stem}{'_' if stem[-1].isdigit() else ''}{number}", number + 1
        self._taken.add(name)
        return name


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
        return index_text(index, {**self.axes, **(instead or {})}, self.nest.extents)

    def load(self, load: Load) -> str:
        """An element, widened."""
        return self.element(load.buffer, self.index(load.index))

    def element(self, buffer: str, offset: str) -> str:
        """The element of a buffer at an offset, widened."""
        element = f"{self.buffers[buffer]}[{offset}]"
        reference = self.nest.buffer(buffer)
        if self.reads_bytes(reference):
            return f"({element} != 0)"
        return f"ws::widen({element})" if reference.type.is_widened else element

    def reads_bytes(self, buffer: BufferRef) -> bool:
        """Whether truth values are read as bytes: a masked softmax of 16x512x512 takes 60 ms with `bool`, 2.7 so."""
        return self.dialect is CPP and buffer.type is Type.BOOL and not buffer.written


class Scope:
    """A block of the function: statements so far, and what is known inside.

    `known` holds axis names and '%reduction' names that this block adds to its parent's.
    """

    def __init__(
        self, function: Function, parent: Scope | None, known: Iterable[str] = (), depth: int = 1, closed: bool = False
    ):
        self.function = function
        self.parent = parent
        self.closed = closed
        """Whether everything stays here that could be computed further out: for what only some threads may do."""
        self.known: frozenset[str] = frozenset(known) | (parent.known if parent else frozenset())
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

    def declare(self, kind: str, stem: str, text: str) -> str:
        """Gives a value a name that begins with the stem, and returns it."""
        name = self.function.names.take(stem)
        self.line(f"const {kind} {name} = {text};")
        return name

    def child(self, known: Iterable[str] = (), deeper: int = 1, *, closed: bool = False) -> Scope:
        """An inner block, to be ended with `absorb`."""
        return Scope(self.function, self, known, self.depth + deeper, closed)

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
        text = convert(self.value(store.value).text, store.value.type, storage, self.function.dialect, store=True)
        place = place or f"{self.function.buffers[store.buffer]}[{self.function.index(store.index)}]"
        self.line(f"{place} = {text};")

    def store_all(self, stores: Sequence[Store]) -> None:
        """Adds the assignments of stores, which may share parts."""
        self.expect(store.value for store in stores)
        for store in stores:
            self.store(store)

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
        while not home.closed and home.parent is not None and needs <= home.parent.known:
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
            case Call("gather", (Memory(buffer, _), offset), _):
                place = self._offset(offset, uses)
                decided = any(part.type is Type.BOOL for part in function.interner.parts([offset]).values())
                place = f"ws::opaque({place})" if decided and function.dialect is CPP else place
                text, stem = Text(function.element(buffer, place)), "found"
                named = hoisted or uses[number] > 1 or len(text.text) > _LONGEST_INLINE
            case Call():
                if _repeats_base(expression):
                    uses[function.interner.number(expression.arguments[0])] += 1
                arguments = [self.value(argument, uses) for argument in expression.arguments]
                if expression.operation == "where" and function.dialect is CPP:
                    arguments[1:] = map(self._unconditional, expression.arguments[1:], arguments[1:])
                text = call_text(expression, arguments, function.dialect)
                stem = _stem(expression)
                named = expression.operation != "at" and (
                    hoisted or uses[number] > 1 or len(text.text) > _LONGEST_INLINE
                )
            case _:
                raise AssertionError(f"nothing to place: {expression}")
        if named:
            text = Text(self.declare(function.dialect.compute(expression.type), stem, text.text))
            self._values[number] = text
        return text

    def _unconditional(self, choice: Expression, text: Text) -> Text:
        """A choice that loads, under a name: a load that is made only sometimes keeps g++ from vectorising the loop."""
        if "[" not in text.text:
            return text
        stem = _stem(choice) if isinstance(choice, Call) else "choice"
        name = self.declare(self.function.dialect.compute(choice.type), stem, text.text)
        self._values[self.function.interner.number(choice)] = Text(name)
        return Text(name)

    def _offset(self, offset: Expression, uses: Counter[int]) -> str:
        """A position inside a buffer, where sums cannot overflow: written as an index is."""
        if uses[self.function.interner.number(offset)] < 2:
            match offset:
                case Call("add", (left, right), Type.I64):
                    return f"{self._offset(left, uses)} + {self._offset(right, uses)}"
                case Call("mul", (value, Literal(step, _)), Type.I64):
                    return f"{step} * {self.value(value, uses).operand}"
                case AxisValue(index, _):
                    return self.function.index(index)
        return self.value(offset, uses).text


def _repeats_base(call: Call) -> bool:
    """Whether the operation's text has its first argument more than once."""
    exponent = call.arguments[-1]
    return call.operation == "pow" and isinstance(exponent, Literal) and exponent.value in (2, 3, -2)


def _stem(call: Call) -> str:
    """What to call the result of an operation."""
    stems = {"div": "ratio", "mul": "product", "add": "total", "sub": "difference", "where": "chosen"}
    stem = stems.get(call.operation, call.operation)
    return f"{stem}_value" if stem in _RESERVED or len(stem) < 5 else stem
