"""Files that no other user may have changed: directories that are ours, links that are not followed, names made safe.

The one idea: a folder that only its owner and root can change holds what we put there, so it is enough to look at
every folder on the way once; and a file that came with a folder, from any user, is opened without following links.
What is wrong is one `BadInput` that names the place and says what to do. It never reads what it refuses.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import re
import secrets
import stat
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from warpsmith.errors import BadInput

ALONE = "WARPSMITH_ALONE"
"""Variable that says, as our images do, that no other user exists here: a volume's folder may have any rights."""

MOST_LINKS = 40
"""As many symbolic links on the way as Linux follows."""
NAME_BYTES = 120
"""Longest stem of a file name that is made of a text; a file system takes 255 bytes with what is added."""
PATH_BYTES = 1024

_NO_FILES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


# ---- directories ---------------------------------------------------------------------------------------


def directory(path: Path, *, make: bool = True, remedy: str = "name another") -> Path:
    """The real path of a directory that only we and root can change, made for us alone where it is missing.

    Raises:
        BadInput: another user could change it or a folder on the way to it, or it is a symbolic link or no directory.
        OSError: it cannot be made, or is missing.
    """
    place = Path(os.path.abspath(path))
    if place.is_symlink():
        raise BadInput(f"{path}: is a symbolic link; name the folder that it stands for")
    parent = _walked(place.parent, remedy)
    place = parent / place.name if place.name else parent
    if make:
        make_folder(place)
    found = os.lstat(place)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    if why := _changed_by_others(place, found, is_last=True):
        raise _refused(place, why, remedy)
    return place


def shared_directory(path: Path, *, remedy: str = "name another") -> Path:
    """The real path of a directory in which what we make stays ours, as it does in a sticky /tmp; raises as above."""
    return _walked(Path(os.path.abspath(path)), remedy)


def temporary_directory() -> Path:
    """Where temporary files are made; raises as above where others could change what lies there."""
    return shared_directory(Path(tempfile.gettempdir()), remedy="set TMPDIR to another folder")


def make_folder(place: Path) -> None:
    """Makes a folder, and those on the way that are missing, for us alone. What is there stays as it is."""
    missing = []
    while not os.path.lexists(place):
        missing.append(place)
        place = place.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)


def _walked(path: Path, remedy: str) -> Path:
    """The real path, every folder and link on the way looked at; what is missing is taken as it is named."""
    waiting, place, links = list(reversed(path.parts[1:])), Path("/"), 0
    while True:
        if why := _changed_by_others(place, os.lstat(place), is_last=False):
            raise _refused(place, why, remedy)
        if not waiting:
            return place
        entry = place / waiting.pop()
        try:
            found = os.lstat(entry)
        except FileNotFoundError:
            return entry.joinpath(*reversed(waiting))
        if not stat.S_ISLNK(found.st_mode):
            place = Path(os.path.normpath(entry))
            continue
        links += 1
        if found.st_uid not in (0, os.geteuid()) or links > MOST_LINKS:
            raise BadInput(f"{entry}: is a symbolic link of another user's; {remedy}")
        target = Path(os.path.normpath(place / os.readlink(entry)))
        waiting += reversed(target.parts[1:])
        place = Path("/")


def _changed_by_others(place: Path, found: os.stat_result, *, is_last: bool) -> str:
    """Why other users (not root) could change a folder, or a file that is the last of a path, or empty.

    In a sticky folder they can, but not what is ours.
    """
    if os.environ.get(ALONE) == "1":
        return ""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to {user_name(found.st_uid)}"
    if not is_last and (not stat.S_ISDIR(found.st_mode) or found.st_mode & stat.S_ISVTX):
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "everybody may write there (chmod o-w takes that away)"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(place, found.st_gid):
        return "its group may write there (chmod g-w takes that away)"
    return ""


def _refused(place: Path, why: str, remedy: str) -> BadInput:
    return BadInput(f"{place}: {why}; {remedy}, or set {ALONE}=1 where no other user has an account, as in a container")


def _is_own_group(place: Path, group: int) -> bool:
    """Whether a group is root's or ours alone (many systems make one for each user), and no access list adds others."""
    try:
        own, members = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
        listed = "system.posix_acl_access" in os.listxattr(place)
    except (KeyError, OSError):
        return False
    return (group == 0 or members.gr_name == own) and not set(members.gr_mem) - {own, "root"} and not listed


