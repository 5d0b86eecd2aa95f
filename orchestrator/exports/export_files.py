"""Writes an exported kernel and, beside it, its records; or a folder that holds both.

The one idea: the user has named the kernel's file, which is replaced whatever it holds, and not the record's. So a
record is replaced only with the kernel that it belongs to; and that is settled before anything is written. A folder
replaces nothing, and is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath

from orchestrator.trust import record
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files

ENDINGS = (".py", ".cu")
"""Of files that exporters write: a long name is shortened before them."""


def own_name(suggested: str) -> str:
    """A name of its own for a file or folder, of what an exporter or server suggests: the task's name is in it, which
    is another's, and may have come with an archive from anywhere."""
    ending = PurePath(suggested).suffix
    return private_files.file_name(suggested, ending if ending in ENDINGS else "")


def write(place: Path, kernel: str, *records: str) -> None:
    """Writes all, as far as the user's umask lets others read. Several records are numbered: `fast.1.record.json`.

    Raises:
        BadInput: one cannot be written, or what stands in a record's place is no record, or of another kernel.
    """
    numbers = [""] if len(records) == 1 else [f".{number}" for number in range(1, len(records) + 1)]
    try:
        beside = [
            (place.with_suffix(f"{number}.record.json"), its) for number, its in zip(numbers, records, strict=True)
        ]
        for path, its_record in beside:
            if not _is_missing(path):
                _require_replaceable(path, place, its_record)
        private_files.replace(place, kernel, mode=0o666)
        for path, its_record in beside:
            private_files.replace(path, its_record, mode=0o666)
    except OSError as error:
        raise BadInput(f"{place}: cannot be written ({error.strerror})") from error


def write_folder(place: Path, files: Mapping[str, str]) -> None:
    """Writes a folder that is not there, or is empty.

    Raises:
        BadInput: it holds something, cannot be written, or a path leads out of it.
    """
    try:
        parent = private_files.shared_directory(place.parent)
        with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=parent) as partial:
            made = Path(partial) / "made"
            made.mkdir()
            for name, text in files.items():
                path = made / private_files.relative_path("a file of an export", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                private_files.replace(path, text, mode=0o666)
            _put(made, parent / place.name, place)
    except OSError as error:
        raise BadInput(f"{place}: cannot be written ({error.strerror})") from error


def _put(made: Path, name: Path, place: Path) -> None:
    try:
        os.rename(made, name)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise BadInput(f"{place}: is there already: move it away, or name another with --output") from error
        raise


def _is_missing(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    return False


def _require_replaceable(beside: Path, place: Path, its_record: str) -> None:
    """Refuses all but the same record and one of the run that the header of the kernel now at `place` names."""
    remedy = f"the record of {place} goes there: move it away, or name another file with --output"
    try:
        run, _ = record.read(beside)
    except BadInput as error:
        raise BadInput(f"{error}; {remedy}") from None
    earlier = b""
    with contextlib.suppress(OSError, BadInput):
        earlier = private_files.read(place)
    if f"(run {run.id})".encode() not in earlier and private_files.read(beside) != its_record.encode():
        raise BadInput(f"{beside}: is the record of run {run.id}, which {place} is not of; {remedy}")
