"""How untrusted code is confined: the user's module, candidate shared objects, and the compilers that read them.

The one idea: three rungs of equal promise and falling means, found out by trying. Each gives a read-only system,
one private temporary directory, no network, no other process in reach, an empty environment, bounded resources and
an end that takes every descendant along:

    BUBBLEWRAP  namespaces through `bwrap`
    UNSHARE     the same namespaces through system calls of our own
    LANDLOCK    no namespaces (containers, restricted pods): file rules, call filter and a hunt for descendants

Landlock and seccomp (`warpsmith.sandbox.lockdown`) apply on all three. This does not judge what the code computed:
whatever comes out of a jail is data from a stranger.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from warpsmith.errors import JailUnavailable
from warpsmith.sandbox import jail_init, lockdown, private_files, trees
from warpsmith.sandbox.jail_layout import Policy, Rung, confine, launch_environment, package_paths, specify

__all__ = [
    "Exit",
    "Finished",
    "Jailed",
    "Policy",
    "Rung",
    "choose",
    "confine",
    "kill_tree",
    "package_paths",
    "probe",
    "run",
    "trust_input",
]


@dataclass(frozen=True)
class Exit:
    """How a jailed process ended: by itself with `code`, or by `signal_number`; one of them is set."""

    code: int | None
    signal_number: int | None

    def __str__(self) -> str:
        if self.signal_number is None:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"signal {self.signal_number} ({signal.Signals(self.signal_number).name})"
        return f"signal {self.signal_number}"


class Process(Protocol):
    """The first process of a jail, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


Fork = Callable[[jail_init.Spec, Sequence[int], int, int], Process | None]
"""(spec, descriptors, stdout, stderr) → the first process of a jail, forked; None where it has to be a new one."""


