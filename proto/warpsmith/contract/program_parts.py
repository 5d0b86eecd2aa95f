"""Parts of a program's source that compile alone, so that many kernels compile beside each other and each is kept.

The one idea: a source stays one file that compiles as a whole, and a line in it says where a part begins, which
includes what it needs itself. A network has hundreds of kernels, and a search changes one of them at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from warpsmith.v1 import candidate_pb2, task_pb2

LEAST, MOST = 8, 1024
"""Parts from which on they are compiled apart, for fewer compile sooner in one go, and as far as."""
_HEAD = "// In parts that compile alone."
_LINE = "// ---- a part"
_BREAK = re.compile(rf"^{_LINE}$\n?", re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
_MACRO = re.compile(r"^\s*#(?!\s*(?:include|pragma)\b)", re.MULTILINE)
_CALLED = re.compile(r"\b(\w+)\(")


def joined(head: str, parts: Iterable[str]) -> str:
    """The text of a source of such parts. `head`: a comment."""
    return "\n".join([_HEAD, head, *(f"{_LINE}\n{part}" for part in parts)])


def apart(program: candidate_pb2.Program) -> list[candidate_pb2.Program]:
    """A program for each part, with the headers that it includes and the launches of its kernels.

    The program itself where it is no such source or has few parts, and where the whole might mean something else than
    its parts: one has a macro of its own, or a kernel is in none or seems to be in several.
    """
    if program.target != task_pb2.TARGET_CUDA or not program.sources:
        return [program]
    source, *headers = program.sources
    head, *texts = _BREAK.split(source.text)
    is_ours = head.startswith(_HEAD) and all(not line or line.startswith("//") for line in head.split("\n"))
    if not is_ours or not LEAST <= len(texts) <= MOST or _MACRO.search(source.text):
        return [program]
    by_name = {header.name: header for header in headers}
    made, launches = [], [step for step in program.steps if step.HasField("launch")]
    for text in texts:
        part = candidate_pb2.Program(target=program.target, architecture=program.architecture)
        part.sources.add(name=source.name, text=text.strip("\n") + "\n")  # the same wherever it stands
        part.sources.extend(by_name[name] for name in _included(text, by_name))
        called = set(_CALLED.findall(text))
        part.steps.extend(step for step in launches if step.launch.entry in called)
        made.append(part)
    owners = Counter(entry for part in made for entry in {step.launch.entry for step in part.steps})
    return made if all(owners[step.launch.entry] == 1 for step in launches) else [program]


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
