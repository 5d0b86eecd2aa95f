"""One run with fake agents: its states, budgets, repairs, faults and finalists."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter

import pytest

from orchestrator import counsel, finalists, testing
from orchestrator.prepare import prepare
from orchestrator.search import Proposal, Search, SearchState
from orchestrator.search.beam import Beam
from orchestrator.search.evolution import Evolution
from orchestrator.search.exhaustive import Exhaustive
from orchestrator.search.memory import Memory
from orchestrator.search.random import Random
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.walks import Effort
from warpsmith.errors import BadInput, NotFound
from warpsmith.v1 import (
    benchmark_service_pb2,
    correctness_service_pb2,
    reasoning_service_pb2,
    run_pb2,
    synthesis_service_pb2,
    task_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)

EFFORT = Effort(parallel_trials=2, retry_pause_seconds=0.0, settle_seconds=5.0)


@dataclasses.dataclass
class Notebook:
    """An observer that remembers."""

    states: list[int] = dataclasses.field(default_factory=list)
    trials: list[trial_pb2.Trial] = dataclasses.field(default_factory=list)
    on_trial: object = None

    def run_changed(self, run: run_pb2.Run) -> None:
        if not self.states or self.states[-1] != run.state:
            self.states.append(run.state)

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        self.trials.append(trial)
        if callable(self.on_trial):
            self.on_trial(trial)


def search_run(
    world: testing.World, notebook: Notebook | None = None, budget: run_pb2.Budget | None = None, **kwargs: object
) -> SearchRun:
    agents = world.agents()
    run = run_pb2.Run(id="r", task=testing.task(), budget=budget or run_pb2.Budget(wall_seconds=20))
    search = kwargs.pop("search", None) or Beam()
    kwargs.setdefault("effort", EFFORT)
    return SearchRun(run, agents, DeviceGate(agents.benchmarks), search, notebook or Notebook(), **kwargs)


def test_a_run_finds_the_fastest_plan_and_walks_through_its_states() -> None:
    notebook = Notebook()
    run = search_run(testing.World(), notebook).execute()
    assert notebook.states == [
        run_pb2.RUN_STATE_PREPARING,
        run_pb2.RUN_STATE_SEARCHING,
        run_pb2.RUN_STATE_FINISHING,
        run_pb2.RUN_STATE_FASTER,
    ]
    assert sorted(map(testing.name_of, run.best.candidate.moves)) == ["author", "vector"]
    assert run.best.timing.tier == 2
    assert run.best.timing.faster
    assert run.best.candidate.program.sources, "the winner can be exported"
    assert run.trial_count == len(notebook.trials)
    assert [trial.number for trial in notebook.trials] == list(range(1, len(notebook.trials) + 1))
    assert len(run.phase_seconds) == 3


def test_every_program_is_walked_once_although_moves_come_in_any_order() -> None:
    notebook = Notebook()
    search_run(testing.World(), notebook).execute()
    programs = [trial.candidate.program.digest for trial in notebook.trials]
    assert len(programs) == len(set(programs)) == 8  # every subset of three moves


def test_nothing_runs_while_something_is_timed_on_a_cpu() -> None:
    world = testing.World(seconds=0.003)
    search_run(world).execute()
    assert world.disturbed == []


def test_a_module_at_its_floor_is_not_searched() -> None:
    world = testing.World(floor_ns=0.79 * testing.EAGER_NS)
    run = search_run(world).execute()
    assert run.state == run_pb2.RUN_STATE_AT_FLOOR
    assert "1.01x could be won" in run.message
    assert world.calls["SynthesizeCandidate"] == 0


def test_slower_kernels_are_never_called_faster() -> None:
    run = search_run(testing.World(gains={"author": 0.7})).execute()
    assert run.state == run_pb2.RUN_STATE_NO_FASTER
    assert "no faster kernel found" in run.message
    assert not run.best.timing.faster


def test_a_candidate_that_does_not_compile_is_repaired() -> None:
    notebook = Notebook()
    world = testing.World(gains={"author": 2.0}, choices={"author": ["broken"]})
    run = search_run(world, notebook).execute()
    broken = next(trial for trial in notebook.trials if trial.ended_at == trial_pb2.STAGE_COMPILE)
    repaired = next(trial for trial in notebook.trials if trial.hypothesis.source == "repair")
    assert broken.verdict.kind == verdict_pb2.FAILURE_KIND_COMPILE_ERROR
    assert repaired.parent == broken.number
    assert run.state == run_pb2.RUN_STATE_FASTER


def test_a_failure_without_remedy_ends_there() -> None:
    world = testing.World(gains={"author": 2.0}, choices={"author": ["wrong"]})
    run = search_run(world).execute()
    assert run.state == run_pb2.RUN_STATE_NO_FASTER
    assert (run.trial_count, run.pass_count) == (2, 1)
    assert "none of the 1 candidates that change something passed" in run.message


def test_a_candidate_that_hangs_while_timed_has_failed() -> None:
    notebook = Notebook()
    search_run(testing.World(gains={"author": 2.0}, choices={"author": ["hang"]}, repairs=False), notebook).execute()
    hung = notebook.trials[-1]
    assert hung.verdict.kind == verdict_pb2.FAILURE_KIND_TIMEOUT
    assert not hung.HasField("timing")


def test_what_passes_only_screening_does_not_win() -> None:
    world = testing.World(gains={"author": 3.0, "tile": 1.5}, choices={"author": ["flattering"]})
    run = search_run(world).execute()
    assert list(map(testing.name_of, run.best.candidate.moves)) == ["tile"]


def test_finalists_are_timed_again_and_only_the_best_of_them_gets_a_final() -> None:
    notebook, world = Notebook(), testing.World(gains={"author": 3.0, "tile": 1.5})
    run = search_run(world, notebook).execute()
    assert run.best.timing.tier == timing_pb2.TIER_FINAL
    assert world.calls["MeasureArtifact"] == len(notebook.trials) + finalists.COUNT + 1
    assert world.calls["VerifyArtifact"] == len(notebook.trials) + 1


class StrongerFinals(testing.World):
    """A final has a baseline that screening lacks and no candidate beats."""

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """As the world's, but nothing is faster in a final."""
        response = super().MeasureArtifact(request, timeout)
        response.timing.faster = response.timing.faster and request.tier != timing_pb2.TIER_FINAL
        return response


