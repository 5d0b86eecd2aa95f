"""Where the workspaces of a program lie in one block of memory: those that are not needed at once share their place.

The one idea: a plan of a network has a workspace for each kernel, and each is needed for a few steps. Laid out by their
lifetimes they need about what eager needs, and a kernel finds memory in the cache that one before it has left. The
largest is placed first, each as low as it fits (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
Inference", 2020: greedy by size).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from gpu_bench.running.executor import Memory
from warpsmith.graphs import aten, dtypes
from warpsmith.program_steps import lifetimes, made_by, tensor_names
from warpsmith.v1 import candidate_pb2, tensor_pb2

ALIGNMENT = 512
"""Bytes, as of torch's own allocations on a GPU."""
_META = torch.device("meta")


@dataclass(frozen=True)
class WorkspacePlan:
    """Places of workspaces."""

    offsets: Mapping[str, int]
    """By name, in bytes; of those that are zero between calls there is none."""
    byte_count: int
    """Of the block."""

    @staticmethod
    def of(program: candidate_pb2.Program) -> WorkspacePlan:
        """The places of a program's workspaces, but for those that prepared steps write, which are kept."""
        kept = {name for step in program.steps if step.prepared for name in made_by(step)}
        specs = {
            buffer.name: buffer.spec
            for buffer in program.buffers
            if buffer.role == candidate_pb2.ROLE_WORKSPACE and not buffer.zero_between_calls and buffer.name not in kept
        }
        lives = lifetimes(program, candidate_pb2.ROLE_WORKSPACE, inside=_inside(program, specs))
        sizes = {name: span_bytes(spec) for name, spec in specs.items()}
        offsets: dict[str, int] = {}
        for name in sorted(specs, key=lambda name: -sizes[name]):
            first, last = lives.get(name, (0, len(program.steps)))
            offset = 0
            for other in sorted(offsets, key=offsets.__getitem__):
                begins, ends = lives.get(other, (0, len(program.steps)))
                is_apart = ends < first or last < begins or offsets[other] >= offset + sizes[name]
                if not is_apart:
                    offset = max(offset, _aligned(offsets[other] + sizes[other]))
            offsets[name] = offset
        return WorkspacePlan(offsets, max((offsets[name] + sizes[name] for name in offsets), default=0))


class PlannedMemory:
    """Memory for workspaces, in one block that another memory gives."""

    def __init__(self, plan: WorkspacePlan, memory: Memory) -> None:
        self._plan, self._memory = plan, memory
        block = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_UINT8, shape=[plan.byte_count], strides=[1])
        self._block = memory.empty("workspaces", block) if plan.byte_count else None

    def empty(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.empty`: a part of the block, where the plan has a place."""
        if self._block is None or name not in self._plan.offsets:
            return self._memory.empty(name, spec)
        offset, dtype = self._plan.offsets[name], dtypes.to_torch(spec.dtype)
        part = self._block[offset : offset + span_bytes(spec)]
        return part.view(dtype).as_strided(list(spec.shape), list(spec.strides))

    def zeros(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.zeros`, beside the block."""
        return self._memory.zeros(name, spec)

    def adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """As `Memory.adopt`."""
        return self._memory.adopt(name, tensor)


def span_bytes(spec: tensor_pb2.TensorSpec) -> int:
    """Bytes from the first to the last element."""
    return dtypes.element_span(spec) * dtypes.to_torch(spec.dtype).itemsize


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _inside(program: candidate_pb2.Program, workspaces: Collection[str]) -> dict[str, list[str]]:
    """Result of a library step → what it reads that lies in a workspace, where they share memory."""
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    found: dict[str, list[str]] = {}
    for step in program.steps:
        call = step.library
        names = tensor_names([*call.args, *(item.value for item in call.kwargs)])
        if step.HasField("library") and any(name in workspaces or name in found for name in names):
            for result, given in _shared(call, {name: specs[name] for name in names}):
                if given in workspaces or given in found:
                    found.setdefault(result, []).append(given)
    return found


def _shared(call: candidate_pb2.LibraryCall, specs: Mapping[str, tensor_pb2.TensorSpec]) -> list[tuple[str, str]]:
    """Pairs of a result and an argument that share memory, from a call without data; all, where there can be none."""
    given = {
        name: torch.empty_strided(list(spec.shape), list(spec.strides), dtype=dtypes.to_torch(spec.dtype), device=_META)
        for name, spec in specs.items()
    }
    places = {name: tensor.untyped_storage()._cdata for name, tensor in given.items()}
    try:
        made = aten.call(call.target, call.args, call.kwargs, given.__getitem__, _META)
    except Exception:  # whatever an operation raises that knows no tensors without data
        return [(result, name) for result in call.results if result for name in given]
    pairs = zip(call.results, made, strict=False)
    return [
        (result, name)
        for result, tensor in pairs
        if result and tensor is not None
        for name, place in places.items()
        if tensor.untyped_storage()._cdata == place
    ]
