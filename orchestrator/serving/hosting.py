"""Runs searches in threads of its own, keeps them in the archive, and tells watchers.

The one idea: a run's events are numbered, archived and told, so that a watcher who comes late, or comes back,
reads the same story; of a run that has ended the archive alone tells it. The archive failing ends the run with that
as its message, and what memory holds stays readable. A device is one run's at a time (`device_gate`); a few more
prepare what needs none, others wait as QUEUED.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from orchestrator import metrics
from orchestrator.archive import Archive
from orchestrator.pipeline import without_bulk
from orchestrator.search import Search
from orchestrator.search_run import ENDED, SearchRun
from warpsmith import plugins
from warpsmith.errors import Infrastructure, NotFound
from warpsmith.v1 import run_pb2, task_pb2, trial_pb2

log = logging.getLogger("warpsmith.orchestrator")

DEFAULT_SEARCH = "beam"
QUIET_SECONDS = 0.5
"""Least time between two records of a run of which nothing but its counts has changed; each trial has its own."""

EVENTS_AT_ONCE = 256
"""Of a run that has ended, what is read for a watcher before it is sent."""

MakeRun = Callable[[run_pb2.Run, Search, "Story", bool], SearchRun]
"""(run, strategy, observer, fresh) → a run that is ready to execute, its task's target set."""


