"""Runs that an orchestrator has left, taken up by the next: from where they were, once, and by one alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from left_runs import EFFORT, Cut, at_trial, database_url_of, ended, hosted, in_state, left, left_again

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving import hosting, ownership, taking_up
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.ownership import Owner
from orchestrator.serving.story import Story
from warpsmith.errors import BadInput, NotFound, RunLost, ServiceGone
from warpsmith.v1 import (
    benchmark_service_pb2,
    run_pb2,
    timing_pb2,
    trial_pb2,
)


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


def test_who_has_lost_a_run_and_taken_it_up_again_writes_nothing_of_before(archive: Archive) -> None:
    """As where the archive was away from all: each takes the other for dead when it is back."""
    first = Owner(archive, stays=True)
    run = run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_SEARCHING)
    archive.put_run(run)
    before = Story(archive, run)
    other = Archive(database_url_of(archive))
    second = Owner(other, stays=True)
    taking_up.taken_up(other, second, "r", first.name).run_changed(run)
    again = taking_up.taken_up(archive, first, "r", second.name)
    for say in (lambda: before.trial_ended(trial_pb2.Trial(number=1)), lambda: before.run_changed(run)):
        with pytest.raises(RunLost):
            say()
    again.trial_ended(trial_pb2.Trial(number=1))
    assert [event.number for event in archive.events("r")] == [1, 2]
    assert before.is_left
    for owner in (first, second):
        owner.close()
    other.close()


def test_a_stopped_run_that_another_orchestrator_takes_up_at_this_moment_is_not_taken_from_it(
    archive: Archive,
) -> None:
    """What the run's own record says is older than who has it."""
    left(archive, None, state=run_pb2.RUN_STATE_CANCELLED)
    run, first = archive.run("left"), ownership.owner_of(archive, "left")
    other = Archive(database_url_of(archive))
    second = Owner(other, stays=True)
    taking_up.taken_up(other, second, "left", first, anew=True)
    assert archive.run("left").state == run_pb2.RUN_STATE_QUEUED, "and so is who watches it told"
    with pytest.raises(RunLost, match="under way at another orchestrator"):
        taking_up.last_owner(archive, run)
    second.close()
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


def test_a_run_is_resumed_while_its_end_is_being_put_away(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchers hear of the end before the thread that conducted the run is through with it."""
    done, told = hosting.RunHost._done, threading.Event()

    def late(host: hosting.RunHost, story: Story) -> None:
        told.wait(30)
        done(host, story)

    monkeypatch.setattr(hosting.RunHost, "_done", late)
    with hosted(archive, testing.World(seconds=0.03)) as host:
        run = host.create(testing.task(), run_pb2.Budget(wall_seconds=60, trial_count=6), "", fresh=True)
        for event in testing.heard(host.watch(run.id, 0)):
            if event.trial.number == 2:
                host.cancel(run.id)
        assert host.resume(run.id).state == run_pb2.RUN_STATE_QUEUED
        told.set()
        again = ended(host, run.id)
        assert (again.state, again.trial_count) == (run_pb2.RUN_STATE_FASTER, 6)


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


def test_a_run_that_is_under_way_elsewhere_stays_there_when_resumed_here_and_is_watched(
    archive: Archive,
) -> None:
    living = Owner(archive, stays=True)
    run = run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_SEARCHING)
    archive.put_run(run)
    story = Story(archive, run)
    story.run_changed(run)
    with hosted(archive, testing.World()) as host:
        assert host.resume("r").state == run_pb2.RUN_STATE_SEARCHING
        assert ownership.owner_of(archive, "r") == living.name
        assert host._stories == {}
        watch = testing.heard(host.watch("r", 0))
        assert next(watch).number == 1
        story.trial_ended(trial_pb2.Trial(number=1))
        run.state = run_pb2.RUN_STATE_NO_FASTER
        story.run_changed(run)
        assert [event.number for event in watch] == [2, 3]
    living.close()
