"""The tasks at hand on one machine: each keeps its workers as long as it is one of the last two.

The one idea: a search stays with its task, so what was loaded and compiled for it is kept; what is true of the machine
is found out once for all tasks. It judges and times nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator

from gpu_bench.limits import Limits
from gpu_bench.machine import Machine
from gpu_bench.session import Session
from gpu_bench.solutions.solution_session import SolutionSession
from gpu_bench.workers.reserve import Reserve
from warpsmith import digest
from warpsmith.sandbox import jail
from warpsmith.v1 import artifact_pb2, benchmark_service_pb2, task_pb2, timing_pb2

_LARGE_ELEMENTS = 1 << 28
"""Elements of a task's inputs and outputs above which it shares the machine's memory with no idle task."""

_PROBE_SECONDS = 60.0
"""Within these a new process has loaded torch and measured a sound GPU; 5 are usual."""


class Sessions:
    """Sessions by task. From any thread."""

    def __init__(self, *, rung: jail.Rung | None = None, limits: Limits | None = None, most: int = 2) -> None:
        self._rung = rung
        self._limits = limits or Limits()
        self._most = most
        self._machine = Machine(rung)
        self._reserve = Reserve(self._machine, rung)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def using(
        self, task: task_pb2.Task, form: artifact_pb2.BinaryFormat.ValueType = artifact_pb2.BINARY_FORMAT_UNSPECIFIED
    ) -> Iterator[Session]:
        """The session of a task, by the digest of what it carries; it stays open at least as long as the block.

        `form`: of the artifact. Solutions in Python have sessions of their own.
        """
        key = digest.of_task(task)
        kind: type[Session] = Session
        if form == artifact_pb2.BINARY_FORMAT_PYTHON_MODULE:
            key, kind = f"{key} solution", SolutionSession
        with self._lock:
            others = [name for name in self._idle() if name != key]
            too_large = [name for name in others if _is_large(task) or _is_large(self._sessions[name].task)]
            old = [self._sessions.pop(name) for name in too_large]
        for each in old:
            each.close()
        with self._lock:
            if key not in self._sessions:
                lot = self._reserve.take(task.target) if kind is Session else None
                made = kind(task, rung=self._rung, limits=self._limits, machine=self._machine, lot=lot)
                self._sessions[key] = made
            session = self._sessions[key]
            self._sessions.move_to_end(key)
            self._users[key] += 1
        try:
            yield session
        finally:
            with self._lock:
                self._users[key] -= 1
                surplus = max(0, len(self._sessions) - self._most)
                old = [self._sessions.pop(name) for name in self._idle()[:surplus]]
            for each in old:
                each.close()

    def _idle(self) -> list[str]:
        """Tasks in no block now, the one used longest ago first."""
        return [name for name in self._sessions if not self._users[name]]

    def end_idle(self) -> bool:
        """Ends the sessions of tasks in no block now, and says whether there were any: they hold memory of the GPU."""
        with self._lock:
            old = [self._sessions.pop(name) for name in self._idle()]
        for each in old:
            each.close()
        return bool(old)

    def describe(
        self, request: benchmark_service_pb2.DescribeDeviceRequest
    ) -> benchmark_service_pb2.DescribeDeviceResponse:
        """The device of a target, measured once and remembered.

        Raises BadInput: the target is not on this machine.
        """
        device = self._machine.describe(request.target).device
        self._reserve.begin(device.target)  # not before: what the machine can do is measured while nothing else runs
        return benchmark_service_pb2.DescribeDeviceResponse(device=device)

    def is_described(self, target: task_pb2.Target.ValueType) -> bool:
        """Whether `describe` knows the device of a target already."""
        return self._machine.known_ceilings(target) is not None

    def probe(self) -> timing_pb2.Device:
        """The GPU as a new process finds it now.

        Raises BadInput: there is none any more; WorkerFault: it does not answer in time.
        """
        return self._machine.measure(task_pb2.TARGET_CUDA, _PROBE_SECONDS).device

    def close(self) -> None:
        """Ends every worker, those at work too."""
        self._machine.hurry()
        with self._lock:
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            session.close()
        self._reserve.close()
        self._machine.close()


def _is_large(task: task_pb2.Task) -> bool:
    return sum(math.prod(spec.shape) for spec in (*task.inputs, *task.outputs)) > _LARGE_ELEMENTS