def test_a_slower_finalist_gets_no_final_where_a_faster_one_was_right_and_lost() -> None:
    notebook, world = Notebook(), StrongerFinals(gains={"author": 3.0, "tile": 1.5})
    run = search_run(world, notebook).execute()
    assert run.state == run_pb2.RUN_STATE_NO_FASTER
    assert world.calls["VerifyArtifact"] == len(notebook.trials) + 1


def test_one_fault_of_a_service_is_tried_again_and_not_charged() -> None:
    world = testing.World(faults=Counter(MeasureArtifact=1, VerifyArtifact=1, SynthesizeCandidate=1))
    run = search_run(world).execute()
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert run.trial_count == run.pass_count == 8


def test_a_trial_that_faults_twice_is_given_up_and_the_search_goes_on() -> None:
    notebook = Notebook()
    world = testing.World(faults=Counter(VerifyArtifact=2))
    run = search_run(world, notebook)
    run._chosen_effort = dataclasses.replace(EFFORT, parallel_trials=1, refill_at=0)
    assert run.execute().state == run_pb2.RUN_STATE_FASTER
    assert all(trial.verdict.state != verdict_pb2.VERDICT_STATE_INFRA for trial in notebook.trials)
    assert len(notebook.trials) == 7


def test_services_that_stay_broken_end_the_run_as_failed() -> None:
    run = search_run(testing.World(faults=Counter(VerifyArtifact=1000))).execute()
    assert run.state == run_pb2.RUN_STATE_FAILED
    assert "VerifyArtifact is out of order" in run.message


def test_services_that_break_later_keep_what_was_found() -> None:
    world = testing.World()

    def break_them(trial: trial_pb2.Trial) -> None:
        if trial.number == 3:
            world.faults["SynthesizeCandidate"] = 1000

    run = search_run(world, Notebook(on_trial=break_them)).execute()
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert "ended early" in run.message


def test_a_module_that_cannot_be_captured_is_bad_input() -> None:
    run = search_run(testing.World(bad_module="fake.py:3: data-dependent shape")).execute()
    assert run.state == run_pb2.RUN_STATE_BAD_INPUT
    assert run.message == "fake.py:3: data-dependent shape"


def test_a_trial_budget_is_kept() -> None:
    run = search_run(testing.World(), budget=run_pb2.Budget(trial_count=3)).execute()
    assert run.trial_count == 3
    assert run.state == run_pb2.RUN_STATE_FASTER


