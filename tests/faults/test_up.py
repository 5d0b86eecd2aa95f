"""`warpsmith up` when what it keeps up is killed, or it is itself: runs under way go on, and so do who watches them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import AGENTS, Command, Place, find, place

from orchestrator import testing
from orchestrator.archive import Archive
from warpsmith.v1 import run_pb2

pytestmark = pytest.mark.faults

TRIALS = "60"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, FAKE_CALL_SECONDS="0.03") as made:
        yield made


def up(here: Place) -> Command:
    """Services that are up."""
    started = here.start("up")
    started.wait_for("unix:", 7)
    return started


def optimize(here: Place, *more: str) -> Command:
    """A search under way."""
    started = here.start(
        "optimize", "good.py", "--target", "cpu", "--budget", "5m", "--trials", TRIALS, "--fresh", *more
    )
    started.wait_for("good #3 ")
    return started


def require_result(here: Place, command: Command) -> None:
    """The command ends with a kernel, and its run has all of its trials once."""
    assert command.process.wait(120) == 0, command.said
    archive = Archive.in_directory(here.path / "runs")
    (run,) = archive.runs()
    trials = archive.trials(run.id)
    archive.close()
    assert run.state == run_pb2.RUN_STATE_FASTER, run.message
    assert len({trial.candidate.program.digest for trial in trials}) == len(trials) == run.trial_count == int(TRIALS)
    assert len(set(map(testing.name_of, run.best.candidate.moves))) == len(run.best.candidate.moves) > 1
    for number in range(1, int(TRIALS) + 1):
        assert command.said.count(f"good #{number} ") == 1, command.said


def test_every_service_of_up_is_killed_in_turn_and_a_watched_run_ends_with_its_result(here: Place) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    for count, name in enumerate([*AGENTS, "orchestrator"], start=1):
        services.kill_service(name)
        services.wait_for("it is started again now", count)
        assert f"the {name} service ended with code -9" in services.said
    require_result(here, search)
    assert search.said.count("the orchestrator is away: waiting for it") <= 1
    assert services.end() == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_up_is_ended_and_started_again_and_a_watched_run_goes_on(here: Place, number: int) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    services.end(number)
    search.wait_for("the orchestrator is away: waiting for it, ")
    up(here)
    search.wait_for("taken up again after ")
    require_result(here, search)
    assert search.said.count("the orchestrator is away") == search.said.count("the orchestrator is back") == 1


def test_a_command_that_is_killed_leaves_a_run_that_only_resume_goes_on_with(here: Place) -> None:
    search = optimize(here)
    assert search.end(signal.SIGKILL) == -9
    up(here)
    listed = here.start("runs")
    listed.process.wait(60)
    assert "goes on with it" in listed.said
    resumed = here.start("resume", "last")
    resumed.wait_for("taken up again after ")
    assert find(resumed.process.pid, "-m orchestrator")
    require_result(here, resumed)  # who resumes is told the whole story
