"""A written kernel: device source, launches and workspaces of one group, and the one text that holds all of it.

The one idea: the text of a kernel is its source below a comment with its launches, so that a move carries it, a person
reads it, and any synthesizer makes the same program of it again. What a launch may name is the group's own buffers and
its workspaces; whether the source is right, and fits the machine, is for those who judge every candidate.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from warpsmith import digest

SOURCE_CHARACTERS = 48 << 10
"""Longest source; the longest that a schedule emits has a third of it."""
RECORD_CHARACTERS = 8 << 10
"""Longest head of a kernel's text; the longest that makes sense has a tenth of it."""
MOST_LAUNCHES = 8
MOST_WORKSPACES = 8
MOST_WORKSPACE_BYTES = 1 << 30
"""Of one workspace."""
MOST_EXTENT = 2**31 - 1
"""Of a grid; what a target bears in truth is its policy's to say."""
ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
}  # fmt: skip

_HEAD = "// launches: "
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


Extent = tuple[int, int, int]


class Fault(StrEnum):
    """Why an answer holds no kernel; also a label of metrics."""

    EMPTY = "empty"
    CUT_OFF = "cut_off"
    NO_CODE = "no_code"
    TOO_LONG = "too_long"
    CONTROL_CHARACTERS = "control_characters"
    NO_ENTRY = "no_entry"
    BAD_LAUNCH = "bad_launch"
    REPEATED = "repeated"


@dataclass(frozen=True)
class Complaint:
    """There is no kernel."""

    fault: Fault
    text: str
    """For the model: what to do better. Holds nothing of its answer but names that were checked."""


@dataclass(frozen=True)
class Signature:
    """What a kernel is called with."""

    entry: str
    """Name of the function, unless a launch says otherwise."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    taken: frozenset[str]
    """Names that no workspace may have: every tensor of the module."""
    is_cuda: bool


@dataclass(frozen=True)
class Workspace:
    """Scratch memory between the launches of one call."""

    name: str
    dtype: str
    """Of `ELEMENT_BYTES`."""
    count: int
    """Elements."""
    zero: bool
    """Whether all bytes are zero before a call; the kernel leaves them so."""


@dataclass(frozen=True)
class Launch:
    """One launch; the extents, x first, are those of CUDA and 0 on a processor."""

    entry: str
    arguments: tuple[str, ...]
    """Buffers in order."""
    grid: Extent = (0, 0, 0)
    block: Extent = (0, 0, 0)
    cluster: Extent = (1, 1, 1)
    shared_bytes: int = 0
    cooperative: bool = False


@dataclass(frozen=True)
class Kernel:
    """What a model may propose: text, and how it is launched."""

    source: str
    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()

    @property
    def record(self) -> str:
        """Launches and workspaces as JSON."""
        record = {"launches": [_brief(launch) for launch in self.launches]}
        if self.workspaces:
            record["workspaces"] = [asdict(workspace) for workspace in self.workspaces]
        return json.dumps(record)

    @property
    def text(self) -> str:
        """All of it as one text, which `from_text` reads."""
        return f"{_HEAD}{self.record}\n{self.source}"

    @property
    def name(self) -> str:
        """Digest of the text, for people and as the choice of a move."""
        return name_of(self.text)


def name_of(text: str) -> str:
    """Digest of a kernel's text."""
    return digest.short(digest.digest("written kernel", text))


def from_text(text: str, signature: Signature) -> Kernel | Complaint:
    """The kernel that a text holds."""
    head, _, source = text.partition("\n")
    record: object = None
    if head.startswith(_HEAD):
        record = loaded(head[len(_HEAD) :])
    return made(source if head.startswith(_HEAD) else text, record, signature)