def test_a_device_budget_is_kept() -> None:
    run = search_run(testing.World(seconds=0.2), budget=run_pb2.Budget(device_seconds=1.0)).execute()
    assert 2 <= run.trial_count <= 5


def test_what_hangs_while_timed_takes_of_the_device_budget_too() -> None:
    class Hanging(testing.World):
        def MeasureArtifact(
            self, request: benchmark_service_pb2.MeasureArtifactRequest, /, timeout: float | None = None
        ) -> benchmark_service_pb2.MeasureArtifactResponse:
            reply = super().MeasureArtifact(request, timeout)
            time.sleep(0.2 if reply.HasField("fault") else 0.0)
            return reply

    notebook = Notebook()
    world = Hanging(gains={"vector": 2.0}, choices={"vector": ["hang", *[f"hang{n}" for n in range(20)]]})
    search_run(world, notebook, budget=run_pb2.Budget(device_seconds=0.5, wall_seconds=20)).execute()
    assert 3 <= len(notebook.trials) <= 6


def test_a_token_budget_is_kept() -> None:
    class Writing(testing.World):
        def SynthesizeCandidate(
            self, request: synthesis_service_pb2.SynthesizeCandidateRequest, /, timeout: float | None = None
        ) -> synthesis_service_pb2.SynthesizeCandidateResponse:
            reply = super().SynthesizeCandidate(request, timeout)
            reply.model_tokens = 100
            return reply

    choices = {"vector": [str(width) for width in range(20)]}
    run = search_run(Writing(choices=choices), budget=run_pb2.Budget(model_tokens=400, wall_seconds=20)).execute()
    assert 400 <= run.model_tokens <= 800
    assert run.trial_count <= 8
    assert run.state == run_pb2.RUN_STATE_FASTER


def test_answers_that_could_not_be_used_cost_their_tokens() -> None:
    class Babbling(testing.World):
        def SynthesizeCandidate(
            self, request: synthesis_service_pb2.SynthesizeCandidateRequest, /, timeout: float | None = None
        ) -> synthesis_service_pb2.SynthesizeCandidateResponse:
            if "tile" in map(testing.name_of, request.hypothesis.moves):
                error = NotFound("no kernel of out [no_code]")
                error.model_tokens = 100
                raise error
            return super().SynthesizeCandidate(request, timeout)

    choices = {"tile": [str(size) for size in range(20)]}
    run = search_run(Babbling(choices=choices), budget=run_pb2.Budget(model_tokens=400, wall_seconds=20)).execute()
    assert 400 <= run.model_tokens <= 1000


def test_a_kernel_near_the_floor_ends_the_search() -> None:
    choices = {"tile": [str(size) for size in range(20)]}
    world = testing.World(floor_ns=0.97 * testing.EAGER_NS / 2.4, choices=choices)
    run = search_run(world).execute()
    assert run.trial_count < 12
    assert run.message.endswith("; a kernel reaches 97 % of the floor, which ended the search")
    assert run.state == run_pb2.RUN_STATE_FASTER
    with_algebra = testing.World(
        gains={"rewrite": 1.01, "author": 2.0, "tile": 0.9}, floor_ns=0.97 * testing.EAGER_NS / 2.0, choices=choices
    )
    assert search_run(with_algebra).execute().trial_count > 20, "algebra may do with less than the floor counts"


def test_a_reasoner_that_thinks_for_long_holds_up_nothing() -> None:
    class Slow(testing.World):
        def ProposeHypotheses(
            self, request: reasoning_service_pb2.ProposeHypothesesRequest, /, timeout: float | None = None
        ) -> reasoning_service_pb2.ProposeHypothesesResponse:
            reply = super().ProposeHypotheses(request, timeout)
            if self.calls["ProposeHypotheses"] > 1:
                is_over.wait(60)
            reply.model_tokens = 1  # a model that is asked does not hold the machine
            return reply

    is_over = threading.Event()
    begin = time.monotonic()
    run = search_run(Slow(), budget=run_pb2.Budget(wall_seconds=2)).execute()
    is_over.set()
    assert time.monotonic() - begin < 20
    assert run.state == run_pb2.RUN_STATE_FASTER


