"""Strategies, the device gate and addresses: the small parts that a run stands on."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import Counter

import pytest

from orchestrator import finalists, testing
from orchestrator.pipeline import Duplicate, Judged, Pipeline
from orchestrator.search import Proposal, SearchState, conformance
from orchestrator.search.beam import Beam
from orchestrator.search.sources import RANDOM, Sources
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.dialing import endpoints
from warpsmith import plugins
from warpsmith.digest import of_moves
from warpsmith.errors import BadInput
from warpsmith.testing import check_plugin
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
    assert [testing.name_of(proposal.hypothesis.moves[0]) for proposal in proposals] == ["1-40", "0-40"]


def test_slots_that_one_parent_leaves_go_to_others_and_nothing_is_proposed_twice() -> None:
    proposals = Beam(width=6).next(state_of([timed(1, 3.0, "a"), timed(2, 2.0, "b")], fertile=2))
    keys = [of_moves(proposal.hypothesis.moves) for proposal in proposals]
    assert len(keys) == len(set(keys)) == 6


def test_an_exhausted_beam_goes_on_with_slower_plans() -> None:
    trials = [timed(1, 3.0, "a"), timed(2, 2.0, "b"), timed(3, 1.5, "a")]
    fertile = state_of(trials, slots=2, fertile=2)
    state = dataclasses.replace(fertile, is_new=lambda each: testing.name_of(each.moves[0]).startswith("3"))
    assert [proposal.parent for proposal in Beam(width=2).next(state)] == [3, 3]


def test_a_plan_that_had_nothing_left_is_asked_again_once_twice_as_many_trials_have_ended() -> None:
    trials = [timed(1, 3.0, "a"), timed(2, 2.0, "b"), timed(3, 1.5, "a")]
    fertile, asked = state_of(trials, fertile=2), list[int]()
    beam = Beam(width=2)

    def ask(state: SearchState, answers: bool) -> list[int]:
        asked.clear()

        def propose(parent: int, limit: int) -> list[hypothesis_pb2.Hypothesis]:
            asked.append(parent)
            return list(fertile.propose(parent, limit)) if answers and parent == 3 else []

        return [proposal.parent for proposal in beam.next(dataclasses.replace(state, propose=propose))]

    assert ask(fertile, answers=False) == []
    assert 3 in asked
    failed = [dataclasses.replace(fertile, trials=[*trials, *[trial_pb2.Trial()] * count]) for count in (2, 3)]
    assert ask(failed[0], answers=True) == []
    assert 3 not in asked
    assert ask(failed[1], answers=True) == [3, 3]


def of_source(source: str, number: int, *, won: bool, parent: int = 0) -> trial_pb2.Trial:
    trial = timed(number, 1.5 if won else 0.9)
    trial.parent, trial.hypothesis.source = parent, source
    return trial


def shares(trials: list[trial_pb2.Trial], ranked: list[str]) -> Counter[str]:
    """How often each source is drawn in a thousand runs that differ by their seed."""
    return Counter(Sources(trials, seed).draw(ranked) for seed in range(1000))


def test_a_source_whose_trials_beat_their_parents_gets_the_slots_although_it_is_ranked_second() -> None:
    trials = [of_source("roofline", number, won=number % 4 == 0) for number in range(1, 17)]
    trials += [of_source("vllm", number, won=False) for number in range(17, 33)]
    drawn = shares(trials, ["vllm", "roofline", RANDOM])
    assert drawn["roofline"] > 650
    assert drawn["roofline"] > 2 * drawn["vllm"]
    assert shares([], ["vllm", "roofline"])["vllm"] > 500


def test_a_random_legal_move_is_rare_until_it_earns() -> None:
    ranked = ["roofline"] * 4 + [RANDOM]
    trials = [of_source("roofline", number, won=number % 2 == 0) for number in range(1, 9)]
    assert shares(trials, ranked)[RANDOM] < 30
    earned = [of_source(RANDOM, number, won=True) for number in range(41, 81)]
    lost = [of_source("roofline", number, won=False) for number in range(1, 41)]
    assert shares(lost + earned, ranked)[RANDOM] > 900


def test_a_source_does_not_answer_for_faults_of_the_machine() -> None:
    faults = [of_source("vllm", number, won=False) for number in range(1, 9)]
    judged = shares(faults, ["vllm", "roofline"])
    for trial in faults:
        trial.verdict.state = verdict_pb2.VERDICT_STATE_INFRA
    assert shares(faults, ["vllm", "roofline"])["vllm"] > 2 * judged["vllm"]


def test_a_source_answers_neither_for_repairs_nor_for_gains_within_the_noise() -> None:
    failed, mended = timed(1, 0.0), of_source("vllm", 2, won=True, parent=1)
    failed.verdict.state = verdict_pb2.VERDICT_STATE_FAIL
    failed.ClearField("timing")
    assert Sources([failed, mended]).draw(["roofline", "vllm"]) == Sources([failed, failed]).draw(["roofline", "vllm"])
    barely = of_source("vllm", 1, won=True)
    barely.timing.speedup_fastest.median, barely.timing.noise_floor = 1.02, 0.03
    noise = shares([barely] * 20, ["roofline", "vllm"])
    barely.timing.noise_floor = 0.01
    assert shares([barely] * 20, ["roofline", "vllm"])["vllm"] > 5 * noise["vllm"]


def test_beam_takes_its_slots_from_the_source_that_earned_them_and_draws_alike_for_equal_trials() -> None:
    won = [of_source("good", number, won=True) for number in range(1, 21)]
    lost = [of_source("bad", number, won=False) for number in range(21, 41)]
    for trial in lost:
        trial.verdict.state = verdict_pb2.VERDICT_STATE_FAIL
    sources = ["bad", "bad", "bad", "bad", "good", "good", "good", "good"]

    def propose(parent: int, limit: int) -> list[hypothesis_pb2.Hypothesis]:
        moves = [testing.move(f"{parent}-{place}") for place in range(len(sources))]
        named = zip(moves, sources, strict=True)
        made = [hypothesis_pb2.Hypothesis(moves=[each], predicted_speedup=9.0, source=name) for each, name in named]
        return made[:limit]

    state = dataclasses.replace(state_of(won + lost, slots=4), propose=propose)
    proposals = Beam(width=1).next(state)
    assert Counter(each.hypothesis.source for each in proposals)["good"] >= 3
    assert Beam(width=1).next(state) == proposals


def test_beam_draws_a_legal_move_where_random_ones_earned_it_but_has_none_written_by_chance() -> None:
    won = [of_source(RANDOM, number, won=True) for number in range(1, 41)]
    lost = [of_source("roofline", number, won=False) for number in range(41, 81)]
    legal = [testing.move(name) for name in ("tile", "vector", "write")]
    analysis = analysis_pb2.Analysis(legal_moves=[analysis_pb2.LegalMove(move=each) for each in legal])
    ranked = dataclasses.replace(state_of(won + lost, slots=4), analyze=lambda _: analysis)

    def propose(parent: int, limit: int) -> list[hypothesis_pb2.Hypothesis]:
        answer = list(ranked.propose(parent, limit))
        for each in answer:
            each.source = "roofline"
        return answer

    proposals = Beam(width=1).next(dataclasses.replace(ranked, propose=propose))
    drawn = [each for each in proposals if each.hypothesis.source == RANDOM]
    assert len(drawn) >= 2
    for each in drawn:
        assert testing.name_of(each.hypothesis.moves[-1]) in ("tile", "vector")
        assert list(each.hypothesis.moves[:-1]) == ([] if each.parent == 0 else [testing.move(f"m{each.parent}")])
    silent = dataclasses.replace(ranked, propose=lambda *_: [])
    assert Beam(width=1).next(silent) == []  # chance does not go on where the reasoner sees nothing


@pytest.mark.parametrize("strategy", plugins.names("search"))
def test_every_installed_strategy_fits_its_role(strategy: str) -> None:
    assert check_plugin("search", strategy) == []


class Careless:
    """Breaks every rule of a strategy."""

    prayers = itertools.count()

    def __init__(self) -> None:
        self._prayer = next(self.prayers)

    def next(self, state: SearchState) -> list[Proposal]:
        """A parent that does not exist, plan zero again, and an illegal move twice; however many slots there are."""
        prayer = Proposal(99, hypothesis_pb2.Hypothesis(moves=[testing.move(f"pray {self._prayer}")]))
        known = Proposal(0, hypothesis_pb2.Hypothesis())
        bad = Proposal(0, hypothesis_pb2.Hypothesis(moves=[testing.move("pray")], new_move_count=1))
        return [prayer, prayer, known, bad, bad][: max(5, state.slots)]


def test_a_careless_strategy_is_told_everything() -> None:
    findings = "\n".join(conformance.check_search(Careless))
    for expected in (
        "where no slot is free", "must come from a seed", "5 where 4 slots", "twice at once", "has been tried",
        "neither plan zero nor", "not its parent's moves", "not legal", "lacks its source", "goes on after",
    ):  # fmt: skip
        assert expected in findings


class Fixed:
    """Only ever tries what can be done to plan zero, and so many of that."""

    def __init__(self, count: int) -> None:
        self._count = count

    def next(self, state: SearchState) -> list[Proposal]:
        """Children of plan zero."""
        fresh = [Proposal(0, each) for each in state.propose(0, 100) if state.is_new(each)]
        return fresh[: min(self._count, state.slots)]


def test_a_strategy_that_stays_at_the_beginning_is_told_so() -> None:
    assert conformance.check_search(lambda: Fixed(0)) == [
        "proposes nothing where moves are legal and the reasoner has hypotheses"
    ]
    assert conformance.check_search(lambda: Fixed(4)) == ["never builds on a trial that passed"]


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