def made(source: str, record: object, signature: Signature) -> Kernel | Complaint:
    """The kernel of a source and a launch record; None as the record for one launch with the default arguments."""
    source = source.replace("\r\n", "\n").replace("\ufeff", "").strip("\n") + "\n"
    if len(source) > SOURCE_CHARACTERS:
        return Complaint(Fault.TOO_LONG, f"the source is longer than {SOURCE_CHARACTERS} characters")
    if any(c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cs", "Cn", "Co") for c in source):
        return Complaint(Fault.CONTROL_CHARACTERS, "the source holds control characters")
    try:
        workspaces, launches = _read(record, signature)
    except _BadRecord as bad:
        return Complaint(Fault.BAD_LAUNCH, str(bad))
    for launch in launches:
        if not re.search(rf"\b{launch.entry}\s*\(", source):
            return Complaint(Fault.NO_ENTRY, f'the source has no function {launch.entry}; declare it extern "C"')
    kernel = Kernel(source, launches, workspaces)
    if len(kernel.record) > RECORD_CHARACTERS:
        return Complaint(Fault.BAD_LAUNCH, f"the launch record is longer than {RECORD_CHARACTERS} characters")
    return kernel


def loaded(text: str) -> object:
    """A launch record from JSON; an empty dictionary where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


class _BadRecord(Exception):
    """Says what is wrong with a launch record."""


def _brief(launch: Launch) -> dict[str, Any]:
    """A launch without what is at its default."""
    default = asdict(Launch("", ()))
    return {name: value for name, value in asdict(launch).items() if name not in default or value != default[name]}


def _read(record: object, signature: Signature) -> tuple[tuple[Workspace, ...], tuple[Launch, ...]]:
    if record is None:
        record = {}
        if signature.is_cuda:
            raise _BadRecord('a kernel for CUDA needs its launches: {"launches": [{"grid": […], "block": […]}]}')
    if not isinstance(record, dict):
        raise _BadRecord("the launch record must be a JSON object")
    listed = record.get("workspaces") or []
    if not isinstance(listed, list) or len(listed) > MOST_WORKSPACES:
        raise _BadRecord(f'"workspaces" must be a list of at most {MOST_WORKSPACES}')
    workspaces = tuple(_workspace(each, signature.taken) for each in listed)
    if len({workspace.name for workspace in workspaces}) != len(workspaces):
        raise _BadRecord("two workspaces have the same name")
    listed = record.get("launches", [record])
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_LAUNCHES:
        raise _BadRecord(f'"launches" must be a list of 1 to {MOST_LAUNCHES}')
    known = [*signature.inputs, *signature.outputs, *(workspace.name for workspace in workspaces)]
    launches = tuple(_launch(each, known, signature) for each in listed)
    passed = {name for launch in launches for name in launch.arguments}
    if missing := [name for name in signature.outputs if name not in passed]:
        raise _BadRecord(f"no launch is given the output {missing[0]}")
    return workspaces, launches


def _workspace(item: object, taken: Collection[str]) -> Workspace:
    if not isinstance(item, dict):
        raise _BadRecord("a workspace must be an object with name, dtype and count")
    name, dtype = item.get("name"), item.get("dtype", "float32")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
        raise _BadRecord("a workspace needs a name of its own, of letters, digits and _")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise _BadRecord(f"the dtype of workspace {name} must be one of {', '.join(ELEMENT_BYTES)}")
    most = MOST_WORKSPACE_BYTES // ELEMENT_BYTES[dtype]
    return Workspace(
        name, dtype, _whole(item.get("count"), 1, most, f"the count of workspace {name}"), item.get("zero") is True
    )


def _launch(item: object, known: Sequence[str], signature: Signature) -> Launch:
    if not isinstance(item, dict):
        raise _BadRecord("a launch must be an object")
    entry, names = item.get("entry", signature.entry), item.get("arguments", list(known))
    if not isinstance(entry, str) or not _NAME.fullmatch(entry):
        raise _BadRecord('"entry" must be the name of a function')
    if not isinstance(names, list) or not 1 <= len(names) <= 2 * len(known) or any(name not in known for name in names):
        raise _BadRecord(f'"arguments" must be a list of these names: {", ".join(known)[:400]}')
    if not signature.is_cuda:
        return Launch(entry, tuple(names))
    return Launch(
        entry,
        tuple(names),
        _extent(item.get("grid"), "grid"),
        _extent(item.get("block"), "block"),
        _extent(item.get("cluster", 1), "cluster"),
        _whole(item.get("shared_bytes", 0), 0, MOST_EXTENT, "shared_bytes"),
        item.get("cooperative") is True,
    )


def _extent(value: object, name: str) -> Extent:
    listed = value if isinstance(value, list) else [value]
    if not 1 <= len(listed) <= 3:
        raise _BadRecord(f"{name} must be one to three whole numbers, x first")
    x, y, z = [*(_whole(each, 1, MOST_EXTENT, f"{name} extent") for each in listed), 1, 1][:3]
    return x, y, z


def _whole(value: object, least: int, most: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _BadRecord(f"{what} must be a whole number from {least} to {most}")
    return value