class Jailed:
    """A running jailed process. Closing it, or the end of this process, ends it and all its descendants.

    `fork`: has the target forked, as a new process by `argv` would be; not on BUBBLEWRAP.
    """

    def __init__(
        self,
        argv: Sequence[str],
        policy: Policy,
        rung: Rung,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
        fork: Fork | None = None,
    ) -> None:
        self._closing = threading.Lock()
        inside, self._control = os.pipe()
        try:
            spec = specify(policy, rung, control_fd=inside, env=env, cwd=cwd)
            descriptors = (inside, *pass_fds)
            forked = fork(spec, descriptors, stdout, stderr) if fork else None
            # Popen, never a fork of our own: servers have threads, and gRPC does not survive a fork.
            self.process: Process = forked or subprocess.Popen(
                confine(argv, policy, rung, spec),
                env=launch_environment(),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=descriptors,
                start_new_session=True,
                bufsize=0,
                cwd="/",
            )
        except BaseException:
            os.close(self._control)
            raise
        finally:
            os.close(inside)

    def wait(self, timeout_s: float | None = None) -> Exit | None:
        """How it ended; None while it runs on after `timeout_s`."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if code < 0 or 128 < code <= 128 + signal.NSIG:
            return Exit(None, -code if code < 0 else code - 128)
        return Exit(code, None)

    def close(self) -> Exit:
        """Ends the process and all its descendants, and returns how it ended."""
        with self._closing:
            if self._control >= 0:
                os.close(self._control)  # the jail's first process sees this and ends the rest
                self._control = -1
        ended = self.wait(5.0)
        if ended is None:
            kill_tree(self.process.pid)
            ended = self.wait(5.0) or Exit(None, signal.SIGKILL)
            for scratch in Path(tempfile.gettempdir()).glob(f"{jail_init.scratch_prefix(self.process.pid)}*"):
                trees.remove(str(scratch))  # on the host, where the jail has no namespaces
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def kill_tree(pid: int) -> None:
    """Kills `pid` and its descendants from outside: the last resort when a jail's first process does not answer."""
    for _ in range(10):
        # Descendants first, while they can still be found; the death of a namespace's process 1 takes the rest.
        alive = jail_init.descendants(pid)
        for victim in [*alive, pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(victim, signal.SIGKILL)
        if not alive:
            return
        time.sleep(0.01)


# --- Running one command to its end ---------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A command that ran in the jail and is gone, with all that it started."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    timed_out: bool
    """It was killed at its deadline."""
    truncated: bool
    """Some output was dropped at `output_bytes`."""


_LOOK_SECONDS = 0.2
"""How often a deadline is asked for again that may have moved."""


def run(
    argv: Sequence[str],
    policy: Policy,
    rung: Rung,
    *,
    deadline_s: float,
    least_end_s: Callable[[], float] = lambda: 0.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    output_bytes: int = 1 << 20,
) -> Finished:
    """Runs `argv` to its end or its deadline, keeping the first `output_bytes` of each of its two outputs.

    A command that fails, crashes or hangs is an answer, not an exception. `cwd` None: the private directory.
    `least_end_s`: the monotonic time before which the deadline does not come; asked again and again.
    """
    begin = time.monotonic()

    def left_s() -> float:
        return max(0.0, max(begin + deadline_s, least_end_s()) - time.monotonic())

    readers, writers = zip(os.pipe(), os.pipe(), strict=True)
    kept = {reader: bytearray() for reader in readers}
    truncated = timed_out = False
    try:
        try:
            jailed = Jailed(argv, policy, rung, env=env, cwd=cwd, stdout=writers[0], stderr=writers[1])
        finally:
            for writer in writers:
                os.close(writer)
        with jailed, selectors.DefaultSelector() as waiting:
            for reader in readers:
                waiting.register(reader, selectors.EVENT_READ)
            while waiting.get_map() and not timed_out:
                # A descendant could hold the pipe open for ever: only the clock ends this loop for certain.
                ready = waiting.select(min(_LOOK_SECONDS, left_s()))
                timed_out = not ready and not left_s()
                for key, _ in ready:
                    if not (chunk := os.read(key.fd, 1 << 16)):
                        waiting.unregister(key.fd)
                    room = output_bytes - len(kept[key.fd])
                    truncated |= len(chunk) > room
                    kept[key.fd] += chunk[:room]
            ended = None if timed_out else jailed.wait(left_s())
            timed_out = ended is None
            ended = ended or jailed.close()
    finally:
        for reader in readers:
            os.close(reader)
    stdout, stderr = (bytes(kept[reader]) for reader in readers)
    return Finished(ended, stdout, stderr, timed_out, truncated)


# --- Which rungs work here ------------------------------------------------------------------------

# Tried from inside: the exit code counts the promises that were broken.
_CHECK: Final = """
import os, socket, sys
secret, escaped, outsider = sys.argv[1:]
def refused(action):
    try:
        action()
    except OSError:
        return 0
    return 1
def write(path):
    with open(path, "w") as file:
        file.write("x")
write(os.environ["TMPDIR"] + "/own")
broken = refused(socket.socket) + refused(lambda: open(secret)) + refused(lambda: write("/usr/.warpsmith"))
if int(outsider):
    broken += refused(lambda: write(escaped)) + refused(lambda: os.kill(int(outsider), 0))
else:
    try:
        write(escaped)  # the temporary directory is private: this may succeed, and must not be seen outside
    except OSError:
        pass
sys.exit(broken)
"""


def _confines(rung: Rung) -> bool:
    if rung is Rung.BUBBLEWRAP and shutil.which("bwrap") is None:
        return False
    if rung is Rung.LANDLOCK and lockdown.landlock_abi() < lockdown.COMPLETE_ABI:
        return False
    with tempfile.TemporaryDirectory(prefix="warpsmith-probe-", dir=private_files.temporary_directory()) as directory:
        secret, escaped = Path(directory, "secret"), Path(directory, "escaped")
        secret.write_text("x")
        # In a PID namespace our number names no process, or the namespace's own first one.
        outsider = str(os.getpid() if rung is Rung.LANDLOCK else 0)
        check = [sys.executable, "-I", "-S", "-c", _CHECK, str(secret), str(escaped), outsider]
        finished = run(check, Policy(), rung, deadline_s=20.0)
        return finished.exit == Exit(0, None) and not escaped.exists()


@functools.cache
def probe() -> tuple[Rung, ...]:
    """The rungs that work on this machine, strongest first; each has just run a process and failed to escape."""
    return tuple(rung for rung in (Rung.BUBBLEWRAP, Rung.UNSHARE, Rung.LANDLOCK) if _confines(rung))


_input_is_trusted = False


def trust_input() -> None:
    """Declares for this process that its user trusts the input, as `--trust-input` says."""
    global _input_is_trusted
    _input_is_trusted = True


def choose() -> Rung:
    """The strongest rung that works here. With none, only trusted input may run, and then on `Rung.NONE`.

    Raises JailUnavailable otherwise.
    """
    if rungs := probe():
        return rungs[0]
    if _input_is_trusted:
        return Rung.NONE
    raise JailUnavailable(
        "untrusted code cannot be confined on this machine: install bubblewrap (Debian: apt-get install bubblewrap), "
        "or allow user namespaces, or use Linux 6.2 or newer with Landlock enabled; "
        "or pass --trust-input if you trust the module as you trust your own shell"
    )
