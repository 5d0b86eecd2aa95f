"""What a toolchain is: the seam between a program's sources and a binary.

The one idea: a source that does not compile is an answer (`Rejected`), a compiler that is missing or broken is an
exception. Toolchains do not cache and do not judge sources; `compiler.py` does both around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from warpsmith.v1 import artifact_pb2, candidate_pb2, task_pb2, verdict_pb2


@dataclass(frozen=True)
class Limits:
    """What one compilation may take before it is given up."""

    wall_seconds: float = 60.0
    """Time, after which the compiler and all that it started are killed."""
    memory_bytes: int = 4 << 30
    """Address space of each compiler process."""
    output_bytes: int = 1 << 20
    """Messages; a compiler that writes more is stopped."""
    binary_bytes: int = 32 << 20
    """The binary."""


@dataclass(frozen=True)
class Compiled:
    """A binary with what each kernel in it takes."""

    content: bytes
    format: artifact_pb2.BinaryFormat.ValueType
    resources: Sequence[artifact_pb2.KernelResources] = ()


@dataclass(frozen=True)
class Rejected:
    """No binary, and why: a kind (COMPILE_ERROR, COMPILE_LIMIT, POLICY_REJECT, RESOURCE) and located messages."""

    kind: verdict_pb2.FailureKind.ValueType
    diagnostics: str


Outcome = Compiled | Rejected


class Toolchain(Protocol):
    """Compiles programs for one target, one compilation at a time in each of its jailed workers.

    `name` is the plugin's name. `compile` is pure: equal sources and equal `describe()` give equal outcomes.
    """

    name: str
    target: task_pb2.Target.ValueType

    def missing(self) -> str:
        """What it lacks on this machine and how to mend that; empty when it can compile."""
        ...

    def describe(self) -> str:
        """Compiler, version, processor and flags in one line: all that the binary depends on besides the sources."""
        ...

    def compile(self, program: candidate_pb2.Program) -> Outcome:
        """Compiles the first source; the others are headers that it includes by name.

        Raises:
            Infrastructure: the compiler is missing, or its jail cannot be built.
        """
        ...

    def close(self) -> None:
        """Ends every process that it started."""
        ...
