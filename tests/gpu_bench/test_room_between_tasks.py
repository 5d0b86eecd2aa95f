"""Tasks on one GPU: one that lacks memory gets that of another that nobody waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_bench.servicer import BenchmarkServicer
from gpu_bench.sessions import Sessions
from warpsmith.errors import WorkerRaised
from warpsmith.v1 import benchmark_service_pb2, task_pb2, verdict_pb2

SHORT = benchmark_service_pb2.ExecutionFault(kind=verdict_pb2.FAILURE_KIND_RESOURCE, detail="out of memory")


class Crowded:
    """Sessions of which one is called and another is idle until it is ended; calls lack memory while it is there."""

    def __init__(self, idle: int, ends: Any = SHORT) -> None:
        self._idle, self._ends, self.calls = idle, ends, 0

    @contextlib.contextmanager
    def using(self, *_: object) -> Iterator[Crowded]:
        yield self

    def end_idle(self) -> bool:
        ended, self._idle = self._idle, 0
        return bool(ended)

    def settle(self) -> None:
        """Nothing is under way."""

    def probe(self) -> Any:
        """Nobody asks."""

    def _call(self, response: Any) -> Any:
        self.calls += 1
        if self._idle or self.calls == 1:
            if isinstance(self._ends, Exception):
                raise self._ends
            response.fault.CopyFrom(self._ends)
        return response

    def compare(self, *_: object) -> benchmark_service_pb2.CompareOutputsResponse:
        response: benchmark_service_pb2.CompareOutputsResponse = self._call(
            benchmark_service_pb2.CompareOutputsResponse()
        )
        return response

    def measure(self, _: object) -> benchmark_service_pb2.MeasureArtifactResponse:
        response: benchmark_service_pb2.MeasureArtifactResponse = self._call(
            benchmark_service_pb2.MeasureArtifactResponse()
        )
        return response


REQUESTS: list[Any] = [
    benchmark_service_pb2.CompareOutputsRequest(task=task_pb2.Task(target=task_pb2.TARGET_CPU)),
    benchmark_service_pb2.MeasureArtifactRequest(task=task_pb2.Task(target=task_pb2.TARGET_CPU)),
]


def answer(sessions: Crowded, request: Any) -> Any:
    servicer = BenchmarkServicer(sessions)  # type: ignore[arg-type]
    is_comparison = isinstance(request, benchmark_service_pb2.CompareOutputsRequest)
    method: Any = servicer.CompareOutputs if is_comparison else servicer.MeasureArtifact
    return method(request, None)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("ends", [SHORT, WorkerRaised("not judged", kind="TruthTooLarge")])
def test_what_lacks_memory_is_tried_again_once_idle_tasks_have_ended(request_: Any, ends: Any) -> None:
    sessions = Crowded(1, ends)
    assert not answer(sessions, request_).HasField("fault")
    assert sessions.calls == 2


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_task_that_is_alone_is_told_at_once(request_: Any) -> None:
    sessions = Crowded(0)
    assert answer(sessions, request_).fault == SHORT
    with pytest.raises(WorkerRaised):
        answer(Crowded(0, WorkerRaised("not judged", kind="TruthTooLarge")), request_)
    with pytest.raises(WorkerRaised):
        answer(Crowded(1, WorkerRaised("broken", kind="AssertionError")), request_)
    assert sessions.calls == 1


def test_other_faults_end_nothing() -> None:
    wrong = benchmark_service_pb2.ExecutionFault(kind=verdict_pb2.FAILURE_KIND_CRASH)
    sessions = Crowded(1, wrong)
    assert answer(sessions, REQUESTS[0]).fault.kind == wrong.kind
    assert sessions.end_idle()


def test_a_task_in_use_stays(small: Any) -> None:
    sessions = Sessions()
    assert not sessions.end_idle()
    with sessions.using(small.task()) as first:
        with sessions.using(small.task(small.module + "# another")) as second:
            pass
        assert sessions.end_idle()
        with sessions.using(small.task(small.module + "# another")) as again:
            assert again is not second
    with sessions.using(small.task()) as same:
        assert same is first
    sessions.close()
