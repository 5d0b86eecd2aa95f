"""What is seen of runs: those that are here in memory, all others in the archive, as it is told by whoever has them.

The one idea: who asks need not know which orchestrator has a run. Watchers of another's are woken by news of the
archive where it is on a server, and look every second where not. It begins and ends nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

from orchestrator.archive import Archive
from orchestrator.archiving import patience
from orchestrator.archiving.news import Bells
from orchestrator.search_run import ENDED
from orchestrator.serving import taking_up
from orchestrator.serving.ownership import Owner
from orchestrator.serving.story import Story, light
from warpsmith.errors import ArchiveFault, ServiceGone
from warpsmith.v1 import run_pb2, trial_pb2

Seen = TypeVar("Seen")

EVENTS_AT_ONCE = 256
"""Of a run that is not under way here, what is read for a watcher before it is sent."""
LOOK_SECONDS = 1.0
"""Pause of who watches another orchestrator's run, before the archive is looked at again."""


class RunsInSight:
    """Runs here, and all of the archive. `owner`: in whose name this orchestrator has runs; None where it has none."""

    def __init__(self, archive: Archive, owner: Owner | None) -> None:
        self._archive, self._owner = archive, owner
        self._stories = dict[str, Story]()
        self._leaving, self._bells = threading.Event(), Bells()
        self.change_count = 0
        """Grows whenever a run has come or ended."""

    def run(self, run_id: str) -> run_pb2.Run:
        """A run by its identifier or the beginning of one.

        Raises:
            NotFound: there is none.
        """
        story = self._stories.get(run_id)
        return story.run if story else taking_up.told(self._archive, self._archive.run(run_id))

    def runs(self, limit: int, task_digest: str, before: float = 0.0) -> list[run_pb2.Run]:
        """Runs, newest first; with `before`, only those created earlier."""
        stories = self._stories.copy()  # taken first: one that ends meanwhile is not given as it was before
        kept = self._archive.runs(limit or 50, task_digest, before)
        return [stories[run.id].run if run.id in stories else taking_up.told(self._archive, run) for run in kept]

    def under_way(self) -> list[run_pb2.Run]:
        """Runs that have not ended, as watchers see them, in the order in which they were asked for: of all that share
        a database on a server."""
        runs = {story.run.id: story.run for story in self._stories.copy().values() if not story.ended}
        for run_id in self._owner.elsewhere() if self._owner else ():
            if run_id not in runs:
                runs[run_id] = taking_up.told(self._archive, self._archive.run(run_id))
        return [light(run) for run in sorted(runs.values(), key=lambda run: run.created_at) if run.state not in ENDED]

    def trials(
        self, run_id: str, after: int = 0, limit: int | None = None, *, with_programs: bool = True
    ) -> list[trial_pb2.Trial]:
        """The trials of a run past a number, in order; the first so many of them.

        Raises:
            NotFound: no such run.
        """
        run = self.run(run_id)
        story = self._stories.get(run.id)
        if story and not (with_programs and story.is_archived):
            return story.trials[after : after + limit if limit else None]
        return self._archive.trials(run.id, after, limit, with_programs=with_programs)

    async def watch(self, run_id: str, after: int) -> AsyncIterator[run_pb2.RunEvent]:
        """Events past a number until the run ends; also of a run of another orchestrator.

        Raises:
            NotFound: no such run, or nobody goes on with it. ServiceGone: the orchestrator ends before the run.
        """
        run_id = (await self._read(lambda: self.run(run_id))).id
        with self._bells.of(run_id) as bell:
            while True:
                if story := self._stories.get(run_id):
                    async for event in self._archived(run_id, after, story.first):
                        yield event
                        after = event.number
                    async for event in story.follow(after):
                        yield event
                    return
                kept = await self._read(lambda: self._archive.run(run_id))  # before its events: then all are there
                async for event in self._archived(run_id, after):
                    yield event
                    after = event.number
                if kept.state in ENDED or self._owner is None:
                    return
                await bell.wait(LOOK_SECONDS)
                if self._leaving.is_set():
                    raise ServiceGone("the orchestrator ends")
                if run_id not in self._stories:
                    await self._read(partial(taking_up.require_awaited, self._archive, self._owner, run_id))

    async def _archived(self, run_id: str, after: int, end: float = float("inf")) -> AsyncIterator[run_pb2.RunEvent]:
        """Events past a number, a page at a time; no further page once all before another number are told."""
        while after + 1 < end:
            page = await self._read(partial(self._archive.events, run_id, after, EVENTS_AT_ONCE))
            for event in page:
                yield event
            if not page:
                return
            after = page[-1].number

    async def _read(self, look: Callable[[], Seen]) -> Seen:
        """What a look at the archive gives; while it is locked or away, it is waited for as who writes does."""
        end = time.monotonic() + self._archive.patience_seconds
        while True:
            try:
                return await asyncio.to_thread(look)
            except ArchiveFault as error:
                if self._leaving.is_set() or time.monotonic() > end or not patience.may_pass(error):
                    raise
            await asyncio.sleep(LOOK_SECONDS)
