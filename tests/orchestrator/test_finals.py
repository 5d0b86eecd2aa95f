"""Finals, and what a run says of results that are too good or mean nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from orchestrator import finalists, testing
from orchestrator.commands import report
from orchestrator.pipeline import Judged
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.walks import Effort
from warpsmith.errors import Infrastructure
from warpsmith.v1 import (
    analysis_pb2,
    benchmark_service_pb2,
    run_pb2,
    synthesis_service_pb2,
    task_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)


class Notebook:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.trials: list[trial_pb2.Trial] = []

    def run_changed(self, run: run_pb2.Run) -> None:
        del run

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        self.trials.append(trial)


def executed(
    world: testing.World,
    notebook: Notebook,
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU,
    trial_count: int = 0,
) -> run_pb2.Run:
    agents = world.agents()
    budget = run_pb2.Budget(wall_seconds=20, trial_count=trial_count)
    run = run_pb2.Run(id="r", task=testing.task(target=target), budget=budget)
    effort = Effort(parallel_trials=2, retry_pause_seconds=0.0, settle_seconds=5.0)
    return SearchRun(run, agents, DeviceGate(agents.benchmarks), Beam(), notebook, effort=effort).execute()


def test_a_time_that_no_machine_can_reach_is_a_failure_and_another_plan_wins() -> None:
    notebook = Notebook()
    world = testing.World(gains={"author": 2.0, "vector": 50.0}, choices={"vector": ["impossible"]})
    run = executed(world, notebook)
    suspects = [trial.verdict for trial in notebook.trials if "vector" in map(testing.name_of, trial.candidate.moves)]
    assert {(each.state, each.kind) for each in suspects} == {
        (verdict_pb2.VERDICT_STATE_FAIL, verdict_pb2.FAILURE_KIND_SUSPECT)
    }
    assert list(map(testing.name_of, run.best.candidate.moves)) == ["author"]
    assert run.state == run_pb2.RUN_STATE_FASTER


def test_a_finalist_that_is_refused_is_named_with_its_reason_beside_what_was_found() -> None:
    notebook = Notebook()
    world = testing.World(gains={"author": 2.0, "vector": 2.0}, choices={"vector": ["flattering"]})
    run = executed(world, notebook)
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert re.search(r"the fastest baseline \[.*\](; #\d+ was refused: WRONG_VALUE, far off)+$", run.message)


def test_a_module_that_computes_nothing_has_no_headline() -> None:
    run = executed(testing.World(reference_flags=[timing_pb2.FLAG_OUTPUT_ZERO]), Notebook())
    assert run.message.startswith("no speedup of this module means anything: it gives zero")
    assert report.row(run)[4] == run.message


def timing(baseline_ns: float, candidate_ns: float) -> timing_pb2.Timing:
    gain = baseline_ns / candidate_ns
    made = timing_pb2.Timing(fastest_arm=timing_pb2.ARM_KIND_COMPILE, faster=gain > 1.01, noise_floor=0.001)
    for kind, median_ns in (
        (timing_pb2.ARM_KIND_CANDIDATE, candidate_ns),
        (timing_pb2.ARM_KIND_EAGER, baseline_ns),
        (timing_pb2.ARM_KIND_COMPILE, baseline_ns),
    ):
        made.arms.add(kind=kind, median_ns=median_ns)
    for speedup in (made.speedup_fastest, made.speedup_eager):
        speedup.median, speedup.low, speedup.high = gain, 0.99 * gain, 1.01 * gain
    return made


def test_a_final_gains_nothing_by_a_baseline_that_was_faster_in_the_search() -> None:
    final = timing(14_000.0, 1_473.0)
    finalists.hold_to(final, timing(6_400.0, 1_473.0))
    assert round(final.speedup_fastest.median, 2) == round(final.speedup_eager.median, 2) == 4.34
    assert (final.faster, list(final.raised)) == (True, [finalists.BASELINE_WAS_FASTER])
    equal = timing(14_000.0, 6_400.0)
    finalists.hold_to(equal, timing(6_400.0, 6_400.0))
    assert not equal.faster


def test_a_baseline_that_takes_what_it_took_before_changes_nothing() -> None:
    final = timing(6_500.0, 1_473.0)
    finalists.hold_to(final, timing(6_400.0, 1_473.0))
    assert final == timing(6_500.0, 1_473.0)


class Suspicious(testing.World):
    """Times of one plan are too good to be true, and no audit clears them."""

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """As the world's; a choice of "doubtful" is flagged."""
        response = super().MeasureArtifact(request, timeout)
        if ":doubtful" in request.program.sources[0].text:
            response.timing.raised.append(timing_pb2.FLAG_FLOOR_SUSPECT)
            response.timing.faster, response.timing.floor_percent = False, 300.0
        return response


