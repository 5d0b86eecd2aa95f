"""Memory that a task's two workers share: the candidate's process writes outputs into it, the judge's reads them.

The one idea: an anonymous file, made and sized by the owner of the workers and inherited by number, laid out by
regions that the judge names; for large outputs of a GPU, memory of that GPU in its place (`outbox`). It holds nothing
that must stay secret: truth and eager results never lie in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gpu_bench.values.keys import Key
from gpu_bench.workers import outbox
from warpsmith.graphs import dtypes
from warpsmith.v1 import judging_pb2, tensor_pb2

DESCRIPTOR_VARIABLE = "WARPSMITH_SHARED_FD"
"""Environment variable of a worker that holds the number of the inherited file."""
_ALIGNMENT = 64
KEPT_BYTES = 32 << 20
"""Larger blocks have pages of their own in glibc's malloc, fetched for each anew, whatever it is told
(DEFAULT_MMAP_THRESHOLD_MAX)."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, -1


def lay_out(tensors: Iterable[tuple[Key, torch.Tensor]], offset: int = 0) -> tuple[list[judging_pb2.Region], int]:
    """Regions for tensors by key, contiguous and aligned, from `offset` on, and where they end."""
    regions: list[judging_pb2.Region] = []
    for key, tensor in tensors:
        spec = tensor_pb2.TensorSpec(
            dtype=dtypes.from_torch(tensor.dtype),
            shape=list(tensor.shape),
            strides=list(torch.empty(tensor.shape, device="meta").stride()),
        )
        regions.append(key.region(spec, offset))
        size = tensor.numel() * tensor.element_size()
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return regions, max(offset, _ALIGNMENT)


class SharedMemory:
    """The file as a worker sees it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._is_pinned = False
        self._on_gpu: torch.Tensor | None = None

    @staticmethod
    @functools.cache
    def inherited() -> SharedMemory:
        """The one whose number stands in this process's environment; mapped once."""
        return SharedMemory(int(os.environ[DESCRIPTOR_VARIABLE]))

    def tensors(self, regions: Sequence[judging_pb2.Region]) -> list[torch.Tensor]:
        """One tensor for each region, on the shared memory itself: of the CPU, or of the GPU after `move`."""
        if self._on_gpu is not None:
            return [_part(self._on_gpu, region) for region in regions]
        size = os.fstat(self._descriptor).st_size
        if self._map is None or len(self._map) != size:
            if self._is_pinned and self._map is not None:
                _unpin(self._map)
            self._map = mmap.mmap(self._descriptor, size)
            self._is_pinned = _pin(self._map)
        return [self._tensor(self._map, region) for region in regions]

    def move(self, size: int) -> int:
        """From here on the memory is the outbox that was sent to this process, or with 0 the file again.

        Gives the size back; 0 where the outbox cannot be mapped and the file stays.
        """
        self._on_gpu = None
        with contextlib.suppress(RuntimeError):
            self._on_gpu = outbox.received(size) if size else None
        return size if self._on_gpu is not None else 0

    @staticmethod
    def _tensor(memory: mmap.mmap, region: judging_pb2.Region) -> torch.Tensor:
        dtype, shape = dtypes.to_torch(region.spec.dtype), list(region.spec.shape)
        count = dtypes.element_span(region.spec)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=region.offset_bytes)
        return flat.as_strided(shape, list(region.spec.strides))


def settle_memory() -> None:
    """Has the C library keep what is freed, up to blocks of KEPT_BYTES, and give it out again.

    By itself it gives memory back by rules that depend on what was freed before, also by others: of two processors'
    readings of 16 MB some took 2.4 and others 7 ms, for waiting for pages. Kept memory is what a process that has run
    for a while has at best, baselines too.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def move(request: judging_pb2.MoveRequest) -> judging_pb2.Moved:
    """Method of a worker: takes GPU memory for what it shares with others."""
    return judging_pb2.Moved(total_bytes=SharedMemory.inherited().move(request.total_bytes))


def _part(memory: torch.Tensor, region: judging_pb2.Region) -> torch.Tensor:
    dtype, shape = dtypes.to_torch(region.spec.dtype), list(region.spec.shape)
    size = dtypes.element_span(region.spec) * dtype.itemsize
    flat = memory[region.offset_bytes : region.offset_bytes + size].view(dtype)
    return flat.as_strided(shape, list(region.spec.strides)) if size else flat.view(shape)


def _pin(memory: mmap.mmap) -> bool:
    """Lets the GPU copy to and from the memory at full speed. Where it cannot, copies are slower and no less right."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return _accepted(torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0))  # type: ignore[no-untyped-call]


def _unpin(memory: mmap.mmap) -> None:
    """Before its pages go: to the driver they would stay pinned, and what is mapped there next could not be."""
    torch.cuda.synchronize()
    _accepted(torch.cuda.cudart().cudaHostUnregister(_address(memory)))  # type: ignore[no-untyped-call]


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _accepted(code: Any) -> bool:
    """Whether the runtime did it. What it refused it would tell again, to whoever launches a kernel next."""
    if int(code) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False
