"""Strategies, the device gate and addresses: the small parts that a run stands on."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from orchestrator import finalists, testing
from orchestrator.device_gate import DeviceGate
from orchestrator.dialing import endpoints
from orchestrator.pipeline import Duplicate, Judged, Pipeline
from orchestrator.search import SearchState
from orchestrator.search.beam import Beam
from warpsmith.digest import of_moves
from warpsmith.errors import BadInput
from warpsmith.v1 import analysis_pb2, candidate_pb2, hypothesis_pb2, task_pb2, timing_pb2, trial_pb2, verdict_pb2


def timed(number: int, speedup: float, *features: str) -> trial_pb2.Trial:
    return trial_pb2.Trial(
        number=number,
        candidate=candidate_pb2.Candidate(
            moves=[testing.move(f"m{number}")], analysis=analysis_pb2.Analysis(features=features)
        ),
        verdict=verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS),
        timing=timing_pb2.Timing(speedup_fastest=timing_pb2.Speedup(median=speedup)),
    )


def state_of(trials: list[trial_pb2.Trial], slots: int = 8, fertile: int = 100, predicted: float = 4.0) -> SearchState:
    def propose(parent: int, limit: int) -> list[hypothesis_pb2.Hypothesis]:
        moves = [testing.move(f"{parent}-{place}") for place in range(fertile)]
        return [hypothesis_pb2.Hypothesis(moves=[each], predicted_speedup=predicted) for each in moves][:limit]

    return SearchState(trials, slots, lambda _: True, lambda _: analysis_pb2.Analysis(), propose)


def test_the_best_of_every_kind_is_a_parent_before_a_second_of_a_kind() -> None:
    trials = [timed(1, 3.0, "row"), timed(2, 2.9, "row"), timed(3, 1.5, "two"), timed(4, 1.2, "three")]
    assert Beam(width=3).parents(state_of(trials)) == [1, 3, 4, 0]


def test_failed_trials_are_no_parents() -> None:
    failed = timed(2, 5.0)
    failed.verdict.state = verdict_pb2.VERDICT_STATE_FAIL
    assert Beam().parents(state_of([timed(1, 1.0), failed])) == [1, 0]


def test_the_best_parent_gets_half_of_the_slots() -> None:
    trials = [timed(1, 3.0, "a"), timed(2, 2.0, "b"), *(timed(number, 1.0, "b") for number in range(3, 9))]
    proposals = Beam(width=2).next(state_of(trials))
    assert [proposal.parent for proposal in proposals] == [1, 1, 1, 1, 2, 2, 0, 0]


def test_what_promises_little_comes_after_what_promises_something() -> None:
    trials = [timed(1, 3.0, "a"), timed(2, 2.5, "b"), timed(3, 1.2, "c"), timed(4, 1.1, "c")]
    proposals = Beam().next(state_of(trials, slots=4, fertile=1, predicted=1.0))
    assert [proposal.parent for proposal in proposals] == [1, 2, 3, 4]
    assert [proposal.parent for proposal in Beam().next(state_of(trials, slots=4, predicted=1.0))] == [1, 1, 2, 1]


def test_settings_do_not_make_another_kind_of_plan() -> None:
    trials = [
        timed(1, 3.0, "row", "row:stores=plain"),
        timed(2, 2.9, "row", "row:stores=streaming"),
        timed(3, 1, "two"),
    ]
    assert Beam(width=2).parents(state_of(trials)) == [1, 3, 0]


def test_no_more_is_under_way_than_has_ended() -> None:
    state = state_of([timed(number, 1.0 + number, str(number)) for number in range(1, 7)])
    assert len(Beam().next(state_of([]))) == 4
    assert len(Beam().next(state)) == 6
    assert len(Beam().next(dataclasses.replace(state, under_way=5))) == 1
    assert not Beam().next(dataclasses.replace(state, under_way=9))


def test_a_parent_whose_first_hypotheses_are_known_is_asked_for_more() -> None:
    state = state_of([timed(1, 2.0, "a")], slots=2)
    known = {of_moves([testing.move(f"{parent}-{place}")]) for parent in (0, 1) for place in range(40)}
    proposals = Beam().next(dataclasses.replace(state, is_new=lambda each: of_moves(each.moves) not in known))
    assert [proposal.hypothesis.moves[0].operation for proposal in proposals] == ["1-40", "0-40"]


def test_slots_that_one_parent_leaves_go_to_others_and_nothing_is_proposed_twice() -> None:
    proposals = Beam(width=6).next(state_of([timed(1, 3.0, "a"), timed(2, 2.0, "b")], fertile=2))
    keys = [of_moves(proposal.hypothesis.moves) for proposal in proposals]
    assert len(keys) == len(set(keys)) == 6


def test_an_exhausted_beam_goes_on_with_slower_plans() -> None:
    trials = [timed(1, 3.0, "a"), timed(2, 2.0, "b"), timed(3, 1.5, "a")]
    fertile = state_of(trials, slots=2, fertile=2)
    state = dataclasses.replace(fertile, is_new=lambda each: each.moves[0].operation.startswith("3"))
    assert [proposal.parent for proposal in Beam(width=2).next(state)] == [3, 3]


def test_a_plan_that_other_moves_led_to_is_not_tried_again() -> None:
    agents, known = testing.World().agents(), set[str]()

    def claim(digest: str) -> bool:
        is_new = digest not in known
        known.add(digest)
        return is_new

    pipeline = Pipeline(agents, DeviceGate(agents.benchmarks), testing.task(), claim=claim)
    outcomes = []
    for program in ("one", "two"):
        trial = trial_pb2.Trial(candidate=candidate_pb2.Candidate(analysis=analysis_pb2.Analysis(plan_digest="plan")))
        trial.candidate.program.digest = program
        trial.candidate.program.sources.add(text="author:")
        outcomes.append(pipeline.walk(trial, timing_pb2.TIER_SCREENING))
    assert [type(outcome) for outcome in outcomes] == [Judged, Duplicate]


def test_finalists_are_the_best_that_changed_something() -> None:
    zero = timed(9, 4.0)
    del zero.candidate.moves[:]
    chosen = finalists.select([timed(1, 1.4), timed(2, 0.9), zero, timed(3, 1.6)])
    assert [trial.number for trial in chosen] == [3, 1]
    assert [trial.number for trial in finalists.select([timed(1, 0.8), timed(2, 0.9)])] == [2]
    assert finalists.select([zero]) == []


def test_timing_waits_for_work_and_work_for_timing() -> None:
    agents = testing.World().agents()
    gate = DeviceGate(agents.benchmarks)
    order: list[str] = []
    begun = threading.Event()

    def time_something() -> None:
        begun.set()
        with gate.timing():
            order.append("timing")

    with gate.working(task_pb2.TARGET_CPU):
        thread = threading.Thread(target=time_something)
        thread.start()
        begun.wait()
        time.sleep(0.02)
        order.append("work")
    thread.join()
    assert order == ["work", "timing"]


def test_compiling_goes_on_while_a_gpu_times() -> None:
    gate = DeviceGate(testing.World().agents().benchmarks)
    with gate.timing(), gate.working(task_pb2.TARGET_CUDA):
        pass


def test_each_benchmark_server_measures_one_thing_at_a_time() -> None:
    servers = testing.World().agents(devices=1).benchmarks + testing.World().agents(devices=1).benchmarks  # type: ignore[operator]
    gate = DeviceGate(servers)
    with gate.timing() as first, gate.timing() as second, gate.checking(task_pb2.TARGET_CUDA):
        assert first is not second


def test_addresses_name_every_benchmark_server() -> None:
    assert endpoints("a:1, b:2") == ["a:1", "b:2"]
    assert "127.0.0.1:50051" in endpoints("dns:///localhost:50051")
    with pytest.raises(BadInput, match="dns:///name:port"):
        endpoints("dns:///localhost")
