"""A trial says at which stage of the pipeline it ended, whatever ended it."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from orchestrator import finalists, testing
from orchestrator.commands import report
from orchestrator.pipeline import Faulted, Interrupted, Judged, Pipeline
from orchestrator.search.beam import Beam
from orchestrator.search_run import Effort, SearchRun
from orchestrator.serving.device_gate import DeviceGate
from warpsmith.v1 import hypothesis_pb2, run_pb2, timing_pb2, trial_pb2

EFFORT = Effort(parallel_trials=1, retry_pause_seconds=0.0, settle_seconds=5.0)


class Notebook:
    """An observer that remembers trials."""

    def __init__(self) -> None:
        self.trials: list[trial_pb2.Trial] = []

    def run_changed(self, run: run_pb2.Run) -> None:
        """Nothing."""

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        """Kept."""
        self.trials.append(trial)


def trials_of_a_run(choice: str) -> list[trial_pb2.Trial]:
    """Plan zero, and a plan that fails as the choice says."""
    world = testing.World(gains={"author": 2.0}, choices={"author": [choice]}, repairs=False)
    agents, notebook = world.agents(), Notebook()
    run = run_pb2.Run(id="r", task=testing.task(), budget=run_pb2.Budget(wall_seconds=20))
    SearchRun(run, agents, DeviceGate(agents.benchmarks), Beam(), notebook, effort=EFFORT).execute()
    return notebook.trials


def proposed(choice: str) -> trial_pb2.Trial:
    """A trial that has not begun."""
    return trial_pb2.Trial(hypothesis=hypothesis_pb2.Hypothesis(moves=[testing.move("author", choice)]))


@pytest.mark.parametrize(
    ("choice", "stage", "outcome"),
    [
        ("broken", trial_pb2.STAGE_COMPILE, "compile_fail"),
        ("wrong", trial_pb2.STAGE_VERIFY, "verify_fail"),
        ("hang", trial_pb2.STAGE_MEASURE, "measure_fail"),
        ("impossible", trial_pb2.STAGE_MEASURE, "measure_fail"),
        ("", trial_pb2.STAGE_TIMED, "timed"),
    ],
)
def test_a_trial_says_at_which_stage_it_ended_and_is_counted_there(
    choice: str, stage: trial_pb2.Stage.ValueType, outcome: str
) -> None:
    def counted() -> float:
        return REGISTRY.get_sample_value("warpsmith_trials_total", {"outcome": outcome}) or 0.0

    before = counted()
    zero, ended = trials_of_a_run(choice)
    assert (zero.ended_at, ended.ended_at) == (trial_pb2.STAGE_TIMED, stage)
    assert counted() == before + 1 + (outcome == "timed")
    assert report.funnel([ended])["compiled"] == (stage != trial_pb2.STAGE_COMPILE)
    assert report.funnel([ended])["timed"] == (stage == trial_pb2.STAGE_TIMED)


def test_a_finalist_that_fails_its_final_says_where() -> None:
    world = testing.World(gains={"author": 3.0}, choices={"author": ["flattering"]})
    pipeline, trial = Pipeline(world.agents(), DeviceGate([world]), testing.task()), proposed("flattering")
    assert isinstance(pipeline.walk(trial, timing_pb2.TIER_SCREENING), Judged)
    assert trial.ended_at == trial_pb2.STAGE_TIMED
    (judged,) = finalists.judge(pipeline, [trial])
    assert judged.ended_at == trial_pb2.STAGE_VERIFY


def test_a_walk_that_is_interrupted_ends_at_the_stage_that_it_did_not_begin() -> None:
    world, trial = testing.World(gains={"author": 2.0}), proposed("")
    pipeline = Pipeline(
        world.agents(), DeviceGate([world]), testing.task(), go_on=lambda: not world.calls["CompileCandidate"]
    )
    assert isinstance(pipeline.walk(trial, timing_pb2.TIER_SCREENING), Interrupted)
    assert trial.ended_at == trial_pb2.STAGE_VERIFY


@pytest.mark.parametrize("method", ["SynthesizeCandidate", "CompileCandidate", "VerifyArtifact", "MeasureArtifact"])
def test_an_answer_that_says_nothing_is_the_services_fault_and_no_verdict(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, calls = testing.World(gains={"author": 3.0}), list[str]()

    def empty(self: testing.World, *_: object, **__: object) -> object:
        calls.append(method)
        return type(answered(self, *_, **__))()

    answered = getattr(testing.World, method)
    monkeypatch.setattr(testing.World, method, empty)
    pipeline = Pipeline(world.agents(), DeviceGate([world]), testing.task(), retry_pause_seconds=0.0)
    outcome = pipeline.walk(proposed(""), timing_pb2.TIER_SCREENING)
    assert isinstance(outcome, Faulted)
    assert outcome.reason == f"{method}: the answer is empty"
    assert len(calls) == 2, "it is asked again, once"
