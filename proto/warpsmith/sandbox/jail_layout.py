"""What a jail shows and allows, turned into the command that builds it. `warpsmith.sandbox.jail` starts it.

The one idea: a jail is an allow-list. One list of readable, writable and device paths becomes the mounts of the
namespaced rungs and the Landlock rules of all rungs, so that no rung shows more than another. Starts nothing.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warpsmith.sandbox import jail_init, private_files


class Rung(enum.Enum):
    """How a process was confined; recorded beside every result."""

    BUBBLEWRAP = "bubblewrap"
    UNSHARE = "unshare"
    LANDLOCK = "landlock"
    NONE = "none"
    """Not confined, only limited and killed as a tree: for input that its user declared trusted."""


@dataclass(frozen=True)
class Policy:
    """What one jailed process may reach. The interpreter, system libraries and compilers are always readable."""

    readable: tuple[Path, ...] = ()
    """Further files and directories to read and execute."""
    listable: tuple[Path, ...] = ()
    """Directories whose file names may be listed (import paths), while the files stay closed."""
    writable: tuple[Path, ...] = ()
    """Existing directories to read and write, at the same path as outside."""
    gpu: bool = False
    """Reach the NVIDIA devices."""
    peers: bool = False
    """Its processes may meet by Unix sockets, and with `gpu` each of them may use CUDA, not the first alone. Only where
    the jail has namespaces of its own: elsewhere the names of sockets and processes are the host's."""
    memory_bytes: int | None = 16 << 30
    """Address space of each process. With `gpu` its private writable memory instead, because CUDA reserves more
    addresses than any machine has memory."""
    cpu_seconds: int | None = None
    """Processor time of each process, all its threads together."""
    processes: int = 1024
    """Processes and threads alive at one time; the kernel holds it where a jail has a count of its own, and the jail's
    first process, which looks 20 times a second, elsewhere."""
    file_bytes: int = 4 << 30
    """Largest file that can be written."""
    open_files: int = 1024
    """Open descriptors of each process."""
    scratch_bytes: int = 2 << 30
    """Size of the private temporary directory, where it is a file system of its own (not on LANDLOCK)."""

    def __post_init__(self) -> None:
        for path in (*self.readable, *self.listable, *self.writable):
            if not path.is_absolute() or path == Path("/"):
                raise ValueError(f"a jail's path must be absolute and not the root: {path}")
        for path in self.writable:
            if not path.is_dir():
                raise ValueError(f"a writable path must be an existing directory: {path}")
        if min(self.processes, self.file_bytes, self.open_files, self.scratch_bytes) < 1:
            raise ValueError("a jail's limits must be positive")


# --- What every jail can read ---------------------------------------------------------------------

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Of /etc only what loaders, compilers and interpreters need: a root that runs us could read /etc/shadow.
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "passwd", "group",
        "nsswitch.conf", "os-release", "python3", f"python3.{sys.version_info.minor}")  # fmt: skip
_SYS = ("/sys/devices", "/sys/bus", "/sys/class", "/sys/module", "/sys/kernel/mm")
# On LANDLOCK /proc is the host's: of processes only the target itself, and no command lines of others.
_PROC = ("self", "cpuinfo", "meminfo", "stat", "version", "filesystems", "devices", "driver/nvidia", "sys/vm",
         "sys/kernel")  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _python_paths() -> Iterable[Path]:
    yield from map(Path, {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix})
    yield Path(os.path.realpath(sys.executable)).parent
    yield from map(Path, package_paths())
    yield Path(__file__).parent.parent


def package_paths() -> list[str]:
    """Directories of installed packages on our import path that the interpreter would not find by itself."""
    named = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    return [
        path
        for path in named
        if not Path(path).is_relative_to(sys.prefix) and not Path(path).is_relative_to(sys.base_prefix)
    ]


def _readable(policy: Policy) -> list[str]:
    """Every readable path, both as named and as resolved, parents before children."""
    wanted = [*_python_paths(), *policy.readable, *(Path("/etc", name) for name in _ETC), *map(Path, _SYS)]
    named = {str(path) for path in wanted if path.exists()}
    inside = {path for path in named | {os.path.realpath(p) for p in named} if path != "/"}
    system = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    kept: list[str] = []
    for path in sorted({*system, *inside}):
        # A path below a kept one is there already. Binding it again could follow a symbolic link out of the new root.
        if not path.startswith(tuple(f"{parent}/" for parent in (*kept, *system))):
            kept.append(path)
    return kept


def _devices(policy: Policy) -> list[str]:
    names = list(_DEVICES)
    if policy.gpu:
        names += sorted(map(str, [*Path("/dev").glob("nvidia*"), *Path("/dev/dri").glob("renderD*")]))
    return [name for name in names if os.path.exists(name)]


