"""Attacks the jail of this machine as a hostile module would, on every rung that works here, and says what held.

The one idea: a probe is a few lines of Python that run inside and end with 1 where they got out; beside them stands
what there is to reach (a secret file, services on loopback and in the file system, our own process, our environment,
shared memory). What a probe could have left outside is looked for from outside. The hostile suite runs the same probes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from warpsmith.sandbox import jail, private_files
from warpsmith.sandbox.jail import Exit, Finished, Policy, Rung

HELD: Final = Exit(0, None)
_ESCAPED: Final = 1
_PRELUDE: Final = """
import ctypes, errno, os, signal, socket, sys, time
place = dict(part.split("=", 1) for part in sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
def refused(action, *arguments):
    try:
        action(*arguments)
    except (OSError, MemoryError):
        return True
    return False
def escaped_if(condition):
    sys.exit(1 if condition else 0)
"""


@dataclass(frozen=True)
class Probe:
    """One attempt to get out or to take too much."""

    name: str
    code: str
    """Python with the prelude before it; it ends by `escaped_if(...)`, or is to be ended."""
    ends: tuple[str, ...] = ()
    """Other ends than "nothing reached" that mean that the jail held: "killed", "timeout", "raised"."""
    policy: Policy = field(default_factory=Policy)
    seconds: float = 20.0


_SMALL = Policy(memory_bytes=512 << 20, processes=64, cpu_seconds=2, file_bytes=1 << 20)
_MEETING = Policy(gpu=True, peers=True)
"""The widest that there is: what compute-sanitizer gets where the rung has namespaces."""

PROBES: tuple[Probe, ...] = (
    Probe("read a secret file", 'escaped_if(not refused(open, place["secret"]))'),
    Probe("read /etc/shadow", 'escaped_if(os.path.exists("/etc/shadow") and not refused(open, "/etc/shadow"))'),
    Probe("list a home directory", 'escaped_if(any(not refused(os.listdir, p) for p in ("/root", "/home")))'),
    Probe("write beside the secret", """
with open(place["escaped"], "w") as file:
    file.write("x")
""", ends=("raised",)),
    Probe("write to the system", """
paths = ["/usr/warpsmith", "/etc/warpsmith", "/var/tmp/warpsmith", "/warpsmith", "/dev/warpsmith", sys.prefix + "/x"]
escaped_if(not all(refused(open, path, "w") for path in paths))"""),
    Probe("change a file's mode or owner", """
escaped_if(not refused(os.chmod, "/usr/bin/env", 0o777) or not refused(os.chown, place["secret"], 0, 0))"""),
    Probe("write through /proc", """
paths = ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", f"/proc/{os.getppid()}/comm"]
escaped_if(not all(refused(open, path, "w") for path in paths))"""),
    Probe("write through /proc as a debugger may", """
paths = ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", f"/proc/{os.getppid()}/mem", "/proc/1/mem"]
escaped_if(not all(refused(open, path, "r+b") for path in paths))""", policy=_MEETING),
    Probe("connect to services as a debugger may", """
def reach(family, name):
    with socket.socket(family) as own:
        own.settimeout(2)
        own.connect(name)
names = [(socket.AF_UNIX, "\\0" + place["shm"]), (socket.AF_UNIX, place["socket"]),
         (socket.AF_INET, ("127.0.0.1", int(place["port"])))]
escaped_if(not all(refused(reach, family, name) for family, name in names))""", policy=_MEETING),
    Probe("connect to a service on loopback", """
def reach():
    with socket.create_connection(("127.0.0.1", int(place["port"])), 2):
        pass
escaped_if(not refused(reach))"""),
    Probe("connect to a socket in the file system", """
def reach():
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(place["socket"])
escaped_if(not refused(reach))"""),
    Probe("reach the metadata address or DNS", """
def metadata():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.sendto(b"x", ("169.254.169.254", 80))
escaped_if(not refused(metadata) or not refused(socket.getaddrinfo, "example.com", 80))"""),
    Probe("make a raw or packet socket", """
kinds = [(socket.AF_INET, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW), (socket.AF_NETLINK, socket.SOCK_RAW)]
escaped_if(not all(refused(socket.socket, family, kind) for family, kind in kinds))"""),
    Probe("kill the service", """
escaped_if(place["shared"] == "1" and not refused(os.kill, int(place["pid"]), 0))"""),
    Probe("trace its parent", """
ATTACH, SEIZE = 16, 0x4206
escaped_if(any(libc.ptrace(way, os.getppid(), 0, 0) == 0 for way in (ATTACH, SEIZE)))"""),
    Probe("read the memory of its parent", """
escaped_if(not refused(open, f"/proc/{os.getppid()}/mem", "rb") or not refused(open, f"/proc/{place['pid']}/mem", "rb")
           and place["shared"] == "1")"""),
    Probe("read the environment of others", """
found = place["token"] in os.environ.values()
for name in filter(str.isdigit, os.listdir("/proc") if not refused(os.listdir, "/proc") else ["1"]):
    try:
        found |= place["token"].encode() in open(f"/proc/{name}/environ", "rb").read()
    except OSError:
        pass
escaped_if(found)"""),
    Probe("read the command lines of others", """
found = False
for name in filter(str.isdigit, os.listdir("/proc") if not refused(os.listdir, "/proc") else ["1"]):
    try:
        found |= place["token"][::-1].encode() in open(f"/proc/{name}/cmdline", "rb").read()
    except OSError:
        pass
escaped_if(found)"""),
    Probe("see shared memory of others", """
escaped_if(not refused(open, "/dev/shm/" + place["shm"]))"""),
    Probe("make namespaces or mounts", """
flags = (0x10000000, 0x20000, 0x20000000)  # user, mount, PID
reached = any(libc.unshare(flag) == 0 for flag in flags) or libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0
escaped_if(reached)"""),
    Probe("ask the kernel for more", """
BPF, PERF, USERFAULT, KEYCTL, IO_URING = 321, 298, 323, 250, 425
numbers = (BPF, PERF, USERFAULT, KEYCTL, IO_URING) if os.uname().machine == "x86_64" else (280, 241, 282, 219, 425)
buffer = ctypes.create_string_buffer(256)
def open_to_us(number):
    ctypes.set_errno(0)
    return libc.syscall(number, 0, buffer, 0, 0, 0) >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)
