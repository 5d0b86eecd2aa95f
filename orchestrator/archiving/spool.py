"""Keeps what waits for a late archive in files, so that it outlives the orchestrator that has found it.

The one idea: a file is one run's at one owner and epoch, and what is in it is committed in that owner's name before
anybody takes the run up, so that the archive's own fence refuses it once another has gone on. A file is locked by who
writes it; a record that was not wholly written is told by its checksum. All files of a folder are bounded together.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from google.protobuf.message import DecodeError
from prometheus_client import Counter, Gauge

from orchestrator.archiving import writes
from orchestrator.archiving.patience import may_pass
from warpsmith import printable
from warpsmith.errors import ArchiveFault, BadInput, RunLost
from warpsmith.sandbox import private_files
from warpsmith.v1 import run_pb2, trial_pb2

log = logging.getLogger("warpsmith.orchestrator")

Writing = Callable[[], contextlib.AbstractContextManager[sa.Connection]]
"""A transaction of the archive; raises ArchiveFault."""

ENDING, PARTIAL, ASIDE = ".spool", ".partial", ".aside"
ENDING_SECONDS = 5.0
"""How long a file may stay locked whose writer is dead: the kernel gives up one lock of a process after the other."""
_MAGIC = b"warpsmith spool 1\n"
_FRAME = struct.Struct(">II")
"""Before each record: its bytes, and their CRC-32."""
_PARTS = struct.Struct(">cI")
"""A record's beginning: `r` for a run or `t` for a trial, and the bytes of its event, which comes first."""
_KINDS: dict[bytes, type[run_pb2.Run] | type[trial_pb2.Trial]] = {b"r": run_pb2.Run, b"t": trial_pb2.Trial}

_records = Gauge("warpsmith_spool_records", "What runs have written that waits for the archive in files.")
_bytes = Gauge("warpsmith_spool_bytes", "Size of these files.")
_set_aside = Counter(
    "warpsmith_spool_set_aside_total", "Such files that the archive never took: another went on with the run."
)


@dataclass(frozen=True)
class Record:
    """What a run writes at once: itself or an ended trial, and the event that tells of it."""

    message: run_pb2.Run | trial_pb2.Trial
    event: run_pb2.RunEvent

    def packed(self) -> bytes:
        """As it stands in a file."""
        kind, event = b"r" if isinstance(self.message, run_pb2.Run) else b"t", self.event.SerializeToString()
        return _framed(_PARTS.pack(kind, len(event)) + event + self.message.SerializeToString())


@dataclass(frozen=True)
class Waiting:
    """What a file holds: of which run, at whose, and how much of the file is no whole record."""

    run_id: str
    owner: str
    epoch: int
    records: list[Record]
    rest: int = 0
    """Bytes after the last whole record."""
    is_torn: bool = False
    """Whether they are the beginning of one record, as a process leaves it that is killed."""


