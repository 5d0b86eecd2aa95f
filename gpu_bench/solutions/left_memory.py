"""What a process that stands still has left in its memory, read from outside.

The one idea: a result is what lies in its memory as the clock stops. A process that is asked to copy its result could
compute it then instead: to write an outer product where it is looked at takes less time than to copy it there. So a
process only says where its results lie, as part of its answer; it runs again after they were read. Needs no torch.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from warpsmith.errors import Infrastructure
from warpsmith.v1 import judging_pb2, tensor_pb2

Place = tuple[int, Sequence[int]]
"""Address, and strides in elements; the address 0 for what is no tensor of the kind that is expected."""
_MOST_GAPS = 1 << 14
"""Times the elements of a tensor that the memory between its first and its last may hold."""


def item_bytes(spec: tensor_pb2.TensorSpec) -> int:
    """Of an element."""
    digits = re.search(r"\d+", tensor_pb2.Dtype.Name(spec.dtype))
    return int(digits[0]) // 8 if digits else 1  # BOOL names none


def packed(places: Sequence[Place]) -> bytes:
    """Places as bytes, for `unpacked` with the ranks that their regions have."""
    flat = [number for address, strides in places for number in (address, *strides)]
    return struct.pack(f"<{len(flat)}q", *flat)


def unpacked(content: bytes, regions: Sequence[judging_pb2.Region]) -> list[Place]:
    """Places from untrusted bytes. Raises ValueError."""
    ranks = [len(region.spec.shape) for region in regions]
    if len(content) != 8 * (sum(ranks) + len(ranks)):
        raise ValueError("no places of results")
    numbers = iter(struct.unpack(f"<{len(content) // 8}q", content))
    return [(next(numbers), [next(numbers) for _ in range(rank)]) for rank in ranks]


class LeftMemory:
    """A process's memory. The reader has stopped it, and every thread and process that shares its memory."""

    def __init__(self, process: int) -> None:
        """Raises Infrastructure where the system does not allow to read it."""
        try:
            self._descriptor = os.open(Path(f"/proc/{process}/mem"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Infrastructure(
                f"the memory of a stopped process cannot be read here ({error.strerror}), which judging a solution "
                "needs: kernel.yama.ptrace_scope has to be 0 or 1"
            ) from None

    def close(self) -> None:
        """Reads no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, place: Place, spec: tensor_pb2.TensorSpec, to: memoryview) -> bool:
        """Copies a tensor, which becomes contiguous. False where nothing lies there."""
        address, strides = place
        shape, size = spec.shape, item_bytes(spec)
        pairs = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent > 1]
        if address <= 0 or any(stride < 0 for _, stride in pairs):
            return False
        if [stride for _, stride in pairs] == [math.prod(e for e, _ in pairs[at + 1 :]) for at in range(len(pairs))]:
            return self._fill(address, to)
        import numpy as np

        span = 1 + sum((extent - 1) * stride for extent, stride in pairs)
        if span > _MOST_GAPS * math.prod(shape):
            return False
        memory = bytearray(span * size)
        if not self._fill(address, memoryview(memory)):
            return False
        kind = np.dtype(f"V{size}")
        extents, steps = [extent for extent, _ in pairs], [stride * size for _, stride in pairs]
        given: Any = np.ndarray(extents, kind, memory, strides=steps)
        np.copyto(np.frombuffer(to, kind).reshape(extents), given)
        return True

    def _fill(self, address: int, to: memoryview) -> bool:
        done = 0
        while done < len(to):
            try:
                count = os.preadv(self._descriptor, [to[done:]], address + done)
            except (OSError, OverflowError):
                return False
            if not count:
                return False
            done += count
        return True
