"""Folders in which code of others wrote: how much they hold, and how they are removed.

The one idea: by descriptors and without recursion, so that depth, long names, links and what still happens there make
no difference. It removes no file that lies outside.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from typing import Final

MOST_NESTED: Final = 128
"""Folders within one another, in a folder whose content is counted: more are held to be too much."""
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def bytes_below(folder: str) -> float:
    """What the files below a folder take up; without end where it cannot be looked into, or is nested too deep."""
    total, opened = 0.0, list[tuple[int, list[str]]]()
    try:
        descriptor = os.open(folder, _FOLDER)
        opened.append((descriptor, os.listdir(descriptor)))
        while opened:
            descriptor, names = opened[-1]
            if not names:
                opened.pop()
                os.close(descriptor)
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another by now
                name = names.pop()
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                total += 512 * found.st_blocks
                if not stat.S_ISDIR(found.st_mode):
                    continue
                if len(opened) > MOST_NESTED:
                    return math.inf
                inner = os.open(name, _FOLDER, dir_fd=descriptor)
                opened.append((inner, []))
                opened[-1][1].extend(os.listdir(inner))
    except FileNotFoundError:
        return total
    except OSError:
        return math.inf
    finally:
        for descriptor, _ in opened:
            os.close(descriptor)
    return total


def remove(folder: str) -> None:
    """Removes a folder and all below it, whatever was done to it; what cannot be removed stays.

    Folders within folders are brought up to the first, so that two are open at once however deep they lie.
    """
    with contextlib.suppress(OSError):
        top, before = _opened(folder), set[str]()
        try:
            while (names := {*os.listdir(top)}) != before:
                before = names
                for name in names:
                    _take_away(name, top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _take_away(name: str, top: int) -> None:
    """Removes an entry of a folder; the folders within it become entries beside it."""
    with contextlib.suppress(OSError):
        if not _is_folder(name, top):
            os.unlink(name, dir_fd=top)
            return
        inner = _opened(name, top)
        try:
            for entry in os.listdir(inner):
                with contextlib.suppress(OSError):
                    if _is_folder(entry, inner):
                        os.close(_opened(entry, inner))  # what may not be written cannot be moved
                        os.rename(entry, os.urandom(16).hex(), src_dir_fd=inner, dst_dir_fd=top)
                    else:
                        os.unlink(entry, dir_fd=inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)


def _is_folder(name: str, within: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)


def _opened(name: str, within: int | None = None) -> int:
    """A descriptor of a folder, which may have been made without permissions."""
    if not os.path.isdir("/proc/self/fd"):
        return os.open(name, _FOLDER, dir_fd=within)
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(place)
