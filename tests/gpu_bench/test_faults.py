"""What is said of a process that ended: how, and what it printed last."""

from __future__ import annotations

import pytest

from gpu_bench import faults
from gpu_bench.running.watchdog import HUNG
from warpsmith.errors import WorkerCrashed
from warpsmith.v1 import verdict_pb2

ABORTED = """a warning
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access

Fatal Python error: Aborted

Current thread 0x1 (most recent call first):
  File "worker.py", line 3 in call
"""


@pytest.mark.parametrize(
    ("signal", "printed", "told"),
    [
        (6, ABORTED, "an abort; it last printed “what(): CUDA error: an illegal memory access”"),
        (11, "Fatal Python error: Segmentation fault\n\nCurrent thread", "a segmentation fault"),
        (11, "", "a segmentation fault"),
        (6, "hidden\x1b[2J \u202ewords\n", "an abort; it last printed “hidden\\x1b[2J \\u202ewords”"),
    ],
)
def test_a_crash_is_told_with_what_was_printed_last(signal: int, printed: str, told: str) -> None:
    fault = faults.crash(WorkerCrashed("gone", signal_number=signal, stderr_tail=printed))
    assert fault.kind == verdict_pb2.FAILURE_KIND_CRASH
    assert fault.detail == f"the process of the program ended by {told}"


def test_what_was_printed_is_cut() -> None:
    fault = faults.crash(WorkerCrashed("gone", exit_code=3, stderr_tail="x" * 4000))
    assert len(fault.detail) < 300


@pytest.mark.parametrize(("signal", "code"), [(9, None), (31, None), (None, HUNG)])
def test_other_ends_are_not_told_in_its_words(signal: int | None, code: int | None) -> None:
    crash = WorkerCrashed("gone", signal_number=signal, exit_code=code, stderr_tail="I passed")
    assert "passed" not in faults.crash(crash).detail
