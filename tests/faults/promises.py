"""What is promised whatever happens, as something that can be looked at while it happens.

The one idea: clients keep what they were told; everything else is read from outside: the archive's file, the processes
and their files. It makes no fault.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from processes import Command

from orchestrator.archive import Archive
from orchestrator.archiving import repair, spool
from orchestrator.search_run import ENDED
from orchestrator.serving.local import published_address
from warpsmith.errors import BadInput
from warpsmith.sandbox import jail_init
from warpsmith.service import wait_until_healthy
from warpsmith.v1 import run_pb2, verdict_pb2

HEALTH_S = 30.0
"""In which the orchestrator answers, whatever has happened to it a moment ago."""
QUIET_S = 90.0
"""Longest time in which no run at all gets on."""
STALLED_S = 600.0
"""Longest time in which one run does not, waiting for its turn included."""
SETTLE_S = 30.0
"""In which what was killed is gone, with all that it had started."""
MORE_FILES, MORE_HANDLES = 12, 40
"""More than at first there may be, of files in all and of open files of one process: a lock, connections."""


class BrokenError(Exception):
    """A promise was broken."""


@dataclass
class Watched:
    """A run as its client has heard of it."""

    run_id: str
    heard: list[run_pb2.RunEvent] = field(default_factory=list)
    heard_at: float = field(default_factory=time.monotonic)
    ended: run_pb2.Run | None = None
    read_count: int = 0
    """Events that were found in the archive too."""

    def hear(self, event: run_pb2.RunEvent) -> None:
        """An event was told."""
        self.heard.append(event)
        self.heard_at = time.monotonic()


@dataclass
class Measured:
    """What a look has found."""

    HEADINGS: ClassVar = ("runs", "trials", "events", "health ms", "processes", "files", "open files", "MB")
    row: tuple[object, ...]


@dataclass
class Promises:
    """Looks at the directory of an `up`, whose processes have `mark` in their environment."""

    folder: Path
    mark: str
    trial_count: int
    _watched: list[Watched] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _broken: str = ""
    _ended_count: int = 0
    _event_count: int = 0
    _at_first: tuple[int, int, int] | None = None
    """Processes, files, and the most open files of one process."""

    @property
    def summary(self) -> str:
        """What was looked at, in words."""
        return f"{self._ended_count} runs, {self._ended_count * self.trial_count} trials, {self._event_count} events"

    def begun(self, watched: Watched) -> None:
        """A client was promised a run."""
        with self._lock:
            self._watched.append(watched)

    def break_one(self, why: str) -> None:
        """A client has heard what it should not."""
        self._broken = self._broken or why

    def raise_broken(self) -> None:
        """Raises what a client has found."""
        if self._broken:
            raise BrokenError(self._broken)

    def look(self, services: Command) -> Measured:
        """Looks at all promises. Raises BrokenError."""
        self.raise_broken()
        if (code := services.process.poll()) is not None:
            raise BrokenError(f"`up` ended by itself with code {code}: {services.said[-1000:]}")
        health_ms = self._health()
        self._nothing_lost()
        if aside := list((self.folder / "runs" / "spool").glob(f"*{spool.ASIDE}")):
            raise BrokenError(
                f"what waited for the archive was set aside, though each run has one orchestrator: {aside}"
            )
        self._all_get_on()
        return Measured((
            self._ended_count, self._ended_count * self.trial_count, self._event_count, f"{health_ms:.0f}",
            *self._nothing_grows(services),
        ))  # fmt: skip

    def all_end(self, clients: list[threading.Thread]) -> None:
        """Every run that was promised ends, now that no fault comes. Raises BrokenError."""
        end = time.monotonic() + STALLED_S
        for each in clients:
            each.join(max(0.0, end - time.monotonic()))
        self.raise_broken()
        if any(each.is_alive() for each in clients):
            raise BrokenError(f"runs do not end though no fault comes: {[run.run_id for run in self._watched]}")
        self._nothing_lost()
        archive = Archive.reading(self.folder / "runs")
        forgotten = [run.id for run in archive.runs(1_000_000) if run.state not in ENDED]
        archive.close()
        if len(forgotten) > len(clients):  # a run of which nobody was told may be under way still
            raise BrokenError(f"runs stand unended in the archive: {forgotten}")

    def nothing_is_left(self) -> None:
        """Of an `up` that has ended. Raises BrokenError."""
        if left := _until_none(lambda: marked(self.mark)):
            raise BrokenError(f"processes are left: {left}")
        if sockets := [str(path) for path in (self.folder / "tmp").rglob("*") if path.is_socket()]:
            raise BrokenError(f"sockets are left: {sockets}")
        if not (found := repair.check(self.folder / "runs")).is_sound:
            raise BrokenError(f"the archive is damaged: {found}")
        if waiting := spool.findings(self.folder / "runs" / "spool"):
            raise BrokenError(f"something waits for the archive still: {waiting}")

    # ---- each promise ------------------------------------------------------------------------------------

    def _health(self) -> float:
        end = time.monotonic() + HEALTH_S
        while time.monotonic() < end:
            start = time.monotonic()
            with suppress(BadInput):  # the next one is not up yet
                if wait_until_healthy(published_address(self.folder / "runs"), 5.0):
                    return 1e3 * (time.monotonic() - start)
            time.sleep(0.1)
        raise BrokenError(f"the orchestrator gives no health for {HEALTH_S:.0f} s")

    def _nothing_lost(self) -> None:
        """What was told is in the archive once; runs that ended have all of their trials, and the best of them."""
        archive = Archive.reading(self.folder / "runs")
        try:
            with self._lock:
                watched = list(self._watched)
            for each in watched:
                told = list(each.heard)
                kept = archive.events(each.run_id, each.read_count)
                require_kept(each.run_id, each.read_count, told[each.read_count :], kept)
                self._event_count += len(told) - each.read_count
                each.read_count = len(told)
                if each.ended is not None:
                    require_whole(archive, each.ended, self.trial_count)
                    self._ended_count += 1
                    with self._lock:
                        self._watched.remove(each)
        finally:
            archive.close()

    def _all_get_on(self) -> None:
        now = time.monotonic()
        with self._lock:
            waited = {each.run_id: now - each.heard_at for each in self._watched}
        if waited and min(waited.values()) > QUIET_S:
            raise BrokenError(f"no run has got on for {min(waited.values()):.0f} s: {sorted(waited)}")
        if stalled := [run for run, seconds in waited.items() if seconds > STALLED_S]:
            raise BrokenError(f"runs do not get on: {stalled}")

    def _nothing_grows(self, services: Command) -> tuple[object, ...]:
        """Processes, files, open files and memory; each is bounded by what there was at first."""
        pid = services.process.pid

        def strangers() -> list[int]:
            return sorted(set(marked(self.mark)) - {pid, *jail_init.descendants(pid)})

        if left := _until_none(strangers):
            raise BrokenError(f"processes have outlived who started them: {left}")
        own = [pid, *jail_init.descendants(pid)]
        # An `up` whose predecessor has not quite ended has logs of its own, which stay: people read them.
        places = (path for place in ("runs", "tmp") for path in (self.folder / place).rglob("*"))
        files = sum(1 for path in places if path.suffix != ".log")
        handles = max(map(_handles, own))
        now = (len(own), files, handles)
        first = self._at_first = self._at_first or now
        if files > first[1] + MORE_FILES or handles > first[2] + MORE_HANDLES or len(own) > first[0] + 1:
            raise BrokenError(f"processes, files, open files of one process grow: from {first} to {now}")
        return (*now, sum(map(_resident_bytes, own)) >> 20)


def require_kept(run_id: str, after: int, told: list[run_pb2.RunEvent], kept: list[run_pb2.RunEvent]) -> None:
    """Raises BrokenError where what a client was told is not what the archive has from there on, once and in order."""
    if [event.number for event in kept] != list(range(after + 1, after + 1 + len(kept))):
        raise BrokenError(f"run {run_id}: numbers of events past {after} are {[event.number for event in kept]}")
    if told != kept[: len(told)]:
        numbers = [event.number for event in told]
        raise BrokenError(f"run {run_id}: past event {after} a client was told {numbers}, the archive has others")


def require_whole(archive: Archive, ended: run_pb2.Run, trial_count: int) -> None:
    """Raises BrokenError where a run that has ended lacks a trial, has one twice, blames one, or hides its best."""
    kept, trials = archive.run(ended.id), archive.trials(ended.id)
    if kept.state != run_pb2.RUN_STATE_FASTER or "ended early" in kept.message or kept != ended:
        raise BrokenError(f"run {ended.id} ended as {run_pb2.RunState.Name(kept.state)}: {kept.message}")
    if [trial.number for trial in trials] != list(range(1, trial_count + 1)):
        raise BrokenError(f"run {ended.id} has the trials {[trial.number for trial in trials]}")
    if len({trial.candidate.program.digest for trial in trials}) != trial_count:
        raise BrokenError(f"run {ended.id} has tried a program twice")
    if blamed := [trial.number for trial in trials if trial.verdict.state != verdict_pb2.VERDICT_STATE_PASS]:
        raise BrokenError(f"run {ended.id} blames the candidates {blamed}")
    best = max(trial.timing.speedup_fastest.median for trial in trials)
    if kept.best.timing.speedup_fastest.median < best * 0.999:
        raise BrokenError(
            f"run {ended.id} has found {best:.3f} and tells {kept.best.timing.speedup_fastest.median:.3f}"
        )


def marked(mark: str) -> list[int]:
    """Processes whose environment has a mark; not those that have ended and are to be reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if f"CHAOS={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _until_none(look: Callable[[], list[int]]) -> list[int]:
    """What is there still when it had time to go."""
    end = time.monotonic() + SETTLE_S
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def _handles(process: int) -> int:
    try:
        return len(os.listdir(f"/proc/{process}/fd"))
    except OSError:
        return 0


def _resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