escaped_if(any(open_to_us(number) for number in numbers))"""),
    Probe("become another user", """
escaped_if(any(not refused(call, 12345) for call in (os.setuid, os.setgid)))"""),
    Probe("a fork bomb", """
started = 0
for _ in range(4096):
    try:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        started += 1
    except OSError:
        break
escaped_if(started > 256)""", ends=("killed",), policy=_SMALL),
    Probe("take all memory", """
held = []
def take():
    while len(held) < 64:
        held.append(bytearray(64 << 20))
escaped_if(not refused(take))""", ends=("killed", "raised"), policy=_SMALL),
    Probe("take the processor for ever", "while True: pass", ends=("killed",), policy=_SMALL),
    Probe("fill the disk", """
def fill():
    with open(os.environ["TMPDIR"] + "/large", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
escaped_if(not refused(fill))""", ends=("killed",), policy=_SMALL),
    Probe("flood the output", "while True: os.write(1, bytes(1 << 16))", ends=("timeout", "killed"), seconds=3.0),
    Probe("hang", "time.sleep(1000)", ends=("timeout",), seconds=3.0),
    Probe("leave a process behind", """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", place["token"]])
    os._exit(0)
time.sleep(0.3)
escaped_if(False)"""),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """How one probe ended on one rung."""

    rung: Rung
    probe: str
    held: bool
    detail: str
    seconds: float


@dataclass(frozen=True)
class Target:
    """What there is to reach outside a jail while probes run."""

    directory: Path
    places: Mapping[str, str]

    def for_rung(self, rung: Rung) -> list[str]:
        """The arguments of a probe. In a PID namespace our number names no process, or one inside."""
        shared = {"shared": "1" if rung in (Rung.LANDLOCK, Rung.NONE) else "0"}
        # A probe is told the token, so that it can look for it in other environments, and backwards in command lines.
        return [f"{name}={value}" for name, value in {**self.places, **shared}.items()]

    def traces(self) -> list[str]:
        """What a probe has left outside."""
        left = [path.name for path in self.directory.iterdir() if path.name not in ("secret", "service.sock")]
        deadline = time.monotonic() + 2.0
        while (living := _processes_with(self.places["token"])) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left + [f"process {number}" for number in living]


@contextlib.contextmanager
def target() -> Iterator[Target]:
    """Secrets, services and processes to reach, for as long as the block."""
    token, name = secrets.token_hex(8), f"warpsmith-{secrets.token_hex(4)}"
    shared = Path("/dev/shm", name)
    with (
        tempfile.TemporaryDirectory(prefix="warpsmith-attack-", dir=private_files.temporary_directory()) as made,
        socket.create_server(("127.0.0.1", 0)) as service,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX) as nameless,
    ):
        nameless.bind(f"\0{name}")
        nameless.listen()
        directory = Path(made)
        (directory / "secret").write_text("secret")
        local.bind(str(directory / "service.sock"))
        local.listen()
        with contextlib.suppress(OSError):
            shared.write_text("secret")
        # A process beside us holds what must not be seen: it knows the token by environment and command line.
        bystander = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", token[::-1]],
            env={"WARPSMITH_SECRET": token},
        )
        places = {
            "secret": str(directory / "secret"), "escaped": str(directory / "escaped"), "pid": str(os.getpid()),
            "socket": str(directory / "service.sock"), "port": str(service.getsockname()[1]), "shm": name,
            "token": token,
        }  # fmt: skip
        try:
            yield Target(directory, places)
        finally:
            bystander.kill()
            bystander.wait()
            shared.unlink(missing_ok=True)


def run(probe: Probe, rung: Rung, outside: Target) -> Finding:
    """Runs one probe on one rung and looks at what became of it."""
    begin = time.monotonic()
    command = [sys.executable, "-I", "-S", "-c", _PRELUDE + probe.code, *outside.for_rung(rung)]
    policy = replace(probe.policy, peers=probe.policy.peers and rung is not Rung.LANDLOCK)
    finished = jail.run(command, policy, rung, deadline_s=probe.seconds)
    seconds = time.monotonic() - begin
    how = _how(finished)
    left = outside.traces()
    (outside.directory / "escaped").unlink(missing_ok=True)
    if left:
        return Finding(rung, probe.name, False, f"it left {', '.join(left)} outside", seconds)
    held = how == "nothing reached" or how in probe.ends
    return Finding(rung, probe.name, held, how, seconds)


def _how(finished: Finished) -> str:
    if finished.timed_out:
        return "timeout"
    if finished.exit == HELD:
        return "nothing reached"
    if finished.exit.signal_number is not None:
        return "killed"
    # An exception ends Python with 1 as well, but it says so.
    if finished.exit.code == _ESCAPED and b"Traceback" not in finished.stderr:
        return "got out"
    return "raised"


def attack(rungs: Callable[[], Sequence[Rung]] = jail.probe, probes: Sequence[Probe] = PROBES) -> list[Finding]:
    """Every probe on every rung that works here, the strongest first; that one is in force."""
    with target() as outside:
        return [run(probe, rung, outside) for rung in rungs() for probe in probes]


def exit_code(findings: Sequence[Finding]) -> int:
    """0 all held, 1 something broke, 3 there is no jail to attack."""
    if not findings:
        return 3
    return 0 if all(finding.held for finding in findings) else 1


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """For programs."""
    return {
        "in_force": findings[0].rung.value if findings else "",
        "probes": [
            {"rung": each.rung.value, "probe": each.probe, "held": each.held, "detail": each.detail}
            for each in findings
        ],
    }


def rows(findings: Sequence[Finding]) -> list[str]:
    """A table, line by line: probes down, rungs across."""
    if not findings:
        return ["no jail works on this machine: nothing untrusted is run (see `warpsmith doctor`)"]
    rungs = list(dict.fromkeys(each.rung for each in findings))
    cells = {(each.probe, each.rung): "held" if each.held else "BROKEN" for each in findings}
    probes = list(dict.fromkeys(each.probe for each in findings))
    lines = [f"{'probe':<42}" + "".join(f"{rung.value:<12}" for rung in rungs).rstrip()]
    lines += [f"{probe:<42}" + "".join(f"{cells[probe, rung]:<12}" for rung in rungs).rstrip() for probe in probes]
    lines += [f"BROKEN on {each.rung.value}: {each.probe}: {each.detail}" for each in findings if not each.held]
    held = sum(each.held for each in findings)
    lines.append(f"in force: {rungs[0].value}; {held} of {len(findings)} probes held")
    return lines


def _processes_with(token: str) -> list[int]:
    """Processes that were started with the token in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if token.encode() in file.read_bytes().split(b"\0") and int(file.parent.name) != os.getpid():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found
