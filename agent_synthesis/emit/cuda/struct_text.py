"""The text of the structs that skeletons in `include/` are instantiated over: members and small functions.

The one idea: control flow, tiles and exchanges stand in a skeleton; a nest adds a struct that says what is loaded, how
it is folded and what is stored. Nothing here knows a skeleton.
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


def function(head: str, lines: Sequence[str]) -> list[str]:
    """A function of a struct, on one line where that fits."""
    if len(lines) == 1 and len(one := f"  WS_INLINE {head} {{ {lines[0].strip()} }}") <= _LINE_CHARACTERS:
        return [one]
    return [f"  WS_INLINE {head} {{", *lines, "  }"]


def constant(type_: str, name: str, fields: Mapping[str, int | bool]) -> list[str]:
    """A constant of a struct that is a structure itself."""
    given = ", ".join(f".{key}\0=\0{str(value).lower()}" for key, value in fields.items())
    text = f"static constexpr {type_} {name}{{{given}}};"
    lines = textwrap.wrap(text, _LINE_CHARACTERS - 4, subsequent_indent="    ", break_on_hyphens=False)
    return [f"  {line}".replace("\0", " ") for line in lines]


def struct(name: str, text: KernelText, *members: Iterable[str]) -> list[str]:
    """The struct: pointers to the nest's buffers, then what else there is."""
    pointers = [f"  {text.argument(buffer)};" for buffer in text.nest.buffers]
    return [f"struct {name} {{", *pointers, *(line for lines in members for line in lines), "};", ""]


def kernel(
    name: str,
    text: KernelText,
    skeleton: str,
    threads: int,
    min_blocks: int,
    workspaces: Mapping[str, str],
    entry: str = "",
    *,
    stores: bool = True,
) -> list[str]:
    """The kernel, which hands the struct and then the workspaces to a function of the skeleton.

    Unless it `stores`, it has no written buffers.
    """
    passed = [buffer for buffer in text.nest.buffers if stores or not buffer.written]
    names = (text.function.buffers[b.name] if b in passed else "nullptr" for b in text.nest.buffers)
    arguments = ", ".join([f"{name}{{{', '.join(names)}}}", *workspaces])
    signature = text.signature(entry or text.entry, threads, min_blocks, passed, workspaces)
    return [*signature, f"  ws::{skeleton}({arguments});", "}", ""]
