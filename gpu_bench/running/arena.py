"""Memory of the bench that the process of a kernel may map: where kernels for the processor read and write.

The one idea: one anonymous file, cut into blocks, each at the same address in every process that maps it, so that a
tensor's own pointer is what a kernel gets. Around a block nothing is mapped: who goes past its pages ends there. It
decides neither which process maps a block nor what lies in it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import secrets
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from warpsmith.graphs import dtypes
from warpsmith.v1 import tensor_pb2

FENCE_BYTES = 4 << 20
"""Unmapped addresses between two blocks, at least."""
KEPT_BYTES = 1 << 30
"""Of unused blocks, kept as they are for the next requests of their size. Others go back to the system."""
_LOWEST, _RANGE = 0x1000_0000_0000, 0x2000_0000_0000
"""Addresses where neither the system nor a loader puts anything, on processors of 47 bits and more."""
_MAP_FIXED_NOREPLACE = 0x100000
_FALLOC_PUNCH_HOLE, _FALLOC_KEEP_SIZE = 2, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


@dataclass(frozen=True, order=True)
class Block:
    """Whole pages of the file."""

    address: int
    size: int
    offset: int

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.size


class Arena:
    """The file and its blocks.

    Finalizers give blocks back, and Python may run one at any point: in the middle of a method here, and in other
    threads. So a finalizer that finds the lock `_at_work` taken only adds its block to `_returned`.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("arena", os.MFD_CLOEXEC)
        self._next_address = _LOWEST + secrets.randbelow(_RANGE // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file_bytes = 0
        self._holes: list[tuple[int, int]] = []
        """(offset, size) of parts of the file that no block has."""
        self._idle: defaultdict[int, list[Block]] = defaultdict(list)
        """By size, the one that was used last at the end."""
        self._idle_bytes = 0
        self._used: list[Block] = []
        """By address."""
        self._returned: deque[Block] = deque()
        """Blocks that are not used any more and that `_used` still has."""
        self._at_work = threading.Lock()
        self.dropped: list[Block] = []
        """Blocks that are gone; a process that maps one unmaps it before another block gets its part of the file."""
        weakref.finalize(self, _close, self.descriptor, self._idle, self._returned).atexit = False

    def readable(self) -> int:
        """A read-only descriptor of the file, for another process; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def raw(self, size: int) -> torch.Tensor:
        """At least `size` bytes, whole pages, as uint8; what they hold is anything. Raises MemoryError."""
        with self._at_work:
            self._settle()
            block = self._taken(max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE)
            bisect.insort(self._used, block)
        pages = (ctypes.c_char * block.size).from_address(block.address)
        weakref.finalize(pages, self._give_back, block)
        return torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive

    def empty(self, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """A tensor in a block of its own. Raises MemoryError."""
        dtype, span = dtypes.to_torch(spec.dtype), dtypes.element_span(spec)
        flat = self.raw(span * dtype.itemsize)[: span * dtype.itemsize].view(dtype)
        return flat.as_strided(list(spec.shape), list(spec.strides))

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in a block of its own, strides and overlaps kept. Raises MemoryError."""
        span = dtypes.element_span(dtypes.spec_of(tensor))
        flat = self.raw(span * tensor.itemsize)[: span * tensor.itemsize].view(tensor.dtype)
        flat.copy_(tensor.detach().as_strided((span,), (1,)))
        return flat.as_strided(tensor.shape, tensor.stride())

    def block_at(self, address: int) -> Block | None:
        """The block in use that holds an address."""
        with self._at_work:
            self._settle()
            at = bisect.bisect_right(self._used, address, key=lambda block: block.address) - 1
            return self._used[at] if at >= 0 and address < self._used[at].end else None

    def empty_pages(self, tensor: torch.Tensor) -> None:
        """Takes the whole pages of a tensor out of everybody's sight: who touches them next waits for each, and finds
        zeros. They are there already: on two processors 12 MB took 10 ms where a shared file's had to be made as well,
        6.5 ms in memory of a process's own, and so 5.7 ms."""
        begin = tensor.data_ptr()
        if (block := self.block_at(begin)) is not None:
            end = begin + dtypes.element_span(dtypes.spec_of(tensor)) * tensor.itemsize
            first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            offset = block.offset + first - block.address
            self._punch(offset, last - first)
            _libc.fallocate(self.descriptor, 0, offset, last - first)

    def _taken(self, size: int) -> Block:
        if idle := self._idle[size]:
            self._idle_bytes -= size
            return idle.pop()
        block = Block(self._next_address, size, self._offset_for(size))
        try:
            mapped = _libc.mmap(
                block.address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE,
                self.descriptor, block.offset,
            )  # fmt: skip
        except (ctypes.ArgumentError, OverflowError) as error:
            raise MemoryError(f"no {size} bytes of memory: {error}") from error
        if mapped != block.address:
            self._free(block)
            raise MemoryError(f"no {size} bytes of memory: {os.strerror(ctypes.get_errno())}")
        self._next_address = block.end + FENCE_BYTES
        return block

    def _offset_for(self, size: int) -> int:
        for place, (offset, room) in enumerate(self._holes):
            if room >= size:
                self._holes[place : place + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        offset = self._file_bytes
        try:
            os.ftruncate(self.descriptor, offset + size)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no {size} bytes of memory: {error}") from error
        self._file_bytes = offset + size
        return offset

    def _give_back(self, block: Block) -> None:
        self._returned.append(block)
        if self._at_work.acquire(blocking=False):  # else the next `_settle` finds it
            try:
                self._settle()
            finally:
                self._at_work.release()

    def _settle(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            del self._used[bisect.bisect_left(self._used, block)]
            self._idle[block.size].append(block)
            self._idle_bytes += block.size
        while self._idle_bytes > KEPT_BYTES:
            largest = max(size for size, blocks in self._idle.items() if blocks)
            gone = self._idle[largest].pop(0)
            self._idle_bytes -= gone.size
            _libc.munmap(gone.address, gone.size)
            self._punch(gone.offset, gone.size)
            self.dropped.append(gone)
            self._free(gone)

    def _free(self, block: Block) -> None:
        """Its part of the file is a hole, one with those on both sides."""
        bisect.insort(self._holes, (block.offset, block.size))
        merged: list[tuple[int, int]] = []
        for offset, size in self._holes:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._holes = merged

    def _punch(self, offset: int, size: int) -> None:
        """Gives a part of the file back."""
        _libc.fallocate(self.descriptor, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, size)


def _close(descriptor: int, idle: dict[int, list[Block]], returned: Iterable[Block]) -> None:
    for block in (*(block for blocks in idle.values() for block in blocks), *returned):
        _libc.munmap(block.address, block.size)
    os.close(descriptor)


_kept: list[Arena] = []


def arena() -> Arena:
    """This process's, for what kernels may write; within `using` another one."""
    if not _kept:
        _kept.append(Arena())
    return _kept[-1]


@contextlib.contextmanager
def using(other: Arena) -> Iterator[None]:
    """What kernels may write lies in another arena meanwhile. Who has the one has no way to the other: two processes of
    one kernel, of which only one is timed, would tell each other by what both may write."""
    arena()
    _kept.append(other)
    try:
        yield
    finally:
        _kept.remove(other)


@functools.cache
def given() -> Arena:
    """This process's for what kernels may only read: theirs has it open for no more than that, so that no protection of
    a page that they might ask for lets them write it."""
    return Arena()
