"""A struct that a kernel's skeleton in `include/` is instantiated over: constants, members and small functions.

The one idea: control flow stands in the skeleton; a nest adds a struct that says what is loaded, how it is folded and
what is stored. This file writes the parts of a struct that are the same for both targets; it knows no skeleton.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from agent_synthesis.emit.expression import Function, Scope

LINE_CHARACTERS = 120
"""Longest line of a struct."""


class Members(Scope):
    """What is the same for all that a thread does, or for a part of it: values become members, which `statements` set.

    Blocks of functions are its children, and so are members that are set more often.
    """

    def __init__(self, function: Function, known: Iterable[str], parent: Scope | None = None) -> None:
        super().__init__(function, parent, known)
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

    def taken(self) -> list[str]:
        """The statements since the last call."""
        taken, self._statements = self._statements, []
        return taken


def function(head: str, lines: Sequence[str]) -> list[str]:
    """A function of the struct, on one line where that fits; `head` is all that stands before its brace."""
    if len(lines) <= 1:
        inside = f" {lines[0].strip()} " if lines else ""
        if len(one := f"  WS_INLINE {head} {{{inside}}}") <= LINE_CHARACTERS:
            return [one]
    return [*wrapped(f"WS_INLINE {head} {{"), *lines, "  }"]


def located(axes: Sequence[str], at: str) -> list[str]:
    """Names for the coordinates that the skeleton hands over as an array."""
    return [f"    const auto& [{', '.join(axes)}] = {at};"] if axes else []


def value(type_: str, fields: Mapping[str, int | bool]) -> str:
    """A constant of a struct type."""
    named = ", ".join(f".{name} = {str(given).lower()}" for name, given in fields.items())
    return f"{type_}{{{named}}}"


def constant(type_: str, name: str, fields: Mapping[str, int | bool]) -> list[str]:
    """A constant of the struct that is a structure itself."""
    return wrapped(f"static constexpr {value(f'{type_} {name}', fields)};")


def wrapped(text: str) -> list[str]:
    """A line of the struct, in lines of readable length that end after a comma."""
    glued = text.replace(" ", "\u00a0").replace(",\u00a0", ", ")
    lines = textwrap.wrap(
        glued, LINE_CHARACTERS - 2, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    return [f"  {line}".replace("\u00a0", " ") for line in lines]
