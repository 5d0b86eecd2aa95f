"""What a kernel's skeleton in `include/` is instantiated over: a struct of pointers, constants and small functions.

The one idea: control flow, tiles and exchanges stand in the skeleton; a nest adds a struct that says what is loaded,
how it is folded and what is stored. This file writes structs and the kernels that hand them over; it knows no skeleton.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from agent_synthesis.emit.cuda.kernel_text import KernelText
from agent_synthesis.emit.expression import Function, Scope

_LINE_CHARACTERS = 120


class Members(Scope):
    """What is the same for all that a thread does: values become members, which `statements` set.

    Blocks of functions are its children.
    """

    def __init__(self, function: Function, known: Iterable[str]) -> None:
        super().__init__(function, None, known)
        self._fields: list[str] = []
        self._statements: list[str] = []

    def declare(self, kind: str, stem: str, text: str) -> str:
        """Gives a value a member whose name begins with the stem."""
        return self.member(kind, self.function.names.take(stem), text)

    def member(self, kind: str, name: str, text: str = "") -> str:
        """Declares a member of that very name; `text` is what sets it."""
        self._fields.append(f"  {kind} {name};")
        self._statements += [f"    {name} = {text};"] if text else []
        return name

    def fields(self) -> list[str]:
        """The declarations."""
        return self._fields

    def statements(self) -> list[str]:
        """What sets them, in order."""
        return self._statements


def body(text: KernelText, known: Iterable[str]) -> Scope:
    """The block of a function of the struct, in which these axes and '%reductions' are known."""
    return Scope(text.function, None, known, depth=2)


def located(axes: Sequence[str], at: str) -> list[str]:
    """Names for the coordinates that the skeleton hands over as an array."""
    return [f"    const auto& [{', '.join(axes)}] = {at};"] if axes else []


def function(head: str, lines: Sequence[str]) -> list[str]:
    """A function of the struct, on one line where that fits; `head` is all that stands before its brace."""
    if len(lines) <= 1:
        inside = f" {lines[0].strip()} " if lines else ""
        if len(one := f"  WS_INLINE {head} {{{inside}}}") <= _LINE_CHARACTERS:
            return [one]
    return [*_wrapped(f"WS_INLINE {head} {{"), *lines, "  }"]


def value(type_: str, fields: Mapping[str, int | bool]) -> str:
    """A constant of a struct type."""
    named = ", ".join(f".{name} = {str(given).lower()}" for name, given in fields.items())
    return f"{type_}{{{named}}}"


def constant(type_: str, name: str, fields: Mapping[str, int | bool]) -> list[str]:
    """A constant of the struct that is a structure itself."""
    return _wrapped(f"static constexpr {value(f'{type_} {name}', fields)};")


def struct(name: str, text: KernelText, *members: Iterable[str]) -> list[str]:
    """The struct: pointers to the nest's buffers, then its other members."""
    pointers = [f"  {text.argument(buffer)};" for buffer in text.nest.buffers]
    return [f"struct {name} {{", *pointers, *(line for lines in members for line in lines), "};", ""]


def kernel(
    name: str,
    text: KernelText,
    skeleton: str,
    threads: int,
    min_blocks: int,
    workspaces: Mapping[str, str] | None = None,
    entry: str = "",
    *,
    stores: bool = True,
    shared: Mapping[str, str] | None = None,
) -> list[str]:
    """The kernel, which hands the struct, its workspaces and its shared memory to a function of the skeleton.

    `workspaces`: name → pointer type. `shared`: name → type, in which `%` is the struct. Unless it `stores`, it has no
    written buffers.
    """
    workspaces, shared = workspaces or {}, shared or {}
    passed = [buffer for buffer in text.nest.buffers if stores or not buffer.written]
    names = (text.function.buffers[b.name] if b in passed else "nullptr" for b in text.nest.buffers)
    signature = text.signature(entry or text.entry, threads, min_blocks, passed, workspaces)
    # In a function template g++ would not put it where the simulated machine looks for shared memory.
    memory = [f"  alignas(16) __shared__ {type_.replace('%', name)} {of};" for of, type_ in shared.items()]
    pointers = ", ".join(names)
    call = f"ws::{skeleton}({', '.join([f'{name}{{{pointers}}}', *workspaces, *shared])});"
    return [*signature, *memory, *_wrapped(call), "}", ""]


def _wrapped(text: str) -> list[str]:
    """A line of the struct, in lines of readable length that end after a comma."""
    glued = text.replace(" ", "\u00a0").replace(",\u00a0", ", ")
    lines = textwrap.wrap(glued, _LINE_CHARACTERS - 2, subsequent_indent="    ", break_on_hyphens=False)
    return [f"  {line}".replace("\u00a0", " ") for line in lines]
