"""The entry file that stands in for a class the user names as `package.module:Class`.

The one idea: find the class's sources by path, without importing anything, and write a small file in KernelBench's
format that imports it and draws its inputs. Whether the class exists and runs is for the jailed worker to say.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from warpsmith.errors import BadInput
from warpsmith.sandbox import python_text

PRESENT_IN_JAIL = frozenset({"torch", "numpy"})
"""Packages that every worker can import; their sources are not carried."""

_FLOATING = ("float64", "float32", "float16", "bfloat16")
_OF_8_BITS = ("float8_e4m3fn", "float8_e5m2")
"""Floats that PyTorch draws in other types alone."""
_INTEGER = ("int64", "int32", "int16", "int8", "uint8")
_MOST_ELEMENTS = 1 << 48
_SPEC = re.compile(r"(?P<dtype>\w+)\s*\[(?P<shape>[\d\s,]*)\]")


@dataclass(frozen=True)
class FoundModule:
    """Where a module's code is."""

    root: Path
    """The import root."""
    entry: str
    """Path of the module's own file below the root; empty for a package that every worker has."""
    sources: Sequence[str]
    """All Python files of its top-level package, by path below the root."""

    @property
    def file(self) -> Path:
        """The module's own file."""
        return self.root / self.entry


def find_module(name: str) -> FoundModule:
    """Finds `a.b.c` on the import path, the current directory first.

    Raises:
        BadInput: there is none; says where was looked.
    """
    parts = name.split(".")
    if parts[0] in PRESENT_IN_JAIL:
        return FoundModule(Path(), "", [])
    for root in [Path.cwd(), *map(Path, filter(None, sys.path))]:
        place = root.joinpath(*parts)
        file = place / "__init__.py" if (place / "__init__.py").is_file() else place.with_suffix(".py")
        if not file.is_file():
            continue
        entry = file.relative_to(root).as_posix()
        return FoundModule(root, entry, sources_of(root, parts[0]) if (root / parts[0]).is_dir() else [entry])
    raise BadInput(f"no module {name!r} in the current directory or on the Python path")


def sources_of(root: Path, package: str) -> list[str]:
    """Paths below `root` of the Python files of a package there; links are among them, to be refused by name."""
    return sorted(each.relative_to(root).as_posix() for each in (root / package).rglob("*.py"))


def write_entry(module: str, class_name: str, inputs: Sequence[str], init: Sequence[str]) -> str:
    """Text of the entry file.

    Raises:
        BadInput: an input spec or a constructor argument cannot be read.
    """
    positional, named = _arguments(init)
    drawn = "".join(f"        {_draw(spec)},\n" for spec in inputs)
    lines = [
        f'"""{class_name} of {module} in KernelBench\'s format, written by Warpsmith\'s intake."""',
        "",
        "import torch",
        "",
        f"from {module} import {class_name} as {'Original' if positional and named else 'Model'}",
        "",
    ]
    arguments: object = positional
    if positional and named:
        lines += [
            "",
            "class Model(Original):",
            "    def __init__(self, *arguments):",
            f"        super().__init__(*arguments, **{named!r})",
            "",
        ]
    elif named:
        arguments = named
    lines += ["", "def get_inputs():", f"    return [\n{drawn}    ]", "", ""]
    lines += ["def get_init_inputs():", f"    return {arguments!r}", ""]
    return "\n".join(lines)


def _draw(spec: str) -> str:
    """The expression that draws one input."""
    match = _SPEC.fullmatch(spec.strip())
    dtypes = (*_FLOATING, *_OF_8_BITS, *_INTEGER, "bool")
    if match is None or match["dtype"] not in dtypes:
        raise BadInput(f"--input {spec!r}: write dtype[shape], such as float32[16,16384]; dtypes: {', '.join(dtypes)}")
    dtype = match["dtype"]
    try:
        shape = tuple(int(extent) for extent in match["shape"].split(",") if extent.strip())
    except ValueError as error:  # spaces inside a number, or more digits than Python reads
        raise BadInput(f"--input {spec[:80]!r}: its shape has to be whole numbers with commas between them") from error
    if math.prod(shape) > _MOST_ELEMENTS:
        raise BadInput(f"--input {spec[:80]!r}: more elements than any machine holds")
    if dtype in _FLOATING:
        return f"torch.randn({shape}, dtype=torch.{dtype})"
    if dtype in _OF_8_BITS:
        return f"torch.randn({shape}).to(torch.{dtype})"
    if dtype == "bool":
        return f"torch.rand({shape}) < 0.5"
    # Integers are mostly indices: small ones are valid in any table worth the name.
    return f"torch.randint(0, 16, {shape}, dtype=torch.{dtype})"


def _arguments(init: Sequence[str]) -> tuple[list[object], dict[str, object]]:
    positional: list[object] = []
    named: dict[str, object] = {}
    for text in init:
        name, equals, literal = text.partition("=")
        is_named = bool(equals) and name.strip().isidentifier()
        try:
            value = python_text.literal(literal if is_named else text)
            repr(value)  # as the entry file has it
        except (ValueError, RecursionError, MemoryError) as error:
            hint = "not a Python literal, or too deep; write 8, 'text', [1, 2] or eps=1e-5"
            raise BadInput(f"--init {text[:80]!r}: {hint}") from error
        if is_named:
            named[name.strip()] = value
        else:
            positional.append(value)
    return positional, named
