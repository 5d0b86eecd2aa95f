"""Several orchestrators, each a process, on one PostgreSQL and one set of services: any of them answers for all runs.

The orchestrators and the database are real, and so are turns and leases of the benchmark service; agents are fakes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpu_bench.servicer import BenchmarkServicer
from gpu_bench.workers.leases import Leases
from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.serving import dialing, fake_service
from warpsmith import service
from warpsmith.errors import BadInput, LimitReached
from warpsmith.service import Patience
from warpsmith.settings import Settings
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import optimization_service_pb2_grpc, run_pb2, verdict_pb2

pytestmark = pytest.mark.postgres

AGENTS = ("reasoning", "synthesis", "compile", "correctness")
BUDGET = run_pb2.Budget(wall_seconds=120, trial_count=60)
MAIN = """
from orchestrator.serving import ownership
ownership.LEASE_SECONDS, ownership.RENEW_SECONDS, ownership.LOOK_SECONDS = {lease!r}, {renew!r}, {look!r}
import orchestrator.__main__
"""


class Benchmark(fake_service._Fake):
    """A fake with the turns of the real one."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._leases, self._sessions = Leases(), self
        self.owners: set[str] = set()
        self._at_once = self.most_at_once = 0

    def is_described(self, _: object) -> bool:
        return True

    turn = BenchmarkServicer.turn

    def MeasureArtifact(self, request: Any, /, timeout: float | None = None) -> Any:
        with self._lock:
            self.owners.add(request.lease.owner)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            answer = super().MeasureArtifact(request, timeout)
        finally:
            with self._lock:
                self._at_once -= 1
        answer.waited_seconds = timeout.turn.waited_seconds  # type: ignore[union-attr]  # gRPC hands over its call here
        return answer


@dataclass
class Orchestrator:
    """One process."""

    process: subprocess.Popen[bytes]
    folder: Path

    def _port(self, place: int) -> str:
        file, end = self.folder / "port", time.monotonic() + 60
        while not file.exists():
            is_coming = self.process.poll() is None and time.monotonic() < end
            assert is_coming, (self.folder / "log").read_text()
            time.sleep(0.02)
        return file.read_text().split()[place]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port(0)}"

    @property
    def client(self) -> client.Optimization:
        return dialing.orchestrator_at(self.address)  # type: ignore[return-value]

    def _metrics(self) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port(1)}/metrics") as page:
            lines: list[str] = page.read().decode().splitlines()
        return lines

    def runs_here(self) -> set[str]:
        return {line.split('"')[1] for line in self._metrics() if line.startswith("warpsmith_run_here{")}

    def waits_for_the_archive(self) -> bool:
        (count,) = (line.split()[1] for line in self._metrics() if line.startswith("warpsmith_archive_waiting "))
        return float(count) > 0

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@dataclass
class Pool:
    """The services and the database, and the orchestrators that share them."""

    url: str
    folder: Path
    benchmark: Benchmark
    addresses: dict[str, str]
    started: list[Orchestrator] = field(default_factory=list)

    def start(self, lease: float = 20.0, renew: float = 4.0, look: float = 1.0, **more: str) -> Orchestrator:
        folder = self.folder / str(len(self.started))
        folder.mkdir()
        (folder / "short_lease.py").write_text(MAIN.format(lease=lease, renew=renew, look=look))
        named = {f"WARPSMITH_{name.upper()}_ADDRESS": address for name, address in self.addresses.items()}
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
            "WARPSMITH_DATABASE_URL": self.url,
            "WARPSMITH_PORT": "0",
            "WARPSMITH_METRICS_PORT": "0",
            "WARPSMITH_PORT_FILE": str(folder / "port"),
            "WARPSMITH_PARENT_PID": str(os.getpid()),
        }
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "short_lease"],
                env={**os.environ, **named, **own, **more},
                stdout=log,
                stderr=log,
            )
        self.started.append(Orchestrator(process, folder))
        return self.started[-1]

    def kept(self) -> list[run_pb2.Run]:
        archive = Archive(self.url)
        runs = archive.runs()
        archive.close()
        return runs

    def require_whole(self, run_id: str, heard: list[run_pb2.RunEvent]) -> run_pb2.Run:
        """Nothing was lost, nothing came twice, and the search was made to its end."""
        archive = Archive(self.url)
        run, trials, events = archive.run(run_id), archive.trials(run_id), archive.events(run_id)
        archive.close()
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert heard == events
        assert [trial.number for trial in trials] == list(range(1, len(trials) + 1))
        assert len({trial.candidate.program.digest for trial in trials}) == len(trials) == run.trial_count == 60
        assert {trial.verdict.state for trial in trials} == {verdict_pb2.VERDICT_STATE_PASS}, "no candidate is charged"
        assert run.state == run_pb2.RUN_STATE_FASTER, run.message
        return run