def _mounts(policy: Policy) -> list[tuple[str, str, str]]:
    """(kind, source, target), parents first, so that a deeper rule stands on top of a wider one."""
    links = [("link", os.readlink(path), path) for path in _SYSTEM if os.path.islink(path)]
    binds = [("read", path, path) for path in _readable(policy)]
    binds += [("write", os.path.realpath(path), str(path)) for path in policy.writable]
    binds += [("write", os.path.realpath(path), os.path.realpath(path)) for path in policy.writable]
    binds += [("device", path, path) for path in _devices(policy)]
    return links + sorted(set(binds), key=lambda mount: (mount[2].count("/"), mount[2], mount[0]))


_OTHERS = 4096
"""Room in a limit that the kernel holds for a user and not for a jail: other pods run as that user too, unseen."""


def _has_own_count(rung: Rung) -> bool:
    """Whether the kernel counts the processes of a jail by themselves, as it does in user namespaces since 5.14."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return rung in (Rung.BUBBLEWRAP, Rung.UNSHARE) and release >= (5, 14)


def _limits(policy: Policy, rung: Rung) -> dict[str, int]:
    limits = {"CORE": 0, "FSIZE": policy.file_bytes, "NOFILE": policy.open_files}
    if policy.memory_bytes is not None:
        limits["DATA" if policy.gpu else "AS"] = policy.memory_bytes
    if policy.cpu_seconds is not None:
        limits["CPU"] = policy.cpu_seconds
    # The few on top are the jail's own processes. Without a count of its own the limit only keeps a fork bomb from the
    # node until the jail's first process sees it.
    limits["NPROC"] = policy.processes + 4 + (0 if _has_own_count(rung) else _tasks_of_user() + _OTHERS)
    return limits


def _tasks_of_user() -> int:
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # a process that has just ended
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


# --- The command ----------------------------------------------------------------------------------


def specify(
    policy: Policy, rung: Rung, *, control_fd: int, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> jail_init.Spec:
    """What the jail's first process must know; it lives as long as the writing end of `control_fd` stays open."""
    namespaced = rung in (Rung.BUBBLEWRAP, Rung.UNSHARE)
    if policy.peers and rung is Rung.LANDLOCK:
        raise ValueError("the landlock rung keeps the processes of a jail apart")
    proc = ["/proc"] if namespaced else [f"/proc/{name}" for name in _PROC]
    return jail_init.Spec(
        unshare=rung is Rung.UNSHARE,
        shared_host=not namespaced,
        lock=rung is not Rung.NONE,
        gpu=policy.gpu,
        peers=policy.peers,
        mounts=_mounts(policy) if rung is Rung.UNSHARE else [],
        readable=[*_readable(policy), *proc],
        listable=[str(path) for path in policy.listable],
        writable=[*map(str, policy.writable), *(["/tmp", "/dev/shm"] if namespaced else [])],
        devices=_devices(policy),
        limits=_limits(policy, rung),
        tasks=policy.processes,
        watched=not _has_own_count(rung),
        scratch_bytes=policy.scratch_bytes,
        scratch_parent=str(private_files.temporary_directory()),
        cwd=str(cwd or ""),
        env={"PATH": _PATH, "LANG": "C.UTF-8", **(env or {})},
        control_fd=control_fd,
    )


def confine(argv: Sequence[str], policy: Policy, rung: Rung, spec: jail_init.Spec) -> list[str]:
    """The command that runs `argv` confined, with what `specify` gave."""
    # -S: no site-packages, whose start-up hooks would cost more than the jail. `launch_environment` has the path.
    first = [sys.executable, "-S", "-s", "-P", "-m", "warpsmith.sandbox.jail_init", json.dumps(spec), "--", *argv]
    return [*_bubblewrap(_mounts(policy), policy), *first] if rung is Rung.BUBBLEWRAP else first


def _bubblewrap(mounts: Iterable[tuple[str, str, str]], policy: Policy) -> list[str]:
    option = {"read": "--ro-bind", "write": "--bind", "device": "--dev-bind", "link": "--symlink"}
    size = ["--size", str(policy.scratch_bytes)]
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
    ]
    # As process 1 our own first process takes all others along when it ends; bwrap's would wait for them all.
    command += ["--unshare-cgroup-try", "--cap-drop", "ALL", "--as-pid-1"]
    command += ["--dev", "/dev", *size, "--tmpfs", "/dev/shm", "--proc", "/proc", *size, "--tmpfs", "/tmp"]
    for name in ("sys", "sysrq-trigger", "irq", "bus"):  # the host's own: bwrap leaves what real root could write
        command += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for kind, source, target in mounts:
        if target not in _DEVICES:  # --dev made those
            command += [option[kind], source, target]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--"]


def launch_environment() -> dict[str, str]:
    """What the jail's first process is started with; the target gets `env` of `confine` and nothing of this."""
    return {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": _PATH, "LANG": "C.UTF-8"}
