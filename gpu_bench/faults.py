"""What is said of a program whose process did not do what was asked of it.

The one idea: how a process ended names its fault, in words that a reader knows. It ends none itself.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from gpu_bench.running.watchdog import HUNG
from warpsmith import printable
from warpsmith.errors import WorkerCrashed, WorkerKilled
from warpsmith.v1 import benchmark_service_pb2, verdict_pb2


def fault(kind: verdict_pb2.FailureKind.ValueType, detail: str) -> benchmark_service_pb2.ExecutionFault:
    """A fault of the program."""
    return benchmark_service_pb2.ExecutionFault(kind=kind, detail=detail)


_SIGNALS = {
    4: "an illegal instruction", 6: "an abort", 7: "a bus error", 8: "a division by zero", 11: "a segmentation fault",
}  # fmt: skip
_SIGKILL, _SIGSYS = 9, 31
KILLED = "killed, most likely for want of memory"
"""Of a program whose process a SIGKILL ended that is not ours."""
MOST_ENDS = 3
"""Processes of the judge that may end over one program."""
LOG_CHARACTERS = 2000
"""Of what a process printed, kept as evidence."""
_MOST_PROGRAMS = 1000
"""Programs of which ends are remembered."""
_LAST_WORDS = 200
"""Characters of what a process printed before its end."""


def crash(worker: WorkerCrashed) -> benchmark_service_pb2.ExecutionFault:
    """Of a process of ours that had a program in it."""
    if worker.exit_code == HUNG:
        return fault(verdict_pb2.FAILURE_KIND_TIMEOUT, "no end of a call while it was timed")
    kind, detail = ended(worker.signal_number, worker.exit_code)
    last = _last_words(worker.stderr_tail) if kind == verdict_pb2.FAILURE_KIND_CRASH else ""
    made = fault(kind, f"{detail}; it last printed {printable.quotation(last, _LAST_WORDS)}" if last else detail)
    made.ends.append(end_of(worker, "candidate"))
    return made


def end_of(worker: WorkerCrashed, name: str) -> verdict_pb2.WorkerEnd:
    """How a process ended, as evidence; `name`: of the contract, such as "judge"."""
    if worker.signal_number:
        how = _SIGNALS.get(worker.signal_number, f"signal {worker.signal_number}")
        how = "SIGKILL, most likely for want of memory" if worker.signal_number == _SIGKILL else how
        how = "SIGKILL from outside" if isinstance(worker, WorkerKilled) else how
    else:
        how = f"an exit with code {worker.exit_code}"
    tail = printable.lines(worker.stderr_tail[-LOG_CHARACTERS:])
    return verdict_pb2.WorkerEnd(worker=name, work=worker.method, how=how, log_tail=tail, at=time.time())


def note_end(found: benchmark_service_pb2.ExecutionFault, work: str) -> None:
    """Adds an end to a crash that the candidate's process has told of itself: a processor's kernels have their own."""
    if found.kind == verdict_pb2.FAILURE_KIND_CRASH and not found.ends:
        found.ends.add(worker="candidate", work=work, how=found.detail, at=time.time())


class Casualties:
    """Processes that ended over programs, whichever task's, and not by them as far as can be told. From any thread.

    A judge never loads a program, but it reads what one has made: nobody can tell whether that is why it ended. A
    program cannot send its own process a SIGKILL, but somebody may have a reason to. So it is tried again with a new
    one, and a program over which `MOST_ENDS` of them ended is set aside.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: OrderedDict[str, list[verdict_pb2.WorkerEnd]] = OrderedDict()

    def note(self, program_digest: str, worker: WorkerCrashed) -> benchmark_service_pb2.ExecutionFault | None:
        """Keeps one more end; the program's fault where it was the last."""
        with self._lock:
            ends = self._ends.setdefault(program_digest, [])
            ends.append(end_of(worker, "candidate" if isinstance(worker, WorkerKilled) else "judge"))
            self._ends.move_to_end(program_digest)
            if len(self._ends) > _MOST_PROGRAMS:
                self._ends.popitem(last=False)
            if len(ends) < MOST_ENDS:
                return None
            del self._ends[program_digest]
        whose = " of the judge" if all(end.worker == "judge" for end in ends) else ""
        detail = f"set aside: {MOST_ENDS} processes{whose} ended over it, the last one by {ends[-1].how}"
        made = fault(verdict_pb2.FAILURE_KIND_SET_ASIDE, detail)
        made.ends.extend(ends)
        return made


def _last_words(printed: str) -> str:
    """The last line before Python's own account of where it was."""
    lines = printed.partition("Fatal Python error")[0].splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


def kills_for_memory() -> int | None:
    """How many processes this machine has killed since it started because memory was short; None where it does not say.

    The kernel counts each before it sends the signal, those of a container's limit too.
    """
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def ended(signal_number: int | None, exit_code: int | None) -> tuple[verdict_pb2.FailureKind.ValueType, str]:
    """Kind and words for the end of a program's process.

    A SIGKILL that we did not send comes from a system short of memory, or from somebody else (`kills_for_memory` tells
    them apart); SIGSYS comes only from the process's own filter.
    """
    if signal_number == _SIGKILL:
        return verdict_pb2.FAILURE_KIND_RESOURCE, KILLED
    if signal_number == _SIGSYS:
        return verdict_pb2.FAILURE_KIND_CHEAT, "the program asked the system for what no kernel needs, and was ended"
    cause = _SIGNALS.get(signal_number or 0, "")
    if not cause:
        cause = f"signal {signal_number}" if signal_number else f"an exit with code {exit_code}"
    return verdict_pb2.FAILURE_KIND_CRASH, f"the process of the program ended by {cause}"
