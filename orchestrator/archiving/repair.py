"""Finds what is damaged in an archive of SQLite, and takes what is readable into a new one.

The one idea: a damaged file is only read. Rows are taken by their numbers from both ends, and one by one around what
cannot be read, so that a lost page costs its own rows and no others; the file is then set aside under another name.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from google.protobuf.message import DecodeError, Message

from orchestrator.archive import FILE_NAME, Archive, refuse_programs, require_plain
from orchestrator.archiving import programs, versions
from orchestrator.serving import ownership
from warpsmith.errors import BadInput
from warpsmith.v1 import analysis_pb2, run_pb2, trial_pb2

KINDS: Mapping[str, type[Message]] = {
    "runs": run_pb2.Run,
    "trials": trial_pb2.Trial,
    "events": run_pb2.RunEvent,
    "groups": analysis_pb2.KnownGroup,
}
"""By table, what a row's message is. A row of another table than the first belongs to one of it."""
TABLES_READ = ("texts", *KINDS)
"""In this order: a trial needs its texts and its run."""
COMPANIONS = ("", "-wal", "-shm")
PROBES = 1_000_000
"""Most rows of a table that are asked for one by one."""


@dataclass
class Table:
    """What became of the rows of one table."""

    name: str
    readable: int = 0
    damaged: int = 0
    """Rows that are there and hold no message of ours."""
    orphaned: int = 0
    """Readable rows whose run, or a text that they need, is lost."""


@dataclass
class Findings:
    """What is known of a file."""

    tables: list[Table]
    version: str
    """Of its schema; empty where it is older than versions."""
    problems: list[str] = field(default_factory=list)
    """What SQLite says of it; empty where it is sound."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is lost."""
        return not self.problems and not any(table.damaged or table.orphaned for table in self.tables)


def check(directory: Path) -> Findings:
    """Reads every row of a directory's archive, also while runs go on.

    Raises:
        BadInput: there is none, or a later release has written it.
    """
    with closing(_opened(_file(directory))) as connection:
        version = _known_version(connection, directory)
        problems = []
        try:
            rows = connection.execute("PRAGMA integrity_check(5)").fetchall()
            problems = [str(row[0]) for row in rows if row[0] != "ok"]
        except sqlite3.DatabaseError as error:
            problems = [str(error)]
        return Findings(_read(connection, lambda *_: True), version, problems)


