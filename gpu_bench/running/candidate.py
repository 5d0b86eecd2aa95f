"""The program in a session's candidate process, and who is to blame when that process ends.

The one idea: what happens in that process while the program is loaded or runs is the program's fault and an answer;
everything else is ours and an error, and so is a process that somebody else kills or stops, which no program can. The
first fault ends the process, so that the next program finds a clean one. It imports no torch: programs run in the
process.
"""

from __future__ import annotations

import signal
from typing import TypeVar

from google.protobuf.message import Message

from gpu_bench import faults
from gpu_bench.workers import room
from gpu_bench.workers.pair import Pair
from warpsmith.errors import WorkerCrashed, WorkerFault, WorkerKilled, WorkerTimeout
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    judging_pb2,
    task_pb2,
    verdict_pb2,
)

Reply = TypeVar(
    "Reply",
    judging_pb2.Execution,
    judging_pb2.OpenedSolution,
    benchmark_service_pb2.MeasureArtifactResponse,
)


_LIMIT = "jail: more than "
"""What a jail says that kills all in it because a limit was passed."""


class Candidate:
    """The program that was loaded last."""

    def __init__(self, target: task_pb2.Target.ValueType, workers: Pair) -> None:
        self._target = target
        self._workers = workers
        self._company: frozenset[int] = frozenset()
        """Processes of its jail before the program ran."""
        self._memory_kills: int | None = None
        """On this machine when the program was loaded; None of a solution, which can kill its own process."""

    def load(
        self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact, deadline_s: float
    ) -> benchmark_service_pb2.ExecutionFault | None:
        """Loads a program; its fault where it cannot be."""
        self._memory_kills = faults.kills_for_memory()
        worker = self._workers.exposed_bench()
        learned = self._workers.preparation().learned
        request = judging_pb2.LoadRequest(program=program, artifact=artifact, learned=learned)
        loaded = self.run("load", request, deadline_s)
        self._company = worker.processes  # none of the program's: loading it runs nothing of it
        return loaded if isinstance(loaded, benchmark_service_pb2.ExecutionFault) else None

    def run(
        self, method: str, request: Message, deadline_s: float
    ) -> judging_pb2.Execution | benchmark_service_pb2.ExecutionFault:
        """As `call`, for what tells of the program's faults itself."""
        answer = self.call(method, request, judging_pb2.Execution, deadline_s)
        if isinstance(answer, judging_pb2.Execution) and answer.fault:
            self._workers.drop_bench()
            self.require_own(answer.detail, method)
            return faults.fault(answer.fault, answer.detail)
        return answer

    def call(
        self, method: str, request: Message, response: type[Reply], deadline_s: float
    ) -> Reply | benchmark_service_pb2.ExecutionFault:
        """Calls the candidate's process; its end is the candidate's fault, because the program was in it.

        Raises WorkerKilled, or WorkerTimeout, where somebody else ended or stopped it, and what `Worker.call` raises.
        """
        worker = self._workers.current_bench
        if worker is None or not worker.alive:
            return self.ended()
        try:
            return room.call(worker, self._workers.current_judge, method, request, response, deadline_s)
        except WorkerTimeout as late:
            self._workers.drop_bench()
            if late.was_stopped:
                raise
            return faults.fault(verdict_pb2.FAILURE_KIND_TIMEOUT, f"no end within {deadline_s:.3g} s")
        except WorkerCrashed as crash:
            self._workers.drop_bench()
            fault = faults.crash(crash)
            if crash.by_itself and _LIMIT not in crash.stderr_tail:
                self.require_own(fault.detail, method)
            return fault
        except WorkerFault:
            self._workers.drop_bench()
            raise

    def require_own(self, detail: str, method: str) -> None:
        """Raises WorkerKilled where a fault is that of a SIGKILL and memory was not short since the program was loaded.

        It is not ours, and no program can send one.
        """
        if detail == faults.KILLED and self._memory_kills is not None and not self._was_memory_short():
            message = f"{method}: somebody else ended the program's process (SIGKILL, with memory left)"
            raise WorkerKilled(message, signal_number=signal.SIGKILL, method=method)

    def _was_memory_short(self) -> bool:
        return faults.kills_for_memory() != self._memory_kills

    def left(self) -> benchmark_service_pb2.ExecutionFault | None:
        """The fault of a program that has ended its process, or that left another one there."""
        # Only programs for a processor have code on the host; beside others, PyTorch's compilers may come and go.
        worker = self._workers.current_bench
        if worker is None or not worker.alive:
            return self.ended()
        if self._target == task_pb2.TARGET_CPU and worker.processes - self._company:
            self._workers.drop_bench()
            return faults.fault(verdict_pb2.FAILURE_KIND_CHEAT, "the program started a process that lives on")
        return None

    def ended(self) -> benchmark_service_pb2.ExecutionFault:
        """The fault of a program whose process ends between two calls, as one of its threads may cause.

        Raises WorkerKilled where somebody else ended it.
        """
        worker = self._workers.current_bench
        how = worker.exit if worker is not None else None
        is_limit = worker is not None and _LIMIT in worker.stderr_tail
        self._workers.drop_bench()
        if how is not None and how.signal_number == signal.SIGKILL and not is_limit:
            self.require_own(faults.KILLED, "between two calls")
        return faults.fault(verdict_pb2.FAILURE_KIND_CRASH, "the program's process ended between two calls")
