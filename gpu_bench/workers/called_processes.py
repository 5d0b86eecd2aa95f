"""Processes of a solution's session, which are called from outside, and the memory that all of them share.

The one idea: each is made with the same threads, in the same kind of jail, on the same memory, whether a solution lives
in it or a baseline, so that nothing but what is loaded tells one from another. It loads nothing and calls none.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping

from gpu_bench.machine import worker_environment, worker_policy
from gpu_bench.pytorch.compiler_cache import CompilerCache
from gpu_bench.solutions.caller import Called
from gpu_bench.workers.outbox import PASSAGE_VARIABLE, Outbox
from gpu_bench.workers.pair import Pair, on_failure
from warpsmith.errors import Infrastructure
from warpsmith.sandbox import jail
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2, task_pb2


class CalledProcesses:
    """Makes them. `workers`: whose memory it is."""

    def __init__(
        self,
        target: task_pb2.Target.ValueType,
        workers: Pair,
        *,
        rung: jail.Rung | None,
        prepare_seconds: float,
    ) -> None:
        self._target, self._workers = target, workers
        self._rung, self._prepare_seconds = rung, prepare_seconds
        self._shared: Outbox | None = None
        """On a GPU, what all processes share."""

    def start(
        self,
        entry: str,
        total_bytes: Callable[[], int],
        cache: CompilerCache | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Called:
        """A process that can be called, with the memory that all share. Only the baselines' may write the cache.

        `total_bytes`: of that memory, asked for when the process is there.
        """
        policy = worker_policy(self._target)
        variables = worker_environment(self._workers.descriptor) | {
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # Threads that are let go all at once come to lie on one processor: 16 of them took 12 ms for 2 (and 2 with
            # each on its own).
            "OMP_PROC_BIND": "true",
            PASSAGE_VARIABLE: str(self._workers.passage.inherited),
            **(environment or {}),
        }
        if cache is not None:
            policy, variables = cache.allowed(policy), variables | cache.environment()
        inherited = (self._workers.descriptor, self._workers.passage.inherited)
        process = Called(entry, policy, rung=self._rung, env=variables, shared_fds=inherited)
        with on_failure(process.close):
            self.share(process, total_bytes())
        return process

    def share(self, worker: Worker, size: int) -> None:
        """On a GPU, gives a process the memory that all share. Raises Infrastructure where that cannot be."""
        if self._target != task_pb2.TARGET_CUDA:
            return
        if self._shared is None:
            self._shared = Outbox.make(size)
        if self._shared is not None:
            self._workers.passage.send(self._shared.descriptor)
            request = judging_pb2.MoveRequest(total_bytes=size)
            moved = worker.call("move", request, judging_pb2.Moved, deadline_s=self._prepare_seconds)
            if moved.total_bytes == size:
                return
        raise Infrastructure(
            "memory of the GPU cannot be shared between processes here, which judging a solution needs"
        )

    def mapped(self, size: int) -> memoryview | None:
        """The memory that all share, where results are put to be read here; None on a GPU: that one is not readable."""
        if self._target == task_pb2.TARGET_CUDA:
            return None
        return memoryview(mmap.mmap(self._workers.descriptor, size))

    def close(self) -> None:
        """Gives the memory back; processes are closed by those who asked for them."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None
