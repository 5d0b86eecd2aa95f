"""Writes an exported kernel and, beside it, its record.

The one idea: the user has named the kernel's file, which is replaced whatever it holds, and not the record's. So a
record is replaced only with the kernel that it belongs to; and that is settled before anything is written.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from orchestrator.trust import record
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files


def write(place: Path, kernel: str, its_record: str) -> None:
    """Writes both, as far as the user's umask lets others read.

    Raises:
        BadInput: one cannot be written, or what stands in the record's place is no record, or of another kernel.
    """
    beside = place.with_suffix(".record.json")
    try:
        if not _is_missing(beside):
            _require_replaceable(beside, place, its_record)
        private_files.replace(place, kernel, mode=0o666)
        private_files.replace(beside, its_record, mode=0o666)
    except OSError as error:
        raise BadInput(f"{place}: cannot be written ({error.strerror})") from error


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
