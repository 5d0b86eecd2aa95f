"""Processes that wait for a task: started, torch and its compiler imported, no user's code seen, no GPU touched.

The one idea: starting a process and importing take seconds of a processor and nothing of a GPU, so it happens while
another task has the GPU. A lot is all that one session needs; every process in it serves that session or none.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from gpu_bench.machine import BENCH, JUDGE, Machine, worker_environment, worker_policy
from gpu_bench.pytorch.compiler_cache import CompilerCache
from gpu_bench.workers import shared_file
from gpu_bench.workers.outbox import PASSAGE_VARIABLE, Passage
from warpsmith.errors import WarpsmithError
from warpsmith.sandbox import jail
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2, task_pb2

LEAST_PROCESSORS = 8
"""Below this many, starting processes ahead would take time from the task at hand."""
_WANTED = (JUDGE, BENCH, BENCH)
"""A judge, a process for the search's candidates, and a fresh one for the final measurement."""
MOST_KEPT_BYTES = 12 << 30
"""A larger file of shared memory goes with its session."""
_WARM_UP_SECONDS = 120.0
AHEAD = 2
"""Lots that wait or are made: one takes twelve seconds, and a task at the floor is done with its own in five."""


class SharedFiles:
    """Memory for outputs that goes from session to session: what was pinned once is pinned in a fifth of the time.

    On an H200's host, 0.3 s instead of 1.4 for 4.3 GB. It holds outputs of earlier tasks, which are not erased.
    """

    def __init__(self) -> None:
        self._idle: list[int] = []
        self._lock = threading.Lock()

    def take(self) -> int:
        """A file; its content and size mean nothing."""
        with self._lock:
            return self._idle.pop() if self._idle else shared_file.made()

    def give_back(self, descriptor: int) -> None:
        """Keeps one file that is not too large; closes others."""
        with self._lock:
            if not self._idle and os.fstat(descriptor).st_size <= MOST_KEPT_BYTES:
                self._idle.append(descriptor)
                return
        os.close(descriptor)

    def close(self) -> None:
        """Closes what is kept."""
        while self._idle:
            os.close(self._idle.pop())


class Lot:
    """Shared memory, a compiler's cache, and processes that know both by now."""

    def __init__(
        self,
        target: task_pb2.Target.ValueType,
        machine: Machine,
        rung: jail.Rung | None,
        memory: SharedFiles,
    ) -> None:
        self.descriptor = memory.take()
        self.passage = Passage()
        self._memory = memory
        self.cache = CompilerCache(headers=machine.headers)
        self._target, self._rung = target, rung
        self._waiting: dict[str, list[Future[Worker]]] = {}
        self._started: list[Worker] = []
        self._is_closed = False
        self._starting = ThreadPoolExecutor(len(_WANTED), thread_name_prefix="reserve")
        for entry in _WANTED:
            self._waiting.setdefault(entry, []).append(self._starting.submit(self._start, entry))
        # While they start: the first time it takes ten seconds, and processes that wait compile nothing.
        self.cache.learn(machine.compiled(target))

    def take(self, entry: str) -> Worker | None:
        """A process that waits; None where none is left."""
        while waiting := self._waiting.get(entry):
            with contextlib.suppress(WarpsmithError):
                worker = waiting.pop(0).result()
                if worker.alive:
                    return worker
                worker.close()
        return None

    def close(self) -> None:
        """Ends the processes that were not taken, removes the cache, and gives the memory to a later lot."""
        self._is_closed = True
        for each in list(self._started):
            each.close()  # also one that still warms up: it is not needed any more
        for entry in list(self._waiting):
            while (worker := self.take(entry)) is not None:
                worker.close()
        self._starting.shutdown()
        self.cache.close()
        self.passage.close()
        self._memory.give_back(self.descriptor)

    def _start(self, entry: str) -> Worker:
        worker = started(entry, self._target, self._rung, self.descriptor, self.cache, self.passage)
        self._started.append(worker)
        if self._is_closed:
            return worker
        worker.call("warm_up", judging_pb2.WarmUpRequest(), judging_pb2.Done, deadline_s=_WARM_UP_SECONDS)
        return worker


def started(
    entry: str,
    target: task_pb2.Target.ValueType,
    rung: jail.Rung | None,
    descriptor: int,
    cache: CompilerCache | None = None,
    passage: Passage | None = None,
) -> Worker:
    """A new process of a session. Only the candidate's may write the cache."""
    environment, policy, inherited = worker_environment(descriptor), worker_policy(target), [descriptor]
    if passage is not None:
        environment |= {PASSAGE_VARIABLE: str(passage.inherited)}
        inherited.append(passage.inherited)
    if entry == BENCH and cache is not None:
        environment |= cache.environment()
        policy = cache.allowed(policy)
    return Worker(entry, policy, rung=rung, env=environment, shared_fds=inherited)


class Reserve:
    """The lots of the next sessions. From any thread."""

    def __init__(self, machine: Machine, rung: jail.Rung | None = None) -> None:
        self._machine, self._rung = machine, rung
        self._lock = threading.Lock()
        self._memory = SharedFiles()
        self._making = ThreadPoolExecutor(1, thread_name_prefix="lots")
        self._coming: deque[Future[Lot]] = deque()

    def begin(self, target: task_pb2.Target.ValueType) -> None:
        """Has lots made from here on, so that the first waits by the time that the first task is captured."""
        if target != task_pb2.TARGET_CUDA or (os.cpu_count() or 1) < LEAST_PROCESSORS:
            return
        with self._lock:
            while len(self._coming) < AHEAD:
                self._coming.append(self._making.submit(Lot, target, self._machine, self._rung, self._memory))

    def take(self, target: task_pb2.Target.ValueType) -> Lot | None:
        """The lot that waits, if one does; another is begun. None for a processor, which its tasks need whole."""
        with self._lock:
            begun = self._coming.popleft() if target == task_pb2.TARGET_CUDA and self._coming else None
        self.begin(target)
        with contextlib.suppress(WarpsmithError):
            return begun.result() if begun is not None else None
        return None

    def close(self) -> None:
        """Ends what waits."""
        with self._lock:
            self._making.shutdown()
            for begun in self._coming:
                if begun.exception() is None:
                    begun.result().close()
            self._coming.clear()
            self._memory.close()