def test_a_time_that_no_audit_cleared_ends_no_search_and_keeps_no_other_from_a_final() -> None:
    world = Suspicious(gains={"author": 2.0, "vector": 12.0}, choices={"vector": ["doubtful"]})
    run = executed(world, Notebook())
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert list(map(testing.name_of, run.best.candidate.moves)) == ["author"]
    assert "ended the search" not in run.message


def test_times_that_no_audit_cleared_come_last_among_finalists() -> None:
    trials = [
        trial_pb2.Trial(
            number=n, verdict=verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS), timing=timing(9.0, ns)
        )
        for n, ns in ((1, 1.0), (2, 4.5))
    ]
    for trial in trials:
        trial.candidate.moves.append(testing.move("author"))
    trials[0].timing.raised.append(timing_pb2.FLAG_FLOOR_SUSPECT)
    assert [trial.number for trial in finalists.select(trials)] == [2, 1]


def test_a_best_time_that_no_audit_cleared_is_not_quoted() -> None:
    run = executed(Suspicious(gains={"author": 12.0}, choices={"author": ["doubtful"]}), Notebook())
    assert run.state == run_pb2.RUN_STATE_NO_FASTER
    assert "less time than the machine allows" in run.message


@pytest.mark.parametrize(
    ("speedup", "raised", "said"),
    [
        (
            (1.68, 1.6, 1.7),
            timing_pb2.FLAG_SLOWER_ON_FRESH_VALUES,
            "seems 1.68x as fast as compile, but first calls on new values do not show it, looked at twice",
        ),
        ((1.68, 1.6, 1.7), timing_pb2.FLAG_FLOOR_SUSPECT, "less time than the machine allows"),
        (
            (1.10, 0.95, 1.3),
            timing_pb2.FLAG_FEW_BLOCKS,
            "[0.95, 1.30], of which the lower end has to be above 1.12x where equals differ by 4.0 %",
        ),
        (
            (3.04, 3.03, 3.05),
            timing_pb2.FLAG_INPUT_UNUSED,
            "reaches 3.04x [3.03, 3.05], but an input of the module does",
        ),
        (
            (9.10, 9.0, 9.2),
            timing_pb2.FLAG_OUTPUT_CONSTANT,
            "reaches 9.10x [9.00, 9.20], but the module gives the same",
        ),
        ((0.86, 0.84, 0.88), timing_pb2.FLAG_FEW_BLOCKS, "the best reaches 0.86x"),
    ],
)
def test_why_the_best_is_not_called_faster_is_said(
    speedup: tuple[float, float, float], raised: timing_pb2.Flag.ValueType, said: str
) -> None:
    median, low, high = speedup
    trial = trial_pb2.Trial()
    trial.timing.fastest_arm, trial.timing.noise_floor = timing_pb2.ARM_KIND_COMPILE, 0.04
    trial.timing.speedup_fastest.CopyFrom(timing_pb2.Speedup(median=median, low=low, high=high))
    trial.timing.raised.append(raised)
    assert said in finalists.shortfall(trial)


def test_a_time_that_an_audit_did_not_clear_keeps_no_slower_finalist_from_winning() -> None:
    doubtful, plain = (
        trial_pb2.Trial(
            number=number,
            verdict=verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS),
            timing=timing(14_000.0, ns),
        )
        for number, ns in ((1, 1_000.0), (2, 13_950.0))
    )
    doubtful.timing.raised.append(timing_pb2.FLAG_FLOOR_SUSPECT)
    doubtful.timing.faster = plain.timing.faster = False
    assert finalists.winner([doubtful, plain]) is plain
    doubtful.timing.raised[0] = timing_pb2.FLAG_FLOOR_AUDITED
    assert finalists.winner([doubtful, plain]) is doubtful


class SlowerFinals(testing.World):
    """In a final a candidate takes half as long again as it did in the search, and a baseline takes next to nothing."""

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """As the world's, but for that."""
        response = super().MeasureArtifact(request, timeout)
        if request.tier == timing_pb2.TIER_FINAL:
            response.timing.faster = False
            next(arm for arm in response.timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE).median_ns *= 1.5
            response.timing.arms.add(kind=timing_pb2.ARM_KIND_COMPILE_MAX_AUTOTUNE, median_ns=1.0)
        return response


@pytest.mark.parametrize(("target", "finals"), [(task_pb2.TARGET_CUDA, 1), (task_pb2.TARGET_CPU, 2)])
def test_a_baseline_of_a_final_that_was_faster_than_a_finalist_spares_its_final_where_times_are_steady(
    target: task_pb2.Target.ValueType, finals: int
) -> None:
    notebook, world = Notebook(), SlowerFinals(gains={"author": 3.0, "tile": 1.2})
    run = executed(world, notebook, target)
    assert run.state == run_pb2.RUN_STATE_NO_FASTER
    assert world.calls["VerifyArtifact"] == len(notebook.trials) + finals


