"""Says whose a run is, so that no two orchestrators go on with one, and none that was left is forgotten.

The one idea: an orchestrator has a name that none before it had, and the archive takes what is said of a run from its
owner alone. So it does no harm to be wrong about who lives; it has only to be right soon. Beside an SQLite file all
are on one machine: each locks a file of its name, and the kernel gives that up with the process. At a database on a
server each renews a row, which counts for `LEASE_SECONDS` by that server's clock. It runs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import sqlalchemy as sa

from orchestrator.archive import Archive
from orchestrator.archiving import news
from orchestrator.archiving.tables import OWNERS, RUNS
from orchestrator.search_run import ENDED
from warpsmith.errors import ArchiveFault, Infrastructure, RunLost
from warpsmith.sandbox import private_files
from warpsmith.v1 import run_pb2

log = logging.getLogger("warpsmith.orchestrator")

LEASE_SECONDS = 20.0
"""After which who renews no row is taken for dead; several times `RENEW_SECONDS`, for a database that is slow."""
RENEW_SECONDS = 4.0
LOOK_SECONDS = 1.0
"""Pause of who looks for what others have left in a database on a server, where a lease may end at any moment."""
END_SECONDS = 3.0
"""How long its threads may take to end what they are at."""
STAYS, PASSES = "stays", "passes"
"""What a name begins with: of an orchestrator whose runs the next one takes up, and of one that serves one command."""

_UNDER_WAY = sorted({*run_pb2.RunState.values()} - ENDED)
_OURS = re.compile(rf"(?:{STAYS}|{PASSES})-[0-9a-f]{{24}}", re.ASCII)
_COUNTING_LOCK = 0x7773
"""The first half of the locks of a PostgreSQL database under which a client's runs are counted; the other is its."""
_NOW = sa.extract("epoch", sa.func.clock_timestamp())


