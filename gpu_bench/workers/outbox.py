"""A piece of GPU memory for outputs: the candidate's process writes into it, the judge's reads out of it.

The one idea: as `sharing`, without two trips over the bus to the host. The memory is made by a process of ours that
ends at once, is known by a file descriptor, and each worker maps it under an address of its own. CUDA's older handles
of addresses mean nothing in another PID namespace (error 201 on an H200); descriptors do. It holds nothing secret.

Run as `python -m gpu_bench.workers.outbox SOCKET_FD BYTES` by `Outbox.make`. No torch before a worker maps it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PASSAGE_VARIABLE = "WARPSMITH_PASSAGE_FD"
"""Environment variable of a worker: the number of the inherited socket through which descriptors come."""
LEAST_BYTES = 64 << 20
"""Outputs below this go through the host in less time than it takes to make an outbox."""
_MAKE_SECONDS = 20.0

# CUDA driver API, chapter "Virtual Memory Management".
_PINNED, _ON_DEVICE, _FILE_DESCRIPTOR, _READ_AND_WRITE = 1, 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("windows", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ON_FIRST = _Location(_ON_DEVICE, 0)
_PROPERTIES = _Properties(_PINNED, _FILE_DESCRIPTOR, _ON_FIRST)


class OutboxFault(RuntimeError):
    """The driver refuses; outputs then go through the host."""


def _checked(function: str, *arguments: object) -> None:
    if code := getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments):
        raise OutboxFault(f"{function} failed with code {code}")


def _granular(size: int) -> int:
    grain = ctypes.c_size_t()
    _checked("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(_PROPERTIES), 0)
    return -(-size // grain.value) * grain.value


# ---- the owner of the workers --------------------------------------------------------------------------------


class Passage:
    """A socket by which descriptors reach the workers of one session; these cannot send any themselves."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()

    @property
    def inherited(self) -> int:
        """The descriptor that workers inherit under the same number."""
        return self._there.fileno()

    def send(self, descriptor: int) -> None:
        """Puts a descriptor where the worker that is called next takes it."""
        socket.send_fds(self._here, [b"."], [descriptor])

    def close(self) -> None:
        """Closes both ends."""
        self._here.close()
        self._there.close()


@dataclass(frozen=True)
class Outbox:
    """Memory of the first GPU. It is free when this is closed and every worker that mapped it has ended."""

    descriptor: int
    size: int

    @staticmethod
    def make(size: int) -> Outbox | None:
        """At least `size` bytes; None where that does not work."""
        here, there = socket.socketpair()
        command = [sys.executable, "-s", "-P", "-m", "gpu_bench.workers.outbox", str(there.fileno()), str(size)]
        with here, there, contextlib.suppress(OSError):
            here.settimeout(_MAKE_SECONDS)
            with subprocess.Popen(command, pass_fds=(there.fileno(),), stderr=subprocess.DEVNULL) as maker:
                try:
                    there.close()
                    _, descriptors, _, _ = socket.recv_fds(here, 1, 1)
                finally:
                    maker.kill()
            return Outbox(descriptors[0], size) if descriptors else None
        return None

    def close(self) -> None:
        """Gives it up."""
        os.close(self.descriptor)


def _make(channel: int, size: int) -> None:
    """The process that makes the memory: it sends the descriptor and ends."""
    context, device, handle, descriptor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_int()
    _checked("cuInit", 0)
    _checked("cuDeviceGet", ctypes.byref(device), 0)
    _checked("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _checked("cuCtxSetCurrent", context)
    length = ctypes.c_size_t(_granular(size))
    _checked("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(_PROPERTIES), ctypes.c_ulonglong(0))
    _checked("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _FILE_DESCRIPTOR, ctypes.c_ulonglong(0))
    with socket.socket(fileno=channel) as there:
        socket.send_fds(there, [b"."], [descriptor.value])
        there.recv(1)  # until the other end has it


# ---- a worker ------------------------------------------------------------------------------------------------


class _Bytes:
    """GPU memory at an address, as torch takes it over; unmapped when torch lets go of it."""

    def __init__(self, address: int, size: int, length: int) -> None:
        weakref.finalize(self, _unmap, address, length).atexit = False
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _unmap(address: int, length: int) -> None:
    place = ctypes.c_ulonglong(address), ctypes.c_size_t(length)
    with contextlib.suppress(OutboxFault):  # as in a thread without a context
        _checked("cuCtxSynchronize")
    for function in ("cuMemUnmap", "cuMemAddressFree"):
        with contextlib.suppress(OutboxFault):  # where a kernel has failed the process is at its end, its memory too
            _checked(function, *place)


def last_sent(passage: socket.socket) -> int:
    """The last descriptor that waits in a socket; earlier ones, which were never fetched, are closed.

    Raises:
        OutboxFault: none waits.
    """
    passage.setblocking(False)
    last = -1
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(passage, 1, 1)
        except BlockingIOError:
            descriptors = []
        if not descriptors:
            break
        if last >= 0:
            os.close(last)
        last = descriptors[0]
    if last < 0:
        raise OutboxFault("no descriptor came")
    return last


def received(size: int) -> torch.Tensor:
    """The outbox whose descriptor was sent last, as uint8 [size] on the current GPU; mapped while a view lives.

    Raises:
        OutboxFault: none was sent, or the driver does not map it.
    """
    import torch

    if not torch.cuda.is_available():
        raise OutboxFault("there is no GPU")
    torch.zeros(1, device="cuda")  # makes torch's context current in this thread
    with socket.socket(fileno=os.dup(int(os.environ[PASSAGE_VARIABLE]))) as passage:
        descriptor = last_sent(passage)
    handle, address, length = ctypes.c_ulonglong(), ctypes.c_ulonglong(), ctypes.c_size_t(_granular(size))
    none, access = ctypes.c_ulonglong(0), _Access(_ON_FIRST, _READ_AND_WRITE)
    try:
        number = ctypes.c_void_p(descriptor)
        _checked("cuMemImportFromShareableHandle", ctypes.byref(handle), number, _FILE_DESCRIPTOR)
    finally:
        os.close(descriptor)
    _checked("cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), none, none)
    _checked("cuMemMap", address, length, ctypes.c_size_t(0), handle, none)
    _checked("cuMemRelease", handle)  # the mapping keeps it
    _checked("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
    assert address.value is not None
    return torch.as_tensor(_Bytes(address.value, size, length.value), device="cuda")


if __name__ == "__main__":
    _make(int(sys.argv[1]), int(sys.argv[2]))