class Doubtful(testing.World):
    """So many finals are not beyond doubt: first calls on new values did not show the gain, or its interval is wide."""

    def __init__(self, doubts: int, is_wide: bool) -> None:
        super().__init__(gains={"author": 2.0})
        self._doubts, self._is_wide = doubts, is_wide

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """As the world's, but for that."""
        response = super().MeasureArtifact(request, timeout)
        if request.tier == timing_pb2.TIER_FINAL and self._doubts:
            self._doubts -= 1
            response.timing.faster = False
            if self._is_wide:
                response.timing.speedup_fastest.low = 0.9
            else:
                response.timing.raised.append(timing_pb2.FLAG_SLOWER_ON_FRESH_VALUES)
        return response


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(
    ("doubts", "finals", "state"),
    [(1, 2, run_pb2.RUN_STATE_FASTER), (9, 2, run_pb2.RUN_STATE_NO_FASTER), (0, 1, run_pb2.RUN_STATE_FASTER)],
)
def test_a_final_that_is_not_beyond_doubt_is_made_once_more(
    doubts: int, finals: int, state: run_pb2.RunState.ValueType, is_wide: bool
) -> None:
    world, notebook = Doubtful(doubts, is_wide), Notebook()
    run = executed(world, notebook)
    assert run.state == state
    assert world.calls["VerifyArtifact"] == len(notebook.trials) + finals
    is_second = doubts == 1
    assert (timing_pb2.FLAG_LOOKED_AT_TWICE in run.best.timing.raised) is is_second


class Slow:
    """A pipeline whose finals take longer than was promised, and are all in doubt."""

    def __init__(self) -> None:
        self.task, self.finals = testing.task(), list[int]()

    def time_again(self, trial: trial_pb2.Trial) -> trial_pb2.Trial:
        trial.timing.CopyFrom(timing(30_000.0, 10_000.0))
        return trial

    def walk(self, trial: trial_pb2.Trial, *_: object) -> Judged:
        self.finals.append(trial.number)
        trial.verdict.state = verdict_pb2.VERDICT_STATE_PASS
        trial.timing.CopyFrom(timing(30_000.0, 20_000.0))
        trial.timing.faster, trial.timing.speedup_fastest.low = False, 0.9
        return Judged(trial)


def test_only_the_first_finalist_in_doubt_is_looked_at_again() -> None:
    pipeline: Any = Slow()
    selected = [trial_pb2.Trial(number=number) for number in (1, 2, 3)]
    assert len(finalists.judge(pipeline, selected)) == 3
    assert pipeline.finals == [1, 1, 2, 3]


def test_what_is_slower_or_wrong_or_too_good_is_not_in_doubt() -> None:
    def of(ns: float, low: float, *flags: timing_pb2.Flag.ValueType) -> trial_pb2.Trial:
        made = trial_pb2.Trial(verdict=verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS))
        made.timing.CopyFrom(timing(10_000.0, ns))
        made.timing.faster, made.timing.speedup_fastest.low = False, low
        made.timing.raised.extend(flags)
        return made

    fresh, suspect = timing_pb2.FLAG_SLOWER_ON_FRESH_VALUES, timing_pb2.FLAG_FLOOR_SUSPECT
    assert finalists.is_doubtful(of(5_000.0, 1.9, fresh))
    assert finalists.is_doubtful(of(5_000.0, 0.9))
    assert not finalists.is_doubtful(of(9_900.0, 0.9)), "too little to be looked for"
    assert not finalists.is_doubtful(of(12_000.0, 0.8, fresh))
    assert not finalists.is_doubtful(of(5_000.0, 1.9, fresh, suspect))
    assert not finalists.is_doubtful(of(5_000.0, 1.9)), "something else speaks against it"
    wrong = of(5_000.0, 0.9)
    wrong.verdict.state = verdict_pb2.VERDICT_STATE_FAIL
    assert not finalists.is_doubtful(wrong)


@pytest.mark.parametrize(("target", "finals"), [(task_pb2.TARGET_CUDA, 0), (task_pb2.TARGET_CPU, 1)])
def test_what_no_final_could_make_faster_on_a_gpu_is_told_as_it_was_screened(
    target: task_pb2.Target.ValueType, finals: int
) -> None:
    notebook, world = Notebook(), testing.World(gains={"author": 0.8})
    run = executed(world, notebook, target)
    assert run.state == run_pb2.RUN_STATE_NO_FASTER
    best = max(trial.timing.speedup_fastest.median for trial in notebook.trials if trial.candidate.moves)
    assert run.message == f"no faster kernel found: the best reaches {best:.2f}x"
    assert run.best.timing.speedup_fastest.median == best < finalists.HOPELESS
    assert world.calls["VerifyArtifact"] == len(notebook.trials) + finals


