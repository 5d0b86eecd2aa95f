"""An orchestrator that is killed, at every event of a run and at random moments: the next one goes on with it.

The orchestrator, its archive and its client are real, and so are the processes; the agents answer as those of `testing`
do. `KILLS` and `SEED` in the environment say how many random kills there are, and which.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import before_others

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.serving.dialing import orchestrator_at
from warpsmith import local_sockets
from warpsmith.sandbox import trees
from warpsmith.service import wait_until_healthy
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, timing_pb2

pytestmark = pytest.mark.faults

KILLS, SEED = int(os.environ.get("KILLS") or 8), int(os.environ.get("SEED") or 1)
BUDGET = run_pb2.Budget(wall_seconds=60)
FAKED_AGENTS = """
from orchestrator import servicer, testing
servicer.agents_of = lambda settings, benchmarks: testing.World(seconds={seconds}).agents()
import orchestrator.__main__
"""


@dataclass
class Orchestrators:
    """One orchestrator after the other at one socket, on one archive."""

    place: Path
    folder: Path = field(default_factory=local_sockets.make_folder)
    call_seconds: float = 0.01
    """What an agent takes for each answer."""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The next one; returns at once."""
        environment = {
            "PYTHONPATH": before_others(self.place),
            "WARPSMITH_RUNS": str(self.place / "runs"),
            "WARPSMITH_SOCKET": str(self.folder / "orchestrator"),
            "WARPSMITH_BENCHMARK_ADDRESS": "127.0.0.1:1",
            "WARPSMITH_PARENT_PID": str(os.getpid()),
        }
        (self.place / "faked_agents.py").write_text(FAKED_AGENTS.format(seconds=self.call_seconds))
        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "faked_agents"], env={**os.environ, **environment}, stdout=log, stderr=log
            )

    def end(self, number: int) -> int:
        """Ends the one that serves, by a signal, and gives its code; starts none."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def client(self) -> client.Optimization:
        """Of whichever serves."""
        address = local_sockets.address_of(self.folder / "orchestrator")
        assert wait_until_healthy(address, 60), (self.place / "log").read_text()
        return orchestrator_at(address)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def orchestrators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchestrators]:
    made = Orchestrators(tmp_path_factory.mktemp("faults"))
    made.start()
    yield made
    made.end(signal.SIGKILL)
    trees.remove(str(made.folder))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that looks often for the next orchestrator."""
    monkeypatch.setattr(client, "PAUSES_S", (0.05,) * 1200)


def watched(orchestrator: client.Optimization, run: run_pb2.Run, watcher: client.Watcher) -> list[run_pb2.RunEvent]:
    """What a client hears of a run from its beginning to its end."""
    heard: list[run_pb2.RunEvent] = []

    def hear(event: run_pb2.RunEvent) -> None:
        heard.append(event)
        watcher(event)

    client.follow(orchestrator, run.id, hear)
    return heard


def watch_of(orchestrators: Orchestrators, run: run_pb2.Run) -> Iterator[run_pb2.RunEvent]:
    """Events of a run as they come."""
    request = messages.WatchRunRequest(run_id=run.id)
    return (reply.event for reply in orchestrators.client.WatchRun(request))


def require_whole(orchestrators: Orchestrators, run: run_pb2.Run, heard: list[run_pb2.RunEvent]) -> None:
    """Nothing that was heard is lost or came twice, no program was tried twice, and the run found what there is."""
    archive = Archive.in_directory(orchestrators.place / "runs")
    ended, trials, events = archive.run(run.id), archive.trials(run.id), archive.events(run.id)
    archive.close()
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert heard == events
    assert [trial.number for trial in trials] == list(range(1, len(trials) + 1))
    assert len({trial.candidate.program.digest for trial in trials}) == len(trials) == ended.trial_count == 8
    assert ended.pass_count == 8
    assert ended.state == run_pb2.RUN_STATE_FASTER, ended.message
    assert sorted(map(testing.name_of, ended.best.candidate.moves)) == ["author", "vector"]
    assert ended.best.timing.speedup_fastest.median == pytest.approx(0.8 * 2.0 * 1.2)
    assert ended.best.timing.tier == timing_pb2.TIER_FINAL


def is_killed_at(orchestrators: Orchestrators, number: int) -> bool:
    """Whether a run has an event of that number; it is killed there, and goes on."""
    orchestrator = orchestrators.client
    run = client.create(orchestrator, testing.task(), BUDGET, fresh=True)
    killed = False

    def kill(event: run_pb2.RunEvent) -> None:
        nonlocal killed
        if event.number == number and not killed:
            killed = True
            orchestrators.end(signal.SIGKILL)
            orchestrators.start()

    require_whole(orchestrators, run, watched(orchestrator, run, kill))
    return killed


@pytest.mark.usefixtures("patient")
def test_a_run_that_is_killed_at_any_of_its_events_ends_by_itself_with_the_same_best(
    orchestrators: Orchestrators,
) -> None:
    number = 1
    while is_killed_at(orchestrators, number):
        number += 1
    print(f"\nkilled at each of {number - 1} events, one in each run: no run lost anything")
    assert number > 12, "a run has more events than that"


def test_an_orchestrator_that_is_asked_to_end_waits_for_no_agent(tmp_path: Path) -> None:
    orchestrators = Orchestrators(tmp_path, call_seconds=60.0)
    orchestrators.start()
    try:
        run = client.create(orchestrators.client, testing.task(), BUDGET, fresh=True)
        next(event for event in watch_of(orchestrators, run) if event.run.state == run_pb2.RUN_STATE_PREPARING)
        begin = time.monotonic()
        assert orchestrators.end(signal.SIGTERM) == 0
        assert time.monotonic() - begin < 20, "Kubernetes gives 30 seconds"
    finally:
        trees.remove(str(orchestrators.folder))
    archive = Archive.in_directory(tmp_path / "runs")
    left = archive.run(run.id)
    archive.close()
    assert (left.state, left.message) == (
        run_pb2.RUN_STATE_PREPARING,
        "left after 0 trials: the next orchestrator takes it up",
    )


@pytest.mark.timeout(300 + 5 * KILLS)
@pytest.mark.usefixtures("patient")
def test_runs_that_are_killed_at_random_moments_lose_nothing(orchestrators: Orchestrators) -> None:
    dice = random.Random(SEED)
    orchestrator = orchestrators.client
    kills, run_count, again = 0, 0, threading.Event()
    while kills < KILLS:
        run = client.create(orchestrator, testing.task(), BUDGET, fresh=True)
        run_count += 1
        moments = {dice.randint(1, 24) for _ in range(dice.randint(1, 3))}
        count = 0

        def kill(_: run_pb2.RunEvent) -> None:
            nonlocal count, kills
            count += 1
            if count in moments:  # noqa: B023 (called in this turn alone)
                again.wait(dice.uniform(0.0, 0.05))
                orchestrators.end(dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
                orchestrators.start()
                kills += 1

        require_whole(orchestrators, run, watched(orchestrator, run, kill))
    print(f"\n{kills} orchestrators ended at random moments in {run_count} runs (SEED={SEED}): no run lost anything")