@dataclass
class Story:
    """The events of one run, archived as they happen. An `Observer` of `ledger`."""

    archive: Archive
    run: run_pb2.Run
    events: list[run_pb2.RunEvent] = field(default_factory=list)
    trials: list[trial_pb2.Trial] = field(default_factory=list)
    cancelled: bool = False
    conductor: SearchRun | None = None

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self._followers: set[Callable[[], None]] = set()
        self._kept: tuple[run_pb2.RunState.ValueType, str] = (run_pb2.RUN_STATE_UNSPECIFIED, "")
        self._kept_at = 0.0
        self._archived_count = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.run.state in ENDED

    @property
    def is_archived(self) -> bool:
        """Whether the archive has every event, and with it the run and its trials as they are."""
        return self._archived_count == len(self.events)

    def run_changed(self, run: run_pb2.Run) -> None:
        """Archives the run and tells watchers; of a search under way, at most every `QUIET_SECONDS`.

        Raises:
            Infrastructure: the archive cannot be written.
        """
        copy = run_pb2.Run()
        copy.CopyFrom(run)
        what, now = (copy.state, copy.message), time.monotonic()
        if copy.state == run_pb2.RUN_STATE_SEARCHING and what == self._kept and now < self._kept_at + QUIET_SECONDS:
            self.run = copy
            return
        self._kept, self._kept_at = what, now
        with self._telling(run_pb2.RunEvent(run=light(copy)), lambda: setattr(self, "run", copy)) as event:
            self.archive.put_run(copy, event)

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        """Archives a trial and tells watchers.

        Raises:
            Infrastructure: the archive cannot be written.
        """
        with self._telling(run_pb2.RunEvent(trial=without_bulk(trial)), lambda: self.trials.append(trial)) as event:
            self.archive.add_trial(self.run.id, trial, event)

    def cancel(self) -> None:
        """Asks the run to stop, also one that has not begun. From any thread."""
        self.cancelled = True
        if (conductor := self.conductor) is not None:
            conductor.cancel()

    @contextmanager
    def _telling(self, event: run_pb2.RunEvent, remember: Callable[[], None]) -> Iterator[run_pb2.RunEvent]:
        """Archives the event in its body, and tells watchers after that: what they were told outlives a crash.

        What the archive refuses is told all the same, because memory still has it.
        """
        event.number, event.at = len(self.events) + 1, time.time()
        try:
            yield event
            self._archived_count += 1
        finally:
            with self.lock:
                remember()
                self.events.append(event)
                followers = list(self._followers)
            for wake in followers:
                wake()

    async def follow(self, after: int) -> AsyncIterator[run_pb2.RunEvent]:
        """Events past a number, as they come, until the run has ended. However many follow, they hold no thread."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self.lock:
            self._followers.add(wake)
        try:
            number = after
            while True:
                changed.clear()
                with self.lock:
                    new, ended = self.events[number:], self.ended
                for event in new:
                    yield event
                number += len(new)
                if ended and number >= len(self.events):
                    return
                if not new:
                    await changed.wait()
        finally:
            with self.lock:
                self._followers.discard(wake)


class RunHost:
    """All runs of an orchestrator: queued, under way, and past."""

    def __init__(self, archive: Archive, make_run: MakeRun, at_once: int = 1) -> None:
        self._archive, self._make_run = archive, make_run
        self._stories: dict[str, Story] = {}
        self.change_count = 0
        """Grows whenever a run has come or ended."""
        self._queue: queue.Queue[tuple[Story, Search, bool] | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._work, name="runs", daemon=True) for _ in range(at_once)]
        for thread in self._threads:
            thread.start()

    def create(self, task: task_pb2.Task, budget: run_pb2.Budget, search: str, fresh: bool) -> run_pb2.Run:
        """Queues a run and returns it.

        Raises:
            UnknownPlugin: no search strategy of that name; Infrastructure: the archive cannot be written.
        """
        name = search or DEFAULT_SEARCH
        strategy: Search = plugins.load("search", name)
        run = run_pb2.Run(
            id=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
            task=task,
            state=run_pb2.RUN_STATE_QUEUED,
            budget=budget,
            created_at=time.time(),
            plugins={"search": name},
        )
        story = Story(self._archive, run)
        self._archive.put_run(run)
        story.run_changed(run)
        self._stories[run.id] = story
        self.change_count += 1
        metrics.active_runs.inc()
        self._queue.put((story, strategy, fresh))
        return run

    def run(self, run_id: str) -> run_pb2.Run:
        """A run by its identifier or the beginning of one.

        Raises:
            NotFound: there is none.
        """
        story = self._stories.get(run_id)
        return story.run if story else self._archive.run(run_id)

    def runs(self, limit: int, task_digest: str, before: float = 0.0) -> list[run_pb2.Run]:
        """Runs, newest first; with `before`, only those created earlier."""
        stories = self._stories.copy()  # taken first: one that ends meanwhile is not given as it was before
        kept = self._archive.runs(limit or 50, task_digest, before)
        return [stories[run.id].run if run.id in stories else run for run in kept]

    def under_way(self) -> list[run_pb2.Run]:
        """Runs that have not ended, as watchers see them, in the order in which they were asked for."""
        runs = [story.run for story in self._stories.copy().values() if not story.ended]
        return list(map(light, sorted(runs, key=lambda run: run.created_at)))

    def trials(self, run_id: str) -> list[trial_pb2.Trial]:
        """The trials of a run with their programs, in order.

        Raises:
            NotFound: no such run.
        """
        run = self.run(run_id)
        story = self._stories.get(run.id)
        return list(story.trials) if story else self._archive.trials(run.id)

    async def watch(self, run_id: str, after: int) -> AsyncIterator[run_pb2.RunEvent]:
        """Events past a number until the run ends.

        Raises:
            NotFound: no such run.
        """
        run = await asyncio.to_thread(self.run, run_id)
        if story := self._stories.get(run.id):
            async for event in story.follow(after):
                yield event
            return
        while page := await asyncio.to_thread(self._archive.events, run.id, after, EVENTS_AT_ONCE):
            for event in page:
                yield event
            after = page[-1].number

    def past_events(self, run_id: str, after: int) -> list[run_pb2.RunEvent]:
        """Events past a number that the archive has.

        Raises:
            NotFound: no such run.
        """
        return self._archive.events(self.run(run_id).id, after)

    def cancel(self, run_id: str) -> run_pb2.Run:
        """Asks a run to stop; one that has ended stays as it is.

        Raises:
            NotFound: no such run.
        """
        run = self.run(run_id)
        story = self._stories.get(run.id)
        if story is None:
            run = self._archive.run(run.id)  # it may have ended since
            if run.state not in ENDED:
                raise NotFound(f"run {run.id} belongs to an orchestrator that is gone")
            return run
        story.cancel()
        return story.run

    def close(self) -> None:
        """Stops what is under way, judges what was found, and closes the archive."""
        for story in list(self._stories.values()):
            if not story.ended:
                story.cancel()
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + 5.0
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._archive.close()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._execute(*job)
            self._forget(job[0])
            self.change_count += 1
            metrics.active_runs.dec()
            metrics.runs.labels(run_pb2.RunState.Name(job[0].run.state)).inc()
            del job  # or it is held until the next one

    def _forget(self, story: Story) -> None:
        """Leaves an ended run to the archive; what that could not take stays in memory."""
        story.conductor = None
        if story.ended and story.is_archived:
            del self._stories[story.run.id]

    def _execute(self, story: Story, strategy: Search, fresh: bool) -> None:
        run = run_pb2.Run()
        run.CopyFrom(story.run)
        try:
            if story.cancelled:
                _end(story, run, run_pb2.RUN_STATE_CANCELLED, "stopped by the user before it began")
                return
            conductor = self._make_run(run, strategy, story, fresh)
            story.conductor = conductor
            if story.cancelled:
                conductor.cancel()
            conductor.execute()
        except Exception as error:  # whatever it is, the run has ended and its watchers must hear so
            if not isinstance(error, Infrastructure):
                log.exception("run %s failed", run.id)
            run.CopyFrom(story.run)
            message = str(error) if isinstance(error, Infrastructure) else f"{type(error).__name__}: {error}"
            _end(story, run, run_pb2.RUN_STATE_FAILED, message)


def _end(story: Story, run: run_pb2.Run, state: run_pb2.RunState.ValueType, message: str) -> None:
    """Ends a run in memory, and in the archive where that is possible."""
    run.state, run.message = state, message
    try:
        story.run_changed(run)
    except Infrastructure as error:
        log.error("run %s: %s", run.id, error)


def light(run: run_pb2.Run) -> run_pb2.Run:
    """The run as watchers see it: no sources, no programs, no trials but the best one."""
    made = run_pb2.Run()
    made.CopyFrom(run)
    del made.task.sources[:]
    if run.HasField("best"):
        made.best.CopyFrom(without_bulk(run.best))
    for arm in made.reference.arms:
        del arm.samples_ns[:]
    return made
