"""The first process inside a jail: builds what the rung needs, starts the target locked down, and outlives it.

Run as `python -m warpsmith.sandbox.jail_init SPEC -- ARGV...` by `warpsmith.sandbox.jail`, which decides everything in
SPEC. The one idea: the jail lives as long as the other end of `control_fd` is open, so that a service which stops, or
is killed, takes its jails with it, every descendant included. It trusts its arguments and reads nothing from the
target.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn, TypedDict

from warpsmith.sandbox import lockdown, trees

_COUNTED_ANEW_BYTES: Final = 64 << 20
"""By which a file system has to have become fuller before what a target may have written is counted again."""
SETUP_FAILED: Final = 125
"""Exit code when the jail itself could not be built; the reason is on standard error."""


class Spec(TypedDict):
    """Everything the first process must know; JSON, because it crosses an exec."""

    unshare: bool
    """Make the namespaces and the new root here (the UNSHARE rung)."""
    shared_host: bool
    """No namespaces: descendants are hunted down one by one, and the scratch directory is on the host."""
    lock: bool
    """Apply Landlock, seccomp and the loss of capabilities. False only for trusted input."""
    gpu: bool
    """Allow the little that CUDA needs beyond its devices."""
    peers: bool
    """Allow it to every process of the jail, and sockets between them."""
    mounts: list[tuple[str, str, str]]
    """(kind, source, target) with kind read, write, device or link, parents first; for `unshare` only."""
    readable: list[str]
    listable: list[str]
    writable: list[str]
    devices: list[str]
    limits: dict[str, int]
    tasks: int
    """Processes and threads allowed at one time."""
    watched: bool
    """Count them here: the kernel counts all that the user runs on the machine, in other pods too."""
    scratch_bytes: int
    scratch_parent: str
    """Where the scratch directory is made for `shared_host`."""
    cwd: str
    """The target's working directory; empty for its scratch directory."""
    env: dict[str, str]
    control_fd: int


# --- The UNSHARE rung: what bubblewrap does, in the few calls that are needed ---------------------

_NEW_NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
_UNSHARE, _PIVOT_ROOT = (272, 97), (155, 41)
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_MOUNT, _UMOUNT2 = (165, 40), (166, 39)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 0x4000, 1 << 18
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE, _CLOEXEC, _CLONE_TREE = -100, 0x1000, 0x8000, 0o2000000, 1
_MNT_DETACH = 2


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    kind_bytes = kind.encode() if kind else None
    lockdown.syscall(_MOUNT[lockdown.ARM], source.encode(), target.encode(), kind_bytes, flags, data.encode())


def _clone_tree(path: str, attributes: int) -> int:
    """A detached copy of the mounts under `path` with `attributes` (MOUNT_ATTR_*) set on all of them."""
    flags = _CLONE_TREE | _AT_RECURSIVE | _CLOEXEC
    tree = lockdown.syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), flags)
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    lockdown.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, wanted, len(wanted))
    return tree


def _attach(tree: int, target: str) -> None:
    move_from_empty_path = 4
    lockdown.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), move_from_empty_path)
    os.close(tree)


