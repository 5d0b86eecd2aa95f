"""Runs that their orchestrators have left, at an event or before they began, and the next orchestrators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.archiving.writer import Message
from orchestrator.search import Search
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving import taking_up
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.hosting import RunHost
from orchestrator.serving.ownership import Owner
from orchestrator.serving.story import Story
from orchestrator.walks import Effort
from warpsmith.v1 import run_pb2

EFFORT = Effort(parallel_trials=2, retry_pause_seconds=0.0, settle_seconds=5.0)


class Dead(BaseException):
    """The orchestrator ends here."""


@dataclasses.dataclass
class Cut(Story):
    """A story at an event of which its orchestrator dies: the archive has it, and nothing after it."""

    dies_at: Callable[[run_pb2.RunEvent], bool] = lambda _: False
    is_dead: bool = False

    def _write(self, message: Message, event: run_pb2.RunEvent) -> None:
        if self.is_dead:
            raise Dead
        super()._write(message, event)
        self.is_dead = self.dies_at(event)
        if self.is_dead:
            raise Dead


def at_trial(number: int) -> Callable[[run_pb2.RunEvent], bool]:
    return lambda event: event.trial.number == number


def in_state(state: run_pb2.RunState.ValueType) -> Callable[[run_pb2.RunEvent], bool]:
    return lambda event: event.run.state == state


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
    mortal = Cut(archive, run, story.first, story.trials, story.attempt, story.epoch, dies_at=dies_at)
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
