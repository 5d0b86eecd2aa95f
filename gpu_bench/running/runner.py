"""The process in which kernels for the processor run, as the bench sees it: built, started, told what to run.

The one idea: it is stopped between calls, and a call ends when the operating system says that every thread of it has
stopped. So the bench can time a call from outside, and after the call nothing runs. Its own source
(`kernel_runner.cpp`) says what it may do. It loads no candidate into the bench, and times nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import secrets
import signal
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from gpu_bench import faults, native
from gpu_bench.running import kernel_image
from gpu_bench.running.arena import Arena, Block, arena, given
from gpu_bench.running.executor import ProgramFault
from gpu_bench.timing import standing
from gpu_bench.timing.clocks import aside, timed_ns
from warpsmith.sandbox import kernel_calls
from warpsmith.v1 import verdict_pb2

_SOURCE = Path(__file__).with_name("kernel_runner.cpp")
_FLAGS = ("-std=c++20", "-O2", "-fopenmp", "-static", "-fno-exceptions", "-fno-rtti", "-fno-builtin", "-w",
          # Not every C library has every function: what is missing has the address 0, and no kernel gets it.
          "-Wl,--unresolved-symbols=ignore-all")  # fmt: skip
_IMAGES, _IMAGE_RANGE = 0x4000_0000_0000, 0x1000_0000_0000
"""Addresses for the candidate's code: above those of the arena."""
_EMPTY, _EMPTY_CALLS = "empty", 51
_NOTHING = 0
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE


class _Segment(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("address", "bytes", "protection")]


class _Window(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("address", "bytes", "offset", "protection", "is_given")]


class _Control(ctypes.Structure):
    """As `Control` of `kernel_runner.cpp`."""

    _fields_ = [
        ("function_count", ctypes.c_uint64), ("functions", ctypes.c_uint64 * 1024),
        ("image_address", ctypes.c_uint64), ("image_bytes", ctypes.c_uint64), ("image_offset", ctypes.c_uint64),
        ("segment_count", ctypes.c_uint64), ("segments", _Segment * 16),
        ("window_count", ctypes.c_uint64), ("windows", _Window * 1024),
        ("word_count", ctypes.c_uint64), ("words", ctypes.c_uint64 * (1 << 16)),
    ]  # fmt: skip


@functools.cache
def _built() -> str:
    """The runner. Raises Infrastructure."""
    names = "".join(f"FUNCTION({name})\n" for name in kernel_calls.FUNCTIONS)
    return native.built(_SOURCE, _FLAGS, {"kernel_functions.h": names}, needs=" (it needs libc.a and libgomp.a)")


