"""Whose a run is: who may stop it and go on with it, what is told of that, and how many a client may have."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.search_run import SearchRun
from orchestrator.servicer import OptimizationServicer
from orchestrator.serving.dialing import orchestrator_at
from orchestrator.serving.hosting import RunHost
from warpsmith import service
from warpsmith.errors import Infrastructure, LimitReached, NotPermitted
from warpsmith.permissions import Caller, Right
from warpsmith.service.admission import Admission
from warpsmith.settings import ClientLimits, Settings
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import optimization_service_pb2_grpc, run_pb2

BUDGET = run_pb2.Budget(wall_seconds=20)


@pytest.fixture
def archive(database_url: str) -> Archive:
    return Archive(database_url)


def test_who_may_run_stops_and_resumes_its_own_runs_and_each_write_is_told(
    archive: Archive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = {
        name: f"{name * 12} {right} {name} vision" for name, right in (("ann", "run"), ("bob", "run"), ("eve", "admin"))
    }
    (tmp_path / "tokens").write_text("\n".join(lines.values()))
    add = optimization_service_pb2_grpc.add_OptimizationServiceServicer_to_server

    def wait(*_: object) -> SearchRun:
        raise Infrastructure("no device")

    settings = Settings(port=0, token_file=tmp_path / "tokens", drain_seconds=0.1)
    server = service.start("orchestrator", add, OptimizationServicer(RunHost(archive, wait)), settings)
    try:
        callers = {}
        for name, line in lines.items():
            (tmp_path / name).write_text(line)
            callers[name] = orchestrator_at(f"127.0.0.1:{server.port}", None, tmp_path / name)
        with caplog.at_level("INFO", "warpsmith.audit"):
            run = client.create(callers["ann"], testing.task(), BUDGET)
            assert (run.user, run.project) == ("ann", "vision")
            request = messages.CancelRunRequest(run_id=run.id[:-2])
            for ask in (callers["bob"].CancelRun, callers["bob"].ResumeRun):
                with pytest.raises(NotPermitted, match=f"^run {run.id} is of ann; bob may not$"):
                    ask(messages.ResumeRunRequest(run_id=run.id) if ask is callers["bob"].ResumeRun else request)
            for name in ("ann", "eve"):
                assert callers[name].CancelRun(request).run.id == run.id
        said = [
            f"CreateRun run={run.id} user=ann",
            f"CancelRun run={run.id} user=ann",
            f"CancelRun run={run.id} user=eve",
        ]
        assert [" ".join(each.getMessage().split()[:3]) for each in caplog.records] == said
    finally:
        server.stop()


def test_one_client_has_so_many_runs_that_have_not_ended_and_others_have_theirs(archive: Archive) -> None:
    release = threading.Event()

    def make_run(*_: object) -> SearchRun:
        release.wait(60)
        raise Infrastructure("released")

    host = RunHost(archive, make_run, may_begin=Admission(ClientLimits(runs=2)).require_run)
    ann, bob = Caller("ann", Right.RUN), Caller("bob", Right.RUN)
    try:
        first, second = (host.create(testing.task(), BUDGET, "", False, ann) for _ in range(2))
        with pytest.raises(LimitReached, match=r"^ann has as many runs that have not ended as one client may, 2 \(W"):
            host.create(testing.task(), BUDGET, "", False, ann)
        assert [run.id for run in host.runs(10, "")] == [second.id, first.id]
        assert host.create(testing.task(), BUDGET, "", False, bob).user == "bob"
        host.cancel(second.id)
        release.set()
        list(testing.heard(host.watch(second.id, 0)))
        assert host.create(testing.task(), BUDGET, "", False, ann).user == "ann"
    finally:
        release.set()
        host.close()
