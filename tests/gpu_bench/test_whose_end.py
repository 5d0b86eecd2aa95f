"""Whose fault it is that a candidate's process ends or stands still: the program's, or somebody else's."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpu_bench import faults
from gpu_bench.limits import Limits
from gpu_bench.session import Session
from gpu_bench.truths import Truths
from warpsmith.errors import WorkerKilled, WorkerTimeout
from warpsmith.v1 import benchmark_service_pb2, verdict_pb2

TASK = benchmark_service_pb2.ComparisonCase(family=verdict_pb2.VALUE_FAMILY_TASK, seed=11)
Compare = Callable[[str], benchmark_service_pb2.CompareOutputsResponse]


@pytest.fixture(scope="module")
def session(small: Any) -> Iterator[Session]:
    made = Session(small.task(), limits=Limits(hang_seconds=30.0))
    yield made
    made.close()


@pytest.fixture
def compare(small: Any, session: Session) -> Compare:
    def run(body: str) -> benchmark_service_pb2.CompareOutputsResponse:
        program = small.kernel_program(body)
        return session.compare(program, small.compiled(program), [TASK])

    return run


def assert_right(response: benchmark_service_pb2.CompareOutputsResponse) -> None:
    assert not response.HasField("fault"), response.fault
    assert response.comparisons[0].outputs[0].max_ratio <= 8


def signalled(session: Session, number: int, *, kernel: bool = False) -> None:
    """Sends a signal to the candidate's process, or to the one in it in which a kernel runs."""
    worker = session._workers.current_bench
    assert worker is not None
    for process in worker.processes - worker.at_first if kernel else worker.at_first:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@contextlib.contextmanager
def between_calls(session: Session, number: int) -> Iterator[None]:
    """The candidate's process gets a signal before its next case, of which it ends."""
    of = Truths.of

    def ending(truths: Truths, case: benchmark_service_pb2.ComparisonCase) -> str | None:
        while (worker := session._workers.current_bench) is not None and worker.alive:
            signalled(session, number)
        return of(truths, case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Truths, "of", ending)
        yield


def memory_kills(monkeypatch: pytest.MonkeyPatch, *counts: int | None) -> None:
    """What the machine says of its kills for memory, one look after the other; the last one then stays."""
    left = list(counts)
    monkeypatch.setattr(faults, "kills_for_memory", lambda: left.pop(0) if len(left) > 1 else left[0])


def test_a_process_that_ends_between_two_calls_is_the_programs_crash(
    compare: Compare, small: Any, session: Session
) -> None:
    with between_calls(session, signal.SIGABRT):  # as a thread of the program may end it at any time
        fault = compare(small.softmax).fault
    assert (fault.kind, fault.detail) == (
        verdict_pb2.FAILURE_KIND_CRASH,
        "the program's process ended between two calls",
    )
    assert_right(compare(small.softmax))


@pytest.mark.parametrize("counts", [(3, 4), (None,)])
def test_a_process_that_is_killed_when_memory_is_short_or_nobody_knows_is_the_programs_fault(
    compare: Compare, small: Any, session: Session, monkeypatch: pytest.MonkeyPatch, counts: tuple[int | None, ...]
) -> None:
    memory_kills(monkeypatch, *counts)
    with between_calls(session, signal.SIGKILL):
        assert compare(small.softmax).fault.kind == verdict_pb2.FAILURE_KIND_CRASH
    memory_kills(monkeypatch, *counts)
    threading.Timer(1.0, signalled, (session, signal.SIGKILL)).start()
    fault = compare("for (volatile long i = 0;; ++i) {}").fault
    assert (fault.kind, fault.detail) == (verdict_pb2.FAILURE_KIND_RESOURCE, faults.KILLED)


def test_a_process_that_somebody_else_kills_is_no_programs_fault(
    compare: Compare, small: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_kills(monkeypatch, 3)
    with between_calls(session, signal.SIGKILL), pytest.raises(WorkerKilled):
        compare(small.softmax)
    for kernel in (False, True):
        compare(small.softmax)  # its process is there again
        threading.Timer(1.0, signalled, (session, signal.SIGKILL), {"kernel": kernel}).start()
        with pytest.raises(WorkerKilled, match="somebody else ended the program's process"):
            compare("for (volatile long i = 0;; ++i) {}")
    assert_right(compare(small.softmax))


def test_a_process_that_somebody_else_stops_is_no_programs_fault(
    compare: Compare, small: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(small.softmax)
    execute = session._candidate.run

    def stopped(method: str, request: Any, deadline_s: float) -> Any:
        signalled(session, signal.SIGSTOP)
        return execute(method, request, min(deadline_s, 1.0))

    with monkeypatch.context() as patch:
        patch.setattr(session._candidate, "run", lambda *given: (execute if given[0] == "load" else stopped)(*given))
        with pytest.raises(WorkerTimeout, match="stood still within 1 s"):
            compare(small.softmax)
    assert_right(compare(small.softmax))