def _make_mount_point(path: str, *, directory: bool) -> None:
    if os.path.exists(path):
        return
    if directory:
        os.makedirs(path)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _build_root(spec: Spec) -> None:
    """Replaces the root by an empty read-only one that holds the listed mounts and private temporary space."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    hardened = _MS_NOSUID | _MS_NODEV
    attributes = {"read": _MS_RDONLY | hardened, "write": hardened, "device": _MS_NOSUID}
    # All sources are taken before anything is covered: some of them may lie below the new root's mount point.
    trees = [
        (_clone_tree(source, attributes[kind]), os.path.isdir(source), target)
        for kind, source, target in spec["mounts"]
        if kind != "link"
    ]
    root = "/tmp"
    _mount("none", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
    for kind, source, target in spec["mounts"]:
        if kind == "link":
            os.symlink(source, root + target)
    size = f"size={spec['scratch_bytes']},mode=1777"
    for directory in ("/tmp", "/dev/shm"):
        os.makedirs(root + directory)
        _mount("none", root + directory, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    os.mkdir(root + "/proc")
    _mount("none", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for name in ("sys", "sysrq-trigger", "irq", "bus"):  # the host's own, and real root could write there
        if os.path.exists(covered := f"{root}/proc/{name}"):
            _attach(_clone_tree(covered, attributes["read"]), covered)
    for name, at in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{at}", f"{root}/dev/{name}")
    for tree, is_directory, target in trees:
        _make_mount_point(root + target, directory=is_directory)
        _attach(tree, root + target)
    os.chdir(root)
    # The old root lands on top of the new one and is dropped at once: no directory to hold it is needed.
    lockdown.syscall(_PIVOT_ROOT[lockdown.ARM], b".", b".")
    lockdown.syscall(_UMOUNT2[lockdown.ARM], b".", _MNT_DETACH)
    os.chdir("/")
    wanted = struct.pack("QQQQ", _MS_RDONLY, 0, 0, 0)
    lockdown.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", 0, wanted, len(wanted))


def _enter_namespaces(spec: Spec) -> int | None:
    """None in process 1 of fresh namespaces; the original process stays outside and has its exit code."""
    user, group = os.getuid(), os.getgid()
    lockdown.syscall(_UNSHARE[lockdown.ARM], _NEW_NAMESPACES)
    Path("/proc/self/setgroups").write_text("deny")
    # The same numbers inside as outside, so that files keep their owners.
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    inner = os.fork()
    if inner:
        os.close(spec["control_fd"])
        return _exit_code(os.waitpid(inner, 0)[1])
    lockdown.prctl(lockdown.PR_SET_PDEATHSIG, signal.SIGKILL)
    _build_root(spec)
    return None


# --- The target -----------------------------------------------------------------------------------


def _exit_code(status: int) -> int:
    """As shells and bubblewrap say it: 128 + the signal for a death by signal."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def confine_target(spec: Spec, scratch: str) -> None:
    """Turns this process into the target; every right is given up."""
    os.setsid()
    os.chdir(spec["cwd"] or scratch)
    lockdown.limit_resources(spec["limits"])
    if spec["lock"]:
        lockdown.drop_capabilities()
        lockdown.prctl(lockdown.PR_SET_DUMPABLE, 1)  # as an exec would: CUDA opens files of /proc/self
        # CUDA names its threads through /proc/self/task/*/comm, and fails (error 304) where it cannot. "self" is this
        # process: the numbers of those that it starts are not known yet, so they need all of the jail's own /proc.
        named = ["/proc"] if spec["peers"] else ["/proc/self/task"]
        lockdown.restrict_files(
            readable=spec["readable"],
            listable=spec["listable"],
            writable=[*spec["writable"], scratch, *(named if spec["gpu"] else [])],
            devices=spec["devices"],
        )
        lockdown.filter_syscalls(shared_host=spec["shared_host"], cuda=spec["gpu"], peers=spec["peers"])


def target_environment(spec: Spec, scratch: str) -> dict[str, str]:
    """All of it."""
    return {"HOME": scratch, "TMPDIR": scratch, **spec["env"]}


def _children(pid: int) -> Iterator[int]:
    """The children of all threads; the kernel may leave some out while a sibling of theirs ends (proc(5))."""
    tasks: list[str] = []
    with contextlib.suppress(OSError):  # a process that has just ended
        tasks = os.listdir(f"/proc/{pid}/task")
    for task in tasks:
        # One thread of it that has just ended; the others may have children too.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as names:
            yield from map(int, names.read().split())


def descendants(pid: int) -> set[int]:
    """Every living descendant of `pid`; double forks are found where `pid` is their subreaper."""
    found: set[int] = set()
    pending = [pid]
    while pending:
        fresh = set(_children(pending.pop())) - found
        found |= fresh
        pending.extend(fresh)
    return found


def _task_count(pid: int) -> int:
    count = 0
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            count += len(os.listdir(f"/proc/{process}/task"))
    return count


def _reap(target: int) -> int | None:
    """Collects every child that has ended; the target's status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == target:
                status = ended[1]
    return status


def _kill_descendants(*, at_once: bool) -> None:
    """Kills until none is left: a killed compiler driver leaves its children running, and a fork bomb races us."""
    for attempt in range(1000):
        if at_once:
            # One call under the kernel's process list lock: nothing can fork its way out of it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001 if attempt < 100 else 0.01)


def _may_kill_all(spec: Spec) -> bool:
    """Whether kill(-1) reaches our descendants alone; proved by trying a harmless signal on the parent."""
    if not (spec["shared_host"] and lockdown.scope_signals()):
        return False
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return True
    return False


class HostFolders:
    """Folders of the machine's that the target may write: no mount bounds what is in them."""

    def __init__(self, folders: Sequence[str], most_bytes: int) -> None:
        self._folders, self._most_bytes, self.count = folders, most_bytes, len(folders)
        self._free: dict[str, int] = {}
        """The most that was free since they were counted last."""

    def are_over(self) -> bool:
        """Whether they hold too much together. They are counted only when their file systems have become fuller."""
        free = {each: _free_bytes(each) for each in self._folders}
        is_fuller = any(self._free.get(each, math.inf) - left >= _COUNTED_ANEW_BYTES for each, left in free.items())
        if not is_fuller:
            self._free = {each: max(left, self._free[each]) for each, left in free.items()}
            return False
        self._free = free
        return sum(map(trees.bytes_below, self._folders)) + self._nameless_bytes() > self._most_bytes

    def _nameless_bytes(self) -> int:
        """Of files that are open and have been removed."""
        devices, found = {os.stat(each).st_dev for each in self._folders}, dict[tuple[int, int], int]()
        for process in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                for name in os.listdir(f"/proc/{process}/fd"):
                    with contextlib.suppress(OSError):
                        file = os.stat(f"/proc/{process}/fd/{name}")
                        if stat.S_ISREG(file.st_mode) and not file.st_nlink and file.st_dev in devices:
                            found[file.st_dev, file.st_ino] = 512 * file.st_blocks
        return sum(found.values())


