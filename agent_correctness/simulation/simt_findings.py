"""What a run on the SIMT machine found, read from what the machine and the sanitizers printed.

The one idea: a finding has a kind that a program can branch on, a place in the kernel's own source, and one sentence.
A message that no rule knows is a finding too, so that nothing that was printed is lost.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass


class Kind(enum.Enum):
    """What is wrong."""

    RACE = "race"
    """Two threads use one place, one of them writes, and nothing orders them: a missing barrier."""
    OUT_OF_BOUNDS = "out_of_bounds"
    """An access outside a buffer, or outside shared memory."""
    UNINITIALIZED = "uninitialized"
    """An output depends on memory that nothing had written."""
    UNWRITTEN = "unwritten"
    """Elements of an output that no thread wrote."""
    DIRTY = "dirty"
    """A workspace that is to be zero between calls is not."""
    ORDER = "order"
    """An output depends on the order in which threads ran."""
    DEADLOCK = "deadlock"
    """All threads wait."""
    MISALIGNED = "misaligned"
    """A wide access to an address that is no multiple of its size."""
    UNDEFINED = "undefined"
    """Behaviour that C++ leaves undefined: an overflow, a shift, an index of an array."""
    MISUSE = "misuse"
    """A warp operation or a barrier that its threads use in a way that CUDA leaves undefined."""
    CRASH = "crash"
    """The run ended by a signal."""
    TIMEOUT = "timeout"
    """The run took too long."""
    UNSUPPORTED = "unsupported"
    """The machine cannot run this; it says nothing about the kernel."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: Kind
    place: str
    """File and line in the kernel's source, such as "softmax.cu:57"; empty where the run as a whole is meant."""
    detail: str
    """One sentence: who, what, where."""


_MACHINE = re.compile(r"^simt: (\w+): (.*)$", re.MULTILINE)
_UNDEFINED = re.compile(r"^(\S+?):(\d+):\d+: runtime error: (.*)$", re.MULTILINE)
_FRAME = re.compile(r"^ +#\d+ .*?([\w.]+\.(?:cu|cuh|hpp)):(\d+)", re.MULTILINE)
_RACE = re.compile(
    r"WARNING: ThreadSanitizer: data race.*?^={18}$\n(?:simt-place: ([^\n]*))?", re.MULTILINE | re.DOTALL
)
_ACCESS = re.compile(
    r"^  (?:Previous )?(atomic )?(write|read) of size (\d+) at \w+ by [^\n]*\n((?:    #.*\n)+)",
    re.MULTILINE | re.IGNORECASE,
)
_STATIC = re.compile(r"is located (\d+ bytes [\w ]+?) global variable '(?:.*::)?([^']+)' defined in .* of size (\d+)")
_GLOBAL = re.compile(r"Location is global '(?:.*::)?([^']+)'")
_MISUSE = ("mask", "barrier")


def read(log: str, exit_code: int) -> list[Finding]:
    """Everything that a run printed, without repeats, in order."""
    found = [*_machine(log), *_undefined(log), *_races(log)]
    if not found and exit_code not in (0, 66):
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        found.append(Finding(Kind.CRASH, _kernel_line(log), f"the run ended by {how}: {_summary(log)}"))
    return list(dict.fromkeys(found))


def _machine(log: str) -> Iterable[Finding]:
    for match in _MACHINE.finditer(log):
        word, detail = match.groups()
        kind = Kind.MISUSE if word in _MISUSE else Kind(word) if word in {k.value for k in Kind} else Kind.CRASH
        rest = log[match.end() :]
        if (static := _STATIC.search(rest)) and "no buffer's" in detail:
            side, name, size = static.groups()
            detail = detail.replace("memory that is no buffer's", f"{side} the {size} of {name} in shared memory")
        yield Finding(kind, _kernel_line(rest), detail)


def _undefined(log: str) -> Iterable[Finding]:
    for file, line, what in _UNDEFINED.findall(log):
        kind = Kind.MISALIGNED if "misaligned" in what else Kind.UNDEFINED
        # Addresses differ from run to run.
        yield Finding(kind, f"{file.rsplit('/', 1)[-1]}:{line}", re.sub(r"0x[0-9a-f]+", "an address", what))


def _races(log: str) -> Iterable[Finding]:
    for match in _RACE.finditer(log):
        report = match.group(0)
        accesses = _ACCESS.findall(report)
        sides = [
            f"{atomic and 'atomically '}{how.lower()}s at {_kernel_line(stack)}" for atomic, how, _, stack in accesses
        ]
        name = _GLOBAL.search(report)
        what = f"{name.group(1)} in shared memory" if name else re.sub(r".* of ", "", match.group(1) or "memory")
        yield Finding(Kind.RACE, _kernel_line(report), f"two threads use {what} unordered: one {', one '.join(sides)}")


def _kernel_line(stack: str) -> str:
    """The innermost line of a stack that is in a kernel's own file, else the innermost that is in a header."""
    first = stack.split("\n\n", 1)[0]
    frames = _FRAME.findall(first)
    own = [f"{file}:{line}" for file, line in frames if file.endswith(".cu")]
    others = [f"{file}:{line}" for file, line in frames if not file.endswith(".cu")]
    return (own or others or [""])[0]


def _summary(log: str) -> str:
    lines = [line for line in log.splitlines() if line.startswith(("SUMMARY", "ERROR")) or "ERROR:" in line]
    return (lines or log.splitlines() or ["no message"])[0][:300]