def test_a_reasoner_that_refuses_one_plan_is_asked_about_others() -> None:
    class Refusing(testing.World):
        def ProposeHypotheses(
            self, request: reasoning_service_pb2.ProposeHypothesesRequest, /, timeout: float | None = None
        ) -> reasoning_service_pb2.ProposeHypothesesResponse:
            if list(map(testing.name_of, request.analysis.moves)) == ["author"]:
                raise BadInput("not this one")
            return super().ProposeHypotheses(request, timeout)

    run = search_run(Refusing()).execute()
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert set(map(testing.name_of, run.best.candidate.moves)) == {"author", "vector"}


def test_a_strategy_that_raises_ends_the_search_and_loses_nothing() -> None:
    class Raising(Beam):
        def next(self, state: SearchState) -> list[Proposal]:
            if len(state.trials) > 2:
                raise ZeroDivisionError("none of mine")
            return super().next(state)

    run = search_run(testing.World(), search=Raising()).execute()
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert run.message.endswith("the search ended early: the strategy Raising failed: ZeroDivisionError: none of mine")


def test_a_reasoner_is_asked_once_while_nothing_has_ended() -> None:
    class Twice(Beam):
        def next(self, state: SearchState) -> list[Proposal]:
            assert list(state.propose(0, 2)) == list(state.propose(0, 4))[:2]
            return super().next(state)

    world = testing.World(choices={"vector": list("abcdef")})
    asked: Counter[tuple[int, int]] = Counter()
    told = world.ProposeHypotheses

    def ask(
        request: reasoning_service_pb2.ProposeHypothesesRequest, /, timeout: float | None = None
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        asked[len(request.history), len(request.analysis.moves)] += request.limit == 4
        return told(request, timeout)

    world.ProposeHypotheses = ask  # type: ignore[method-assign]
    search_run(world, search=Twice(), budget=run_pb2.Budget(trial_count=4, wall_seconds=20)).execute()
    assert {count for (_, moves), count in asked.items() if moves == 0} <= {0, 1}


def test_a_wall_budget_is_kept() -> None:
    world = testing.World(seconds=0.05)
    run = search_run(world, budget=run_pb2.Budget(wall_seconds=0.3)).execute()
    assert run.phase_seconds[1] < 10
    assert run.trial_count < 8


def test_what_is_verified_when_the_budget_ends_is_timed_all_the_same() -> None:
    class Slow(testing.World):
        def VerifyArtifact(
            self, request: correctness_service_pb2.VerifyArtifactRequest, /, timeout: float | None = None
        ) -> correctness_service_pb2.VerifyArtifactResponse:
            if len(request.program.sources[0].text.split()) == 2:
                conductor._deadline = 0.0  # the budget ends
                assert conductor._stop_walks.wait(20)
            return super().VerifyArtifact(request, timeout)

    conductor = search_run(Slow(gains={"author": 2.0, "vector": 1.2}), notebook := Notebook())
    conductor._chosen_effort = dataclasses.replace(EFFORT, settle_seconds=60.0)
    conductor.execute()
    assert max(len(trial.candidate.moves) for trial in notebook.trials) == 2


def test_cancelling_judges_the_best_so_far() -> None:
    notebook = Notebook()
    conductor = search_run(testing.World(seconds=0.01), notebook)
    stopped = threading.Event()

    def stop(trial: trial_pb2.Trial) -> None:
        if trial.number == 2:
            conductor.cancel()
            stopped.set()

    notebook.on_trial = stop
    run = conductor.execute()
    assert stopped.is_set()
    assert run.state == run_pb2.RUN_STATE_CANCELLED
    assert run.best.timing.faster
    assert run.trial_count < 8


def test_a_reasoner_is_told_of_the_last_trials_and_of_the_family_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counsel, "RECENT_COUNT", 2)
    asked: list[tuple[int, list[trial_pb2.Trial]]] = []

    class Remembering(testing.World):
        def ProposeHypotheses(
            self, request: reasoning_service_pb2.ProposeHypothesesRequest, /, timeout: float | None = None
        ) -> reasoning_service_pb2.ProposeHypothesesResponse:
            asked.append((len(request.analysis.moves), list(request.history)))
            return super().ProposeHypotheses(request, timeout)

    search_run(Remembering(choices={"vector": list("abc"), "tile": list("abc")})).execute()
    for depth, history in asked:
        numbers = [trial.number for trial in history]
        assert numbers == sorted(set(numbers))
        for trial in history[:-2]:
            assert depth in (len(trial.candidate.moves), len(trial.candidate.moves) - 1), (
                "kin alone is remembered longer"
            )
    assert any(len(history) > 2 for _, history in asked)
    assert max(len(history) for _, history in asked) < max(history[-1].number for _, history in asked if history)