@pytest.fixture
def pool(postgresql: Any, tmp_path: Path) -> Iterator[Pool]:
    with ExitStack() as held:
        addresses, own = {}, Settings(port=0, drain_seconds=0.1)
        space = fake_service.world(0.02)
        benchmark = Benchmark(gains=space.gains, choices=space.choices, floor_ns=1.0, seconds=0.02)
        for name in (*AGENTS, "benchmark"):
            servicer = benchmark if name == "benchmark" else fake_service.world(0.005)
            running = service.start(name, fake_service.ADD[name], servicer, own)
            held.callback(running.stop)
            addresses[name] = f"127.0.0.1:{running.port}"
        made = Pool(postgresql.url("several"), tmp_path, benchmark, addresses)
        yield made
        for each in made.started:
            if each.process.poll() is None:
                each.end(signal.SIGKILL)


def in_thread(orchestrator: client.Optimization, run_id: str) -> tuple[threading.Thread, list[run_pb2.RunEvent]]:
    """Who watches a run to its end, and what it hears."""
    heard: list[run_pb2.RunEvent] = []
    thread = threading.Thread(target=client.follow, args=(orchestrator, run_id, heard.append))
    thread.start()
    return thread, heard


def until(heard: list[run_pb2.RunEvent], trial: int) -> None:
    end = time.monotonic() + 60
    while not any(event.trial.number >= trial for event in list(heard)):
        assert time.monotonic() < end, heard[-1:]
        time.sleep(0.01)


def test_each_answers_for_the_runs_of_all_at_once(pool: Pool) -> None:
    first, second = pool.start(), pool.start()
    run = client.create(first.client, testing.task(), BUDGET, fresh=True)
    lags: list[float] = []
    heard: list[run_pb2.RunEvent] = []

    def hear(event: run_pb2.RunEvent) -> None:
        lags.append(time.time() - event.at)
        heard.append(event)

    client.follow(second.client, run.id, hear)
    pool.require_whole(run.id, heard)
    print(
        f"\nan event is heard at another orchestrator after {sorted(lags)[len(lags) // 2] * 1e3:.1f} ms (median), "
        f"{max(lags) * 1e3:.1f} ms at most, of {len(lags)}"
    )
    assert max(lags[1:]) < 0.9, "before anybody would have looked"
    assert second.client.GetRun(messages.GetRunRequest(run_id=run.id)).run.state == run_pb2.RUN_STATE_FASTER
    assert [each.id for each in second.client.ListRuns(messages.ListRunsRequest()).runs] == [run.id]


def test_a_run_is_stopped_by_another_orchestrator_at_once(pool: Pool) -> None:
    first, second = pool.start(look=60.0), pool.start(look=60.0)
    run = client.create(first.client, testing.task(), run_pb2.Budget(wall_seconds=600), fresh=True)
    thread, heard = in_thread(second.client, run.id)
    until(heard, 2)
    assert first.runs_here() == {run.id}
    assert not second.runs_here()
    queue = second.client.DescribeQueue(messages.DescribeQueueRequest())  # type: ignore[attr-defined]
    assert [each.id for each in queue.runs] == [run.id]
    begin = time.monotonic()
    second.client.CancelRun(messages.CancelRunRequest(run_id=run.id))
    thread.join(60)
    took = time.monotonic() - begin
    print(f"\na run is judged and has ended {took:.2f} s after another orchestrator was asked to stop it")
    assert heard[-1].run.state == run_pb2.RUN_STATE_CANCELLED
    assert took < 3.0, "who would look for it does so once a minute here"


