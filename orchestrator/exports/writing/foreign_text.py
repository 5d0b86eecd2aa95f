"""Text that is not ours, as generated Python holds it: sources, names of operations, files and functions, comments.

The one idea: nothing is written as it came. A text becomes a literal that reads back as the text, a name has to be one,
and a comment cannot act. What a forward returns beside tensors is `export_outputs`' business.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterable

from warpsmith import printable
from warpsmith.contract import structures
from warpsmith.errors import BadInput
from warpsmith.program_steps import BLOCK, NUMBERS, buffers_of, calls_in
from warpsmith.v1 import candidate_pb2

_FILE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}\.(?:cu|cuh|cpp|hpp)")
"""A source's name, which compilers are called with. As the compile policy has it."""
_ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
# Attributes of `torch.ops` that are no namespace, and those of every object, run code of their own.
_OPERATION = re.compile(
    r"(?!load_library\b|import_module\b)[A-Za-z]\w*\.(?:(?!__)[A-Za-z_]\w*|__i?(?:and|or|xor|lshift|rshift)__)"
    r"\.[A-Za-z]\w*",
    re.ASCII,
)
_CODING = re.compile(r"coding(?=[:=])")
"""In a comment of the first two lines, Python reads the rest of the file by what follows (PEP 263)."""


def literal(text: str) -> str:
    """A Python literal of a text that reads as the text does, wherever it can."""
    if "'''" not in text and not text.endswith(("'", "\\")) and printable.lines(text, len(text)) == text:
        written = f"{'r' if chr(92) in text else ''}'''{text}'''"
        if ast.literal_eval(ast.parse(written, filename="", mode="eval")) == text:
            return written
    return repr(text) if "\n" not in text else f"({_lines_literal(text)})"


def _lines_literal(text: str) -> str:
    return "\n        ".join(["", *[repr(line) for line in text.splitlines(keepends=True)], ""])


def comment(lines: Iterable[str]) -> str:
    """Lines as a comment, each of which may hold more lines."""
    shown = printable.lines("\n".join(lines)).splitlines()
    return "\n".join(f"# {_CODING.sub('coding ', line)}".rstrip() for line in shown)


def operation(target: str) -> str:
    """The expression of a library's operation, such as `torch.ops.aten.relu.default`."""
    *parts, overload = target.split(".")
    place = ".".join(["torch.ops", *parts])
    return f"getattr({place}, {overload!r})" if keyword.iskeyword(overload) else f"{place}.{overload}"


def require_names(program: candidate_pb2.Program) -> None:
    """Refuses a program with names that are more than names, or that stand for nothing.

    Raises:
        BadInput: names the first.
    """
    known = {buffer.name for buffer in program.buffers}
    named = {name for step in program.steps for name in buffers_of(step)}
    if unknown := sorted({*named, *program.outputs} - known):
        raise BadInput(f"the program names a buffer {unknown[0][:40]!r}, which it does not have")
    for source in program.sources:
        _require(_FILE, source.name, "name of a source")
    for step in program.steps:
        if step.HasField("launch"):
            _require(_ENTRY, step.launch.entry, "name of a function")
        if step.HasField("library"):
            for call in calls_in(step.library):
                _require_call(call, is_in_block=step.library.target == BLOCK)


def _require_call(call: candidate_pb2.LibraryCall, *, is_in_block: bool) -> None:
    if not (is_in_block and call.target in NUMBERS):
        _require(_OPERATION, call.target, "name of an operation")
    for item in call.kwargs:
        _require(_ENTRY, "" if keyword.iskeyword(item.name) else item.name, "name of an argument")
    for constant in structures.torch_constants([*call.args, *(item.value for item in call.kwargs)]):
        if constant not in structures.TORCH_CONSTANTS:
            raise BadInput(f"{constant[:40]!r} is no memory format or layout of torch's")


def _require(pattern: re.Pattern[str], name: str, what: str) -> None:
    if not pattern.fullmatch(name):
        raise BadInput(f"{name[:40]!r} is no {what}, so no export can hold it")
