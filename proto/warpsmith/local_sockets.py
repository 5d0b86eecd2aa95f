"""Unix domain sockets of the services of one command: where they are, and whether one is ours before we speak to it.

The one idea: only its owner can enter the folder of a socket, or make one of that name once it is gone, so no other
user can reach the server or stand in its place, and neither side has to show anything to the other. Every user of the
machine can reach a port on loopback, or listen at a free one; where a user names a port, we look at least whose it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

from warpsmith.errors import BadInput, Infrastructure
from warpsmith.sandbox import private_files

SCRATCH_PREFIX = "warpsmith-scratch-"
"""How the folder begins in which all services of a command work (TMPDIR)."""
SCHEME = "unix:"
BY_TLS = ".tls"
"""How the name of a socket ends at which a certificate is asked for, and shown."""
PATH_BYTES = 107
"""Longest path of a socket; Linux keeps 108 bytes with the final zero."""
ROOM = 60
"""Bytes that are kept for our folders' names and the longest socket's name in them."""


def make_folder() -> Path:
    """A new folder that only we can enter, below one of ours that stays, at a path short enough for sockets.

    A command may call a server again after its folder is gone: in a `/tmp` that all share, anybody could have made one
    of that name by then.

    Raises:
        Infrastructure: no such folder can be made here.
    """
    refused = []
    places = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp", "/var/tmp")
    for parent in dict.fromkeys(place for place in places if os.path.isdir(place)):
        if len(os.fsencode(parent)) + ROOM > PATH_BYTES or not re.fullmatch(r"/[\w./+-]+", parent, re.ASCII):
            refused.append(f"{parent}: too long, or of unusual characters")
            continue
        try:
            own = private_files.directory(Path(parent, f"warpsmith-{os.geteuid()}"))
            if os.stat(own).st_mode & 0o077:
                raise BadInput(f"{own}: others may enter it (chmod 700 takes that away)")
            return Path(tempfile.mkdtemp(prefix="", dir=own))
        except (OSError, BadInput) as error:
            refused.append(str(error))
    raise Infrastructure(f"no private folder for the services' sockets: {'; '.join(refused)}; set TMPDIR")


def clean_up(socket: Path | None, port_file: Path | None) -> None:
    """What a service does at its end whose command is gone: the last one removes the folders that were made for all."""
    if port_file is not None:
        port_file.unlink(missing_ok=True)
    folders = [Path(tempfile.gettempdir())] if Path(tempfile.gettempdir()).name.startswith(SCRATCH_PREFIX) else []
    for folder in [*([socket.parent] if socket is not None else []), *folders]:
        with contextlib.suppress(OSError):  # the others' sockets may be there still, or what they work with
            folder.rmdir()


def address_of(socket: Path) -> str:
    """The address of a server that listens at a path."""
    return f"{SCHEME}{socket}"


def is_one(address: str) -> bool:
    """Whether an address is that of a Unix socket."""
    return address.startswith(SCHEME)


def is_by_tls(address: str) -> bool:
    """Whether the socket of an address is served by mutual TLS."""
    return address.endswith(BY_TLS)


def path_of(address: str) -> Path:
    """Where the socket of an address is.

    Raises:
        BadInput: its path is not absolute, or too long.
    """
    path = Path("/" + address.removeprefix(SCHEME).lstrip("/"))
    if not address.startswith(f"{SCHEME}/"):
        raise BadInput(f"{address}: write unix:/path, from the root on")
    return _short(path)


def require_own(address: str) -> None:
    """Refuses the address of a Unix socket that a user other than us and root could have put there, or could reach.

    Raises:
        BadInput: the socket or its folder is another user's, or there is no such folder.
    """
    path = path_of(address)
    try:
        folder = private_files.directory(path.parent, make=False, remedy="a socket has to be in a folder of your own")
        found = os.lstat(folder / path.name)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise BadInput(f"{address}: nothing listens there any more") from None
        return  # a server that is being replaced; no other user can take its place
    except OSError as error:
        raise BadInput(f"{address}: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid not in (0, os.geteuid()):
        raise BadInput(f"{address}: is no socket of yours")


def place_for(socket: Path) -> Path:
    """The path to listen at, in a folder that only we can enter.

    Raises:
        BadInput: others could enter or change the folder, it is missing, or the path is too long.
    """
    remedy = "the socket of a service has to be in a folder of its own"
    try:
        folder = private_files.directory(socket.parent, make=False, remedy=remedy)
    except OSError as error:
        raise BadInput(f"{socket}: {error.strerror}") from error
    if os.stat(folder).st_mode & 0o077:
        raise BadInput(f"{folder}: others may enter it; {remedy} (chmod 700)")
    return _short(folder / socket.name)


def _short(path: Path) -> Path:
    if len(os.fsencode(path)) > PATH_BYTES:
        raise BadInput(f"{path}: too long for a socket; at most {PATH_BYTES} bytes")
    return path


# ---- ports on loopback, which people name ---------------------------------------------------------------

_LOOPBACK = re.compile(
    r"(?:dns:///|ipv[46]:|https?://)?(?:localhost|127\.[\d.]+|\[?::1\]?):(\d{1,5})(?:/.*)?", re.ASCII | re.IGNORECASE
)
_LISTENING = "0A"
_ANY_OR_LOOPBACK = re.compile(r"0+|(?:0{24})?[0-9A-F]{6}7F|0{24}01000000|0{16}FFFF0000[0-9A-F]{6}7F")
"""Hosts in the kernel's tables, each 32-bit word with its bytes turned: any, 127.x.x.x, ::1, ::ffff:127.x.x.x."""


def is_loopback(address: str) -> bool:
    """Whether an address is a port of this machine's loopback."""
    return _LOOPBACK.fullmatch(address) is not None


def require_own_port(address: str) -> None:
    """Refuses an address on loopback at which a user other than us and root listens at the moment.

    Where no other user has an account (`private_files.ALONE`), none is refused. Such an address has no other
    protection: when no process listens any more, any user can take the port.

    Raises:
        BadInput: says whose port it is.
    """
    if os.environ.get(private_files.ALONE) == "1":
        return
    match = _LOOPBACK.fullmatch(address)
    others = _listeners(int(match[1])) - {0, os.geteuid()} if match else set()
    if others:
        owners = " and ".join(map(private_files.user_name, sorted(others)))
        raise BadInput(f"{address}: the port belongs to {owners}; use a Unix socket in a folder of yours instead")


def _listeners(port: int) -> set[int]:
    """Users whose processes listen at a port of this machine's loopback; empty where the kernel does not say."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, rows):
            host, _, number = fields[1].rpartition(":")
            if fields[3] == _LISTENING and int(number, 16) == port and _ANY_OR_LOOPBACK.fullmatch(host):
                found.add(int(fields[7]))
    return found