def test_who_asks_another_orchestrator_to_resume_a_run_under_way_watches_it_there(pool: Pool) -> None:
    """And where it was left or stopped, that one goes on with it; of several that are asked at once, one does."""
    first, second, third = pool.start(), pool.start(), pool.start()
    run = client.create(first.client, testing.task(), BUDGET, fresh=True)
    thread, heard = in_thread(second.client, run.id)
    until(heard, 2)
    told = client.resume(second.client, run.id)
    assert (told.id, told.state) == (run.id, run_pb2.RUN_STATE_SEARCHING)
    assert first.runs_here() == {run.id}
    assert not second.runs_here()
    client.cancel(first.client, run.id)
    thread.join(60)
    assert heard[-1].run.state == run_pb2.RUN_STATE_CANCELLED
    with ThreadPoolExecutor(2) as both:
        again = list(both.map(lambda each: client.resume(each.client, run.id), (second, third)))
    assert {each.id for each in again} == {run.id}
    assert not any(each.state == run_pb2.RUN_STATE_CANCELLED for each in again)
    thread, more = in_thread(first.client, run.id)
    thread.join(120)
    pool.require_whole(run.id, more)
    assert sum(event.run.state == run_pb2.RUN_STATE_QUEUED for event in more) == 2, "at its start, and taken up once"
    with pytest.raises(BadInput, match="has ended: "):
        client.resume(third.client, run.id)


def test_limits_count_over_all(pool: Pool) -> None:
    more = {"WARPSMITH_MOST_RUNS": "2"}
    first, second = pool.start(**more), pool.start(**more)
    long = run_pb2.Budget(wall_seconds=600)
    runs = [client.create(each.client, testing.task(), long, fresh=True) for each in (first, second)]
    at_once = Patience(budget_seconds=0.0)
    for each in (first, second):
        stub = service.dial(optimization_service_pb2_grpc.OptimizationServiceStub, each.address, at_once)
        with pytest.raises(LimitReached, match="WARPSMITH_MOST_RUNS"):
            stub.CreateRun(messages.CreateRunRequest(task=testing.task(), budget=long))
    thread, _ = in_thread(first.client, runs[1].id)
    first.client.CancelRun(messages.CancelRunRequest(run_id=runs[1].id))
    thread.join(60)
    client.create(first.client, testing.task(), long, fresh=True)


def test_two_time_in_turns_on_one_device(pool: Pool) -> None:
    orchestrators = pool.start(), pool.start()
    runs = [client.create(each.client, testing.task(), BUDGET, fresh=True) for each in orchestrators]
    watching = [in_thread(each.client, run.id) for each, run in zip(orchestrators, runs, strict=True)]
    for (thread, heard), run in zip(watching, runs, strict=True):
        thread.join(120)
        pool.require_whole(run.id, heard)
    assert len(pool.benchmark.owners) == 2
    assert pool.benchmark.most_at_once == 1
    held = sum(run.stage_seconds["measure"] for run in pool.kept())
    calls = pool.benchmark.calls["MeasureArtifact"]
    assert held < 0.04 * calls, "each pays for its own time, of 0.02 s a call, and not for that of the other"
    ends = [heard[-1].at for _, heard in watching]
    begins = [next(event.at for event in heard if event.trial.number) for _, heard in watching]
    assert max(begins) < min(ends), "neither waits until the other's run has ended"


def test_the_runs_of_one_that_is_killed_are_taken_up_when_its_lease_ends(pool: Pool) -> None:
    first, second = pool.start(3.0, 0.5), pool.start(3.0, 0.5)
    run = client.create(first.client, testing.task(), BUDGET, fresh=True)
    thread, heard = in_thread(second.client, run.id)
    until(heard, 3)
    killed = time.time()
    first.end(signal.SIGKILL)
    thread.join(120)
    pool.require_whole(run.id, heard)
    again = next(event for event in heard if event.run.message.startswith("taken up again"))
    print(f"\ntaken up {again.at - killed:.1f} s after it was killed, of which the lease is 3")
    assert again.at - killed < 3.0 + 2.0
    assert not second.runs_here()


