"""The executor of the `cpu` target: programs whose kernels run in a process of their own.

The one idea: this process, which has the clock, the module and its baselines, never loads a candidate's code. It puts
tensors where the kernels' process may map them, queues calls, and has that process make them (`runner`). What lies
elsewhere, as the results of library calls do, is copied for the call, which is not charged for that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from gpu_bench.running.arena import arena
from gpu_bench.running.elsewhere import Elsewhere, Queue
from gpu_bench.running.executor import Call, Kept, Memory, ProgramFault, Sources
from gpu_bench.running.runner import Runner
from gpu_bench.running.straight_line import LaunchCode, kept_of, rest_of, straighten
from gpu_bench.timing.clocks import aside
from warpsmith import arguments as launch_arguments
from warpsmith.graphs import dtypes
from warpsmith.v1 import artifact_pb2, candidate_pb2, task_pb2, verdict_pb2

_SCALARS: dict[str, type[ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float]] = {
    "int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float,
}  # fmt: skip
_SCALAR_BYTES = 8


class HostExecutor:
    """Runs programs of the `cpu` target."""

    target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU

    def load(
        self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact, device: torch.device
    ) -> HostProgram:
        """As `Executor.load`.

        Raises ProgramFault: the binary is no shared object of this processor, or lacks an entry.
        """
        launches = [step.launch.entry for step in program.steps if step.WhichOneof("kind") == "launch"]
        if not launches:
            return HostProgram(program, device, None)
        if artifact.format != artifact_pb2.BINARY_FORMAT_SHARED_OBJECT:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, "the artifact holds no shared object")
        runner = Runner(artifact.content)
        for name in launches:
            if name not in runner.entries:
                raise ProgramFault(
                    verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, f"the binary has no entry called {name}"
                ) from None
        return HostProgram(program, device, runner)

    def synchronize(self) -> None:
        """Nothing to wait for: calls return when they have ended."""


class HostProgram:
    """A program of the `cpu` target, loaded into a process of its own where it has kernels."""

    def __init__(self, program: candidate_pb2.Program, device: torch.device, runner: Runner | None) -> None:
        self.program = program
        self.device = device
        self.runner = runner
        self.elsewhere: Elsewhere | None = runner
        self._sources = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_SOURCE}
        self._bytes = {
            buffer.name: dtypes.element_span(buffer.spec) * dtypes.to_torch(buffer.spec.dtype).itemsize
            for buffer in program.buffers
        }

    def bind(
        self,
        sources: Sources,
        memory: Memory | None = None,
        after_step: Callable[[], object] | None = None,
        workspaces: Memory | None = None,
        kept: Kept | None = None,
    ) -> Call:
        """As `LoadedProgram.bind`; with `workspaces` outputs come from it too, once: they are its to empty.

        Only in judged calls, which have `memory`, can sources be written that the program does not declare: there it
        is seen and told, elsewhere it is the end of the process.
        """
        queue = Queue(self.runner.flush, self.runner.settle) if self.runner is not None else None
        outputs = None if memory is not None else workspaces
        pack = functools.partial(self._pack, is_judged=memory is not None)
        part = rest_of(self.program, kept)
        call = straighten(
            self.program, sources, memory, self.device, pack, after_step, workspaces, queue, outputs, part
        )
        if self.runner is not None:
            self.runner.flush()  # maps what is there by now, so that no call waits for it
        return call

    def keep(
        self, sources: Sources, memory: Memory | None = None, after_step: Callable[[], object] | None = None
    ) -> Kept:
        """As `LoadedProgram.keep`."""
        queue = Queue(self.runner.flush, self.runner.settle) if self.runner is not None else None
        pack = functools.partial(self._pack, is_judged=memory is not None)
        return kept_of(self.program, sources, self.device, pack, queue, memory, after_step)

    def _pack(self, launch: candidate_pb2.Launch, *, is_judged: bool) -> LaunchCode:
        runner = self.runner
        assert runner is not None
        words = [runner.entries[launch.entry], len(launch.arguments), *[0] * len(launch.arguments)]
        scalars = arena().raw(_SCALAR_BYTES * max(1, len(launch.arguments)))
        guests: dict[int, Guest] = {}
        for position, argument in enumerate(launch.arguments):
            kind = argument.WhichOneof("kind") or ""
            if kind in _SCALARS:
                words[2 + position] = scalars.data_ptr() + _SCALAR_BYTES * position
                _SCALARS[kind].from_address(words[2 + position]).value = getattr(argument, kind)
        runner.show(scalars.data_ptr())

        def place(position: int, address: int) -> None:
            name = launch_arguments.buffer_of(launch.arguments[position]) or ""
            if not address:  # of an empty tensor, where there is nothing to read or write
                guests.pop(position, None)
                words[2 + position] = 0
                return
            if runner.show(address, is_written=is_judged or name in launch.writes or name not in self._sources):
                guests.pop(position, None)
                words[2 + position] = address
                return
            guest = guests.setdefault(position, Guest(arena().raw(self._bytes[name]), self._bytes[name]))
            guest.home, guest.is_written = address, name in launch.writes
            words[2 + position] = guest.copy.data_ptr()
            runner.show(words[2 + position])

        def run(_alive: object = scalars) -> None:
            if not guests:
                runner.queue(words)
                return
            runner.flush()
            with aside():
                for guest in guests.values():
                    ctypes.memmove(guest.copy.data_ptr(), guest.home, guest.size)
            runner.queue(words)
            if any(guest.is_written for guest in guests.values()):
                runner.flush()
                with aside():
                    for guest in guests.values():
                        if guest.is_written:
                            ctypes.memmove(guest.home, guest.copy.data_ptr(), guest.size)

        return LaunchCode(run, place)


class Guest:
    """A tensor that lies where kernels cannot see it, and its copy where they can."""

    def __init__(self, copy: torch.Tensor, size: int) -> None:
        self.copy = copy
        self.size = size
        self.home = 0
        self.is_written = False
