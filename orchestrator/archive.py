"""Keeps runs, trials and events: SQLite under `runs/` on one machine, PostgreSQL by its URL.

The one idea: rows are whole protobuf messages with a few columns beside them to look by, written in one transaction
each and never changed except for the run itself, so that a run that dies is readable up to its last event. A full
disk or a directory that cannot be written is one clear error; reading goes on. Who opens an older archive to write
brings its schema up to date (`archiving.versions`), and its runs stay. Messages of an older release are read by
`warpsmith.contract.earlier`. A SQLite database may be a stranger's: one that holds more than plain tables and indexes
is refused, and so is a row that we would not write. A run belongs to whoever writes it (`owner`, told apart in
`serving.ownership`): in each transaction the archive looks whether it still does.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import sqlalchemy as sa
from google.protobuf.message import DecodeError, Message
from sqlalchemy.exc import ArgumentError, DBAPIError

from orchestrator.archiving import news, programs, versions, writes
from orchestrator.archiving.patience import attempts
from orchestrator.archiving.spool import Spool
from orchestrator.archiving.tables import EVENTS, GROUPS, RUNS, TRIALS
from orchestrator.search import moves_of
from orchestrator.search.memory import is_same_place
from warpsmith import printable
from warpsmith.contract import earlier
from warpsmith.digest import of_moves
from warpsmith.errors import ArchiveFault, BadInput, NotFound
from warpsmith.sandbox import private_files
from warpsmith.v1 import analysis_pb2, run_pb2, timing_pb2, trial_pb2, verdict_pb2

FILE_NAME = "warpsmith.sqlite3"
REMEDY = "name another with --runs"
DAMAGED = "`warpsmith archive recover` saves what is readable, and --runs names another"
BUSY_MILLISECONDS = 10_000
"""How long a writer waits for another process's transaction."""
JOURNAL_SECONDS = 2.0
"""How long a rollback journal may lie there: SQLite has one for a moment while it makes a database."""
LATEST_SECONDS = 253402300800.0
"""Where the year 10000 begins: no run was created then or later."""
KNOWN_COUNT = 3
"""Lists of moves that a new run begins with, where earlier ones of its task or of tasks of its shape are known."""

KNOWN_RUNS = 20
"""Latest runs of a task among which times of its baselines are looked for."""

MessageT = TypeVar("MessageT", bound=Message)

_RUN = sa.select(RUNS.c.id.label("run_id"), RUNS.c.message, RUNS.c.state)
_TRIAL = sa.select(TRIALS.c.run_id, TRIALS.c.message)
_WHOLE_TRIAL: sa.Select[Any] = sa.select(sa.literal_column("trials.*")).select_from(TRIALS)
"""Also of an older archive that is only read, which has fewer columns."""


