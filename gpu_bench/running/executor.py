"""The executor's contract, and what all executors share: sources and memory.

It loads no binaries (`host`, `cuda`), writes no calls (`straight_line`), checks no policy (`policy`), judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gpu_bench.running.arena import arena
from gpu_bench.running.elsewhere import Elsewhere
from gpu_bench.values.keys import Key
from warpsmith.graphs import dtypes
from warpsmith.v1 import artifact_pb2, candidate_pb2, judging_pb2, task_pb2, tensor_pb2, verdict_pb2

Call = Callable[[], tuple[torch.Tensor, ...]]
"""One forward: allocates outputs as eager does, runs every step on torch's current stream, returns the outputs."""


class ProgramFault(Exception):
    """The program cannot be loaded, or a step of it failed: an answer about the program, not an error of ours."""

    def __init__(self, kind: verdict_pb2.FailureKind.ValueType, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Sources:
    """The tensors that exist before the first step. Shapes and dtypes are those of the module."""

    inputs: Sequence[torch.Tensor]
    """Tensor inputs, flattened in pytree order."""
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By qualified name."""
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Module buffers, by qualified name."""

    def by_key(self) -> dict[Key, torch.Tensor]:
        """All of them."""
        found = {Key.input(position): tensor for position, tensor in enumerate(self.inputs)}
        found |= {Key.parameter(name): tensor for name, tensor in self.parameters.items()}
        return found | {Key.state(name): tensor for name, tensor in self.state.items()}

    @staticmethod
    def from_keys(found: Mapping[Key, torch.Tensor]) -> Sources:
        """The inverse of `by_key`."""

        def named(kind: judging_pb2.RegionKind.ValueType) -> dict[str, torch.Tensor]:
            return {key.name: tensor for key, tensor in found.items() if key.kind == kind}

        inputs = [tensor for key, tensor in found.items() if key.is_input]
        return Sources(inputs, named(judging_pb2.REGION_KIND_PARAMETER), named(judging_pb2.REGION_KIND_STATE))


class Memory(Protocol):
    """Where a bound program's own tensors come from."""

    def empty(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """Memory of a workspace or output, not initialised, with the spec's strides."""
        ...

    def zeros(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """Memory of a workspace that is zero before the first call and that every call leaves zero."""
        ...

    def adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Takes what a library step returned; may move it."""
        ...


@dataclass(frozen=True)
class Kept:
    """What the prepared steps of a program have made, for calls that then run the other steps only."""

    tensors: Mapping[str, torch.Tensor]
    """By buffer."""
    renew: Callable[[], None]
    """Makes them anew, where they lie: parameters have changed."""


class LoadedProgram(Protocol):
    """A program with its binary loaded, on one device."""

    program: candidate_pb2.Program
    device: torch.device
    elsewhere: Elsewhere | None
    """The process that its kernels run in, where it is not this one."""

    def bind(
        self,
        sources: Sources,
        memory: Memory | None = None,
        after_step: Callable[[], object] | None = None,
        workspaces: Memory | None = None,
        kept: Kept | None = None,
    ) -> Call:
        """The call for one set of sources. Workspaces are allocated here, once; outputs in each call.

        With `memory` (judging) every tensor comes from it; without it (timing) from torch's own allocator.
        `after_step` is called after each step, to time them apart. With `workspaces` (timing) only those come from it.
        With `kept` (timing on the prepared track) prepared steps are left out, else every call runs them.
        Raises ProgramFault: a source that the program names is missing or of another type.
        """
        ...

    def keep(
        self, sources: Sources, memory: Memory | None = None, after_step: Callable[[], object] | None = None
    ) -> Kept:
        """Runs the prepared steps, which come first. As `bind`."""
        ...


class Executor(Protocol):
    """Loads programs of one target."""

    target: task_pb2.Target.ValueType

    def load(
        self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact, device: torch.device
    ) -> LoadedProgram:
        """Loads the binary and finds every entry. Raises ProgramFault."""
        ...

    def synchronize(self) -> None:
        """Waits until every step has ended. Raises ProgramFault for a fault that shows only now."""
        ...


class TorchMemory:
    """Plain memory for timing, nothing watched: of a GPU torch's, of a processor what kernels can see."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.empty`."""
        del name
        if self._device.type == "cpu":
            return arena().empty(spec)
        return torch.empty_strided(
            list(spec.shape), list(spec.strides), dtype=dtypes.to_torch(spec.dtype), device=self._device
        )

    def zeros(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.zeros`."""
        made = self.empty(name, spec)
        span = dtypes.element_span(spec)
        if span:
            made.as_strided((span,), (1,)).zero_()
        return made

    def adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """As `Memory.adopt`: leaves it where it is."""
        del name
        return tensor
