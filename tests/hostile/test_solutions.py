"""Solutions that cheat fail with the right kind, by the product's own judge and sessions; honest ones pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hostile_solutions import CHEATS, HONEST, Solution, reference_task

from agent_correctness.judge import Judge
from gpu_bench import integrity, solution_timing
from gpu_bench.limits import Limits
from gpu_bench.solution_session import SolutionSession
from orchestrator import judge
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
UNDECIDED = verdict_pb2.VERDICT_STATE_INFRA
LOOK_SECONDS = 30.0
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
                SolutionSession(reference_task(reference), rung=self._rung, limits=LIMITS),
                reference,
            )
        return self._session

    def judgement(self, solution: Solution, look_seconds: float = LOOK_SECONDS) -> judge.Judgement:
        """What the product says of a solution; one that is timed is timed again while nobody can say."""
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
            return judge.Judgement(solution.name, verdict)
        asked = benchmark_service_pb2.MeasureArtifactRequest(
            task=session.task, program=program, artifact=artifact, tier=timing_pb2.TIER_SCREENING
        )
        end = time.monotonic() + look_seconds
        while True:
            right = verdict_pb2.Verdict()
            right.CopyFrom(verdict)
            found = judge.concluded(solution.name, right, session.measure(asked))
            # A cheat of no gain at this moment is no wrong accept, but no catch either.
            gains = found.timing is None or found.timing.speedup_eager.median > solution_timing.FRESH_ABOVE
            is_slower = solution_timing.TIMED_ON_FRESH_VALUES in found.labels
            is_clear = found.verdict.state != UNDECIDED and (gains if solution.kinds else not is_slower)
            if is_clear or time.monotonic() > end:
                return found

    def dismiss(self, case: Solution) -> None:
        """Ends the process of a solution; judge and, where one is timed, baselines are there."""
        session = self.session(case.reference)
        session._judge_worker()
        if case.timed:
            session._open_contest(timing_pb2.TIER_SCREENING)
        session._drop_bench()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session, self._reference = None, ""


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


@pytest.fixture(scope="module")
def bystander(judged: Bench, rung: Any) -> Iterator[Bench]:
    """Others' honest work: judge and solution are there before each hostile one, and have to do well after it."""
    del judged
    made = Bench(rung)
    assert made.judgement(HONEST[0]).verdict.state == PASS
    yield made
    made.close()


def kind_of(verdict: verdict_pb2.Verdict) -> str:
    return verdict_pb2.FailureKind.Name(verdict.kind).removeprefix("FAILURE_KIND_")


@pytest.mark.parametrize("case", CHEATS, ids=lambda case: case.name)
def test_a_hostile_solution_fails_and_leaves_nothing(
    case: Solution, judged: Bench, bystander: Bench, traces: Any, record_property: Any
) -> None:
    judged.dismiss(case)
    before = traces.now()
    begin = time.monotonic()
    found = judged.judgement(case)
    seconds = time.monotonic() - begin
    verdict = found.verdict
    told = f"{verdict_pb2.VerdictState.Name(verdict.state)}: {kind_of(verdict)}: {verdict.detail}"
    if verdict.state == UNDECIDED and case.timed:
        assert not found.timing.faster
        record_property("undecided", True)  # neither accepted nor caught
    elif verdict.state == PASS and case.most:
        assert found.timing.speedup_eager.median < case.most, found.timing.speedup_eager
    else:
        assert verdict.state == FAIL, told
        assert kind_of(verdict) in case.kinds, told
    assert seconds < case.seconds + (LOOK_SECONDS if case.timed else 0.0)
    control = bystander.judgement(HONEST[0])
    assert control.verdict.state == PASS, control.verdict.detail
    judged.dismiss(case)
    traces.assert_same(before)


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_an_honest_solution_passes(case: Solution, judged: Bench, record_property: Any) -> None:
    found = judged.judgement(case)
    if found.verdict.state == UNDECIDED and case.timed:
        record_property("undecided", True)
        pytest.skip("others kept the machine busy: not decided")
    assert found.verdict.state == PASS, f"{kind_of(found.verdict)}: {found.verdict.detail}"
    assert solution_timing.TIMED_ON_FRESH_VALUES not in found.labels, found.timing


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
    monkeypatch.setattr(solution_timing, what, lambda *_, **__: (solution_timing.Look.THERE, []))
    assert judged.judgement(named(name), look_seconds=0).verdict.state != FAIL


def test_work_left_out_while_it_is_timed_needs_the_sums_on_fresh_values(
    judged: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solution_timing, "_compare_sums", lambda *_: None)
    assert judged.judgement(named("less work once it is timed"), look_seconds=0).verdict.state != FAIL


def test_a_memo_on_top_of_an_honest_gain_needs_the_time_on_fresh_values(
    judged: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solution_timing.Round, "is_slower", False)
    case = named("an honest gain with a memo on top")
    for _ in range(5):
        timing = judged.judgement(case, look_seconds=0).timing
        if timing is None or timing.speedup_eager.median > case.most:
            return
        is_unsteady = solution_timing.UNCLEAR_ON_FRESH_VALUES in timing.flags
        assert is_unsteady, timing.speedup_eager
    pytest.skip("others kept the machine busy: not decided")


def test_a_replaced_clock_needs_the_look_at_functions() -> None:
    before = integrity.Snapshot.taken()
    assert before.replaced() == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: 0.0)
        assert before.replaced() == ["time.perf_counter"]