class Archive:
    """Runs and all that became of them. Safe to use from several threads and processes."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        """The archive at an SQLAlchemy URL, with its tables made where they are missing, or brought up to date.

        Raises:
            BadInput: the URL is malformed, no driver for it is installed, or a later release has made the archive.
            ArchiveFault: the database cannot be reached or written.
        """
        self._engine = _engine(url)
        self._file = _file_of(self._engine.url)
        self._place = f"sqlite:///{self._file}" if self._file else self._engine.url.render_as_string(hide_password=True)
        self.owner = ""
        """In whose name it is written; empty for nobody's, as by releases that knew no owners."""
        self.patience_seconds = 0.0
        """How long what is written waits for a database that is locked, full or away."""
        self.spool: Spool | None = None
        """Where it waits then, so that it outlives this process."""
        self._texts: set[str] = set()
        """Digests of texts that are known to be kept."""
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", partial(_set_up, self._place, read_only))
        if not read_only:
            try:
                with self.writing() as connection:
                    versions.bring_up_to_date(connection, self._place)
            except BaseException:
                self.close()
                raise

    @classmethod
    def in_directory(cls, directory: Path) -> Archive:
        """The archive of a directory, which is made where it is missing.

        Raises:
            BadInput: the directory cannot be made or written, others could change it, a link is where a file should be,
                or the database is not one of ours.
        """
        try:
            place = private_files.directory(directory, remedy=REMEDY)
            private_files.claim(place / FILE_NAME)
            require_plain(place)
        except OSError as error:
            raise BadInput(f"{directory}: cannot be written ({error.strerror}); {REMEDY}") from error
        return cls(f"sqlite:///{place / FILE_NAME}")

    @classmethod
    def reading(cls, directory: Path) -> Archive:
        """The archive of a directory for reading only: also where the disk is full or nothing may be written.

        Raises:
            BadInput: there is none, others could change the directory, or a link is where a file should be. Where the
                database is not one of ours, the first reading raises it.
        """
        try:
            place = private_files.directory(directory, make=False, remedy=REMEDY)
        except OSError:
            place = directory
        file = place / FILE_NAME
        if not os.path.lexists(file):
            raise BadInput(
                f"{directory}: no runs are kept here; `warpsmith optimize` makes some, --runs looks elsewhere"
            )
        require_plain(place)
        # Without its companion files the database is whole, and may be read where no file can be made.
        whole = not file.with_name(f"{FILE_NAME}-wal").exists()
        options = "mode=ro&immutable=1" if whole else "mode=ro"
        return cls(f"sqlite:///file:{quote(str(file))}?{options}&uri=true", read_only=True)

    @property
    def folder(self) -> Path | None:
        """Where its file is; None for a database on a server."""
        return self._file.parent if self._file else None

    def listen(self, heard: news.Heard, ended: threading.Event) -> None:
        """As `news.listen`."""
        news.listen(self._engine, heard, ended)

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    # ---- writing -------------------------------------------------------------------------------------

    def put_run(self, run: run_pb2.Run, event: run_pb2.RunEvent | None = None, epoch: int | None = None) -> None:
        """Adds a run, or replaces what is kept of it, together with the event that tells of it. `epoch`: how often it
        had changed hands when the writer got it; None for whoever may write it now.

        Raises:
            RunLost: another orchestrator has it now; ArchiveFault: the database cannot be written.
        """
        for is_again, attempt in enumerate(attempts(self.patience_seconds)):
            with attempt, self.writing() as connection:
                if not (is_again and writes.is_told(connection, run.id, event)):
                    writes.put_run(connection, run, event, self.owner, epoch)

    def add_trial(
        self, run_id: str, trial: trial_pb2.Trial, event: run_pb2.RunEvent | None = None, epoch: int | None = None
    ) -> None:
        """Adds an ended trial, together with the event that tells of it; as `put_run`. Its binary should be dropped."""
        row = writes.TrialRow(run_id, trial, self._texts)
        for is_again, attempt in enumerate(attempts(self.patience_seconds)):
            with attempt, self.writing() as connection:
                if not (is_again and writes.is_told(connection, run_id, event)):
                    row.add(connection, event, self.owner, epoch)
        self._texts |= row.texts.keys()

    # ---- reading: of a row that is not what we write, each raises BadInput -----------------------------

    def run(self, run_id: str) -> run_pb2.Run:
        """The run of that identifier, or of that unambiguous beginning of one; `last` for the newest.

        Raises:
            NotFound: none, or several.
        """
        if run_id == "last":
            newest = self.runs(limit=1)
            if not newest:
                raise NotFound("no run is kept yet")
            return newest[0]
        query = _RUN.where(RUNS.c.id.startswith(run_id, autoescape=True))
        rows = self.rows(query.limit(3)) if run_id else []
        exact = [row for row in rows if row.run_id == run_id] or rows
        if len(exact) != 1:
            raise NotFound(f"no run {run_id!r}" if not exact else f"several runs begin with {run_id!r}")
        return self._kept(run_pb2.Run, exact[0])

    def runs(self, limit: int = 50, task_digest: str = "", before: float = 0.0) -> list[run_pb2.Run]:
        """Runs, newest first; with `before`, only those created earlier."""
        query = _RUN.order_by(RUNS.c.created_at.desc(), RUNS.c.id).limit(limit)
        if before:
            query = query.where(RUNS.c.created_at < before)
        if task_digest:
            query = query.where(RUNS.c.task_digest == task_digest)
        return [self._kept(run_pb2.Run, row) for row in self.rows(query)]

    def trials(
        self, run_id: str, after: int = 0, limit: int | None = None, *, with_programs: bool = True
    ) -> list[trial_pb2.Trial]:
        """The trials of a run past a number, in order; the first so many of them."""
        query = _WHOLE_TRIAL if with_programs else _TRIAL
        query = query.where(TRIALS.c.run_id == run_id, TRIALS.c.number > after).order_by(TRIALS.c.number).limit(limit)
        rows = self.rows(query)
        found = [self._kept(trial_pb2.Trial, row) for row in rows]
        if not with_programs:
            return list(map(programs.dropped, found))
        named = [f"{getattr(row, 'texts', '')}" for row in rows]
        texts = programs.fetched(self.rows, named)
        for trial, row, names in zip(found, rows, named, strict=True):
            if not programs.put_back(trial, names, texts):
                raise _damaged(self._place, row)
        return found

    def events(self, run_id: str, after: int = 0, limit: int | None = None) -> list[run_pb2.RunEvent]:
        """Events of a run past a number, in order; the first so many of them."""
        query = (
            sa.select(EVENTS.c.run_id, EVENTS.c.message)
            .where(EVENTS.c.run_id == run_id, EVENTS.c.number > after)
            .order_by(EVENTS.c.number)
            .limit(limit)
        )
        return [self._kept(run_pb2.RunEvent, row) for row in self.rows(query)]

    def known_moves(self, run: run_pb2.Run, limit: int = KNOWN_COUNT) -> list[list[analysis_pb2.Move]]:
        """Moves that earlier runs on such a device found best: those of the task, then those of its shape, best first.

        Both digests count the target. Winners of runs come before trials that were only screened. A kernel that was
        written for another task is not among them: its text holds that task's sizes.
        """
        lists = self._best_moves(RUNS.c.task_digest == run.task.digest, run.device.name, limit)
        if run.shape_digest and len(lists) < limit:
            alike = (RUNS.c.shape_digest == run.shape_digest) & (RUNS.c.task_digest != run.task.digest)
            for key, moves in self._best_moves(alike, run.device.name, 2 * limit).items():
                if not any(move.kind == analysis_pb2.MOVE_KIND_WRITE for move in moves):
                    lists.setdefault(key, moves)
        return list(lists.values())[:limit]

    def known_reference(
        self, task_digest: str, environment: timing_pb2.Environment
    ) -> timing_pb2.ReferenceReport | None:
        """Times of a task's baselines, as the latest run found that timed them, on the same device with the same
        driver, torch, Python and threads; None where there is none. Whether they hold is the benchmark's to say."""
        for run in self.runs(limit=KNOWN_RUNS, task_digest=task_digest):
            found = run.reference
            if found.arms and not found.is_kept and is_same_place(found.environment, environment):
                return found
        return None

    def known_groups(self, device: str, forms: Sequence[str]) -> dict[str, analysis_pb2.KnownGroup]:
        """By form, what runs on such a device found best for groups: of each form the fastest."""
        here = (GROUPS.c.device == device) & GROUPS.c.form.in_(sorted({*forms}))
        query = sa.select(GROUPS.c.run_id, GROUPS.c.message).where(here).order_by(GROUPS.c.median_ns.desc())
        found = [self._kept(analysis_pb2.KnownGroup, row) for row in self.rows(query)]
        return {group.form: group for group in found}

    def _best_moves(
        self, condition: sa.ColumnElement[bool], device: str, limit: int
    ) -> dict[str, list[analysis_pb2.Move]]:
        """The best lists of moves of runs that fulfil a condition, by digest."""
        same = condition & (RUNS.c.device == device)
        runs = _RUN.where(same, RUNS.c.speedup > 1.0).order_by(RUNS.c.speedup.desc())
        trials = (
            _TRIAL.join(RUNS, RUNS.c.id == TRIALS.c.run_id)
            .where(same, TRIALS.c.speedup > 1.0, TRIALS.c.verdict == verdict_pb2.VERDICT_STATE_PASS)
            .order_by(TRIALS.c.speedup.desc())
        )
        found = [self._kept(run_pb2.Run, row).best for row in self.rows(runs.limit(limit))]
        found += [self._kept(trial_pb2.Trial, row) for row in self.rows(trials.limit(2 * limit))]
        return {of_moves(moves_of(trial)): list(moves_of(trial)) for trial in found if moves_of(trial)}

    def rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """What a query gives. Raises ArchiveFault where the database cannot be read."""
        try:
            with self._engine.connect() as connection:
                return connection.execute(query).all()
        except DBAPIError as error:
            raise ArchiveFault(f"cannot read runs from {self._place}: {error.orig}{_remedy(error)}") from error

    def _kept(self, kind: type[MessageT], row: sa.Row[Any]) -> MessageT:
        """The message of a row, which an earlier version may have written; raises BadInput where none did."""
        try:
            message = earlier.translated(kind.FromString(row.message))
        except (DecodeError, TypeError):  # damaged, or no bytes: SQLite keeps anything in any column
            message = None
        if message is None or not 0.0 <= getattr(message, "created_at", 0.0) < LATEST_SECONDS:
            raise _damaged(self._place, row)
        return _as_in_row(message, row)

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction. Raises ArchiveFault where the database cannot be written."""
        try:
            with self._engine.begin() as connection:
                if self._engine.dialect.name == "sqlite":
                    connection.exec_driver_sql("BEGIN IMMEDIATE")  # what is read first may be written then
                yield connection
        except DBAPIError as error:
            remedy = _remedy(error) or "; what was found so far stays readable"
            raise ArchiveFault(f"cannot write to {self._place}: {error.orig}{remedy}") from error


def _damaged(place: str, row: sa.Row[Any]) -> BadInput:
    run = printable.quotation(f"{row.run_id}", 40)
    return BadInput(f"{place}: what is kept of run {run} is damaged, or not ours; {DAMAGED}")


def _as_in_row(message: MessageT, row: sa.Row[Any]) -> MessageT:
    """The message; of a run that was taken up after its end, whose row says so first, as queued."""
    if isinstance(message, run_pb2.Run) and row.state == run_pb2.RUN_STATE_QUEUED:
        message.state = run_pb2.RUN_STATE_QUEUED
    return message


def _remedy(error: DBAPIError) -> str:
    """What to do about what SQLite says of a damaged file; nothing about a lock or a full disk."""
    return f"; {DAMAGED}" if type(error.orig) is sqlite3.DatabaseError else ""


def require_plain(place: Path) -> None:
    """Looks at every file that SQLite may open: another user may have made the folder.

    SQLite follows links, and carries a rollback journal out: it even deletes a file that a journal names.
    """
    for companion in ("", "-wal", "-shm", "-journal"):
        private_files.require_plain(place / f"{FILE_NAME}{companion}")
    journal, end = place / f"{FILE_NAME}-journal", time.monotonic() + JOURNAL_SECONDS
    while _holds_something(journal):
        if time.monotonic() > end:
            raise BadInput(f"{journal}: would change files when the database is opened; we keep none, so move it away")
        time.sleep(0.01)


def _holds_something(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_size > 0
    return False


def _engine(url: str) -> sa.Engine:
    try:
        place = sa.make_url(url)
        if place.drivername in ("postgres", "postgresql"):
            place = place.set(drivername="postgresql+psycopg")
        # A connection that a restart of the database has cut is found out before it is used.
        return sa.create_engine(place, pool_pre_ping=place.drivername.startswith("postgresql"))
    except ModuleNotFoundError as error:
        raise BadInput(f"{place.drivername}: {error.name} is missing: pip install 'warpsmith[postgres]'") from error
    except ArgumentError:
        # Its text would repeat the URL with its password.
        raise BadInput("the database's URL is malformed: write postgresql://user:password@host/name") from None


def _file_of(url: sa.URL) -> Path | None:
    """SQLite's file, which a URL may name as a URI; None for a database on a server."""
    if url.get_backend_name() != "sqlite" or not url.database:
        return None
    is_uri = url.database.startswith("file:")
    return Path(unquote(url.database.removeprefix("file:")) if is_uri else url.database)