class Runner:
    """A process with one candidate's code in it. From one thread.

    Calls are queued and made by `flush`; a fault of the candidate ends the process and shows there.
    """

    def __init__(self, binary: bytes, memory: Arena | None = None) -> None:
        """Starts it. Raises ProgramFault for a binary that cannot be loaded."""
        self.arena = memory or arena()
        self._forced_switches = 0
        self._batches = 0
        self._given = given()
        self._mapped: dict[int, tuple[Block, int]] = {}
        self._dropped = {each: len(each.dropped) for each in (self.arena, self._given)}
        self._shared = self.arena.raw(ctypes.sizeof(_Control)).zero_()
        self._control = _Control.from_address(self._shared.data_ptr())
        self._words = self._control.words
        self._count = 0
        self._windows: list[tuple[Block, int, bool]] = []
        self._is_killed = False
        self._process = self._start()
        self._end = weakref.finalize(self, _end, self._process)
        self._wait_until_stopped()
        self.entries = self._load(binary)
        self.handshake_ns = self._empty_call_ns()
        """As of `Elsewhere`; measured before a byte of the candidate's has run."""

    def _start(self) -> int:
        block = self.arena.block_at(self._shared.data_ptr())
        assert block is not None
        descriptor = os.dup(self.arena.descriptor)
        readable = self._given.readable()
        os.set_inheritable(descriptor, True)
        os.set_inheritable(readable, True)
        environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        arguments = ["runner", str(descriptor), f"{block.address:x}", str(block.offset), str(readable)]
        try:
            return os.posix_spawn(_built(), arguments, environment)
        finally:
            os.close(descriptor)
            os.close(readable)

    def _load(self, binary: bytes) -> Mapping[str, int]:
        control = self._control
        names = (kernel_image.TRAP, _EMPTY, *kernel_calls.FUNCTIONS)
        functions = dict(zip(names, control.functions[: control.function_count], strict=True))
        self._empty = functions.pop(_EMPTY)
        address = _IMAGES + secrets.randbelow(_IMAGE_RANGE // mmap.PAGESIZE) * mmap.PAGESIZE
        image = kernel_image.laid_out(binary, address, functions)
        staged = self.arena.raw(len(image.content))
        staged[: len(image.content)].copy_(torch.frombuffer(bytearray(image.content), dtype=torch.uint8))
        block = self.arena.block_at(staged.data_ptr())
        assert block is not None
        control.image_address, control.image_bytes = image.address, len(image.content)
        control.image_offset = block.offset
        control.segment_count = len(image.segments)
        for place, segment in zip(control.segments, image.segments, strict=False):
            place.address, place.bytes, place.protection = segment.address, segment.size, segment.protection
        self._continue_until_stopped()
        return image.entries

    # ---- calls ---------------------------------------------------------------------------------------------

    def show(self, address: int, *, is_written: bool = True) -> bool:
        """Has the process map the block at an address before its next call, to be read at least; False where no block
        is there, or none that it could write."""
        block, is_given = self.arena.block_at(address), False
        if block is None:
            block, is_given = self._given.block_at(address), True
        if block is None or (is_given and is_written):
            return False
        protection = _BOTH if is_written else mmap.PROT_READ
        known, held = self._mapped.get(block.address, (None, _NOTHING))
        if known != block or protection & ~held:
            self._mapped[block.address] = block, protection
            self._windows.append((block, protection, is_given))
        return True

    def queue(self, words: Sequence[int]) -> None:
        """One call: address of the entry, number of arguments, and where each of them lies."""
        count = len(words)
        if self._count + count > len(self._words):
            self.flush()
        self._words[self._count : self._count + count] = words
        self._count += count

    def flush(self) -> None:
        """Makes the calls that are queued. Raises ProgramFault: the process has ended."""
        if not self._count and not self._windows:
            return
        with aside():
            standing.begin()
        try:
            self._make_calls()
        finally:
            with aside():
                standing.end()

    def _make_calls(self) -> None:
        for memory, known in self._dropped.items():
            dropped = memory.dropped[known:]  # it may grow meanwhile
            self._dropped[memory] += len(dropped)
            for block in dropped:
                if self._mapped.pop(block.address, None) is not None:
                    self._windows.insert(0, (block, _NOTHING, False))
        control, most = self._control, len(self._control.windows)
        while True:
            now, self._windows = self._windows[:most], self._windows[most:]
            for place, (block, protection, is_given) in zip(control.windows, now, strict=False):
                place.address, place.bytes, place.offset, place.protection, place.is_given = (
                    block.address, block.size, block.offset, protection, is_given,
                )  # fmt: skip
            control.window_count = len(now)
            control.word_count, self._count = (0, self._count) if self._windows else (self._count, 0)
            self._continue_until_stopped()
            if not self._windows:
                return

    def settle(self) -> None:
        """Makes the calls that are queued, unless more are to come in a batch."""
        if not self._batches:
            self.flush()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """As `Elsewhere.batch`."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
        self.flush()

    def forced_switches(self) -> int:
        """How often the system took a processor away from one of its threads."""
        return self._forced_switches

    def _empty_call_ns(self) -> float:
        """Time of a call that does nothing, with all threads: the lower quartile, for load only ever adds."""
        times = []
        for _ in range(_EMPTY_CALLS):
            begin = timed_ns()
            self.queue([self._empty, 0])
            self.flush()
            times.append(timed_ns() - begin)
        return float(sorted(times)[len(times) // 4])

    def kill(self) -> None:
        """Ends it, from any thread: a call that waits for it gets a fault."""
        self._is_killed = True
        if self._end.alive:
            os.kill(self._process, signal.SIGKILL)

    def _continue_until_stopped(self) -> None:
        if self._end.alive:
            os.kill(self._process, signal.SIGCONT)
        self._wait_until_stopped()

    def _wait_until_stopped(self) -> None:
        if self._end.alive:
            _, status, usage = os.wait4(self._process, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                self._forced_switches = usage.ru_nivcsw
                return
            self._end.detach()
            self._fault = self._fault_of(status)
        raise self._fault

    def _fault_of(self, status: int) -> ProgramFault:
        if self._is_killed:
            return ProgramFault(verdict_pb2.FAILURE_KIND_TIMEOUT, "no end of a call while it was timed")
        code = os.waitstatus_to_exitcode(status)
        kind, text = faults.ended(signal_number=-code if code < 0 else None, exit_code=code if code >= 0 else None)
        return ProgramFault(kind, text)


def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
