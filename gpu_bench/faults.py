"""What is said of a program whose process did not do what was asked of it.

The one idea: how a process ended names its fault, in words that a reader knows. It ends none itself.
"""

from __future__ import annotations

from gpu_bench.watchdog import HUNG
from warpsmith.errors import WorkerCrashed
from warpsmith.v1 import benchmark_service_pb2, verdict_pb2


def fault(kind: verdict_pb2.FailureKind.ValueType, detail: str) -> benchmark_service_pb2.ExecutionFault:
    """A fault of the program."""
    return benchmark_service_pb2.ExecutionFault(kind=kind, detail=detail)


_SIGNALS = {
    4: "an illegal instruction", 6: "an abort", 7: "a bus error", 8: "a division by zero", 11: "a segmentation fault",
}  # fmt: skip
_SIGKILL = 9


def crash(ended: WorkerCrashed) -> benchmark_service_pb2.ExecutionFault:
    """Nobody but the kernel, short of memory, kills a worker that we did not."""
    if ended.exit_code == HUNG:
        return fault(verdict_pb2.FAILURE_KIND_TIMEOUT, "no end of a call while it was timed")
    if ended.signal_number == _SIGKILL:
        return fault(verdict_pb2.FAILURE_KIND_RESOURCE, "killed, most likely for want of memory")
    cause = _SIGNALS.get(ended.signal_number or 0, "")
    if not cause:
        number, code = ended.signal_number, ended.exit_code
        cause = f"signal {number}" if number else f"an exit with code {code}"
    return fault(verdict_pb2.FAILURE_KIND_CRASH, f"the process of the program ended by {cause}")