def test_one_that_was_stopped_finds_its_run_another_ones_and_says_no_more(pool: Pool) -> None:
    first, second = pool.start(3.0, 0.5), pool.start(3.0, 0.5)
    run = client.create(first.client, testing.task(), BUDGET, fresh=True)
    thread, heard = in_thread(second.client, run.id)
    until(heard, 3)
    first.process.send_signal(signal.SIGSTOP)
    while not any(event.run.message.startswith("taken up again") for event in list(heard)):
        assert thread.is_alive()
        time.sleep(0.01)
    first.process.send_signal(signal.SIGCONT)
    thread.join(120)
    pool.require_whole(run.id, heard)
    again, told = in_thread(first.client, run.id)
    again.join(60)
    assert told == heard
    end = time.monotonic() + 30
    while first.runs_here():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_rolling_update_interrupts_no_run(pool: Pool) -> None:
    old = [pool.start(), pool.start()]
    ports = ",".join(each.address for each in old)
    runs = [client.create(each.client, testing.task(), BUDGET, fresh=True) for each in old]
    new = [pool.start(), pool.start()]
    everybody = f"ipv4:{ports},{','.join(each.address for each in new)}"
    watching = [in_thread(dialing.orchestrator_at(everybody), run.id) for run in runs]  # type: ignore[arg-type]
    for each in old:
        for _, heard in watching:
            until(heard, 2)
        assert each.end(signal.SIGTERM) == 0
    for (thread, heard), run in zip(watching, runs, strict=True):
        thread.join(120)
        pool.require_whole(run.id, heard)
        numbers = [place for place, event in enumerate(heard) if event.run.message.startswith("left after")]
        gaps = [heard[place + 1].at - heard[place].at for place in numbers]
        print(f"\nhanded over {len(gaps)} times, within {max(gaps, default=0.0):.2f} s")
        assert all(gap < 4.0 for gap in gaps), "a lease, which nobody has to wait for, is 20 s"
    assert sum("left after" in event.run.message for _, heard in watching for event in heard) >= 2


@contextmanager
def locked(_: Any, url: str, *_others: object) -> Iterator[None]:
    """Somebody has all tables for himself; the block begins once an orchestrator waits for one."""
    import psycopg

    with psycopg.connect(url) as connection:
        tables = connection.execute("select tablename from pg_tables where schemaname = 'public'").fetchall()
        connection.execute(f"lock table {', '.join(name for (name,) in tables)} in access exclusive mode".encode())
        waits = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        eventually(lambda: connection.execute(waits.encode()).fetchone()[0] > 0)  # type: ignore[index]
        yield
        connection.rollback()


@contextmanager
def away(postgresql: Any, _: str, orchestrators: list[Orchestrator]) -> Iterator[None]:
    """The server has ended; the block begins once an orchestrator waits for it."""
    postgresql.stop()
    try:
        eventually(lambda: any(each.waits_for_the_archive() for each in orchestrators))
        yield
    finally:
        postgresql.start()


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("fault", [locked, away])
def test_a_database_that_is_locked_or_away_for_a_while_costs_runs_time_and_no_trial(
    pool: Pool, postgresql: Any, fault: Callable[..., AbstractContextManager[None]]
) -> None:
    """`HOLD=60` in the environment has it so for as many seconds more, in which all leases end."""
    orchestrators = [pool.start(), pool.start()]
    runs = [client.create(each.client, testing.task(), BUDGET, fresh=True) for each in orchestrators]
    watching = [in_thread(each.client, run.id) for each, run in zip(reversed(orchestrators), runs, strict=True)]
    for _, heard in watching:
        until(heard, 2)
    with fault(postgresql, pool.url, orchestrators):
        time.sleep(float(os.environ.get("HOLD") or 0))
    for (thread, heard), run in zip(watching, runs, strict=True):
        thread.join(180)
        pool.require_whole(run.id, heard)