_NAME = r'(?:\w+|"\w+")'
_NAMES = rf"\({_NAME}(?:, {_NAME})*\)"
_COLUMN = rf"{_NAME} (?:VARCHAR\(\d+\)|TEXT|INTEGER|BIGINT|BOOLEAN|FLOAT|BLOB)(?: DEFAULT '\w*')?(?: NOT NULL)?"
_PART = rf"(?:{_COLUMN}|(?:CONSTRAINT {_NAME} )?PRIMARY KEY {_NAMES}|FOREIGN KEY ?{_NAMES} REFERENCES {_NAME} {_NAMES})"
_PLAIN = re.compile(
    rf"CREATE TABLE {_NAME} \( ?{_PART}(?: ?, {_PART})* ?\)|CREATE INDEX {_NAME} ON {_NAME} {_NAMES}", re.ASCII
)
"""A statement that makes a table or an index in which nothing is computed: all that we write, and that a later release
would write for another column or table."""


def refuse_programs(cursor: Any) -> None:
    """A stranger's database may hold programs: a view in a table's place, say, or a column that is computed.

    Raises BadInput, or what SQLite raises where it cannot read the schema.
    """
    cursor.execute("PRAGMA trusted_schema=OFF")
    cursor.execute("SELECT CAST(name AS TEXT), CAST(sql AS TEXT) FROM sqlite_master")
    for name, statement in cursor.fetchall():
        is_own_index = statement is None and f"{name}".startswith("sqlite_autoindex_")
        if not is_own_index and not _PLAIN.fullmatch(re.sub(r"\s+", " ", statement or "", flags=re.ASCII)):
            raise BadInput(f"{FILE_NAME}: {printable.quotation(f'{name}', 80)} is no plain table or index; {REMEDY}")


def _set_up(place: str, read_only: bool, connection: Any, _: object) -> None:
    """Of each new connection to a SQLite file; nothing is changed before it is known to be one of ours."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS}")
    refuse_programs(cursor)
    versions.require_known(versions.of_sqlite(cursor), place)
    if not read_only:
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")  # a power cut loses nothing that was told to a watcher
        cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