class Owner:
    """An orchestrator as the owner of runs, from now until `close`; from then on the archive is written in its name.

    Raises:
        ArchiveFault: the archive, or a file beside it, cannot be written or locked.
    """

    def __init__(self, archive: Archive, *, stays: bool) -> None:
        self._archive = archive
        self.name = f"{STAYS if stays else PASSES}-{secrets.token_hex(12)}"
        self.stays = stays
        self._threads: list[threading.Thread] = []
        self._hurry, self._is_closed = threading.Event(), False
        self._renewed_at, self._judges_from = time.monotonic(), 0.0
        """When it has last shown that it lives, and from when on it says of others that they do not."""
        self._lock = _locked(_sign(archive.folder, self.name)) if archive.folder else None
        for sign in archive.folder.glob("owner-*.lock") if archive.folder else ():
            _is_locked(sign, remove=True)
        self.renew()
        archive.owner = self.name

    def renew(self) -> None:
        """Says that it lives; to be called every `RENEW_SECONDS`. Raises ArchiveFault where that cannot be written."""
        if self._lock is None:
            with self._archive.writing() as connection:
                is_mine = OWNERS.c.name == self.name
                if not connection.execute(sa.update(OWNERS).where(is_mine).values(seen_at=_NOW)).rowcount:
                    connection.execute(sa.insert(OWNERS).values(name=self.name, seen_at=_NOW))
                connection.execute(sa.delete(OWNERS).where(OWNERS.c.seen_at < _NOW - 100 * LEASE_SECONDS))
            if self._is_late():
                self._judges_from = time.monotonic() + LEASE_SECONDS
            self._renewed_at = time.monotonic()

    def _is_late(self) -> bool:
        return time.monotonic() > self._renewed_at + LEASE_SECONDS - 2 * RENEW_SECONDS

    def live(self, look: Callable[[], None], ended: threading.Event) -> None:
        """Renews itself in a thread until `ended`, and has `look` see at once, and now and then, what others left.

        They have a thread each: what was left may be large, and who loads it lives.
        """

        def now_and_then(work: Callable[[], None], pause: Callable[[], object]) -> None:
            while not ended.is_set():
                try:
                    work()
                except Infrastructure as error:
                    log.error("this orchestrator cannot show that it lives, or look for runs: %s", error)
                pause()

        def until_hurried() -> None:
            self._hurry.wait(RENEW_SECONDS if self._archive.folder else LOOK_SECONDS)
            self._hurry.clear()

        for work, pause in ((self.renew, lambda: ended.wait(RENEW_SECONDS)), (look, until_hurried)):
            thread = threading.Thread(target=now_and_then, args=(work, pause), name="owner", daemon=True)
            self._threads.append(thread)
            thread.start()

    def look_now(self) -> None:
        """Has `look` see at once what others left."""
        self._hurry.set()

    def left(self) -> list[tuple[str, str]]:
        """Runs that have not ended and were those of orchestrators that stay and are dead, oldest first: run, owner.

        None for a while after it could not renew itself: the database was away, and who lives has to show it first.
        """
        if self._archive.folder is None and (self._is_late() or time.monotonic() < self._judges_from):
            return []
        query = (
            sa.select(RUNS.c.id, RUNS.c.owner)
            .where(RUNS.c.state.in_(_UNDER_WAY), RUNS.c.owner.startswith(f"{STAYS}-"))
            .order_by(RUNS.c.created_at, RUNS.c.id)
        )
        found = [(row.id, row.owner) for row in self._archive.rows(query)]
        dead = {owner for _, owner in found if not is_alive(self._archive, owner)}
        return [(run_id, owner) for run_id, owner in found if owner in dead]

    def take(self, run_id: str, before: str, *, anew: bool = False) -> tuple[int, int]:
        """Makes a run its own, and gives how often it has been taken since a trial last ended, and at all; `anew`: once
        since a trial.

        Raises:
            RunLost: it is no longer that of `before`; ArchiveFault: the archive cannot be written.
        """
        count = sa.literal(0) if anew else RUNS.c.attempt_count
        changed = {"owner": self.name, "attempt_count": count + 1, "epoch": RUNS.c.epoch + 1}
        if anew:  # its state too, at once: of two who are asked for it, the second must not take it from the first
            changed |= {"stop_asked": sa.literal(0), "state": sa.literal(int(run_pb2.RUN_STATE_QUEUED))}
        with self._archive.writing() as connection:
            taken = sa.update(RUNS).where(RUNS.c.id == run_id, RUNS.c.owner == before).values(**changed)
            if not connection.execute(taken).rowcount:
                raise RunLost(f"another orchestrator has taken up run {run_id}")
            now = connection.execute(sa.select(RUNS.c.attempt_count, RUNS.c.epoch).where(RUNS.c.id == run_id)).one()
            return now.attempt_count, now.epoch

    def note(self, run_id: str, **columns: int) -> None:
        """Keeps `attempt_count` or `stop_asked` of a run of its own. Raises ArchiveFault where that is impossible."""
        with self._archive.writing() as connection:
            own = (RUNS.c.id == run_id) & (RUNS.c.owner == self.name)
            connection.execute(sa.update(RUNS).where(own).values(**columns))

    def ask_to_stop(self, run_id: str) -> None:
        """Has whoever owns a run, or takes it up, stop it. Raises ArchiveFault where that cannot be written."""
        with self._archive.writing() as connection:
            connection.execute(sa.update(RUNS).where(RUNS.c.id == run_id).values(stop_asked=1))
            news.tell(connection, news.Topic.STOP, run_id)

    def asked_to_stop(self) -> list[str]:
        """Its runs under way whose user wants no more of them."""
        own = (RUNS.c.owner == self.name) & (RUNS.c.stop_asked == 1)
        return [row.id for row in self._archive.rows(sa.select(RUNS.c.id).where(RUNS.c.state.in_(_UNDER_WAY), own))]

    def is_to_stop(self, run_id: str) -> bool:
        """Whether the user of a run wanted no more of it."""
        rows = self._archive.rows(sa.select(RUNS.c.stop_asked).where(RUNS.c.id == run_id))
        return any(row.stop_asked for row in rows)

    @contextlib.contextmanager
    def counting(self, client: str) -> Iterator[int]:
        """Gives how many runs of a client have not ended and are somebody's; nobody else counts them within the block.

        They are those of all orchestrators that share a database. Raises ArchiveFault where it cannot be read.
        """
        with contextlib.ExitStack() as held:
            if self._archive.folder is None:
                connection = held.enter_context(self._archive.writing())
                lock = sa.func.pg_advisory_xact_lock(_COUNTING_LOCK, sa.func.hashtext(client))
                connection.execute(sa.select(lock))
            query = (
                sa.select(RUNS.c.owner, sa.func.count().label("runs"))
                .where(RUNS.c.state.in_(_UNDER_WAY), RUNS.c.client == client)
                .group_by(RUNS.c.owner)
            )
            yield sum(row.runs for row in self._archive.rows(query) if self._is_somebodys(row.owner))

    def _is_somebodys(self, owner: str) -> bool:
        return owner.startswith(STAYS) or is_alive(self._archive, owner)

    def elsewhere(self) -> list[str]:
        """Runs that have not ended and are those of others that share a database on a server, oldest first."""
        if self._archive.folder is not None:
            return []
        query = (
            sa.select(RUNS.c.id, RUNS.c.owner)
            .where(RUNS.c.state.in_(_UNDER_WAY), RUNS.c.owner != self.name)
            .order_by(RUNS.c.created_at, RUNS.c.id)
        )
        found = self._archive.rows(query)
        living = {owner for owner in {row.owner for row in found} if self._is_somebodys(owner)}
        return [row.id for row in found if row.owner in living]

    def close(self) -> None:
        """Lives no longer: what it has not ended is left, and others hear so. `live` should have ended."""
        if self._is_closed:
            return
        self._is_closed = True
        self._hurry.set()
        for thread in self._threads:
            thread.join(END_SECONDS)
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()
            return
        with contextlib.suppress(ArchiveFault), self._archive.writing() as connection:  # then it expires
            connection.execute(sa.delete(OWNERS).where(OWNERS.c.name == self.name))
            news.tell(connection, news.Topic.LEFT)


