"""Timing a solution from outside: one call a reading, what asking costs, and work put off until results are read."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from google.protobuf.message import Message

from gpu_bench.limits import Limits
from gpu_bench.solutions import contest
from gpu_bench.solutions.caller import Answer
from gpu_bench.solutions.contest import with_work_put_off
from gpu_bench.solutions.solution_timing import HANDSHAKE, OutsideClock, contend
from gpu_bench.timing.clocks import RETAKE_COUNT, Arm, Reading
from warpsmith.v1 import graph_pb2, judging_pb2, task_pb2, timing_pb2, verdict_pb2

READING = (Arm("candidate", lambda index: index), [0], Reading.COLD)


def answer(seconds: float, waited: float = 0.0) -> Answer:
    return Answer(seconds, waited, b"")


def test_a_reading_is_one_call() -> None:
    asked: list[str] = []

    def call(name: str) -> Answer:
        asked.append(name)
        return answer(0.25)

    assert OutsideClock(call).take(*READING).ns == 0.25e9
    assert asked == ["candidate"]


def test_a_call_that_waited_for_a_processor_is_made_again() -> None:
    answers = iter([answer(0.1, waited=0.05), answer(0.02, waited=0.0005)])
    assert OutsideClock(lambda _: next(answers)).take(*READING).ns == pytest.approx(0.02e9)


def test_where_every_call_waits_the_last_one_counts() -> None:
    answers = iter([answer(0.01 + 0.001 * number, waited=0.01) for number in range(RETAKE_COUNT + 1)])
    last = 0.01 + 0.001 * (RETAKE_COUNT - 1)
    assert OutsideClock(lambda _: next(answers)).take(*READING).ns == pytest.approx(last * 1e9)


@pytest.mark.parametrize(
    ("eager_seconds", "slack", "late_seconds"),
    [
        ([0.001, 0.001, 0.009], 1.0, 0.004),
        ([0.001], 2.0, 0.003),
        ([0.006], 1.0, 0.0),
        ([0.003], 2.0, 0.0),
        ([], 1.0, 0.0),
    ],
)
def test_what_is_put_off_until_somebody_looks_is_part_of_the_time(
    eager_seconds: list[float], slack: float, late_seconds: float
) -> None:
    found = with_work_put_off(answer(0.002), answer(0.005, waited=0.0001), eager_seconds, slack)
    assert found.seconds == pytest.approx(0.002 + late_seconds)
    assert found.waited_seconds == (0.0001 if late_seconds else 0.0)


@pytest.mark.parametrize(("ours_s", "is_faster"), [(0.001, True), (0.004, False)])
def test_a_contest_tells_what_asking_costs_and_who_is_faster(ours_s: float, is_faster: bool) -> None:
    yardstick = judging_pb2.Yardstick(graph=graph_pb2.Graph(), flags=[timing_pb2.FLAG_INPUT_UNUSED])
    offered = [timing_pb2.Arm(kind=timing_pb2.ARM_KIND_COMPILE, failure="no compiler")]
    seconds = {"candidate": ours_s, "eager": 0.004, HANDSHAKE: 0.0001}
    timing = contend(
        yardstick, offered, task_pb2.PRECISION_FP32, timing_pb2.TIER_SCREENING, lambda name: answer(seconds[name])
    )
    assert timing.handshake_ns == pytest.approx(1e5)
    assert timing.faster is is_faster
    assert timing.speedup_eager.median == pytest.approx(0.004 / ours_s)
    assert {timing_pb2.FLAG_INPUT_UNUSED, timing_pb2.FLAG_TIMED_AS_CALLED} <= set(timing.raised)
    assert {arm.kind: arm.failure for arm in timing.arms}[timing_pb2.ARM_KIND_COMPILE] == "no compiler"


def test_the_first_timed_calls_of_every_solution_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "LOOK_SHARE", 0.0)
    asked: list[str] = []

    def ask(method: str, _: object, response: type[Message]) -> Message:
        asked.append(method)
        return response()

    solution = Mock(processes=set())
    solution.ask.return_value = answer(0.0)
    made = contest.Contest(
        task_pb2.TARGET_CPU, Limits(), contest.PlacedValues(Mock(), 1.0), judging_pb2.Introduction(), 0.0
    )
    monkeypatch.setattr(made.values, "ask", ask)
    monkeypatch.setattr(made, "visit", lambda *_, **__: contest.Visit(answer(1.0), judging_pb2.Taken(), answer(0.0)))
    for _ in range(2):
        made.admit(solution)
        for _ in range(2 * contest.ALL_LOOKED_AT):
            made.time_solution("solution", 0)
    assert asked.count("look") == 2 * contest.ALL_LOOKED_AT


def test_each_family_that_was_judged_comes_again_before_any_comes_twice() -> None:
    others = contest.OtherFamilies()
    for family in verdict_pb2.ValueFamily.values()[1:]:
        others.add(family)
    wanted = {*verdict_pb2.ValueFamily.values()} - {0, verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_FRESH}
    drawn = [[others.drawn() for _ in wanted] for _ in range(8)]
    assert all({*each} == wanted for each in drawn)
    assert len({*map(tuple, drawn)}) > 4
