"""Writes a page where the user wants it.

The one idea: the user names a file for a report, so an earlier report or an empty file gives way to it, and nothing
else does.
"""

from __future__ import annotations

import os
from pathlib import Path

from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files

MARK = '<meta name="generator" content="Warpsmith">'
"""By which a page of ours is known; it stands in its head."""
_HEAD_BYTES = 2000


def write(place: Path, html: str) -> None:
    """Writes a page, as far as the user's umask lets others read.

    Raises:
        BadInput: it cannot be written, or what stands there is no page of ours.
    """
    try:
        if not os.path.lexists(place) or _may_go(place):
            private_files.replace(place, html, mode=0o666)
            return
    except OSError as error:
        raise BadInput(f"{place}: cannot be written ({error.strerror})") from error
    raise BadInput(f"{place}: is no report of ours, so it stays; move it away, or name another file with --html")


def _may_go(place: Path) -> bool:
    held = private_files.read(place)
    return not held or MARK.encode() in held[:_HEAD_BYTES]
