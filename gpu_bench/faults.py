"""What is said of a program whose process did not do what was asked of it.

The one idea: how a process ended names its fault, in words that a reader knows. It ends none itself.
"""

from __future__ import annotations

from gpu_bench.running.watchdog import HUNG
from warpsmith import printable
from warpsmith.errors import WorkerCrashed
from warpsmith.v1 import benchmark_service_pb2, verdict_pb2


def fault(kind: verdict_pb2.FailureKind.ValueType, detail: str) -> benchmark_service_pb2.ExecutionFault:
    """A fault of the program."""
    return benchmark_service_pb2.ExecutionFault(kind=kind, detail=detail)


_SIGNALS = {
    4: "an illegal instruction", 6: "an abort", 7: "a bus error", 8: "a division by zero", 11: "a segmentation fault",
}  # fmt: skip
_SIGKILL, _SIGSYS = 9, 31
_LAST_WORDS = 200
"""Characters of what a process printed before its end."""


def crash(worker: WorkerCrashed) -> benchmark_service_pb2.ExecutionFault:
    """Of a process of ours that had a program in it."""
    if worker.exit_code == HUNG:
        return fault(verdict_pb2.FAILURE_KIND_TIMEOUT, "no end of a call while it was timed")
    kind, detail = ended(worker.signal_number, worker.exit_code)
    last = _last_words(worker.stderr_tail) if kind == verdict_pb2.FAILURE_KIND_CRASH else ""
    return fault(kind, f"{detail}; it last printed {printable.quotation(last, _LAST_WORDS)}" if last else detail)


def _last_words(printed: str) -> str:
    """The last line before Python's own account of where it was."""
    lines = printed.partition("Fatal Python error")[0].splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


def ended(signal_number: int | None, exit_code: int | None) -> tuple[verdict_pb2.FailureKind.ValueType, str]:
    """Kind and words for the end of a program's process.

    A SIGKILL that we did not send comes from a system short of memory; SIGSYS comes only from the process's own filter.
    """
    if signal_number == _SIGKILL:
        return verdict_pb2.FAILURE_KIND_RESOURCE, "killed, most likely for want of memory"
    if signal_number == _SIGSYS:
        return verdict_pb2.FAILURE_KIND_CHEAT, "the program asked the system for what no kernel needs, and was ended"
    cause = _SIGNALS.get(signal_number or 0, "")
    if not cause:
        cause = f"signal {signal_number}" if signal_number else f"an exit with code {exit_code}"
    return verdict_pb2.FAILURE_KIND_CRASH, f"the process of the program ended by {cause}"