def recover(directory: Path) -> tuple[Findings, Path]:
    """Takes what is readable into a new archive, and sets the old one aside; gives its new name.

    Raises:
        BadInput: there is none, an orchestrator has it, a later release has written it, or not a row can be read.
    """
    file = _file(directory)
    if ownership.somebody_lives(directory):
        raise BadInput(f"{file}: an orchestrator is at work on it; end `warpsmith up`, or the command that runs, first")
    with tempfile.TemporaryDirectory(dir=directory, prefix=".recovering-") as folder:
        copied, made = Path(folder, FILE_NAME), Path(folder, "made")
        for companion in COMPANIONS[:2]:
            if (part := file.with_name(file.name + companion)).exists():
                copied.with_name(copied.name + companion).write_bytes(part.read_bytes())
        with closing(_opened(copied, mode="rw")) as connection, _filling(made) as add:
            version = _known_version(connection, directory)
            found = Findings(_read(connection, add), version)
        if not any(table.readable for table in found.tables):
            raise BadInput(f"{file}: not a row of it can be read; move it away to begin anew")
        aside = file.with_name(f"{file.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        for companion in COMPANIONS:
            if (part := file.with_name(file.name + companion)).exists():
                part.rename(aside.with_name(aside.name + companion))
        made.rename(file)
    return found, aside


def back_up(directory: Path, copy: Path) -> int:
    """Writes a sound copy of a directory's archive, also while runs go on; gives its size in bytes.

    Raises:
        BadInput: there is no archive, it is damaged, or the copy is there already or cannot be written.
    """
    file = _file(directory)
    if copy.exists():
        raise BadInput(f"{copy}: is there already; a back-up never replaces a file")
    part = copy.with_name(f"{copy.name}.part")
    try:
        with closing(_opened(file)) as source, closing(sqlite3.connect(part)) as target:
            source.backup(target)
        part.rename(copy)
    except sqlite3.Error as error:
        raise BadInput(f"{file}: cannot be copied to {copy}: {error}; see `warpsmith archive check`") from error
    except OSError as error:
        raise BadInput(f"{copy}: cannot be written ({error.strerror})") from error
    finally:
        part.unlink(missing_ok=True)
    return copy.stat().st_size


def _file(directory: Path) -> Path:
    file = directory / FILE_NAME
    if not file.exists():
        raise BadInput(f"{directory}: no runs are kept here; --runs looks elsewhere")
    require_plain(directory)
    return file


def _opened(file: Path, mode: str = "ro") -> sqlite3.Connection:
    # Without its companions it is whole, and none are made beside it.
    whole = "&immutable=1" if mode == "ro" and not file.with_name(f"{file.name}-wal").exists() else ""
    connection = sqlite3.connect(f"file:{quote(str(file))}?mode={mode}{whole}", uri=True)
    connection.text_factory = lambda read: read.decode(errors="replace")
    try:
        connection.execute("PRAGMA writable_schema=ON")  # so SQLite opens what is shorter than its header says
        refuse_programs(connection.cursor())
    except sqlite3.DatabaseError as error:
        connection.close()
        raise BadInput(f"{file}: not even its tables can be read: {error}; move it away to begin anew") from error
    return connection


def _known_version(connection: sqlite3.Connection, directory: Path) -> str:
    try:
        version = versions.of_sqlite(connection.cursor())
    except sqlite3.DatabaseError:  # the page that says so is damaged: the rows are asked
        return versions.UNVERSIONED
    versions.require_known(version, str(directory / FILE_NAME))
    return version


Row = Mapping[str, Any]
Taken = Callable[[str, Row], bool]
"""Takes a readable row of a table; False where what it needs is lost."""


def _read(connection: sqlite3.Connection, take: Taken) -> list[Table]:
    return [_read_table(connection, name, take) for name in TABLES_READ]


def _read_table(connection: sqlite3.Connection, name: str, take: Taken) -> Table:
    table = Table(name)
    for row in _rows(connection, name):
        if not _is_ours(name, row):
            table.damaged += 1
        elif take(name, row):
            table.readable += 1
        else:
            table.orphaned += 1
    return table


def _is_ours(table: str, row: Row) -> bool:
    try:
        if table == "texts":
            return bool(programs.digest_of(row["content"]) == row["digest"])
        KINDS[table].FromString(row["message"])
    except (DecodeError, TypeError, KeyError):
        return False
    return True


def _rows(connection: sqlite3.Connection, table: str) -> Iterator[Row]:
    """Rows of a table that can be read: from both ends up to what cannot, and in between one by one."""
    query = f"SELECT rowid AS place, * FROM {table}"
    first, is_whole = yield from _until_unreadable(connection, f"{query} ORDER BY rowid")
    if is_whole:
        return
    last, _ = yield from _until_unreadable(connection, f"{query} WHERE rowid > {first} ORDER BY rowid DESC")
    end = min(last or _most_rows(connection), first + PROBES)
    for number in range(first + 1, end):
        yield from _until_unreadable(connection, f"{query} WHERE rowid = {number}")


def _most_rows(connection: sqlite3.Connection) -> int:
    """Of any table: a row takes ten bytes or more."""
    (pages,), (page_bytes,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    return int(pages * page_bytes // 10)


def _until_unreadable(connection: sqlite3.Connection, query: str) -> Generator[Row, None, tuple[int, bool]]:
    """Rows up to one that cannot be read; gives the rowid of the last one, and whether it was the end."""
    place = 0
    try:
        cursor = connection.execute(query)
        names = [column[0] for column in cursor.description]
        for values in cursor:
            yield (row := dict(zip(names, values, strict=True)))
            place = row["place"]
    except sqlite3.DatabaseError:
        return place, False
    return place, True


@contextmanager
def _filling(file: Path) -> Iterator[Taken]:
    """A new archive at a file, with what fills it."""
    Archive(f"sqlite:///{file}").close()
    with closing(sqlite3.connect(file)) as target:
        columns = {name: [row[1] for row in target.execute(f"PRAGMA table_info({name})")] for name in TABLES_READ}
        runs: set[str] = set()
        texts: set[str] = set()

        def take(table: str, row: Row) -> bool:
            if table == "texts":
                texts.add(row["digest"])
            elif table == "runs":
                runs.add(row["id"])
            elif row["run_id"] not in runs or not texts.issuperset(f"{row.get('texts', '')}".split()):
                return False
            kept = {name: row[name] for name in columns[table] if name in row}
            places = ", ".join("?" * len(kept))
            target.execute(f"INSERT OR IGNORE INTO {table} ({', '.join(kept)}) VALUES ({places})", list(kept.values()))
            return True

        yield take
        target.commit()
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        target.execute("PRAGMA journal_mode=DELETE")