def test_known_moves_are_the_first_hypotheses() -> None:
    notebook = Notebook()
    known = [[testing.move("vector"), testing.move("author")]]
    one_by_one = dataclasses.replace(EFFORT, parallel_trials=1)
    search_run(testing.World(), notebook, memory=Memory(moves=lambda _: known), effort=one_by_one).execute()
    first = [trial.number for trial in notebook.trials if trial.hypothesis.source == "archive"]
    assert first == [2]


def test_known_moves_that_no_longer_apply_are_dropped() -> None:
    run = search_run(testing.World(), memory=Memory(moves=lambda _: [[testing.move("gone")]])).execute()
    assert run.state == run_pb2.RUN_STATE_FASTER


def test_algebra_is_timed_apart_from_kernels() -> None:
    world = testing.World(gains={"rewrite": 5.0, "author": 2.0}, choices={"rewrite": ["linear_row_sum"]})
    run = search_run(world).execute()
    arms = {arm.kind: arm.median_ns for arm in run.best.timing.arms}
    assert arms[timing_pb2.ARM_KIND_REWRITTEN] == testing.EAGER_NS / 5
    assert arms[timing_pb2.ARM_KIND_CANDIDATE] == testing.EAGER_NS / 10


@pytest.mark.parametrize("search", [Random(seed=1), Evolution(seed=1), Exhaustive()])
def test_strategies_that_ask_no_reasoner_find_something(search: Search) -> None:
    world = testing.World()
    run = search_run(world, search=search).execute()
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert world.calls["ProposeHypotheses"] == 0


def test_an_exhaustive_search_walks_every_plan_once_and_ends() -> None:
    notebook = Notebook()
    search_run(testing.World(), notebook, search=Exhaustive()).execute()
    plans = {frozenset(map(testing.name_of, trial.candidate.moves)) for trial in notebook.trials}
    assert len(plans) == len(notebook.trials) == 8  # every subset of three moves


def test_an_unspecified_target_becomes_the_machines() -> None:
    conductor = search_run(testing.World())
    conductor.run.task.CopyFrom(testing.task(target=task_pb2.TARGET_UNSPECIFIED))
    run = conductor.execute()
    assert run.task.target == task_pb2.TARGET_CPU
    assert run.task.digest == testing.task().digest


def test_a_strategy_that_repeats_itself_ends() -> None:
    class Stubborn:
        def next(self, state: object) -> list[object]:
            return Beam().next(dataclasses.replace(state, is_new=lambda _: True))  # type: ignore[type-var]

    run = search_run(testing.World(gains={"author": 2.0}), search=Stubborn()).execute()
    assert run.trial_count == 2


def test_cancelling_while_preparing_ends_at_once() -> None:
    class Slow(testing.World):
        def RunReference(
            self, request: benchmark_service_pb2.RunReferenceRequest, /, timeout: float | None = None
        ) -> benchmark_service_pb2.RunReferenceResponse:
            conductor.cancel()
            is_over.wait(60)
            return super().RunReference(request, timeout)

    is_over = threading.Event()
    world = Slow()
    conductor = search_run(world)
    run = conductor.execute()
    assert world.calls["RunReference"] == 0  # nobody waits for it
    is_over.set()
    assert run.state == run_pb2.RUN_STATE_CANCELLED
    assert "before the search began" in run.message


def test_a_bad_module_does_not_wait_for_the_reference() -> None:
    world = testing.World(seconds=0.05, bad_module="no")
    search_run(world).execute()
    time.sleep(0.3)
    assert world.calls["RunReference"] == 0


@pytest.mark.parametrize(("devices", "opened"), [(1, 1), (2, 0)])
def test_the_only_benchmark_service_opens_the_task_before_it_times_the_reference(devices: int, opened: int) -> None:
    world = testing.World(seconds=0.02)
    assert prepare(world.agents(devices), DeviceGate([world] * devices), testing.task()) is not None
    assert (world.calls["OpenTask"], world.calls["RunReference"]) == (opened, 1)
    assert world.disturbed == []