class Constant(testing.World):
    """Its module gives the same whatever it is given."""

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """As the world's, but for that."""
        response = super().MeasureArtifact(request, timeout)
        response.timing.raised.append(timing_pb2.FLAG_OUTPUT_CONSTANT)
        response.timing.faster = False
        return response


@pytest.mark.parametrize(("target", "least_finals"), [(task_pb2.TARGET_CUDA, 0), (task_pb2.TARGET_CPU, 1)])
def test_no_final_on_a_gpu_is_made_of_a_module_that_nothing_is_faster_than(
    target: task_pb2.Target.ValueType, least_finals: int
) -> None:
    notebook, world = Notebook(), Constant(gains={"author": 3.0})
    run = executed(world, notebook, target)
    assert run.state == run_pb2.RUN_STATE_NO_FASTER
    assert "but the module gives the same on all such values" in run.message
    finals = world.calls["VerifyArtifact"] - len(notebook.trials)
    assert finals >= least_finals if least_finals else finals == 0


class Kept(testing.World):
    """Its baselines are an earlier run's."""

    def RunReference(
        self, request: benchmark_service_pb2.RunReferenceRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.RunReferenceResponse:
        """As the world's, but for that."""
        response = super().RunReference(request, timeout)
        response.report.is_kept = True
        return response


def test_a_final_is_made_where_the_baselines_of_screenings_are_an_earlier_runs() -> None:
    notebook, world = Notebook(), Kept(gains={"author": 0.8})
    run = executed(world, notebook, task_pb2.TARGET_CUDA)
    assert run.state == run_pb2.RUN_STATE_NO_FASTER
    assert world.calls["VerifyArtifact"] == len(notebook.trials) + 1


class NoRewrittenReference(testing.World):
    """Synthesis fails whenever algebra is asked for in library calls alone."""

    def SynthesizeCandidate(
        self, request: synthesis_service_pb2.SynthesizeCandidateRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.SynthesizeCandidateResponse:
        """As the world's, but for that."""
        if request.hypothesis.source == "rewritten reference":
            raise Infrastructure("no memory")
        return super().SynthesizeCandidate(request, timeout)


def test_a_final_does_without_a_rewritten_reference_that_cannot_be_had() -> None:
    run = executed(NoRewrittenReference(gains={"rewrite": 3.0}, choices={"rewrite": ["linear_row_sum"]}), Notebook())
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert not any(arm.kind == timing_pb2.ARM_KIND_REWRITTEN for arm in run.best.timing.arms)


class RewritesUnasked(testing.World):
    """Its kernels use algebra that no move names, and it notes what the reference in library calls is made of."""

    reference_moves: tuple[str, ...] = ()

    def SynthesizeCandidate(
        self, request: synthesis_service_pb2.SynthesizeCandidateRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.SynthesizeCandidateResponse:
        """As the world's, but for that."""
        response = super().SynthesizeCandidate(request, timeout)
        if request.hypothesis.source == "rewritten reference":
            self.reference_moves = tuple(move.choice for move in request.hypothesis.moves)
        elif any(move.kind == analysis_pb2.MOVE_KIND_AUTHOR for move in request.hypothesis.moves):
            response.candidate.rewrites[:] = ["unrolled"]
        return response


def test_algebra_that_a_move_on_the_whole_plan_used_is_in_the_rewritten_reference() -> None:
    world = RewritesUnasked(gains={"author": 3.0, "rewrite": 0.5}, choices={"rewrite": ["unrolled"]})
    run = executed(world, Notebook())
    assert [move.kind for move in run.best.candidate.moves] == [analysis_pb2.MOVE_KIND_AUTHOR]
    assert any(arm.kind == timing_pb2.ARM_KIND_REWRITTEN for arm in run.best.timing.arms)
    assert world.reference_moves == ("unrolled",)


def test_a_run_that_timed_nothing_but_the_module_itself_says_why() -> None:
    nothing_legal = executed(testing.World(gains={}), Notebook())
    assert "it has no call in whose place there is a kernel of ours" in nothing_legal.message
    cut_short = executed(testing.World(), Notebook(), trial_count=1)
    assert (cut_short.trial_count, cut_short.state) == (1, run_pb2.RUN_STATE_NO_FASTER)
    assert "before the search was over; give it a larger budget" in cut_short.message
