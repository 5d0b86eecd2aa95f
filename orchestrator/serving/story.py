"""What has happened in one run: numbered events, archived one by one, and told to whoever watches.

The one idea: watchers hear what the archive has already, so that a watcher who comes back, also to the next
orchestrator, reads the same story. A story ends with its run, or it is left: then nothing more is written here, and
watchers are sent to whoever goes on with it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from orchestrator import metrics
from orchestrator.archive import Archive
from orchestrator.archiving.writer import Message, Writer
from orchestrator.pipeline import without_bulk
from orchestrator.search_run import ENDED, SearchRun
from warpsmith.errors import ServiceGone
from warpsmith.v1 import run_pb2, trial_pb2

QUIET_SECONDS = 0.5
"""Least time between two records of a run of which nothing but its counts has changed; each trial has its own."""


@dataclass
class Story:
    """The events of one run, archived as they happen. An `Observer` of `ledger`."""

    archive: Archive
    run: run_pb2.Run
    first: int = 1
    """Number of the first event that happens here; those before it are in the archive alone."""
    trials: list[trial_pb2.Trial] = field(default_factory=list)
    """With their programs while they may become finalists; the archive has all."""
    attempt: int = 0
    """How often the run was taken up since a trial last ended; 0 for one that begins here."""
    epoch: int = 0
    """How often the run has changed hands."""
    cancelled: bool = False
    is_left: bool = False
    """Whether another orchestrator goes on with the run, now or later."""
    conductor: SearchRun | None = None
    events: list[run_pb2.RunEvent] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self._followers: set[Callable[[], None]] = set()
        self._writer = Writer(self.archive, self.run.id, self.epoch, self.first, self._tell, self._lose)
        self._latest = self.run
        """The run as it was last written, which may wait for the archive still."""
        self._kept: tuple[run_pb2.RunState.ValueType, str] = (run_pb2.RUN_STATE_UNSPECIFIED, "")
        self._kept_at = 0.0
        self._archived_count = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.run.state in ENDED

    @property
    def is_archived(self) -> bool:
        """Whether the archive has every event that was told, and with it the run and its trials as they were."""
        return self._archived_count == len(self.events)

    def run_changed(self, run: run_pb2.Run) -> None:
        """Archives the run and tells watchers; of a search under way, at most every `QUIET_SECONDS`.

        Raises:
            RunLost: it was left; Infrastructure: the archive cannot be written.
        """
        metrics.heard(run.id)
        copy = run_pb2.Run()
        copy.CopyFrom(run)
        self._latest = copy
        what, now = (copy.state, copy.message), time.monotonic()
        if copy.state == run_pb2.RUN_STATE_SEARCHING and what == self._kept and now < self._kept_at + QUIET_SECONDS:
            if not self._writer.is_late:
                self.run = copy
            return
        self._kept, self._kept_at = what, now
        self._write(copy, run_pb2.RunEvent(run=light(copy)))

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        """Archives a trial and tells watchers. Raises as `run_changed`."""
        self._write(trial, run_pb2.RunEvent(trial=without_bulk(trial)))

    def _write(self, message: Message, event: run_pb2.RunEvent) -> None:
        self._writer.write(message, event)

    def cancel(self) -> None:
        """Asks the run to stop, also one that has not begun. From any thread."""
        self.cancelled = True
        if (conductor := self.conductor) is not None:
            conductor.cancel()

    def leave(self, message: str) -> None:
        """Writes a last word, and no more; watchers are sent away. A run that has ended stays as it is."""
        if self.ended or self.is_left:
            return
        last = None
        if self._latest.state not in ENDED:
            last = run_pb2.Run()
            last.CopyFrom(self._latest)
            last.message = message
        self._writer.leave(last, run_pb2.RunEvent(run=light(last or self._latest)))
        self._lose()

    def _lose(self) -> None:
        with self.lock:
            self.is_left = True
        self._wake()

    def _wake(self) -> None:
        with self.lock:
            followers = list(self._followers)
        for wake in followers:
            wake()

    def _tell(self, message: Message, event: run_pb2.RunEvent, is_kept: bool) -> None:
        """Tells watchers what the archive has: what they were told outlives a crash.

        What the archive refuses is told all the same, because memory still has it; but not of another's run.
        """
        with self.lock:
            if self.is_left:
                return
            if isinstance(message, run_pb2.Run):
                self.run = message
            else:
                self.trials.append(message)
                self.attempt = 0
            self._archived_count += is_kept
            self.events.append(event)
        self._wake()

    async def follow(self, after: int) -> AsyncIterator[run_pb2.RunEvent]:
        """Events here past a number, as they come, until the run has ended. However many follow, they hold no thread.

        Raises:
            ServiceGone: the run was left.
        """
        loop, changed, number = asyncio.get_running_loop(), asyncio.Event(), after

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self.lock:
            self._followers.add(wake)
        try:
            while True:
                changed.clear()
                with self.lock:
                    new, is_left, is_over = self._past(number), self.is_left, self.ended or self.is_left
                for event in new:
                    yield event
                    number = event.number
                if is_left:
                    raise ServiceGone(f"run {self.run.id} waits for the next orchestrator: {self.run.message}")
                if is_over:
                    return
                if not new:
                    await changed.wait()
        finally:
            with self.lock:
                self._followers.discard(wake)

    def _past(self, number: int) -> list[run_pb2.RunEvent]:
        return self.events[max(0, number + 1 - self.first) :]


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