class Spool:
    """The files of an orchestrator: `folder`, made once it is needed, holds at most `most_bytes`."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._lock = threading.Lock()
        self._has_warned = False

    def begin(self, run_id: str, owner: str, epoch: int) -> SpoolFile:
        """What will hold what waits of a run; nothing is written yet."""
        header = {"run": run_id, "owner": owner, "epoch": epoch}
        return SpoolFile(self, self._file(run_id), _MAGIC + _framed(json.dumps(header).encode()))

    def _file(self, run_id: str) -> Path:
        return self.folder / private_files.file_name(f"{run_id}{ENDING}", ENDING)

    def files(self) -> list[Path]:
        """Those that hold what waits, also what others write now."""
        return sorted(self.folder.glob(f"*{ENDING}"))

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Held while so many bytes are written. Raises OSError where they are more than there may be."""
        with self._lock:
            private_files.directory(self.folder)
            used = sum(map(_size, self.folder.iterdir()))
            if used + size > self.most_bytes:
                raise OSError(0, f"it holds {used} of at most {self.most_bytes} bytes")
            yield
            self._has_warned = False

    def warn(self, what: str) -> None:
        """Says once, until something is written there again."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s %s", self.folder, what)

    # ---- what others have left -------------------------------------------------------------------------

    def deliver(self, writing: Writing, run_id: str) -> None:
        """Commits what waits of a run, each record once, where nobody has gone on with the run since; to be called
        before it is taken up. What is refused, or is not ours, is set aside.

        Raises:
            ArchiveFault: the archive cannot be written now; the file stays.
        """
        self._deliver(writing, [self._file(run_id)], ENDING_SECONDS)

    def deliver_all(self, writing: Writing) -> None:
        """The same of every file that nobody writes. Raises as above."""
        self._deliver(writing, [*self.files(), *self.folder.glob(f".*{PARTIAL}")])

    def _deliver(self, writing: Writing, paths: list[Path], seconds: float = 0.0) -> None:
        try:
            for path in filter(Path.exists, paths):
                private_files.directory(self.folder, make=False)
                with _held(path, seconds) as is_ours:
                    if is_ours and path.suffix == PARTIAL:
                        path.unlink()
                    elif is_ours:
                        _deliver(writing, path)
        except (OSError, BadInput) as error:
            self.warn(f"cannot be read or cleared ({error})")


class SpoolFile:
    """Of one run that waits now. Not for several threads at once."""

    def __init__(self, spool: Spool, path: Path, header: bytes) -> None:
        self.path, self._spool, self._header = path, spool, header
        self._descriptor: int | None = None
        self._size = self._count = 0

    def add(self, record: Record) -> bool:
        """Whether the record is on the disk now; of one that is not, nothing is, and the log says why."""
        packed = record.packed()
        try:
            with self._spool.room(len(packed) + (0 if self._size else len(self._header))):
                if self._descriptor is None:
                    self._begin(packed)
                else:
                    self._append(self._descriptor, packed)
        except (OSError, BadInput) as error:
            why = getattr(error, "strerror", None) or error
            self._spool.warn(f"takes nothing ({why}): runs wait for the archive without it")
            return False
        self._count += 1
        _records.inc()
        _bytes.inc(len(packed))
        return True

    def _begin(self, packed: bytes) -> None:
        """Makes the file with its first record: others see it whole and locked, or not at all."""
        if self.path.exists():
            raise FileExistsError(0, f"{self.path.name} is there already")
        partial = self.path.with_name(f".{self.path.name}{PARTIAL}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(descriptor, self._header + packed)
            partial.rename(self.path)
            _sync_folder(self.path.parent)
        except BaseException:
            os.close(descriptor)
            for path in (partial, self.path):
                path.unlink(missing_ok=True)
            raise
        self._descriptor, self._size = descriptor, len(self._header) + len(packed)
        log.warning(
            "what waits for the archive is kept in %s; files there hold at most %d bytes",
            self.path,
            self._spool.most_bytes,
        )

    def _append(self, descriptor: int, packed: bytes) -> None:
        try:
            _write(descriptor, packed)
        except BaseException:
            os.ftruncate(descriptor, self._size)  # a record in its midst would hide those after it
            os.lseek(descriptor, self._size, os.SEEK_SET)
            raise
        self._size += len(packed)

    def remove(self) -> None:
        """The archive has all of it."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            self.close()

    def set_aside(self, why: str) -> None:
        """The archive will never have it."""
        if self._descriptor is not None:
            _move_aside(self.path, why)
            self.close()

    def close(self) -> None:
        """Leaves it to whoever delivers it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            _records.dec(self._count)
            _bytes.dec(self._size - len(self._header))
            self._descriptor, self._size, self._count = None, 0, 0


def read(path: Path) -> Waiting:
    """What a file holds.

    Raises:
        BadInput: it is not one of ours; OSError: it cannot be read.
    """
    content = private_files.read(path)
    place, records = len(_MAGIC), list[Record]()
    try:
        if not content.startswith(_MAGIC):
            raise ValueError
        header, place = _unframed(content, place)
        told = json.loads(header)
        run_id, owner, epoch = str(told["run"]), str(told["owner"]), int(told["epoch"])
    except (EOFError, ValueError, KeyError, TypeError):
        raise BadInput("it is no spool of ours") from None
    try:
        while place < len(content):
            record, end = _unframed(content, place)
            kind, size = _PARTS.unpack_from(record)
            event, rest = record[_PARTS.size : _PARTS.size + size], record[_PARTS.size + size :]
            message = _KINDS[kind].FromString(rest)
            if isinstance(message, run_pb2.Run) and message.id != run_id:
                raise ValueError
            records.append(Record(message, run_pb2.RunEvent.FromString(event)))
            place = end
    except EOFError:
        return Waiting(run_id, owner, epoch, records, len(content) - place, is_torn=True)
    except (ValueError, KeyError, struct.error, DecodeError):
        return Waiting(run_id, owner, epoch, records, len(content) - place)
    return Waiting(run_id, owner, epoch, records)


def findings(folder: Path) -> list[str]:
    """A sentence on each file of a folder: what waits, and what was set aside."""
    found = []
    for path in sorted([*folder.glob(f"*{ENDING}"), *folder.glob(f"*{ASIDE}")]):
        how = "set aside" if path.suffix == ASIDE else "waits for the archive"
        try:
            waiting = read(path)
        except (OSError, BadInput) as error:
            found.append(f"{path}: {error}; {how}")
            continue
        trials = [record.message.number for record in waiting.records if isinstance(record.message, trial_pb2.Trial)]
        what = f"trials {trials[0]} to {trials[-1]}" if trials else "no trial"
        found.append(f"{path}: {what} of run {printable.quotation(waiting.run_id, 40)}; {how}")
    return found


def _deliver(writing: Writing, path: Path) -> None:
    try:
        waiting = read(path)
    except BadInput as error:
        _move_aside(path, f"{error}")
        return
    try:
        count = _commit(writing, waiting)
    except ArchiveFault as error:
        if may_pass(error):
            raise
        _move_aside(path, f"{error}, so its {len(waiting.records)} records do not count")
        return
    log.warning("%s: %d of %d records were not in the archive yet", path, count, len(waiting.records))
    if waiting.rest and not waiting.is_torn:
        _move_aside(path, f"{waiting.rest} bytes of it are damaged")
        return
    if waiting.rest:
        log.warning("%s: its last %d bytes are no whole record, and are cut off", path, waiting.rest)
    path.unlink()


def _commit(writing: Writing, waiting: Waiting) -> int:
    """Adds what the archive does not have, all or nothing, in the name of who found it; gives how many records."""
    if not waiting.records:
        return 0
    run_id, owner, epoch = waiting.run_id, waiting.owner, waiting.epoch
    texts, count = set[str](), 0
    with writing() as connection:
        if not writes.is_kept(connection, run_id, owner, epoch):
            raise RunLost(f"there is no run {run_id}")
        there = writes.told(connection, run_id, waiting.records[0].event.number)
        for record in waiting.records:
            if record.event.number in there:
                continue
            count += 1
            if isinstance(record.message, run_pb2.Run):
                writes.put_run(connection, record.message, record.event, owner, epoch)
            else:
                row = writes.TrialRow(run_id, record.message, texts)
                row.add(connection, record.event, owner, epoch)
                texts |= row.texts.keys()
    return count


@contextlib.contextmanager
def _held(path: Path, seconds: float) -> Iterator[bool]:
    """Whether the file is ours alone within the block: nobody writes or delivers it, or not for longer than that."""
    end = time.monotonic() + seconds
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        while not (is_ours := _locks(descriptor)) and time.monotonic() < end:
            time.sleep(0.02)
        yield is_ours and os.path.lexists(path) and os.path.samestat(os.fstat(descriptor), os.lstat(path))
    finally:
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _move_aside(path: Path, why: str) -> None:
    number, aside = 1, path.with_suffix(ASIDE)
    while os.path.lexists(aside):
        number += 1
        aside = path.with_suffix(f".{number}{ASIDE}")
    path.rename(aside)
    _set_aside.inc()
    log.error("%s: %s; it is set aside as %s", path, why, aside.name)


def _size(path: Path) -> int:
    """Of a file that its run may remove meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _framed(content: bytes) -> bytes:
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


def _unframed(content: bytes, place: int) -> tuple[bytes, int]:
    """The record at a place, and where the next begins. Raises EOFError where it is not whole, ValueError where it is
    not what was written."""
    begin = place + _FRAME.size
    if begin > len(content):
        raise EOFError
    size, checksum = _FRAME.unpack_from(content, place)
    found = content[begin : begin + size]
    if zlib.crc32(found) != checksum or len(found) < size:
        raise EOFError if begin + size >= len(content) else ValueError
    return found, begin + size


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