def owner_of(archive: Archive, run_id: str) -> str:
    """The name of a run's owner; empty for nobody's, as in an archive of a release that knew none."""
    try:
        rows = archive.rows(sa.select(RUNS.c.owner).where(RUNS.c.id == run_id))
    except ArchiveFault:
        return ""
    return str(rows[0].owner) if rows else ""


def whose(archive: Archive, run_id: str) -> tuple[str, bool]:
    """The name of a run's owner, and whether the run has not ended, both of one moment. Raises ArchiveFault."""
    row = archive.rows(sa.select(RUNS.c.owner, RUNS.c.state).where(RUNS.c.id == run_id))[0]
    return str(row.owner), row.state in _UNDER_WAY


def is_alive(archive: Archive, name: str) -> bool:
    """Whether the orchestrator of a name lives, as far as can be seen."""
    if not name:
        return False
    if not _OURS.fullmatch(name):
        return True  # a stranger's row is nobody's to take
    if archive.folder is None:
        fresh = (OWNERS.c.name == name) & (OWNERS.c.seen_at > _NOW - LEASE_SECONDS)
        return bool(archive.rows(sa.select(OWNERS.c.name).where(fresh)))
    return _is_locked(_sign(archive.folder, name))


def somebody_lives(directory: Path) -> bool:
    """Whether an orchestrator of this machine has the SQLite archive of a directory."""
    return any(_is_locked(sign) for sign in directory.glob("owner-*.lock"))


def _is_locked(sign: Path, *, remove: bool = False) -> bool:
    """Whether somebody holds the lock of a file; `remove`: else it is removed."""
    try:
        descriptor = os.open(sign, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # what cannot be looked at is nobody's to take
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        if remove:
            sign.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)


def _sign(folder: Path, name: str) -> Path:
    return folder / f"owner-{name}.lock"


def _locked(place: Path) -> IO[bytes]:
    try:
        while True:
            sign = private_files.append_to(place)
            try:
                fcntl.flock(sign, fcntl.LOCK_EX)
                if place.exists() and os.path.samestat(os.fstat(sign.fileno()), os.lstat(place)):
                    return sign
            except BaseException:
                sign.close()
                raise
            sign.close()  # before it was locked somebody took it for a dead one's
    except OSError as error:
        raise ArchiveFault(f"{place}: cannot be made or locked ({error.strerror})") from error
