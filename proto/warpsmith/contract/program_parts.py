"""Parts of a program's source that compile alone, so that many kernels compile beside each other and each is kept.

The one idea: a source stays one file that compiles as a whole, and a line in it says where a part begins, which
includes what it needs itself. A network has hundreds of kernels, and a search changes one of them at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from warpsmith.v1 import candidate_pb2, task_pb2

LEAST = 8
"""Parts from which on they are compiled apart: fewer compile sooner in one go."""
_LINE = "// ---- a part that compiles alone"
_BREAK = re.compile(rf"^{_LINE}$\n?", re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_CALLED = re.compile(r"\b(\w+)\(")


def joined(head: str, parts: Iterable[str]) -> str:
    """The text of a source of such parts. `head`: a comment."""
    return "\n".join([head, *(f"{_LINE}\n{part}" for part in parts)])


def apart(program: candidate_pb2.Program) -> list[candidate_pb2.Program]:
    """A program for each part, with the headers that it includes and the launches of its kernels; the program itself
    where it has few parts, or other text than a comment before the first."""
    if program.target != task_pb2.TARGET_CUDA or not program.sources:
        return [program]
    source, *headers = program.sources
    head, *texts = _BREAK.split(source.text)
    if len(texts) < LEAST or any(line.strip() and not line.startswith("//") for line in head.splitlines()):
        return [program]
    made = []
    by_name = {header.name: header for header in headers}
    launches: dict[str, list[candidate_pb2.Step]] = {}
    for step in program.steps:
        if step.HasField("launch"):
            launches.setdefault(step.launch.entry, []).append(step)
    for text in texts:
        part = candidate_pb2.Program(target=program.target, architecture=program.architecture)
        part.sources.add(name=source.name, text=text.strip() + "\n")  # the same wherever it stands
        part.sources.extend(by_name[name] for name in _included(text, by_name))
        for entry in dict.fromkeys(_CALLED.findall(text)):
            part.steps.extend(launches.pop(entry, []))
        made.append(part)
    for steps in launches.values():  # of kernels that are nowhere: the compiler says so
        made[-1].steps.extend(steps)
    return made


def _included(text: str, headers: Mapping[str, candidate_pb2.DeviceSource]) -> list[str]:
    """The headers of a text and all that they include, each once."""
    found: dict[str, None] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop(0)
        if name in headers and name not in found:
            found[name] = None
            pending += _INCLUDE.findall(headers[name].text)
    return list(found)
