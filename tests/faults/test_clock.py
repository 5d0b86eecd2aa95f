"""Wall clocks that are set by days while a run is under way: budgets, waits and events do not depend on them.

The orchestrator is a real process whose wall clock `stepped_clock.cpp` moves; its other clocks go on, as where one
is set. (libfaketime moves waits by the monotonic clock too, which no step does.)
"""

from __future__ import annotations

import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from between import Between, agent, orchestrator
from processes import AGENTS

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.ledger import day_of
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2

pytestmark = pytest.mark.faults

TRIALS, DAY = 30, 86400
BUDGET = run_pb2.Budget(wall_seconds=60, trial_count=TRIALS)


class Clock:
    """The wall clock of processes that have `environment`."""

    def __init__(self, place: Path) -> None:
        self._file = place / "clock"
        self._file.write_bytes(bytes(8))
        library = place / "stepped_clock.so"
        source = Path(__file__).with_name("stepped_clock.cpp")
        subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """Is so far from ours, at once."""
        with self._file.open("r+b") as shared:
            shared.write(struct.pack("<q", seconds))


@dataclass
class Here:
    """Where orchestrators of one archive are started, one after the other."""

    stack: ExitStack
    place: Path
    clock: Clock
    addresses: dict[str, str]

    def start(self) -> Between:
        return orchestrator(self.stack, self.place, {**self.addresses, **self.clock.environment}, {})

    def kept(self, run_id: str) -> tuple[run_pb2.Run, list[int], list[int]]:
        """A run in the archive, the numbers of its trials, and those of its events."""
        archive = Archive.in_directory(self.place / "runs")
        trials, events = archive.trials(run_id), archive.events(run_id, 0)
        run = archive.run(run_id)
        archive.close()
        assert len({each.candidate.program.digest for each in trials}) == len(trials)
        return run, [each.number for each in trials], [each.number for each in events]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    with ExitStack() as stack:
        agents = {f"WARPSMITH_{name.upper()}_ADDRESS": agent(stack, tmp_path, name) for name in AGENTS}
        yield Here(stack, tmp_path, Clock(tmp_path), agents)


def require_whole(here: Here, run_id: str) -> run_pb2.Run:
    run, trials, events = here.kept(run_id)
    assert run.state == run_pb2.RUN_STATE_FASTER, run.message
    assert "ended early" not in run.message
    assert trials == list(range(1, TRIALS + 1))
    assert events == list(range(1, len(events) + 1))
    assert 0 < run.spent.wall_seconds < BUDGET.wall_seconds
    assert all(0 <= seconds < BUDGET.wall_seconds for seconds in (*run.phase_seconds, *run.stage_seconds.values()))
    return run


def test_a_clock_that_is_set_forward_and_back_by_days_changes_nothing_but_dates(here: Here) -> None:
    orchestrators = here.start()
    run = client.create(orchestrators.client, testing.task("stepped"), BUDGET, "", fresh=True)
    steps = {3: 2 * DAY, 10: -30 * DAY, 17: 3600}

    def hear(event: run_pb2.RunEvent) -> None:
        if event.trial.number in steps:
            here.clock.step(steps[event.trial.number])

    client.follow(orchestrators.client, run.id, hear)
    ended = require_whole(here, run.id)
    now = time.time()
    assert {day_of(now + 2 * DAY), day_of(now - 30 * DAY)} <= set(ended.device_day_seconds), "the clock was really set"


def test_the_next_orchestrator_goes_on_with_a_run_that_began_in_its_future(here: Here) -> None:
    first = here.start()
    run = client.create(first.client, testing.task("future"), BUDGET, "", fresh=True)
    for response in first.client.WatchRun(messages.WatchRunRequest(run_id=run.id)):
        if response.event.trial.number == 5:
            break
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(60)
    here.clock.step(-30 * DAY)
    client.follow(here.start().client, run.id, lambda _: None)
    assert day_of(time.time() - 30 * DAY) in require_whole(here, run.id).device_day_seconds
