"""What only a database with a server can do: several orchestrators at once, restarts, addresses that are wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.archiving.tables import OWNERS
from orchestrator.search import Search
from orchestrator.search_run import ENDED, SearchRun
from orchestrator.serving import ownership
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.hosting import RunHost
from orchestrator.serving.ownership import Owner
from orchestrator.serving.story import Story
from orchestrator.walks import Effort
from warpsmith.errors import ArchiveFault, BadInput
from warpsmith.v1 import run_pb2, task_pb2


def host_on(url: str, hosts: list[RunHost]) -> RunHost:
    agents = testing.World().agents()
    gate = DeviceGate(agents.benchmarks)

    def make_run(run: run_pb2.Run, search: Search, story: Story, fresh: bool) -> SearchRun:
        del fresh
        return SearchRun(run, agents, gate, search, story, effort=Effort(retry_pause_seconds=0.0))

    host = RunHost(Archive(url), make_run)
    hosts.append(host)
    return host


def finished(host: RunHost) -> run_pb2.Run:
    task: task_pb2.Task = testing.task()
    run = host.create(task, run_pb2.Budget(wall_seconds=20), "", fresh=True)
    for _ in testing.heard(host.watch(run.id, 0)):
        pass
    return host.run(run.id)


@pytest.mark.postgres
def test_two_orchestrators_on_one_database_keep_their_runs_apart(postgresql: Any) -> None:
    url, hosts, ended = postgresql.url("shared"), [], []
    # Both start on an empty database at once: who comes second must not stumble over the first one's tables.
    starting = [threading.Thread(target=host_on, args=(url, hosts)) for _ in range(2)]
    for each in starting:
        each.start()
    for each in starting:
        each.join(30)
    assert len(hosts) == 2
    running = [threading.Thread(target=lambda host=host: ended.append(finished(host))) for host in 2 * hosts]
    for each in running:
        each.start()
    for each in running:
        each.join(60)
    assert len({run.id for run in ended}) == 4
    reader = Archive(url)
    for run in ended:
        assert run.state in ENDED
        assert run.trial_count > 0
        assert [trial.number for trial in reader.trials(run.id)] == list(range(1, run.trial_count + 1))
        numbers = [event.number for event in reader.events(run.id)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert {host.run(run.id).id for host in hosts} == {run.id}, "each sees the other's runs"
    reader.close()
    for host in hosts:
        host.close()


@pytest.mark.postgres
def test_a_restart_of_the_database_costs_what_falls_into_it_and_nothing_later(postgresql: Any) -> None:
    archive = Archive(postgresql.url("restarted"))
    archive.put_run(run_pb2.Run(id="a", task=testing.task()))
    postgresql.stop()
    try:
        with pytest.raises(ArchiveFault, match=r"(?s)cannot write to postgresql.*stays readable"):
            archive.put_run(run_pb2.Run(id="b", task=testing.task()))
    finally:
        postgresql.start()
    archive.put_run(run_pb2.Run(id="c", task=testing.task()))
    assert {run.id for run in archive.runs()} == {"a", "c"}
    archive.close()


@pytest.mark.postgres
def test_an_owner_that_renews_its_row_no_more_is_dead_after_a_while(postgresql: Any) -> None:
    archive = Archive(postgresql.url("owners"))
    owner = Owner(archive, stays=True)
    assert ownership.is_alive(archive, owner.name)
    with archive.writing() as connection:
        connection.execute(sa.update(OWNERS).values(seen_at=OWNERS.c.seen_at - ownership.LEASE_SECONDS - 1.0))
    assert not ownership.is_alive(archive, owner.name)
    owner.renew()
    assert ownership.is_alive(archive, owner.name)
    owner.close()
    assert not ownership.is_alive(archive, owner.name)
    archive.close()


@pytest.mark.postgres
def test_who_could_not_renew_its_row_takes_nobody_for_dead_before_others_could(
    postgresql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(ownership.time, "monotonic", lambda: now[0])
    archive = Archive(postgresql.url("late"))
    dead = ownership.Owner(archive, stays=True)
    archive.put_run(run_pb2.Run(id="r", state=run_pb2.RUN_STATE_SEARCHING))
    dead.close()
    living = ownership.Owner(archive, stays=True)
    left = [("r", dead.name)]
    assert living.left() == left
    now[0] += ownership.LEASE_SECONDS
    assert living.left() == []
    back = now[0]
    while now[0] < back + ownership.LEASE_SECONDS:
        living.renew()
        assert living.left() == []
        now[0] += ownership.RENEW_SECONDS
    assert living.left() == left
    living.close()
    archive.close()


def test_a_run_is_found_in_postgresql_by_the_beginning_of_its_name(postgresql: Any) -> None:
    archive = Archive(postgresql.url("named"))
    long = testing.task()
    long.name = "a" * 1000
    archive.put_run(run_pb2.Run(id="2026_1", task=long))
    archive.put_run(run_pb2.Run(id="2026x1", task=long))
    assert archive.run("2026_").id == "2026_1", "an underscore is no wildcard"
    archive.close()


def test_a_database_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(ArchiveFault, match=r"postgresql\+psycopg://me:\*\*\*@127.0.0.1:1/runs") as raised:
        Archive("postgresql://me:secret@127.0.0.1:1/runs")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["not a url", "nothing://x"])
def test_a_url_that_means_nothing_is_bad_input(url: str) -> None:
    with pytest.raises(BadInput):
        Archive(url)
