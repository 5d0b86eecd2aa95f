"""Memory that a task's two workers share: the candidate's process writes outputs into it, the judge's reads them.

The one idea: an anonymous file, made and sized by the owner of the workers and inherited by number, laid out by
regions that the judge names. It holds nothing that must stay secret: truth and eager results never lie in it.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
from collections.abc import Iterable, Sequence

import torch

from warpsmith import dtypes
from warpsmith.v1 import judging_pb2, tensor_pb2

DESCRIPTOR_VARIABLE = "WARPSMITH_SHARED_FD"
"""Environment variable of a worker that holds the number of the inherited file."""
_ALIGNMENT = 64


def lay_out(tensors: Iterable[tuple[str, torch.Tensor]], offset: int = 0) -> tuple[list[judging_pb2.Region], int]:
    """Regions for named tensors, contiguous and aligned, from `offset` on, and where they end."""
    regions: list[judging_pb2.Region] = []
    for name, tensor in tensors:
        spec = tensor_pb2.TensorSpec(
            dtype=dtypes.from_torch(tensor.dtype),
            shape=list(tensor.shape),
            strides=list(torch.empty(tensor.shape, device="meta").stride()),
        )
        regions.append(judging_pb2.Region(name=name, spec=spec, offset_bytes=offset))
        size = tensor.numel() * tensor.element_size()
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return regions, max(offset, _ALIGNMENT)


class SharedMemory:
    """The file as a worker sees it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    @staticmethod
    @functools.cache
    def inherited() -> SharedMemory:
        """The one whose number stands in this process's environment; mapped once."""
        return SharedMemory(int(os.environ[DESCRIPTOR_VARIABLE]))

    def tensors(self, regions: Sequence[judging_pb2.Region]) -> list[torch.Tensor]:
        """One CPU tensor for each region, on the shared memory itself."""
        size = os.fstat(self._descriptor).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self._descriptor, size)
            _pin(self._map)
        return [self._tensor(self._map, region) for region in regions]

    @staticmethod
    def _tensor(memory: mmap.mmap, region: judging_pb2.Region) -> torch.Tensor:
        dtype = dtypes.to_torch(region.spec.dtype)
        shape = list(region.spec.shape)
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=region.offset_bytes).view(shape)


def _pin(memory: mmap.mmap) -> None:
    """Lets the GPU copy to and from the memory at full speed. Where it cannot, copies are slower and no less right."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)  # type: ignore[no-untyped-call]