def _free_bytes(folder: str) -> int:
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
    return 0


def _wait_for_target(target: int, spec: Spec, wakeup: int, folders: HostFolders) -> int:
    """The exit code to report: the target's, or SIGKILL's when the service hangs up or a limit that is counted here is
    passed: of processes and threads, and of bytes in folders of the machine's."""
    # The kernel exempts real root from the limit on processes. 20 looks a second.
    watched = spec["watched"] or os.getuid() == 0
    waiting = select.poll()
    waiting.register(wakeup, select.POLLIN)
    waiting.register(spec["control_fd"], select.POLLIN)
    pause_ms = 50 if watched else 250 if folders.count else None
    while True:
        ready = [descriptor for descriptor, _ in waiting.poll(pause_ms)]
        if wakeup in ready:
            os.read(wakeup, 4096)
            if (status := _reap(target)) is not None:
                return _exit_code(status)
        if spec["control_fd"] in ready:
            return 128 + signal.SIGKILL
        if watched and _task_count(os.getpid()) > spec["tasks"]:
            sys.stderr.write(f"jail: more than {spec['tasks']} processes and threads; all killed\n")
            return 128 + signal.SIGKILL
        if folders.count and folders.are_over():
            sys.stderr.write(f"jail: more than {spec['scratch_bytes']} bytes in folders of the machine's; all killed\n")
            return 128 + signal.SIGKILL


Target = Callable[[Spec, str], NoReturn]
"""(spec, scratch directory) → never returns: it has `confine_target` called, and goes on as the target."""


def _supervise(spec: Spec, become_target: Target, kept: Sequence[int]) -> int:
    lockdown.prctl(lockdown.PR_SET_CHILD_SUBREAPER, 1)
    lockdown.prctl(lockdown.PR_SET_DUMPABLE, 0)  # the target runs as the same user and must not open our memory
    scratch = "/tmp"
    if spec["shared_host"]:
        scratch = tempfile.mkdtemp(prefix=scratch_prefix(os.getpid()), dir=spec["scratch_parent"])
    wakeup, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    at_once = _may_kill_all(spec)
    target = os.fork()
    if target == 0:
        try:
            become_target(spec, scratch)
        except BaseException as error:
            os.write(2, f"jail: cannot start: {error}\n".encode())
            os._exit(127 if isinstance(error, FileNotFoundError) else SETUP_FAILED)
    close_all_but(spec["control_fd"], wakeup, signalled, *kept)
    bounded = () if spec["shared_host"] else ("/tmp", "/dev/shm")  # by their mounts
    written = [*(each for each in spec["writable"] if each not in bounded), *([scratch] if spec["shared_host"] else [])]
    try:
        return _wait_for_target(target, spec, wakeup, HostFolders(written, spec["scratch_bytes"]))
    finally:
        if spec["shared_host"]:  # elsewhere the end of this process ends the PID namespace, and everyone in it
            _kill_descendants(at_once=at_once)
            trees.remove(scratch)


def close_all_but(*kept: int) -> None:
    """Lets go of all but the first three and these, so that who reads a pipe of the target sees its end."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def scratch_prefix(pid: int) -> str:
    """How the name of a scratch directory on the host begins: by it the directory is found where `pid` was killed."""
    return f"warpsmith-jail-{pid}-"


def run(spec: Spec, become_target: Target, leave: Callable[[int], NoReturn], kept: Sequence[int] = ()) -> NoReturn:
    """Builds the jail, starts its target and outlives it; `leave` ends the process that was called, with the exit code.

    `kept`: descriptors that `leave` needs.
    """
    try:
        code = _enter_namespaces(spec) if spec["unshare"] else None
        if code is None:
            code = _supervise(spec, become_target, () if spec["unshare"] else kept)
            if spec["unshare"]:
                os._exit(code)
    except OSError as error:
        sys.stderr.write(f"jail: cannot be built: {error}\n")
        code = SETUP_FAILED
    sys.stderr.flush()
    leave(code)


def main() -> NoReturn:
    """Reads SPEC and ARGV from the command line; never returns."""
    spec: Spec = json.loads(sys.argv[1])
    argv = sys.argv[3:]
    os.set_inheritable(spec["control_fd"], False)

    def start(spec: Spec, scratch: str) -> NoReturn:
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and an exec would pass that on
            signal.signal(ignored, signal.SIG_DFL)
        confine_target(spec, scratch)
        os.execvpe(argv[0], argv, target_environment(spec, scratch))

    run(spec, start, os._exit)


if __name__ == "__main__":
    main()
