"""Solutions that cheat fail with the right kind, by the product's own judge and sessions; honest ones pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hostile_solutions import CHEATS, HONEST, Solution

from agent_correctness.judge import Judge
from gpu_bench import integrity, solution_timing
from gpu_bench.limits import Limits
from gpu_bench.solution_session import SolutionSession
from warpsmith import digest
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

pytestmark = pytest.mark.hostile

FAIL, PASS = verdict_pb2.VERDICT_STATE_FAIL, verdict_pb2.VERDICT_STATE_PASS
LOOK_SECONDS = 45.0
"""How long a timed solution is looked at again; a quiet machine needs one look."""
LIMITS = Limits(hang_seconds=10.0, open_seconds=25.0)


class Bench:
    """One warm session at a time: that of the reference asked for last."""

    def __init__(self, rung: Any) -> None:
        self._rung = rung
        self._session: SolutionSession | None = None
        self._reference = ""

    def session(self, reference: str) -> SolutionSession:
        if self._session is None or self._reference != reference:
            self.close()
            self._session, self._reference = (
                SolutionSession(task_of(reference), rung=self._rung, limits=LIMITS),
                reference,
            )
        return self._session

    def verdict(self, solution: Solution, look_seconds: float = LOOK_SECONDS) -> verdict_pb2.Verdict:
        session = self.session(solution.reference)
        program, artifact = artifact_of(solution.text)

        class Comparer:
            def compare(
                self, asked: benchmark_service_pb2.CompareOutputsRequest
            ) -> benchmark_service_pb2.CompareOutputsResponse:
                return session.compare(asked.program, asked.artifact, asked.cases)

        request = correctness_service_pb2.VerifyArtifactRequest(
            task=session.task, program=program, artifact=artifact, tier=timing_pb2.TIER_SCREENING
        )
        verdict = Judge(Comparer()).verify(request)
        if not solution.timed or verdict.state != PASS:
            return verdict
        asked = benchmark_service_pb2.MeasureArtifactRequest(
            task=session.task, program=program, artifact=artifact, tier=timing_pb2.TIER_SCREENING
        )
        end = time.monotonic() + look_seconds
        while True:  # on a busy machine a look may give nothing: then nothing is called faster either
            measured = session.measure(asked)
            if measured.HasField("fault"):
                return verdict_pb2.Verdict(state=FAIL, kind=measured.fault.kind, detail=measured.fault.detail)
            unclear = solution_timing.UNCLEAR_ON_FRESH_VALUES in measured.timing.flags
            assert not (unclear and measured.timing.faster)
            if (not unclear and not solution.kinds) or time.monotonic() > end:
                return verdict

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def task_of(reference: str) -> task_pb2.Task:
    made = task_pb2.Task(
        name="reference", entry_path="model.py", class_name="Model", target=task_pb2.TARGET_CPU,
        precision=task_pb2.PRECISION_FP32,
        sources=[task_pb2.SourceFile(path="model.py", content=reference.encode())],
    )  # fmt: skip
    made.digest = digest.of_task(made)
    return made


def artifact_of(text: str) -> tuple[candidate_pb2.Program, artifact_pb2.Artifact]:
    own = digest.digest(text)
    form = artifact_pb2.BINARY_FORMAT_PYTHON_MODULE
    return candidate_pb2.Program(target=task_pb2.TARGET_CPU, digest=own), artifact_pb2.Artifact(
        digest=own, program_digest=own, format=form, content=text.encode()
    )


@pytest.fixture(scope="module")
def judged(traces: Any, rung: Any) -> Iterator[Bench]:
    del traces
    made = Bench(rung)
    yield made
    made.close()


def kind_of(verdict: verdict_pb2.Verdict) -> str:
    return verdict_pb2.FailureKind.Name(verdict.kind).removeprefix("FAILURE_KIND_")


@pytest.mark.parametrize("case", CHEATS, ids=lambda case: case.name)
def test_a_hostile_solution_fails(case: Solution, judged: Bench) -> None:
    begin = time.monotonic()
    verdict = judged.verdict(case)
    assert verdict.state == FAIL, f"{verdict_pb2.VerdictState.Name(verdict.state)}: {verdict.detail}"
    assert kind_of(verdict) in case.kinds, verdict.detail
    assert time.monotonic() - begin < case.seconds


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_an_honest_solution_passes(case: Solution, judged: Bench) -> None:
    verdict = judged.verdict(case)
    assert verdict.state == PASS, f"{kind_of(verdict)}: {verdict.detail}"


# ---- each defence is needed ------------------------------------------------------------------------------------


def named(name: str) -> Solution:
    return next(case for case in CHEATS if case.name == name)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("memo by content", "look_behind"),
        ("a thread that burns the processor while others are timed", "watch_idle"),
    ],
)
def test_a_timed_solution_needs_each_look(name: str, what: str, judged: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution_timing, what, lambda *_: solution_timing.Look.THERE)
    assert judged.verdict(named(name), look_seconds=0).state == PASS


def test_a_replaced_clock_needs_the_look_at_functions() -> None:
    before = integrity.Snapshot.taken()
    assert before.replaced() == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: 0.0)
        assert before.replaced() == ["time.perf_counter"]
