"""What earlier trials teach."""

from __future__ import annotations

import pytest

from agent_reasoning.evidence import Evidence, kind
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, timing_pb2, trial_pb2, verdict_pb2

Move = analysis_pb2.Move


def trial(
    number: int,
    move: Move,
    *,
    ns: float,
    predicted: float = 1.0,
    parent: int = 0,
    state: verdict_pb2.VerdictState.ValueType = verdict_pb2.VERDICT_STATE_PASS,
) -> trial_pb2.Trial:
    hypothesis = hypothesis_pb2.Hypothesis(moves=[move], new_move_count=1, predicted_speedup=predicted)
    made = trial_pb2.Trial(number=number, parent=parent, hypothesis=hypothesis)
    made.verdict.state = state
    if ns:
        made.timing.arms.add(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=ns)
    return made


AUTHOR = Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="a")
FUSE = Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="a", choice="b")


def test_one_surprise_moves_a_prediction_by_a_third_of_its_logarithm() -> None:
    history = [trial(1, AUTHOR, ns=800), trial(2, FUSE, ns=100, parent=1)]
    assert Evidence(history).correction([FUSE]) == pytest.approx(8 ** (1 / 3))
    assert Evidence(history).correction([AUTHOR]) == pytest.approx(1.0)


def test_what_was_predicted_is_no_surprise() -> None:
    history = [trial(1, AUTHOR, ns=800), trial(2, FUSE, ns=100, predicted=8.0, parent=1)]
    assert Evidence(history).correction([FUSE]) == pytest.approx(1.0)


def test_failures_lower_the_reliability_of_their_kind_only() -> None:
    failed = [trial(i, FUSE, ns=0, state=verdict_pb2.VERDICT_STATE_FAIL) for i in (1, 2)]
    evidence = Evidence(failed)
    assert evidence.reliability([AUTHOR, FUSE]) == pytest.approx(0.5)
    assert evidence.reliability([AUTHOR]) == 1.0


def test_faults_of_the_machine_teach_nothing() -> None:
    evidence = Evidence([trial(1, FUSE, ns=0, state=verdict_pb2.VERDICT_STATE_INFRA)])
    assert evidence.reliability([FUSE]) == 1.0
    assert not evidence.tried([FUSE])


def test_step_times_are_summed_by_group() -> None:
    made = trial(1, AUTHOR, ns=900)
    for ns in (300.0, 400.0):
        made.timing.steps.add(group="a", computed_by=analysis_pb2.ENGINE_AUTHORED, median_ns=ns)
    made.timing.steps.add(group="b", computed_by=analysis_pb2.ENGINE_LIBRARY, median_ns=200.0)
    evidence = Evidence([made])
    assert evidence.measured_groups([AUTHOR]) == {"a": 700.0, "b": 200.0}
    assert evidence.measured_groups([FUSE]) == {}
    assert evidence.library_slowness({"b": 50.0}) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("move", "expected"),
    [
        (Move(kind=analysis_pb2.MOVE_KIND_SET, group="a", arguments={"threads": 256}), "set threads=256"),
        (Move(kind=analysis_pb2.MOVE_KIND_SET, group="b", choice="reduce=cluster"), "set reduce=cluster"),
        (Move(kind=analysis_pb2.MOVE_KIND_REWRITE, group="a", choice="linear_row_sum"), "rewrite linear_row_sum"),
        (FUSE, "fuse"),
    ],
)
def test_moves_are_alike_whatever_their_group(move: Move, expected: str) -> None:
    assert kind(move) == expected


def test_moves_on_the_module_itself_are_compared_with_its_own_trial() -> None:
    zero = trial_pb2.Trial(number=1)
    zero.verdict.state = verdict_pb2.VERDICT_STATE_PASS
    zero.timing.arms.add(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=800)
    assert Evidence([zero, trial(2, AUTHOR, ns=100)]).correction([AUTHOR]) == pytest.approx(8 ** (1 / 3))
