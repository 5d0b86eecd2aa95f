"""A minute of chaos, and whether it sees a promise that is broken."""
# ruff: noqa: ARG001 (each spoils one thing of two)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import chaos
import pytest
from promises import BrokenError, require_kept, require_whole

from orchestrator import testing
from orchestrator.archive import Archive
from warpsmith.v1 import run_pb2, trial_pb2, verdict_pb2

pytestmark = pytest.mark.faults

EVENTS = [run_pb2.RunEvent(number=number, at=float(number)) for number in range(1, 6)]


def test_a_minute_of_chaos_breaks_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    code = chaos.main(["--minutes", "0.5", "--every", "10", "--seed", "3"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "every promise held: " in said
    assert len([line for line in said.splitlines() if line.startswith("| 0.")]) == 3


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (EVENTS[:3], EVENTS[:2]),
        (EVENTS[:3], [EVENTS[0], EVENTS[2], EVENTS[3]]),
        (EVENTS[:3], [*EVENTS[:2], EVENTS[1], EVENTS[2]]),
        ([EVENTS[0], run_pb2.RunEvent(number=2, at=9.0)], EVENTS),
        ([EVENTS[0], EVENTS[0]], EVENTS),
    ],
    ids=["lost", "a gap", "kept twice", "another", "told twice"],
)
def test_an_event_that_was_told_and_is_not_kept_once_is_seen(
    told: list[run_pb2.RunEvent], kept: list[run_pb2.RunEvent]
) -> None:
    require_kept("r", 0, EVENTS[:3], EVENTS)
    require_kept("r", 3, [], EVENTS[3:])
    with pytest.raises(BrokenError):
        require_kept("r", 0, told, kept)


def twice(run: run_pb2.Run, trials: list[trial_pb2.Trial]) -> None:
    trials[1].candidate.program.digest = trials[0].candidate.program.digest


def blamed(run: run_pb2.Run, trials: list[trial_pb2.Trial]) -> None:
    trials[1].verdict.state = verdict_pb2.VERDICT_STATE_INFRA


def fallen(run: run_pb2.Run, trials: list[trial_pb2.Trial]) -> None:
    run.best.CopyFrom(trials[0])


def lost(run: run_pb2.Run, trials: list[trial_pb2.Trial]) -> None:
    trials.pop()


def failed(run: run_pb2.Run, trials: list[trial_pb2.Trial]) -> None:
    run.state = run_pb2.RUN_STATE_FAILED


def early(run: run_pb2.Run, trials: list[trial_pb2.Trial]) -> None:
    run.message = "2x; the search ended early: no answer"


@pytest.mark.parametrize("spoil", [twice, blamed, fallen, lost, failed, early])
def test_a_run_that_did_not_end_right_is_seen(
    tmp_path: Path, spoil: Callable[[run_pb2.Run, list[trial_pb2.Trial]], None]
) -> None:
    trials = []
    for number in (1, 2, 3):
        trial = trial_pb2.Trial(number=number, ended_at=trial_pb2.STAGE_TIMED)
        trial.candidate.program.digest = f"p{number}"
        trial.verdict.state = verdict_pb2.VERDICT_STATE_PASS
        trial.timing.speedup_fastest.median = float(number)
        trials.append(trial)
    run = run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_FASTER, best=trials[2])

    def archived(name: str) -> Archive:
        (tmp_path / name).mkdir(mode=0o700)
        made = Archive.in_directory(tmp_path / name)
        made.put_run(run)
        for trial in trials:
            made.add_trial("r", trial)
        return made

    require_whole(archived("right"), run, 3)
    spoil(run, trials)
    with pytest.raises(BrokenError):
        require_whole(archived("wrong"), run, 3)
