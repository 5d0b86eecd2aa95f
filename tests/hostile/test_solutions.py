"""Solutions that cheat fail with the right kind, by the product's own judge and sessions; honest ones pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hostile_solutions import CHEATS as OTHER_CHEATS
from hostile_solutions import HONEST, Solution, reference_task
from hostile_timed_solutions import TIMED_CHEATS

from agent_correctness.judge import Judge
from gpu_bench.limits import Limits
from gpu_bench.solutions import contest, integrity, structure_text
from gpu_bench.solutions.called_solution import CalledSolution
from gpu_bench.solutions.solution_session import SolutionSession
from orchestrator.trust import judge
from warpsmith import digest
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    judging_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

pytestmark = pytest.mark.hostile

CHEATS = [*OTHER_CHEATS, *TIMED_CHEATS]
FAIL, PASS = verdict_pb2.VERDICT_STATE_FAIL, verdict_pb2.VERDICT_STATE_PASS
LOOK_SECONDS = 30.0
"""For how long a solution that only its times can catch is timed again; on a quiet machine one time is enough."""
CHANCES = 2
"""How often a believed solution is timed again: a gain by chance comes one time in forty, a real one every time."""
TIMES = 5
"""How often a solution is timed without one defence, until it gains something."""
AHEAD_SECONDS = 0.1
"""For a solution to work ahead between values and call, as on a machine that is busy with something else."""
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
        """What the product says of a solution; one that has to be caught by its times is timed until it is, for a cheat
        that gains nothing at a moment is no catch."""
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
            if not solution.kinds or found.verdict.state != PASS or time.monotonic() > end:
                return found

    def dismiss(self, case: Solution) -> None:
        """Ends the process of a solution; judge and, where one is timed, baselines are there."""
        session = self.session(case.reference)
        session._workers.judge()
        if case.timed:
            session._opened_arms(timing_pb2.TIER_SCREENING)
        session._workers.drop_bench()

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
def test_a_hostile_solution_fails_or_gains_nothing_and_leaves_nothing(
    case: Solution, judged: Bench, bystander: Bench, traces: Any
) -> None:
    judged.dismiss(case)
    before = traces.now()
    begin = time.monotonic()
    found = judged.judgement(case)
    seconds = time.monotonic() - begin
    for _ in range(CHANCES):
        if not is_believed(found, case):
            break
        found = judged.judgement(case)
    verdict = found.verdict
    told = f"{verdict_pb2.VerdictState.Name(verdict.state)}: {kind_of(verdict)}: {verdict.detail}"
    assert not is_believed(found, case), found.timing.speedup_eager
    if verdict.state != PASS or not case.most:
        assert verdict.state == FAIL, told
        assert kind_of(verdict) in case.kinds, told
    assert seconds < case.seconds + (LOOK_SECONDS if case.timed else 0.0)
    control = bystander.judgement(HONEST[0])
    assert control.verdict.state == PASS, control.verdict.detail
    judged.dismiss(case)
    traces.assert_same(before)


def is_believed(found: judge.Judgement, case: Solution) -> bool:
    """Whether it is called faster with more than it may have, if it may have any."""
    timing = found.timing
    return bool(case.most and timing and timing.faster and timing.speedup_eager.low > case.most)


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_an_honest_solution_passes(case: Solution, judged: Bench) -> None:
    found = judged.judgement(case)
    assert found.verdict.state == PASS, f"{kind_of(found.verdict)}: {found.verdict.detail}"


# ---- each defence is needed ------------------------------------------------------------------------------------


def named(name: str) -> Solution:
    return next(case for case in CHEATS if case.name == name)


def without_looks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contest, "ALL_LOOKED_AT", 0)
    patch.setattr(contest, "LOOK_SHARE", 0.0)
    patch.setattr(contest, "JUDGED_ONE_IN", 1 << 62)


def with_known_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contest.secrets, "randbits", lambda _: 7)


def with_nobody_stopped(patch: pytest.MonkeyPatch) -> None:
    for name in ("stop", "pause", "resume"):
        patch.setattr(Worker, name, lambda _: None)
    place = contest.PlacedValues.place

    def placed(self: contest.PlacedValues, *arguments: Any, **named: Any) -> bool:
        was_placed = place(self, *arguments, **named)
        time.sleep(AHEAD_SECONDS)
        return was_placed

    patch.setattr(contest.PlacedValues, "place", placed)


def with_any_structure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(structure_text, "difference", lambda *_: "")
    patch.setattr(CalledSolution, "_other_strides", lambda *_: "")


def without_looks_at_earlier_results(patch: pytest.MonkeyPatch) -> None:
    different = contest.Contest._different

    def of_the_last_alone(self: contest.Contest, kept: judging_pb2.Kept.ValueType = judging_pb2.KEPT_LAST) -> list[str]:
        return [] if kept == judging_pb2.KEPT_BEFORE else different(self)

    patch.setattr(contest.Contest, "_different", of_the_last_alone)


def with_results_read_when_they_are_described(patch: pytest.MonkeyPatch) -> None:
    read, look = CalledSolution.read_results, CalledSolution.look_at_structure
    told: list[bytes] = []
    patch.setattr(CalledSolution, "read_results", lambda _, places: told.append(places) or "")

    def looked(self: CalledSolution, text: bytes, result: str) -> None:
        read(self, told[-1])
        look(self, text, result)

    patch.setattr(CalledSolution, "look_at_structure", looked)
    patch.setattr(contest, "with_work_put_off", lambda answer, *_: answer)


def with_the_constructors_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contest.PlacedValues, "place_timed_members", lambda *_: None)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("less work once it is timed", without_looks),
        ("a constant with eager's sums for whoever it thinks is timing", without_looks),
        ("memo by content", with_known_values),
        ("a thread that works ahead on what is placed for it", with_nobody_stopped),
        ("puts its work off until somebody looks", with_results_read_when_they_are_described),
        ("leaves out a parameter that the constructor makes of zeros", with_the_constructors_parameters),
    ],
)
def test_a_timed_solution_needs_each_defence(
    name: str, off: Callable[[pytest.MonkeyPatch], None], judged: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = named(name)
    off(monkeypatch)
    told: list[float] = []
    while not told or (case.most and len(told) < TIMES and max(told) <= case.most):  # a busy machine may hide a gain
        judged.dismiss(case)
        found = judged.judgement(case, look_seconds=0)
        assert found.verdict.state == PASS, found.verdict.detail
        assert found.timing is not None
        told.append(found.timing.speedup_eager.median)
    monkeypatch.undo()
    judged.close()
    if case.most:  # else that it passes is enough: with the defence it fails
        assert max(told) > case.most, told


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("a tuple instead of a dict", with_any_structure),
        ("another layout", with_any_structure),
        ("gives the same memory again", without_looks_at_earlier_results),
    ],
)
def test_a_judged_solution_needs_each_defence(
    name: str, off: Callable[[pytest.MonkeyPatch], None], judged: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    off(monkeypatch)
    assert judged.judgement(named(name)).verdict.state == PASS


def test_a_replaced_clock_needs_the_look_at_functions() -> None:
    before = integrity.Snapshot.taken()
    assert before.replaced() == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: 0.0)
        assert before.replaced() == ["time.perf_counter"]
