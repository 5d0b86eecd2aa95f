"""The executor of the `cpu` target: a shared object in this process, its entries called with packed pointers.

The one idea: the object is loaded from a private file that is gone before it runs; OpenMP symbols resolve to torch's
own libgomp, so that library steps and kernels share one pool of threads. It trusts nothing to stay alive: a fault
here ends the process, and the owner of the process says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_bench.executor import Call, LaunchCode, Memory, ProgramFault, Sources, straighten
from warpsmith.v1 import artifact_pb2, candidate_pb2, task_pb2, verdict_pb2

_SCALARS: dict[str, type[ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float]] = {
    "int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float,
}  # fmt: skip

Entry = Callable[[ctypes.Array[ctypes.c_void_p]], None]


@functools.cache
def share_openmp() -> None:
    """Makes torch's OpenMP runtime visible to objects that are loaded from now on."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return
    with contextlib.suppress(OSError):  # a torch built on the system's runtime
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


class HostExecutor:
    """Runs programs of the `cpu` target in this process."""

    target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU

    def load(
        self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact, device: torch.device
    ) -> HostProgram:
        """As `Executor.load`.

        Raises ProgramFault: the binary is no shared object of this processor, or lacks an entry.
        """
        launches = [step.launch.entry for step in program.steps if step.WhichOneof("kind") == "launch"]
        if not launches:
            return HostProgram(program, device, {})
        if artifact.format != artifact_pb2.BINARY_FORMAT_SHARED_OBJECT:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, "the artifact holds no shared object")
        library = _load(artifact.content)
        entries: dict[str, Entry] = {}
        for name in launches:
            try:
                entry = getattr(library, name)
            except AttributeError:
                raise ProgramFault(
                    verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, f"the binary has no entry called {name}"
                ) from None
            entry.restype = None
            entry.argtypes = None
            entries[name] = entry
        return HostProgram(program, device, entries)

    def synchronize(self) -> None:
        """Nothing to wait for: calls return when they have ended."""


def _load(content: bytes) -> ctypes.CDLL:
    share_openmp()
    # A fresh name for each load: for a name that it knows, the loader gives the object that it has.
    descriptor, path = tempfile.mkstemp(prefix="kernel-", suffix=".so")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise ProgramFault(
            verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, f"the shared object does not load: {error}"
        ) from error
    finally:
        os.unlink(path)


class HostProgram:
    """A loaded program of the `cpu` target."""

    def __init__(self, program: candidate_pb2.Program, device: torch.device, entries: dict[str, Entry]) -> None:
        self.program = program
        self.device = device
        self._entries = entries

    def bind(
        self,
        sources: Sources,
        memory: Memory | None = None,
        after_step: Callable[[], object] | None = None,
        workspaces: Memory | None = None,
    ) -> Call:
        """As `LoadedProgram.bind`."""
        return straighten(self.program, sources, memory, self.device, self._pack, after_step, workspaces)

    def _pack(self, launch: candidate_pb2.Launch) -> LaunchCode:
        pointers = (ctypes.c_void_p * max(1, len(launch.arguments)))()
        scalars: list[ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float] = []
        for position, argument in enumerate(launch.arguments):
            kind = argument.WhichOneof("kind") or ""
            if kind in _SCALARS:
                scalar = _SCALARS[kind](getattr(argument, kind))
                scalars.append(scalar)
                pointers[position] = ctypes.addressof(scalar)
        entry = self._entries[launch.entry]

        def run(_alive: object = scalars) -> None:
            entry(pointers)

        return LaunchCode(run, pointers.__setitem__)
