"""Runs that an orchestrator has left, taken up by the next: from where they were, once, and by one alone."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import cli, client
from orchestrator.search import Search
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving import hosting, ownership, taking_up
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.hosting import RunHost
from orchestrator.serving.ownership import Owner
from orchestrator.serving.story import Story
from orchestrator.walks import Effort
from warpsmith.errors import BadInput, NotFound, RunLost, ServiceGone
from warpsmith.v1 import (
    benchmark_service_pb2,
    run_pb2,
    timing_pb2,
    trial_pb2,
)

EFFORT = Effort(parallel_trials=2, retry_pause_seconds=0.0, settle_seconds=5.0)


class Dead(BaseException):
    """The orchestrator ends here."""


@dataclasses.dataclass
class Cut(Story):
    """A story at an event of which its orchestrator dies: the archive has it, and nothing after it."""

    dies_at: Callable[[run_pb2.RunEvent], bool] = lambda _: False
    is_dead: bool = False

    @contextmanager
    def _telling(self, event: run_pb2.RunEvent, remember: Callable[[], None]) -> Iterator[run_pb2.RunEvent]:
        if self.is_dead:
            raise Dead
        with super()._telling(event, remember) as told:
            yield told
        self.is_dead = self.dies_at(event)
        if self.is_dead:
            raise Dead


def at_trial(number: int) -> Callable[[run_pb2.RunEvent], bool]:
    return lambda event: event.trial.number == number


def in_state(state: run_pb2.RunState.ValueType) -> Callable[[run_pb2.RunEvent], bool]:
    return lambda event: event.run.state == state


@pytest.fixture
def archive(database_url: str) -> Iterator[Archive]:
    made = Archive(database_url)
    yield made
    made.close()


def database_url_of(archive: Archive) -> str:
    return archive._engine.url.render_as_string(hide_password=False)


def left(
    archive: Archive,
    dies_at: Callable[[run_pb2.RunEvent], bool] | None,
    world: testing.World | None = None,
    owner: Owner | None = None,
    **fields: object,
) -> run_pb2.Run:
    """A run whose orchestrator died at an event; None: before it began."""
    owner = owner or Owner(archive, stays=True)
    run = run_pb2.Run(task=testing.task(), state=run_pb2.RUN_STATE_QUEUED, plugins={"search": "beam"}, fresh=True)
    run.MergeFrom(run_pb2.Run(**{"id": "left", "created_at": 1.0, **fields}))  # type: ignore[arg-type]
    archive.put_run(run)
    story = Cut(archive, run, dies_at=dies_at or (lambda _: False))
    story.run_changed(run)
    if dies_at is not None:
        agents = (world or testing.World()).agents()
        begun = run_pb2.Run()
        begun.CopyFrom(run)
        with pytest.raises(Dead):
            SearchRun(begun, agents, DeviceGate(agents.benchmarks), Beam(), story, effort=EFFORT).execute()
    owner.close()
    archive.owner = ""
    return archive.run(run.id)


def left_again(archive: Archive, dies_at: Callable[[run_pb2.RunEvent], bool]) -> None:
    """The run taken up by an orchestrator that dies at a later event."""
    owner = Owner(archive, stays=True)
    ((run_id, before),) = owner.left()
    story = taking_up.taken_up(archive, owner, run_id, before)
    assert not taking_up.why_never(story)
    run = taking_up.queued(story)
    mortal = Cut(archive, run, story.first, story.trials, story.attempt, dies_at=dies_at)
    agents = testing.World().agents()
    gate = DeviceGate(agents.benchmarks)
    with pytest.raises(Dead):
        SearchRun(run, agents, gate, Beam(), mortal, effort=EFFORT, past=tuple(story.trials)).execute()
    owner.close()
    archive.owner = ""


@contextmanager
def hosted(archive: Archive, world: testing.World, *, stays: bool = True) -> Iterator[RunHost]:
    """An orchestrator, as the servicer makes one, from its start to its end."""
    agents = world.agents()
    gate = DeviceGate(agents.benchmarks)

    def make_run(run: run_pb2.Run, search: Search, story: Story, _: bool) -> SearchRun:
        past = tuple(story.trials) if story.attempt else None
        return SearchRun(run, agents, gate, search, story, effort=EFFORT, past=past)

    reader = Archive(database_url_of(archive))
    host = RunHost(reader, make_run, 1, Owner(reader, stays=stays))
    try:
        yield host
    finally:
        host.close()


def ended(host: RunHost, run_id: str = "left") -> run_pb2.Run:
    """A run, once it has ended."""
    list(testing.heard(host.watch(run_id, 0)))
    return host.run(run_id)


def test_a_search_goes_on_after_the_trials_that_there_are(archive: Archive) -> None:
    before = left(archive, at_trial(3))
    heard = archive.events("left")
    with hosted(archive, world := testing.World()) as host:
        run = ended(host)
        events = list(testing.heard(host.watch("left", 0)))
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert events[: len(heard)] == heard
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert events[len(heard)].run.message == "taken up again after 3 trials"
    assert run.trial_count == run.pass_count == 8
    trials = archive.trials("left")
    assert [trial.number for trial in trials] == list(range(1, 9))
    assert len({trial.candidate.program.digest for trial in trials}) == 8
    assert world.calls["VerifyArtifact"] == 5 + 1, "those that were left to try, and a final"
    assert before.trial_count <= 3


def test_what_was_spent_stays_spent(archive: Archive) -> None:
    class Writing(testing.World):
        def SynthesizeCandidate(self, request, /, timeout=None):  # type: ignore[no-untyped-def]
            reply = super().SynthesizeCandidate(request, timeout)
            reply.model_tokens = 100
            return reply

    left(archive, at_trial(3), Writing(seconds=0.02), budget=run_pb2.Budget(wall_seconds=60, trial_count=5))
    spent = archive.trials("left")[-1].spent
    assert spent.model_tokens >= 300
    assert 0.06 < spent.device_seconds < spent.wall_seconds * 2
    with hosted(archive, Writing()) as host:
        run = ended(host)
    assert run.trial_count == 5
    assert 500 <= run.model_tokens <= 300 + 100 * 7
    assert run.spent.wall_seconds > spent.wall_seconds
    assert run.spent.device_seconds > spent.device_seconds
    assert len(run.phase_seconds) == 3


@pytest.mark.parametrize(
    "budget",
    [
        run_pb2.Budget(wall_seconds=0.05),
        run_pb2.Budget(device_seconds=0.05, wall_seconds=60),
        run_pb2.Budget(trial_count=3, wall_seconds=60),
    ],
)
def test_a_budget_that_was_spent_is_not_spent_again(archive: Archive, budget: run_pb2.Budget) -> None:
    left(archive, at_trial(3), testing.World(seconds=0.05), budget=run_pb2.Budget(wall_seconds=60))
    run = archive.run("left")
    run.budget.CopyFrom(budget)
    archive.owner = ownership.owner_of(archive, "left")
    archive.put_run(run)
    archive.owner = ""
    with hosted(archive, testing.World()) as host:
        assert ended(host).trial_count == 3
        assert host.run("left").state == run_pb2.RUN_STATE_FASTER


def test_a_run_that_was_finishing_only_finishes(archive: Archive) -> None:
    left(archive, in_state(run_pb2.RUN_STATE_FINISHING), budget=run_pb2.Budget(wall_seconds=60))
    left_again(archive, in_state(run_pb2.RUN_STATE_FINISHING))
    with hosted(archive, world := testing.World()) as host:
        run = ended(host)
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert world.calls["ProposeHypotheses"] == world.calls["SynthesizeCandidate"] == 0
    states = [event.run.state for event in archive.events("left")]
    assert states.count(run_pb2.RUN_STATE_SEARCHING) == 1


def test_what_a_run_knows_of_its_baselines_is_not_measured_anew(archive: Archive) -> None:
    left(archive, at_trial(2))
    with hosted(archive, world := testing.World()) as host:
        ended(host)
    assert [arm.kind for arm in world.known_references[0].arms] == [
        timing_pb2.ARM_KIND_EAGER,
        timing_pb2.ARM_KIND_COMPILE,
    ]


def test_queued_runs_are_queued_in_the_order_in_which_they_came(archive: Archive) -> None:
    for number, name in ((3.0, "c"), (1.0, "a"), (2.0, "b")):
        left(archive, None, id=name, created_at=number)
    with hosted(archive, testing.World(seconds=0.01)) as host:
        for name in "abc":
            assert ended(host, name).state == run_pb2.RUN_STATE_FASTER
    begun = {name: next(e.at for e in archive.events(name) if e.run.state == 2) for name in "abc"}
    assert sorted(begun, key=lambda name: begun[name]) == ["a", "b", "c"]


def test_a_run_that_its_user_stopped_is_judged_and_searched_no_more(archive: Archive) -> None:
    owner = Owner(archive, stays=True)
    dying = at_trial(3)

    def stop(event: run_pb2.RunEvent) -> bool:
        if dying(event):
            owner.note("left", stop_asked=1)
        return dying(event)

    left(archive, stop, owner=owner)
    with hosted(archive, testing.World()) as host:
        run = ended(host)
    assert run.state == run_pb2.RUN_STATE_CANCELLED
    assert (run.trial_count, run.best.timing.faster) == (3, True)


def test_of_two_orchestrators_one_takes_a_run_and_none_takes_what_lives(archive: Archive) -> None:
    left(archive, at_trial(2), id="dead")
    living = Owner(archive, stays=True)
    archive.put_run(run_pb2.Run(id="living", task=testing.task(), state=run_pb2.RUN_STATE_SEARCHING))
    others = [Archive(database_url_of(archive)) for _ in range(2)]
    owners = [Owner(each, stays=True) for each in others]
    assert [owner.left() for owner in owners] == [[("dead", ownership.owner_of(archive, "dead"))]] * 2
    before = ownership.owner_of(archive, "dead")
    taken = Counter[str]()

    def take(owner: Owner) -> None:
        try:
            owner.take("dead", before)
            taken["by one"] += 1
        except RunLost:
            taken["not"] += 1

    threads = [threading.Thread(target=take, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == {"by one": 1, "not": 1}
    for each in (living, *owners):
        each.close()
    for each in others:
        each.close()


def test_who_has_lost_a_run_writes_no_more_of_it(archive: Archive) -> None:
    old = Owner(archive, stays=True)
    run = run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_SEARCHING)
    archive.put_run(run)
    story = Story(archive, run)
    story.trial_ended(trial_pb2.Trial(number=1))
    other = Archive(database_url_of(archive))
    new = Owner(other, stays=True)
    new.take("r", old.name)
    for say in (lambda: story.trial_ended(trial_pb2.Trial(number=2)), lambda: story.run_changed(run)):
        with pytest.raises(RunLost):
            say()
    with pytest.raises(ServiceGone):
        list(testing.heard(story.follow(0)))
    assert len(archive.trials("r")) == len(archive.events("r")) == len(story.trials) == 1
    for owner in (old, new):
        owner.close()
    other.close()


def test_a_run_of_one_command_waits_until_it_is_resumed(archive: Archive) -> None:
    left(archive, at_trial(3), owner=Owner(archive, stays=False))
    with hosted(archive, testing.World()) as host:
        assert host.under_way() == []
        assert "`warpsmith resume left` goes on with it" in host.run("left").message
        with pytest.raises(NotFound, match="warpsmith resume left"):
            list(testing.heard(host.watch("left", 0)))
        assert host.resume("left").message == "taken up again after 3 trials"
        assert ended(host).trial_count == 8
        with pytest.raises(BadInput, match="has ended: "):
            host.resume("left")


@pytest.mark.parametrize("stays", [True, False])
def test_a_run_of_one_command_that_is_gone_is_cancelled_at_once_and_can_be_resumed(
    archive: Archive, stays: bool
) -> None:
    left(archive, at_trial(4), owner=Owner(archive, stays=False))
    with hosted(archive, world := testing.World(), stays=stays) as host:
        stopped = host.cancel("left")
        assert stopped == archive.run("left") == host.cancel("left")
        assert (stopped.state, stopped.awaits_resume) == (run_pb2.RUN_STATE_CANCELLED, False)
        assert stopped.message.startswith("stopped by the user after its orchestrator had ended")
        assert (stopped.best_trial > 0, stopped.best.timing.faster) == (True, False)
        assert stopped.best.candidate.program.sources
        assert [event.number for event in archive.events("left")] == list(range(1, len(archive.events("left")) + 1))
        assert not world.calls["VerifyArtifact"]
        host.resume("left")
        assert ended(host).state == run_pb2.RUN_STATE_FASTER


def test_who_cancels_a_run_that_is_taken_up_unasked_has_its_best_judged(archive: Archive) -> None:
    left(archive, at_trial(3))
    owner = Owner(archive, stays=True)
    asked = taking_up.cancelled(archive, owner, archive.run("left"))
    assert (asked.state, asked.message) == (
        run_pb2.RUN_STATE_SEARCHING,
        "left when its orchestrator ended: the next one takes it up by itself",
    )
    assert not asked.awaits_resume
    owner.close()
    archive.owner = ""
    with hosted(archive, testing.World()) as host:
        run = ended(host)
    assert run.state == run_pb2.RUN_STATE_CANCELLED
    assert (run.trial_count, run.best.timing.faster) == (3, True)


def test_a_run_that_is_under_way_elsewhere_is_cancelled_there(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "RENEW_SECONDS", 0.05)
    endless = testing.World(choices={"author": [f"c{number}" for number in range(10_000)]}, seconds=0.01)
    with hosted(archive, endless) as host, hosted(archive, testing.World()) as other:
        run = host.create(testing.task(), run_pb2.Budget(wall_seconds=600), "exhaustive", fresh=True)
        for event in testing.heard(host.watch(run.id, 0)):
            if event.trial.number == 2:
                assert other.cancel(run.id).id == run.id
        assert host.run(run.id).state == run_pb2.RUN_STATE_CANCELLED


def test_who_reads_a_directory_sees_whether_the_orchestrator_of_a_run_lives(tmp_path: Path) -> None:
    archive = Archive.in_directory(tmp_path)
    owner = Owner(archive, stays=False)
    archive.put_run(run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_SEARCHING, message="searching"))
    with client.reading("", tmp_path) as orchestrator:
        assert client.latest(orchestrator, 9)[0].message == "searching"
        owner.close()
        (run,) = client.latest(orchestrator, 9)
    assert (run.message, run.awaits_resume) == (
        "left when its orchestrator ended: `warpsmith resume r` goes on with it",
        True,
    )
    archive.close()


def test_warpsmith_cancel_ends_what_was_left_where_no_orchestrator_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = Archive.in_directory(tmp_path)
    for stays in (False, True):
        left(archive, at_trial(2), owner=Owner(archive, stays=stays), id=f"left-{stays}")
        monkeypatch.setattr("sys.argv", ["warpsmith", "cancel", f"left-{stays}", "--runs", str(tmp_path)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert (exited.value.code, capsys.readouterr().out) == (0, f"left-{stays}: CANCELLED\n")
        assert archive.run(f"left-{stays}").state == run_pb2.RUN_STATE_CANCELLED
    archive.close()


def test_a_run_that_was_cancelled_can_be_resumed_while_its_budget_lasts(archive: Archive) -> None:
    world = testing.World(seconds=0.03)
    with hosted(archive, world) as host:
        run = host.create(testing.task(), run_pb2.Budget(wall_seconds=60, trial_count=6), "", fresh=True)
        for event in testing.heard(host.watch(run.id, 0)):
            if event.trial.number == 2:
                host.cancel(run.id)
        stopped = host.run(run.id)
        assert stopped.state == run_pb2.RUN_STATE_CANCELLED
        assert stopped.trial_count < 6
        host.resume(run.id)
        again = ended(host, run.id)
        assert (again.state, again.trial_count) == (run_pb2.RUN_STATE_FASTER, 6)
    kept = archive.run(run.id)
    kept.state = run_pb2.RUN_STATE_CANCELLED
    archive.owner = ownership.owner_of(archive, run.id)
    archive.put_run(kept)
    archive.owner = ""
    with hosted(archive, world) as host, pytest.raises(BadInput, match="has spent its budget"):
        host.resume(run.id)


def test_a_run_that_cannot_be_prepared_has_failed_after_three_attempts_and_keeps_its_best(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "RETRY_SECONDS", 0.0)
    left(archive, at_trial(4))
    with hosted(archive, world := testing.World(faults=Counter(OpenTask=100))) as host:
        run = ended(host)
    assert run.state == run_pb2.RUN_STATE_FAILED
    assert run.message == "taken up 3 times without getting on: OpenTask is out of order"
    assert world.calls["OpenTask"] == 3
    assert run.best_trial
    assert not run.best.timing.faster, "it was only screened"
    with hosted(archive, testing.World()) as host:
        host.resume("left")
        assert ended(host).state == run_pb2.RUN_STATE_FASTER


def test_a_run_that_ends_its_orchestrator_each_time_has_failed(archive: Archive) -> None:
    left(archive, at_trial(4))
    for _ in range(3):
        owner = Owner(archive, stays=True)
        ((run_id, before),) = owner.left()
        owner.take(run_id, before)
        owner.close()
    with hosted(archive, testing.World()) as host:
        run = ended(host)
    assert run.state == run_pb2.RUN_STATE_FAILED
    assert run.message.startswith("taken up 3 times, and each time the orchestrator ended")
    assert run.best_trial


def test_a_run_that_gets_on_may_be_taken_up_any_number_of_times(archive: Archive) -> None:
    left(archive, at_trial(1))
    for number in range(2, 7):
        left_again(archive, at_trial(number))
    with hosted(archive, testing.World()) as host:
        assert ended(host).state == run_pb2.RUN_STATE_FASTER


def test_an_orchestrator_that_ends_leaves_its_runs_within_seconds_and_sends_watchers_on(archive: Archive) -> None:
    class Hanging(testing.World):
        def MeasureArtifact(
            self, request: benchmark_service_pb2.MeasureArtifactRequest, /, timeout: float | None = None
        ) -> benchmark_service_pb2.MeasureArtifactResponse:
            if self.calls["MeasureArtifact"] == 3:
                measuring.set()
                release.wait(60)
            return super().MeasureArtifact(request, timeout)

    measuring, release = threading.Event(), threading.Event()
    sent_on: list[ServiceGone] = []

    def watch() -> None:
        try:
            list(testing.heard(host.watch(run.id, 0)))
        except ServiceGone as error:
            sent_on.append(error)

    with hosted(archive, Hanging()) as host:
        run = host.create(testing.task(), run_pb2.Budget(wall_seconds=60), "", fresh=True)
        queued = host.create(testing.task("other"), run_pb2.Budget(wall_seconds=60), "", fresh=True)
        watching = threading.Thread(target=watch)
        watching.start()
        assert measuring.wait(30)
        begin = time.monotonic()
        host.leave()
        assert time.monotonic() - begin < 10
        watching.join(10)
        with pytest.raises(ServiceGone):
            host.create(testing.task(), run_pb2.Budget(), "", fresh=True)
    release.set()
    assert len(sent_on) == 1
    assert archive.run(run.id).message == "left after 3 trials: the next orchestrator takes it up"
    with hosted(archive, testing.World()) as host:
        assert ended(host, run.id).trial_count == 8
        assert ended(host, queued.id).state == run_pb2.RUN_STATE_FASTER


@pytest.mark.parametrize("dies_at", [at_trial(2), in_state(run_pb2.RUN_STATE_FINISHING)])
def test_a_run_that_is_left_judges_nothing_more(archive: Archive, dies_at: Callable[[run_pb2.RunEvent], bool]) -> None:
    class Leaving(Cut):
        def run_changed(self, run: run_pb2.Run) -> None:
            super().run_changed(run)
            if dies_at(self.events[-1]):
                conductor.leave()

        def trial_ended(self, trial: trial_pb2.Trial) -> None:
            super().trial_ended(trial)
            if dies_at(self.events[-1]):
                conductor.leave()

    agents = (world := testing.World(seconds=0.01)).agents()
    run = run_pb2.Run(id="r", task=testing.task(), budget=run_pb2.Budget(wall_seconds=60))
    archive.put_run(run)
    story = Leaving(archive, run)
    conductor = SearchRun(run, agents, DeviceGate(agents.benchmarks), Beam(), story, effort=EFFORT)
    with pytest.raises(RunLost):
        conductor.execute()
    assert story.run.state in (run_pb2.RUN_STATE_SEARCHING, run_pb2.RUN_STATE_FINISHING)
    assert not story.run.HasField("best")
    assert world.calls["VerifyArtifact"] <= len(story.trials) + EFFORT.parallel_trials
    assert len(story.run.phase_seconds) == (2 if story.run.state == run_pb2.RUN_STATE_FINISHING else 1)


def test_a_run_of_which_a_trial_is_missing_has_failed(archive: Archive) -> None:
    left(archive, at_trial(2))
    archive.owner = ownership.owner_of(archive, "left")
    archive.add_trial("left", trial_pb2.Trial(number=4))
    archive.owner = ""
    with hosted(archive, testing.World()) as host:
        assert ended(host).state == run_pb2.RUN_STATE_FAILED
        assert "not all of its trials are kept" in host.run("left").message


def test_a_task_that_no_client_could_have_sent_is_not_taken_up(archive: Archive) -> None:
    tampered = testing.task()
    tampered.entry_path = "../../etc/passwd"
    left(archive, None, task=tampered)
    with hosted(archive, world := testing.World()) as host:
        assert ended(host).state == run_pb2.RUN_STATE_FAILED
        assert "it cannot be taken up: " in host.run("left").message
    assert not world.calls


def test_a_run_that_is_under_way_elsewhere_is_watched_and_not_resumed(archive: Archive) -> None:
    living = Owner(archive, stays=True)
    run = run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_SEARCHING)
    archive.put_run(run)
    story = Story(archive, run)
    story.run_changed(run)
    with hosted(archive, testing.World()) as host:
        with pytest.raises(BadInput, match="under way at another orchestrator"):
            host.resume("r")
        watch = testing.heard(host.watch("r", 0))
        assert next(watch).number == 1
        story.trial_ended(trial_pb2.Trial(number=1))
        run.state = run_pb2.RUN_STATE_NO_FASTER
        story.run_changed(run)
        assert [event.number for event in watch] == [2, 3]
    living.close()
