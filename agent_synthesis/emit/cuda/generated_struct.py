"""What a kernel's skeleton in `include/` is instantiated over: a struct of pointers, constants and small functions.

The one idea: control flow stands in the skeleton, and what a nest adds to it is a struct with the nest's names. This
file writes structs and the kernels that hand them over; it knows no skeleton.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from agent_synthesis.emit.cuda.kernel_text import KernelText
from agent_synthesis.emit.expression import Scope

_LINE_CHARACTERS = 120


def body(text: KernelText, known: Iterable[str]) -> Scope:
    """The block of a function of the struct, in which these axes and '%reductions' are known."""
    return Scope(text.function, None, known, depth=2)


def function(head: str, lines: Sequence[str]) -> list[str]:
    """A function of the struct; `head` is all that stands before its brace."""
    if len(lines) == 1 and len(one_line := f"  {head} {{ {lines[0].strip()} }}") <= _LINE_CHARACTERS:
        return [one_line]
    return [*_wrapped(f"{head} {{"), *lines, "  }"]


def value(type_: str, fields: Mapping[str, int | bool]) -> str:
    """A constant of a struct type."""
    named = ", ".join(f".{name} = {str(given).lower()}" for name, given in fields.items())
    return f"{type_}{{{named}}}"


def constant(type_: str, name: str, fields: Mapping[str, int | bool]) -> list[str]:
    """A constant of the struct."""
    return _wrapped(f"static constexpr {value(f'{type_} {name}', fields)};")


def _wrapped(text: str) -> list[str]:
    """A line of the struct, in lines of readable length that end after a comma."""
    glued = text.replace(" ", "\u00a0").replace(",\u00a0", ", ")
    lines = textwrap.wrap(glued, _LINE_CHARACTERS - 2, subsequent_indent="    ", break_on_hyphens=False)
    return [f"  {line}".replace("\u00a0", " ") for line in lines]


def struct(text: KernelText, what: str, *members: Sequence[str]) -> list[str]:
    """The struct: pointers to the nest's buffers, then its other members."""
    pointers = [f"  {text.argument(buffer)};" for buffer in text.nest.buffers]
    return [f"struct {text.entry}_{what} {{", *pointers, *(line for lines in members for line in lines), "};", ""]


def kernel(
    text: KernelText,
    what: str,
    skeleton: str,
    threads: int,
    min_blocks: int,
    *,
    shared: Mapping[str, str] | None = None,
) -> list[str]:
    """The kernel, but for its closing brace: it hands the struct to a function of the skeleton.

    `shared`: what it has in shared memory and hands over too, name → type, in which `%` is the struct.
    """
    given = ", ".join(text.function.buffers[buffer.name] for buffer in text.nest.buffers)
    name = f"{text.entry}_{what}"
    # In a function template g++ would not put it where the simulated machine looks for shared memory.
    memory = [f"  alignas(16) __shared__ {type_.replace('%', name)} {of};" for of, type_ in (shared or {}).items()]
    call = f"ws::{skeleton}({', '.join([f'{name}{{{given}}}', *(shared or {})])});"
    return [*text.signature(text.entry, threads, min_blocks), *memory, *_wrapped(call)]


def located(axes: Sequence[str], at: str) -> list[str]:
    """Names for the coordinates that the skeleton hands over as an array."""
    return [f"    const auto& [{', '.join(axes)}] = {at};"] if axes else []
