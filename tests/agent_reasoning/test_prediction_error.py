"""The command that says how far predictions are from measurements."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_reasoning.evidence import Evidence
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, run_pb2, task_pb2, timing_pb2, trial_pb2, verdict_pb2

SCRIPT = Path(__file__).parents[2] / "benchmarks/search/prediction_error.py"
AUTHOR = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="a")
FUSE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="a", choice="b")
LANES = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_SET, group="a", choice="lanes=64 threads=64")


@pytest.fixture(scope="module")
def command() -> Any:
    spec = importlib.util.spec_from_file_location("prediction_error", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prediction_error"] = module
    spec.loader.exec_module(module)
    return module


def trial(
    number: int, *moves: analysis_pb2.Move, ns: float, new: int = 1, parent: int = 0, predicted: float = 1.0
) -> trial_pb2.Trial:
    hypothesis = hypothesis_pb2.Hypothesis(
        moves=moves, new_move_count=new, predicted_speedup=predicted, source="roofline"
    )
    made = trial_pb2.Trial(number=number, parent=parent, hypothesis=hypothesis, seconds=1.0)
    made.verdict.state = verdict_pb2.VERDICT_STATE_PASS
    if ns:
        made.timing.arms.add(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=ns)
    return made


def events(*trials: trial_pb2.Trial) -> list[run_pb2.RunEvent]:
    """A run in which each trial begins when the one before it has ended."""
    begun = run_pb2.RunEvent(at=0.0, run=run_pb2.Run(task=task_pb2.Task(name="softmax")))
    return [begun, *(run_pb2.RunEvent(at=2.0 * place, trial=each) for place, each in enumerate(trials, 1))]


def test_the_error_is_the_factor_between_predicted_and_measured_gain(command: Any) -> None:
    (found,) = command.predictions(events(trial(1, ns=800), trial(2, AUTHOR, ns=400, predicted=3.0)))
    assert (found.task, found.name, found.gain) == ("softmax", "author", pytest.approx(2.0))
    assert found.before == found.after == pytest.approx(math.log(1.5))
    assert command.percent([found.after]) == pytest.approx(50.0)


def test_before_takes_back_what_earlier_trials_had_taught(command: Any) -> None:
    earlier = [trial(1, ns=800), trial(2, AUTHOR, ns=400, predicted=1.0)]
    taught = Evidence(earlier).correction([AUTHOR])
    assert taught > 1.1
    late = trial(3, AUTHOR, ns=400, predicted=taught)
    *_, found = command.predictions(events(*earlier, late))
    assert found.before == pytest.approx(math.log(1.0 / 2.0))
    assert found.after == pytest.approx(math.log(taught / 2.0))


def test_a_prediction_that_evidence_corrected_counts_as_well(command: Any) -> None:
    corrected = trial(2, AUTHOR, ns=400, predicted=3.0)
    corrected.hypothesis.source = "evidence"
    assert len(command.predictions(events(trial(1, ns=800), corrected))) == 1


def test_what_was_not_timed_or_not_predicted_is_left_out(command: Any) -> None:
    other = trial(4, AUTHOR, ns=10)
    other.hypothesis.source = "archive"
    assert command.predictions(events(trial(1, ns=800), trial(2, AUTHOR, ns=0), trial(3, FUSE, ns=9, parent=2))) == []
    assert command.predictions(events(trial(1, ns=800), other)) == []


def test_the_table_names_settings_without_their_values_and_chains_as_such(command: Any) -> None:
    found = command.predictions(
        events(
            trial(1, ns=800),
            trial(2, AUTHOR, FUSE, new=2, ns=400, predicted=2.0),
            trial(3, AUTHOR, FUSE, LANES, parent=2, ns=500),
        )
    )
    lines = command.table(found).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| chain: author + fuse", "| set lanes, threads", "| **all**", "| **all but settings**",
    ]  # fmt: skip
    assert lines[2].split(" | ")[1:4] == ["1", "1", "2.00x"]
