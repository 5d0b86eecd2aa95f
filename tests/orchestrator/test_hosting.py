"""Runs behind OptimizationService, over gRPC: queue, events, cancelling, and an archive that fails."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator import finalists, testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.pipeline import without_bulk
from orchestrator.search import Search
from orchestrator.search.memory import Memory
from orchestrator.search_run import SearchRun
from orchestrator.servicer import OptimizationServicer
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.dialing import orchestrator_at
from orchestrator.serving.hosting import RunHost
from orchestrator.serving.story import Story
from orchestrator.walks import Effort
from warpsmith import service
from warpsmith.errors import ArchiveFault, BadInput, Infrastructure, NotFound, ServiceGone, ServiceLate
from warpsmith.settings import Settings
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import optimization_service_pb2_grpc, run_pb2, trial_pb2

BUDGET = run_pb2.Budget(wall_seconds=20)


@contextmanager
def serving(archive: Archive, world: testing.World) -> Iterator[client.Optimization]:
    agents = world.agents()
    gate = DeviceGate(agents.benchmarks)

    def make_run(run: run_pb2.Run, search: Search, story: Story, fresh: bool) -> SearchRun:
        def known(begun: run_pb2.Run) -> list[object]:
            return [] if fresh else archive.known_moves(begun)

        return SearchRun(
            run, agents, gate, search, story, memory=Memory(moves=known), effort=Effort(retry_pause_seconds=0.0)
        )

    servicer = OptimizationServicer(RunHost(archive, make_run))
    add = optimization_service_pb2_grpc.add_OptimizationServiceServicer_to_server
    server = service.start("orchestrator", add, servicer, Settings(port=0))
    try:
        yield orchestrator_at(f"127.0.0.1:{server.port}")
    finally:
        server.stop()


@pytest.fixture
def archive(database_url: str) -> Archive:
    return Archive(database_url)


def watched(orchestrator: client.Optimization, run: run_pb2.Run) -> tuple[run_pb2.Run, list[run_pb2.RunEvent]]:
    events: list[run_pb2.RunEvent] = []
    return client.follow(orchestrator, run.id, events.append), events


def test_a_run_is_created_watched_listed_and_read_again(archive: Archive) -> None:
    with serving(archive, testing.World()) as orchestrator:
        run, events = watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET))
        assert run.state == run_pb2.RUN_STATE_FASTER
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert not any(event.run.task.sources for event in events)
        listed = orchestrator.ListRuns(messages.ListRunsRequest()).runs
        assert [each.id for each in listed] == [run.id]
        trials = orchestrator.ListTrials(messages.ListTrialsRequest(run_id="last")).trials
        assert len(trials) == run.trial_count
        assert not any(trial.candidate.program.sources for trial in trials)
        with_sources = orchestrator.ListTrials(messages.ListTrialsRequest(run_id=run.id, with_sources=True)).trials
        assert all(trial.candidate.program.sources for trial in with_sources)


def test_a_second_run_of_a_task_begins_with_what_the_first_found(archive: Archive) -> None:
    with serving(archive, testing.World()) as orchestrator:
        watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET))
        second, _ = watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET))
        trials = orchestrator.ListTrials(messages.ListTrialsRequest(run_id=second.id)).trials
        assert any(trial.hypothesis.source == "archive" for trial in trials[:3])
        third, _ = watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET, fresh=True))
        trials = orchestrator.ListTrials(messages.ListTrialsRequest(run_id=third.id)).trials
        assert not any(trial.hypothesis.source == "archive" for trial in trials)


def test_a_run_of_another_task_of_the_same_shape_begins_with_what_won_the_first(archive: Archive) -> None:
    with serving(archive, testing.World()) as orchestrator:
        first, _ = watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET))
        second, _ = watched(orchestrator, client.create(orchestrator, testing.task("edited"), BUDGET))
        assert first.shape_digest == second.shape_digest != ""
        assert first.task.digest != second.task.digest
        trials = orchestrator.ListTrials(messages.ListTrialsRequest(run_id=second.id)).trials
        known = [trial.hypothesis.moves for trial in trials if trial.hypothesis.source == "archive"]  # as they ended
        assert first.best.candidate.moves in known


def test_queued_runs_wait_their_turn_and_can_be_cancelled_before_it(archive: Archive) -> None:
    with serving(archive, testing.World(seconds=0.2)) as orchestrator:
        first = client.create(orchestrator, testing.task("first"), BUDGET)
        second = client.create(orchestrator, testing.task("second"), BUDGET)
        orchestrator.CancelRun(messages.CancelRunRequest(run_id=second.id))
        orchestrator.CancelRun(messages.CancelRunRequest(run_id=first.id))
        assert watched(orchestrator, first)[0].state == run_pb2.RUN_STATE_CANCELLED
        ended, _ = watched(orchestrator, second)
        assert (ended.state, ended.trial_count) == (run_pb2.RUN_STATE_CANCELLED, 0)


def test_what_is_unknown_or_malformed_is_refused(archive: Archive) -> None:
    with serving(archive, testing.World()) as orchestrator:
        with pytest.raises(NotFound, match="no run 'nothing'"):
            orchestrator.GetRun(messages.GetRunRequest(run_id="nothing"))
        with pytest.raises(NotFound, match="no run 'nothing'"):
            list(orchestrator.WatchRun(messages.WatchRunRequest(run_id="nothing")))
        with pytest.raises(
            BadInput, match="no search is called 'magic'; installed: beam, evolution, exhaustive, random"
        ):
            client.create(orchestrator, testing.task(), BUDGET, "magic")
        tampered = testing.task()
        tampered.sources[0].content += b"#"
        with pytest.raises(BadInput, match="digest"):
            client.create(orchestrator, tampered, BUDGET)


def test_a_run_without_a_faster_kernel_has_nothing_to_export(archive: Archive) -> None:
    with serving(archive, testing.World(gains={"author": 0.5})) as orchestrator:
        run, _ = watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET))
        with pytest.raises(NotFound, match="nothing faster"):
            orchestrator.ExportBest(messages.ExportBestRequest(run_id=run.id))
        with pytest.raises(BadInput, match=r"installed: .*kernelbench, module"):
            orchestrator.ExportBest(messages.ExportBestRequest(run_id=run.id, flavour="fortran"))


def test_trials_come_in_pages_of_a_mebibyte_also_from_a_server_that_knows_none(archive: Archive) -> None:
    with serving(archive, testing.World()) as orchestrator:
        run = client.create(orchestrator, testing.task(), BUDGET)
        ended, _ = watched(orchestrator, run)
        for number in range(ended.trial_count + 1, ended.trial_count + 10):
            large = trial_pb2.Trial(number=number)
            large.candidate.program.sources.add(name="k.cpp", text="x" * 400_000)
            archive.add_trial(run.id, large)
        host = RunHost(archive, lambda *_: None)  # type: ignore[arg-type,return-value]
        servicer = OptimizationServicer(host)

        def page(after: int, limit: int) -> list[int]:
            asked = messages.ListTrialsRequest(run_id=run.id, with_sources=True, after=after, limit=limit)
            found = servicer.ListTrials(asked, None)
            assert not limit or found.ByteSize() < (1 << 20) + 1000
            return [each.number for each in found.trials]

        last = ended.trial_count + 9
        assert page(0, 0) == list(range(1, last + 1))
        assert page(last - 4, 9) == [last - 3, last - 2]
        assert page(last - 1, 9) == [last]
        assert page(last, 9) == []
        reader: Any = client.InProcess(archive)
        assert [each.number for each in client.trials(reader, run.id)] == list(range(1, last + 1))
        assert len(client.trial(reader, run.id, last).candidate.program.sources[0].text) == 400_000  # type: ignore[union-attr]
        assert client.trial(reader, run.id, last + 1) is None

        class Earlier:
            def ListTrials(self, request: messages.ListTrialsRequest, timeout: float) -> messages.ListTrialsResponse:
                del timeout
                return servicer.ListTrials(messages.ListTrialsRequest(run_id=request.run_id), None)

        earlier: Any = Earlier()
        assert [each.number for each in client.trials(earlier, run.id)] == list(range(1, last + 1))
        assert client.trial(earlier, run.id, 2).number == 2  # type: ignore[union-attr]
        host.close()


def test_runs_come_in_pages_of_a_mebibyte_also_from_a_server_that_knows_none(archive: Archive) -> None:
    for number in range(1, 8):
        large = run_pb2.Run(id=f"run-{number}", task=testing.task(), created_at=float(number))
        large.best.candidate.program.sources.add(name="k.cpp", text="x" * 400_000)
        archive.put_run(large)
    servicer = OptimizationServicer(RunHost(archive, lambda *_: None))  # type: ignore[arg-type,return-value]
    page = servicer.ListRuns(messages.ListRunsRequest(limit=50), None)
    assert [run.id for run in page.runs] == ["run-7", "run-6"]
    assert len(servicer.ListRuns(messages.ListRunsRequest(limit=50, light=True), None).runs) == 7

    class Earlier:
        def ListRuns(self, request: messages.ListRunsRequest, timeout: float) -> messages.ListRunsResponse:
            del timeout
            return messages.ListRunsResponse(runs=archive.runs(request.limit))

    for server in (client.InProcess(archive), Earlier()):
        reader: Any = server
        assert [run.id for run in client.latest(reader, 50)] == [f"run-{number}" for number in range(7, 0, -1)]
        assert [run.id for run in client.latest(reader, 4)] == ["run-7", "run-6", "run-5", "run-4"]
    servicer.close()


def test_a_full_disk_ends_the_run_and_its_watchers_hear_why(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    add_trial = archive.add_trial

    def full(run_id: str, trial: trial_pb2.Trial, event: run_pb2.RunEvent, epoch: int) -> None:
        if trial.number >= 3:
            raise ArchiveFault("cannot write: the disk is full; what was found so far stays readable")
        add_trial(run_id, trial, event, epoch)

    monkeypatch.setattr(archive, "add_trial", full)
    with serving(archive, testing.World()) as orchestrator:
        run, _ = watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET))
        assert run.state == run_pb2.RUN_STATE_FAILED
        assert "disk is full" in run.message
        assert len(archive.trials(run.id)) == 2


def test_of_a_search_under_way_every_trial_is_kept_and_its_counts_now_and_then(archive: Archive) -> None:
    run = run_pb2.Run(id="one", task=testing.task(), state=run_pb2.RUN_STATE_PREPARING)
    archive.put_run(run)
    story = Story(archive, run)
    story.run_changed(run)
    run.state = run_pb2.RUN_STATE_SEARCHING
    for number in range(1, 21):
        story.trial_ended(trial_pb2.Trial(number=number))
        run.trial_count = number
        story.run_changed(run)
        assert story.run.trial_count == number, "who asks is told"
    run.state = run_pb2.RUN_STATE_FINISHING
    story.run_changed(run)
    assert len(archive.trials("one")) == 20
    assert archive.run("one").trial_count == 20
    told = [event.run for event in archive.events("one") if event.HasField("run")]
    assert len(told) < 10
    states = [run_pb2.RUN_STATE_PREPARING, run_pb2.RUN_STATE_SEARCHING, run_pb2.RUN_STATE_FINISHING]
    assert sorted({each.state for each in told}) == states
    archive.close()


def test_watchers_are_told_what_the_archive_has(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_pb2.Run(id="one", task=testing.task(), state=run_pb2.RUN_STATE_PREPARING)
    archive.put_run(run)
    story = Story(archive, run)
    told_count: list[int] = []
    for name in ("add_trial", "put_run"):
        kept = getattr(archive, name)
        monkeypatch.setattr(
            archive, name, lambda *given, kept=kept: (told_count.append(len(story.events)), kept(*given))
        )
    story.run_changed(run)
    story.trial_ended(trial_pb2.Trial(number=1))
    assert told_count == [0, 1]
    assert archive.events("one") == story.events
    archive.close()


def test_interrupting_a_watched_run_asks_it_to_stop_and_keeps_the_best(archive: Archive) -> None:
    with serving(archive, testing.World(seconds=0.1)) as orchestrator:
        run = client.create(orchestrator, testing.task(), BUDGET)

        def interrupt(event: run_pb2.RunEvent) -> None:
            if event.trial.timing.faster:
                raise KeyboardInterrupt

        told: list[str] = []
        ended = client.follow(
            orchestrator, run.id, interrupt, to_cancel=[run.id], on_interrupt=lambda: told.append("stopping")
        )
        assert told == ["stopping"]
        assert ended.state == run_pb2.RUN_STATE_CANCELLED
        assert ended.best.timing.faster


class Breaking:
    """A server of a run of five events, from which connections break."""

    def __init__(self, lasting: Sequence[int]) -> None:
        self.lasting = list(lasting)
        self.asked: list[int] = []

    def WatchRun(self, request: messages.WatchRunRequest) -> Iterator[messages.WatchRunResponse]:
        self.asked.append(request.after)
        events = [run_pb2.RunEvent(number=number) for number in range(request.after + 1, 6)]
        lasts = self.lasting.pop(0)
        yield from (messages.WatchRunResponse(event=event) for event in events[:lasts])
        if lasts < len(events):
            raise ServiceGone("WatchRun: UNAVAILABLE: Stream removed")

    def GetRun(self, request: messages.GetRunRequest, timeout: float) -> messages.GetRunResponse:  # noqa: ARG002 (its name)
        return messages.GetRunResponse(run=run_pb2.Run(id=request.run_id))


def test_a_watch_whose_connection_breaks_goes_on_from_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0.0, 0.0))
    seen: list[int] = []
    server = Breaking([0, 2, 0, 1, 0, 9])
    assert client.follow(server, "r", lambda event: seen.append(event.number)).id == "r"
    assert (seen, server.asked) == ([1, 2, 3, 4, 5], [0, 0, 2, 2, 3, 3])
    with pytest.raises(ServiceGone):
        client.follow(Breaking([2, 0, 0, 0, 9]), "r", lambda _: None)


def test_who_watches_hears_once_that_the_orchestrator_is_away_and_that_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0.0,) * 5)
    told: list[str] = []
    looked: list[int] = []

    def follow(lasting: list[int]) -> None:
        told.clear()
        looked.clear()
        client.follow(Breaking(lasting), "r", lambda _: None, note=told.append, check=lambda: looked.append(1))

    follow([2, 0, 0, 0, 1, 9])
    assert told == ["the orchestrator is away: waiting for it, 0 s at most", "the orchestrator is back"]
    assert len(looked) == 5
    follow([2, 9])
    assert told == [], "a connection that ends by its age is nothing to tell of"


def test_a_watch_whose_orchestrator_stands_still_at_the_end_still_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0.0, 0.0))
    silent = [True]

    class Stopped(Breaking):
        def GetRun(self, request: messages.GetRunRequest, timeout: float) -> messages.GetRunResponse:
            if silent.pop():
                silent.append(False)
                raise ServiceLate("GetRun: DEADLINE_EXCEEDED")
            return super().GetRun(request, timeout)

    seen: list[int] = []
    assert client.follow(Stopped([9, 9]), "r", lambda event: seen.append(event.number)).id == "r"
    assert (seen, silent) == ([1, 2, 3, 4, 5], [])


def test_a_stop_that_was_asked_for_while_the_orchestrator_was_away_reaches_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0.0,) * 5)
    stopped: list[str] = []

    class Stoppable(Breaking):
        def CancelRun(self, request: messages.CancelRunRequest, timeout: float) -> messages.CancelRunResponse:  # noqa: ARG002
            if not stopped:
                stopped.append("away")
                raise ServiceGone("CancelRun: UNAVAILABLE")
            stopped.append(request.run_id)
            return messages.CancelRunResponse()

    def interrupt(event: run_pb2.RunEvent) -> None:
        if event.number == 2:
            raise KeyboardInterrupt

    client.follow(Stoppable([9, 9, 9]), "r", interrupt, to_cancel=["a", "b"])
    assert stopped == ["away", "a", "b"]

    def sleep(_: float) -> None:
        if pressed:
            raise pressed.pop()

    pressed = [KeyboardInterrupt()]
    monkeypatch.setattr(client.time, "sleep", sleep)
    client.follow(Stoppable([0, 9]), "r", lambda _: None, to_cancel=["c"])
    assert stopped[3:] == ["c"], "also while it waits"


def test_past_runs_are_read_without_a_server(tmp_path: Path) -> None:
    archive = Archive.in_directory(tmp_path)
    with serving(archive, testing.World()) as orchestrator:
        run, events = watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET))
    with client.reading("", tmp_path) as reader:
        assert reader.GetRun(messages.GetRunRequest(run_id="last"), timeout=1.0).run.id == run.id
        again = [reply.event for reply in reader.WatchRun(messages.WatchRunRequest(run_id=run.id))]
    assert [event.number for event in again] == [event.number for event in events]


def test_watchers_of_a_run_in_which_nothing_happens_hold_no_thread(archive: Archive) -> None:
    release = threading.Event()

    def make_run(*_: object) -> SearchRun:
        release.wait(60)
        raise Infrastructure("released")

    servicer = OptimizationServicer(RunHost(archive, make_run))
    add = optimization_service_pb2_grpc.add_OptimizationServiceServicer_to_server
    server = service.start("orchestrator", add, servicer, Settings(port=0, thread_count=4))
    try:
        orchestrator = orchestrator_at(f"127.0.0.1:{server.port}")
        run = client.create(orchestrator, testing.task(), BUDGET)
        request = messages.WatchRunRequest(run_id=run.id)
        watches = [iter(orchestrator.WatchRun(request)) for _ in range(64)]
        for watch in watches:
            assert next(watch).event.number == 1
        assert orchestrator.GetRun(messages.GetRunRequest(run_id=run.id), timeout=5.0).run.id == run.id
        assert service.wait_until_healthy(f"127.0.0.1:{server.port}", 5.0)
        for watch in watches[1:]:
            watch.close()  # type: ignore[attr-defined]
        release.set()
        assert next(watches[0]).event.run.message == "released"
    finally:
        release.set()
        server.stop()


def test_an_ended_run_leaves_memory_and_is_told_by_the_archive_as_it_was(archive: Archive) -> None:
    agents = testing.World().agents()
    gate, told, made = DeviceGate(agents.benchmarks), [], []

    def make_run(run: run_pb2.Run, search: Search, story: Story, _: bool) -> SearchRun:
        conductor = SearchRun(run, agents, gate, search, story, effort=Effort(retry_pause_seconds=0.0))
        told.append(story)
        made.append(weakref.ref(conductor))
        return conductor

    host = RunHost(archive, make_run)
    run_id = host.create(testing.task(), BUDGET, "", fresh=True).id
    watched_events = list(testing.heard(host.watch(run_id, 0)))
    end = time.monotonic() + 20.0
    while (host._stories or made[0]() is not None) and time.monotonic() < end:
        time.sleep(0.02)
        gc.collect()
    assert (host._stories, made[0]()) == ({}, None)
    story = told[0]
    assert watched_events == story.events == list(testing.heard(host.watch(run_id, 0))) == archive.events(run_id)
    assert list(testing.heard(host.watch(run_id, 3))) == archive.events(run_id, 3) == story.events[3:]
    assert host.trials(run_id, with_programs=False) == list(map(without_bulk, story.trials)) != []
    assert host.run(run_id) == host.cancel(run_id) == host.runs(0, "")[0] == story.run
    host.close()


def test_programs_are_held_of_those_that_may_be_finalists_and_read_of_all(archive: Archive) -> None:
    def has_sources(trial: trial_pb2.Trial | None) -> bool:
        return trial is not None and bool(trial.candidate.program.sources)

    agents, stories, read = testing.World().agents(), [], []
    gate = DeviceGate(agents.benchmarks)

    def make_run(run: run_pb2.Run, search: Search, story: Story, _: bool) -> SearchRun:
        stories.append(story)
        return SearchRun(run, agents, gate, search, story, effort=Effort(retry_pause_seconds=0.0))

    host = RunHost(archive, make_run)
    reader: Any = OptimizationServicer(host)
    asked = host.create(testing.task(), BUDGET, "", fresh=True).id
    for event in testing.heard(host.watch(asked, 0)):
        if event.HasField("trial"):
            request = messages.ListTrialsRequest(run_id=asked, with_sources=True, limit=100)
            read.append(list(map(has_sources, reader.ListTrials(request, None).trials)))
            assert len(read[-1]) >= event.trial.number
    assert all(map(all, read))
    assert len(read[-1]) == 8
    held = [trial.number for trial in stories[0].trials if has_sources(trial)]
    assert len(held) == finalists.COUNT
    assert host.run(asked).best_trial in held
    host.close()


def test_of_an_ended_run_what_the_archive_could_not_take_stays_readable(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise ArchiveFault("cannot write: the disk is full")

    monkeypatch.setattr(archive, "add_trial", full)
    with serving(archive, testing.World()) as orchestrator:
        run, _ = watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET))
        watched(orchestrator, client.create(orchestrator, testing.task(), BUDGET))  # by now the first is done with
        trials = orchestrator.ListTrials(messages.ListTrialsRequest(run_id=run.id)).trials
        assert [trial.number for trial in trials] == [1]
        assert archive.trials(run.id) == []
