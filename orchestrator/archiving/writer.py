"""Writes what happens in one run to the archive, in order; while that is late, what waits for it is in the spool.

The one idea: a thread of its own waits for the archive, so that the run need not: once a record is in a file, the run
goes on. Where no file takes it, and at the run's end, the run waits too. Nothing is told before the archive has it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.archive import Archive
from orchestrator.archiving.patience import may_pass
from orchestrator.archiving.spool import Record
from orchestrator.search_run import ENDED
from warpsmith.errors import Infrastructure, RunLost
from warpsmith.v1 import run_pb2, trial_pb2

LATE_SECONDS = 1.0
"""After which an archive that has not answered is late."""
IDLE_SECONDS = 1.0
"""How long its thread stays when there is nothing to write."""

Message = run_pb2.Run | trial_pb2.Trial
Told = Callable[[Message, run_pb2.RunEvent, bool], None]
"""Hears in order of each that was written: the archive has it, or (False) never will, though memory has."""


@dataclass(eq=False)
class _Entry:
    given: Message
    record: Record
    """Of a copy: its program may be taken from what was given meanwhile."""
    is_told: bool = False
    is_in_file: bool = False

    @property
    def is_end(self) -> bool:
        """Whether it is a run's last."""
        return isinstance(self.record.message, run_pb2.Run) and self.record.message.state in ENDED


class Writer:
    """Of one run at its owner; `first`: the number of its first event here; `lost` hears that the run is another's.
    From any thread."""

    def __init__(
        self, archive: Archive, run_id: str, epoch: int, first: int, told: Told, lost: Callable[[], None]
    ) -> None:
        self._archive, self._run_id, self._epoch, self._next = archive, run_id, epoch, first
        self._told, self._lost = told, lost
        self._changed = threading.Condition()
        self._waiting: deque[_Entry] = deque()
        self._file = archive.spool.begin(run_id, archive.owner, epoch) if archive.spool else None
        self._is_working = False
        self._is_late = self._is_refused = False
        """Whether something waits for longer than it should, and whether a file did not take all of it."""
        self._fault: Exception | None = None
        """Why the archive is waited for no longer, until a writer hears of it."""
        self._closed: RunLost | None = None

    @property
    def is_late(self) -> bool:
        """Whether something waits for the archive for longer than it should."""
        return self._is_late

    def write(self, message: Message, event: run_pb2.RunEvent) -> None:
        """Writes a run, or an ended trial, as it is now, and the event that tells of it, whose number it gives. Returns
        when the archive has it, or else a file; of a run that has ended when the archive has it.

        Raises:
            RunLost: the run is another's, or was left; ArchiveFault: the archive has not taken all that was written.
        """
        with self._changed:
            entry = self._begin(message, event)
            if entry.is_end or not entry.is_in_file:
                self._wait(entry)
            self._require_taken(entry)

    def leave(self, message: run_pb2.Run | None, event: run_pb2.RunEvent) -> None:
        """Writes a last word, if there is one, and nothing more. What waits stays in its file."""
        with self._changed:
            with suppress(Infrastructure):
                if message is not None:
                    self._begin(message, event)
            self._close(RunLost(f"run {self._run_id} was left"))

    # ---- with the lock ---------------------------------------------------------------------------------

    def _begin(self, message: Message, event: run_pb2.RunEvent) -> _Entry:
        """Has it written, and gives it after a moment, or once a file has it where the archive is late."""
        if self._closed:
            raise self._closed
        copy = type(message)()
        copy.CopyFrom(message)  # type: ignore[arg-type]
        event.number, event.at, self._next = self._next, time.time(), self._next + 1
        entry = _Entry(message, Record(copy, event))
        self._waiting.append(entry)
        if self._fault is None or entry.is_end:
            self._fault = None  # a run that ends has all tried once more
            self._work_on()
            if not self._is_late:
                self._wait(entry, LATE_SECONDS)
        if not entry.is_told and not self._closed:
            self._is_late = True
            self._put_in_file()
        return entry

    def _put_in_file(self) -> None:
        for entry in self._waiting:
            if not entry.is_in_file and not self._is_refused:
                entry.is_in_file = self._file is not None and self._file.add(entry.record)
                self._is_refused = not entry.is_in_file

    def _wait(self, entry: _Entry, seconds: float | None = None) -> None:
        self._changed.wait_for(lambda: entry.is_told or self._fault or self._closed, seconds)

    def _require_taken(self, entry: _Entry) -> None:
        if self._closed and not entry.is_told:
            raise self._closed
        if self._fault is None:
            return
        fault, self._fault = self._fault, None
        if entry.is_end:  # memory has it, and is all that there is for whoever watches here
            while self._waiting:
                self._settle(is_kept=False)
        raise fault

    def _settle(self, *, is_kept: bool) -> None:
        entry = self._waiting.popleft()
        self._told(entry.given, entry.record.event, is_kept)
        entry.is_told = True

    def _close(self, why: RunLost) -> None:
        if self._closed is None:
            self._closed = why
            self._put_in_file()
            self._waiting.clear()
            if self._file is not None:
                self._file.close()
            self._changed.notify_all()

    # ---- its thread ------------------------------------------------------------------------------------

    def _work_on(self) -> None:
        if not self._is_working:
            self._is_working = True
            threading.Thread(target=self._work, name="archive", daemon=True).start()
        self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (entry := self._next_entry()) is not None:
                try:
                    self._commit(entry.record)
                except Exception as error:  # whatever it is, the run must hear it
                    self._failed(error)
                else:
                    self._taken()
        except Exception as error:  # of who was told
            with self._changed:
                self._is_working, self._fault = False, error
                self._changed.notify_all()
            raise

    def _next_entry(self) -> _Entry | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed or self._fault, IDLE_SECONDS)
            if self._waiting and not self._closed and not self._fault:
                return self._waiting[0]
            self._is_working = False
            return None

    def _commit(self, record: Record) -> None:
        if isinstance(record.message, run_pb2.Run):
            self._archive.put_run(record.message, record.event, self._epoch)
        else:
            self._archive.add_trial(self._run_id, record.message, record.event, self._epoch)

    def _taken(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._settle(is_kept=True)
            if not self._waiting:
                self._is_late = self._is_refused = False
                if self._file is not None:
                    self._file.remove()
            self._changed.notify_all()

    def _failed(self, error: Exception) -> None:
        with self._changed:
            if self._closed:
                return
            if isinstance(error, RunLost):
                if self._file is not None and self._is_late:
                    self._put_in_file()
                    self._file.set_aside(f"{error}")
                self._waiting.clear()
                self._close(error)
                self._lost()
            else:
                self._fault = error
                if not may_pass(error):
                    self._settle(is_kept=False)
            self._changed.notify_all()