def user_name(number: int) -> str:
    """The name of a user, as far as the system knows one."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


# ---- files ---------------------------------------------------------------------------------------------


def read_beneath(root: Path, name: str | PurePosixPath, *, most_bytes: int = 1 << 30) -> bytes:
    """The bytes of a file below a folder that any user may have filled; no link is followed on the way from the folder.

    Raises:
        BadInput: the file or a folder on the way is a symbolic link, or no plain file, or too large.
        OSError: it cannot be read.
    """
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise BadInput(f"{name}: leaves the folder {root}")
    with contextlib.ExitStack() as stack:
        folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        for depth, part in enumerate(relative.parts[:-1], start=1):
            with _explained(root.joinpath(*relative.parts[:depth]), folder, part):
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                folder = os.open(part, flags, dir_fd=folder)
            stack.callback(os.close, folder)
        with _explained(root / relative, folder, relative.name):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(relative.name, flags, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            _require_plain(root / relative, found)
            if found.st_size > most_bytes:
                raise BadInput(f"{root / relative}: holds {found.st_size} bytes; at most {most_bytes} are read")
            return file.read(found.st_size)


def read(path: Path, *, most_bytes: int = 1 << 30) -> bytes:
    """The bytes of a file, itself no link; raises as `read_beneath`."""
    whole = Path(os.path.abspath(path))
    return read_beneath(whole.parent, whole.name, most_bytes=most_bytes)


def own_file(path: Path, *, make: bool = False, remedy: str = "name another") -> Path:
    """The real path of a file that only we and root can change, in a `shared_directory`; `make` makes what is missing.

    Raises:
        BadInput: another user could change it or a folder on the way to it, or it is a symbolic link.
        OSError: it cannot be made, or is missing.
    """
    whole = Path(os.path.abspath(path))
    place = shared_directory(whole.parent, remedy=remedy) / whole.name
    if make:
        make_folder(place.parent)
        append_to(place).close()
    found = os.lstat(place)
    if stat.S_ISLNK(found.st_mode):
        raise _is_link(path)
    if why := _changed_by_others(place, found, is_last=True):
        raise _refused(path, why, remedy)
    return place


def append_to(path: Path) -> IO[bytes]:
    """The file open to be appended to, made for us alone where it is missing. Its folder is a `directory`.

    Raises:
        BadInput: it is a link, or no plain file.
        OSError: it cannot be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _explained(path):
        descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        _require_plain(path, found)
        _require_one_name(path, found)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return open(path, "ab", buffering=0, opener=lambda *_: descriptor)


def replace(path: Path, content: str | bytes, *, mode: int = 0o600) -> None:
    """Writes a file that readers see whole or not at all; where a link stands, the link is replaced.

    Raises:
        BadInput: what stands there is a directory, a device, a pipe or a socket, or a link to one of the last three.
        OSError: it cannot be written.
    """
    _require_replaceable(path)
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _require_replaceable(path: Path) -> None:
    with contextlib.suppress(OSError):  # where nothing can be looked at, nothing is written either
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind == stat.S_IFLNK:
            target = stat.S_IFMT(os.stat(path).st_mode)
            kind = kind if target == stat.S_IFDIR else target
        if kind in _NO_FILES:
            raise BadInput(f"{path}: is {_NO_FILES[kind]}, which no file replaces; name another")


def claim(path: Path) -> None:
    """Makes sure that what foreign code opens by this path is a plain file of ours alone, made where missing.

    Raises:
        BadInput: it is a link, no plain file, or another user's.
        OSError: it cannot be made or changed.
    """
    with append_to(path) as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.geteuid()):
            raise BadInput(f"{path}: belongs to {user_name(found.st_uid)}; move it away")
        if found.st_uid == os.geteuid() and found.st_mode & 0o077 and os.environ.get(ALONE) != "1":
            os.fchmod(file.fileno(), 0o600)


def require_plain(path: Path) -> None:
    """Refuses, unread, what is there and is no plain file under one name; raises as `claim`."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise _is_link(path)
        _require_plain(path, found)
        _require_one_name(path, found)


def _require_plain(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"{path}: is no plain file")


def _require_one_name(path: Path, found: os.stat_result) -> None:
    if found.st_nlink > 1:
        raise BadInput(f"{path}: has other names too (hard links), so writing here would change another file; copy it")


def _is_link(path: Path) -> BadInput:
    return BadInput(f"{path}: is a symbolic link, and links are not followed; put the file itself there")


@contextlib.contextmanager
def _explained(path: Path, folder: int | None = None, name: str | None = None) -> Iterator[None]:
    """Says of a link that was not followed that it is one; Linux says ELOOP, or ENOTDIR of one that is on the way."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _link_stands(name or path, folder):
            raise _is_link(path) from None
        if error.errno == errno.ENXIO:  # a pipe that no process reads
            raise BadInput(f"{path}: is no plain file") from None
        raise


def _link_stands(name: str | Path, folder: int | None) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


# ---- names ---------------------------------------------------------------------------------------------


def file_name(text: str, ending: str = "") -> str:
    """A file name made of any text: one part of a path, of letters, digits, dots, dashes, underscores; never hidden.

    The text's own end stays where it is the `ending`.
    """
    stem = unicodedata.normalize("NFC", text[: 4 * NAME_BYTES]).removesuffix(ending)
    kept = re.sub(r"[^\w.-]+", "_", stem).lstrip("._-").encode()[:NAME_BYTES].decode(errors="ignore")
    return (kept or "unnamed") + ending


def require_name(what: str, text: str) -> str:
    """The text, where it can be a name: not a path, without control characters, not endless.

    Raises:
        BadInput: it cannot.
    """
    if not text.isprintable() or "/" in text or text in (".", "..") or len(text) > 200:
        raise BadInput(f"{what} {text[:40]!r} is no name: write one without slashes and control characters")
    return text


def relative_path(what: str, text: str) -> PurePosixPath:
    """The text as a path that stays below the folder that it is put in.

    Raises:
        BadInput: it does not, or no file can have it.
    """
    pure = PurePosixPath(text)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts:
        raise BadInput(f"{what} {text[:80]!r} must be relative and stay inside the module's folder")
    if (
        not text.isprintable()
        or len(text.encode()) > PATH_BYTES
        or max(len(part.encode()) for part in pure.parts) > 255
    ):
        raise BadInput(f"{what} {text[:80]!r} is no path that a file can have")
    return pure
