"""Starts workers from a process that has imported what they need: importing torch takes two seconds, a fork 10 ms.

    service ── socket ──> fork server ── fork ──> first process of a jail ── fork ──> worker

The one idea: what a jail is stays the same; `jail_init` builds it from the same specification, in a forked process in
place of a new one. The server is started by the service that asks it, with nothing of its environment but what
libraries read while they load. It has one thread, runs only code that is installed, forgets each request, and ends
with the service. A worker is a new process where bubblewrap builds the jail, where it reaches a GPU (CUDA does not
survive a fork, and much of PyTorch begins it unasked), and where the server cannot serve.

A worker begins with all that its server has imported, for whichever entry: one with little memory, as a compiler has,
is forked by a server of its entry alone.

Run as `python -m warpsmith.sandbox.worker --fork SOCKET` by `ForkServer`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from warpsmith.sandbox import jail_init, lockdown
from warpsmith.sandbox.jail_layout import launch_environment

Serve = Callable[[str, int, int], NoReturn]
"""(entry, request_fd, reply_fd) → never returns: `worker.serve`."""

_REQUEST: Final = struct.Struct("!II")
"""Bytes of the entry's name, bytes of the text; then both, with the descriptors beside them."""
_REPLY: Final = struct.Struct("!iI")
"""The process's number or -1; bytes of the reason, and then it."""
_MOST_DESCRIPTORS: Final = 64
_REPLY_SECONDS: Final = 60.0
_READ_WHILE_LOADING: Final = (
    "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "TRITON_", "PYTHON",
)  # fmt: skip
_MOST_SERVERS: Final = 8
_READ_LATER: Final = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})
PRELOAD: Final = "preload"
"""A function of an entry's module that the server calls once, for what the first call of every worker would import; not
where there is a GPU, which a first capture and PyTorch's compiler touch."""
NAME: Final = "fork-server"
"""Of the server among processes."""
_NAME: Final = Path("/proc/self/comm")
_GPU: Final = Path("/dev/nvidiactl")


# --- The service's side ---------------------------------------------------------------------------


class Forked:
    """A process that the server has forked; what `subprocess.Popen` gives of one that it started."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self._code: int | None = None
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, os.close, status)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, when it has ended. Raises subprocess.TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        with self._lock:
            if self._code is not None:
                return self._code
            watched = os.dup(self._status)  # one of our own: another thread may close the other
        try:
            waiting = select.poll()
            waiting.register(watched, select.POLLIN)
            if waiting.poll(None if timeout is None else 1e3 * timeout):
                with self._lock:
                    if self._code is None:
                        told = os.read(watched, 1)  # a killed process tells nothing
                        self._code = told[0] if told else -signal.SIGKILL
                        self._close()
            return self._code
        finally:
            os.close(watched)


class ForkServer:
    """The server's process, as the service that asks it sees it. From any thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._refused: set[str] = set()
        """Entries that cannot be forked."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-m", "warpsmith.sandbox.worker", "--fork", str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd="/",
            )
        ours.settimeout(_REPLY_SECONDS)
        self._socket = ours

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def fork(
        self,
        entry: str,
        pipes: tuple[int, int],
        spec: jail_init.Spec,
        descriptors: Sequence[int],
        stdout: int,
        stderr: int,
    ) -> Forked | None:
        """The first process of a jail in which `entry` is served through `pipes` (requests, replies).

        `descriptors` have the same numbers there. None where the server cannot: it says why on standard error.
        """
        if entry in self._refused:
            return None
        status, told = os.pipe()
        text = json.dumps({"spec": spec, "pipes": pipes, "numbers": [1, 2, told, *descriptors], "status": told})
        name, body = entry.encode(), text.encode()
        try:
            with self._lock:
                socket.send_fds(
                    self._socket, [_REQUEST.pack(len(name), len(body))], [stdout, stderr, told, *descriptors]
                )
                self._socket.sendall(name + body)
                pid, length = _REPLY.unpack(_received(self._socket, _REPLY.size))
                reason = _received(self._socket, length).decode(errors="replace")
        except (OSError, EOFError) as error:  # TimeoutError is one
            self.close()
            pid, reason = -1, str(error)
        finally:
            os.close(told)
        if pid > 0:
            return Forked(pid, status)
        os.close(status)
        self._refused.add(entry)
        sys.stderr.write(f"fork server: {entry} is started as a new process: {reason}\n")
        return None

    def close(self) -> None:
        """Ends it; what it has forked lives on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


_servers: dict[tuple[int, str, tuple[tuple[str, str], ...]], ForkServer] = {}
"""By our process (a fork of ours has none), the only entry ("" for any) and the server's environment."""
_starting = threading.Lock()


def server_for(environment: Mapping[str, str], only: str = "") -> ForkServer:
    """The server for workers of this environment, and of the entry `only`; it is started where there is none."""
    read = {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_WHILE_LOADING) and name not in _READ_LATER
    }
    # numpy's library would begin threads as it loads, and a process with threads cannot be forked.
    needed = launch_environment() | {"OPENBLAS_NUM_THREADS": "1"} | read
    key = os.getpid(), only, tuple(sorted(needed.items()))
    with _starting:
        server = _servers.pop(key, None)
        if server is not None and not server.alive:
            server.close()
            server = None
        server = server or ForkServer(needed)
        _servers[key] = server  # the last is the one that was asked last
        if len(_servers) > _MOST_SERVERS:
            _servers.pop(next(iter(_servers))).close()
        return server


def forking(
    entry: str, pipes: tuple[int, int], environment: Mapping[str, str], *, alone: bool
) -> Callable[[jail_init.Spec, Sequence[int], int, int], Forked | None]:
    """What forks a worker of an entry, as `ForkServer.fork` does, by (spec, descriptors, stdout, stderr).

    `alone`: by a server that serves no other entry.
    """
    return functools.partial(server_for(environment, entry if alone else "").fork, entry, pipes)


@atexit.register
def _close_all() -> None:
    for (process, *_), server in _servers.items():
        if process == os.getpid():
            server.close()


def _received(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        if not (count := connection.recv_into(view)):
            raise EOFError("ended")
        view = view[count:]
    return buffer


# --- The server's side ----------------------------------------------------------------------------


def main(descriptor: int, serve: Serve) -> NoReturn:
    """Forks what is asked for until the service hangs up; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of those that end: the service is told by a pipe
    own_name = _NAME.read_text()
    _NAME.write_text(NAME)
    lockdown.prctl(lockdown.PR_SET_DUMPABLE, 0)  # other processes of the same user must not open our memory
    connection = socket.socket(fileno=descriptor)
    prepared: set[str] = set()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, text, descriptors = _request(connection)
            pid, reason = -1, b""
            try:
                if name not in prepared:
                    _prepare(name)
                    prepared.add(name)
                if (pid := os.fork()) == 0:
                    connection.detach()
                    lockdown.prctl(lockdown.PR_SET_DUMPABLE, 1)  # files of /proc/self are root's otherwise
                    _NAME.write_text(own_name)
                    _become_first_process(name, text, descriptors, serve)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:1000].encode()
            text[:] = bytes(len(text))  # later workers have all of this memory: they must not find it there
            for each in descriptors:
                os.close(each)
            connection.sendall(_REPLY.pack(pid, len(reason)) + reason)
    os._exit(0)


def _request(connection: socket.socket) -> tuple[str, bytearray, list[int]]:
    descriptors = array.array("i")
    room = socket.CMSG_LEN(_MOST_DESCRIPTORS * descriptors.itemsize)
    header, beside, _, _ = connection.recvmsg(_REQUEST.size, room)
    for _, _, content in beside:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    header += _received(connection, _REQUEST.size - len(header)) if header else b""
    if not header:
        raise EOFError
    name_length, length = _REQUEST.unpack(header)
    return _received(connection, name_length).decode(), _received(connection, length), list(descriptors)


def _prepare(entry: str) -> None:
    """Imports an entry's module, and what its workers would import next."""
    module = importlib.import_module(entry.partition(":")[0])
    if not _GPU.exists():
        getattr(module, PRELOAD, lambda: None)()
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("what it imports begins threads")
    gc.collect()
    gc.freeze()  # a collection in a child would copy all of it


def _become_first_process(entry: str, text: bytearray, descriptors: Sequence[int], serve: Serve) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked = json.loads(text)
        _place(descriptors, asked["numbers"])
        os.setsid()
        status, spec, pipes = asked["status"], asked["spec"], asked["pipes"]
        kept = {0, 1, 2, *asked["numbers"]} - {status, spec["control_fd"]}

        def target(spec: jail_init.Spec, scratch: str) -> NoReturn:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            jail_init.close_all_but(*kept)
            _begin_anew(spec, scratch)
            jail_init.confine_target(spec, scratch)
            serve(entry, *pipes)

        def leave(code: int) -> NoReturn:
            os.write(status, bytes([code]))
            os._exit(code)

        jail_init.run(spec, target, leave, kept=[status])
    except BaseException as error:
        os.write(2, f"jail: cannot be built: {error}\n".encode())
        os._exit(jail_init.SETUP_FAILED)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives the descriptors these numbers, and closes all others but the first three."""
    above = max(*numbers, *descriptors) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    jail_init.close_all_but(*moved)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def _begin_anew(spec: jail_init.Spec, scratch: str) -> None:
    """What a new process would find: its environment, random numbers of its own (Python's are by themselves), and a
    folder of its own where Inductor compiles C++ headers, which it chooses in TMPDIR as it is imported."""
    os.environ.clear()
    os.environ.update(jail_init.target_environment(spec, scratch))
    tempfile.tempdir = None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    inductor: Any = sys.modules.get("torch._inductor.codecache")
    if chosen := getattr(inductor, "_HEADER_DIR", ""):
        headers = Path(os.environ["TMPDIR"], *Path(chosen).parts[-2:])
        inductor._HEADER_DIR, inductor._HEADER_LOCK_DIR = str(headers), str(headers / "locks")
