"""The jail, on every rung that this machine has: what must be refused, what must work, and that nothing stays."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from warpsmith.errors import JailUnavailable
from warpsmith.sandbox import jail, jail_init
from warpsmith.sandbox.jail import Exit, Finished, Jailed, Policy, Rung
from warpsmith.sandbox.jail_layout import specify

SUCCESS = Exit(0, None)
on_every_rung = pytest.mark.parametrize("rung", jail.probe(), ids=lambda rung: rung.value)
_numbers = itertools.count()


def inside(code: str, rung: Rung, *arguments: object, policy: Policy | None = None, **options: object) -> Finished:
    """Runs Python `code` in the jail; `refused(action)` there is true where the kernel says no."""
    prelude = "import os, sys\ndef refused(action):\n  try: action()\n  except OSError: return True\n  return False\n"
    argv = [sys.executable, "-I", "-c", prelude + textwrap.dedent(code), *map(str, arguments)]
    return jail.run(argv, policy or Policy(), rung, **{"deadline_s": 20.0, **options})  # type: ignore[arg-type]


def unique_sleep() -> str:
    """A `sleep` argument that no other process on this machine has."""
    return f"9{os.getpid()}.{next(_numbers)}"


def running(argument: str) -> bool:
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"sleep\0{argument}" in (process / "cmdline").read_text():
                return True
        except OSError:
            continue
    return False


def gone_within(argument: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while running(argument):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_this_machine_has_a_rung() -> None:
    assert jail.probe(), "install bubblewrap, allow user namespaces, or use Linux 6.2+ with Landlock"
    assert jail.choose() is jail.probe()[0]


def test_without_a_rung_only_declared_trust_runs_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "probe", lambda: ())
    with pytest.raises(JailUnavailable, match="bubblewrap"):
        jail.choose()
    monkeypatch.setattr(jail, "_input_is_trusted", False)
    jail.trust_input()
    assert jail.choose() is Rung.NONE


def test_trust_does_not_lower_a_rung_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "_input_is_trusted", True)
    assert jail.choose() is jail.probe()[0]


@pytest.mark.parametrize("path", [Path("relative"), Path("/")])
def test_a_policy_refuses_paths_that_say_too_much_or_too_little(path: Path) -> None:
    with pytest.raises(ValueError, match="absolute"):
        Policy(readable=(path,))


@on_every_rung
def test_the_environment_holds_only_what_was_given(rung: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPSMITH_TEST_TOKEN", "hunter2")
    finished = inside("print(sorted(os.environ))", rung, env={"OMP_NUM_THREADS": "2"})
    assert finished.exit == SUCCESS, finished.stderr
    names = {"HOME", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "PATH", "TMPDIR"}
    assert set(eval(finished.stdout)) <= names


@on_every_rung
def test_no_kind_of_socket_can_be_made(rung: Rung, tmp_path: Path) -> None:
    code = """
    import socket
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_VSOCK):
        assert refused(lambda: socket.socket(family)), family
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    own.send(b"x")
    assert other.recv(1) == b"x"
    for path in (sys.argv[1], chr(0) + "abstract"):
        assert refused(lambda: own.sendto(b"x", path)), path
        assert refused(lambda: own.sendmsg([b"x"], [], 0, path)), path
        assert refused(lambda: own.connect(path)), path
        assert refused(lambda: own.bind(path)), path
    for host in ("localhost", "169.254.169.254", "example.com"):
        assert refused(lambda: socket.create_connection((host, 80), timeout=1)), host
    """
    finished = inside(code, rung, tmp_path / "service.sock")
    assert finished.exit == SUCCESS, finished.stderr


@on_every_rung
def test_a_gpu_process_may_make_a_unix_socket_but_reach_nothing(rung: Rung, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(tmp_path / "service.sock"))
        service.listen()
        code = """
        import socket
        assert refused(lambda: socket.socket(socket.AF_INET))
        own = socket.socket(socket.AF_UNIX)
        own.bind(chr(0) + f"cuda-{os.getpid()}")
        assert refused(lambda: own.connect(sys.argv[1]))
        assert refused(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", sys.argv[1]))
        """
        policy = Policy(gpu=True, readable=(tmp_path,))
        finished = inside(code, rung, tmp_path / "service.sock", policy=policy)
    assert finished.exit == SUCCESS, finished.stderr


@on_every_rung
def test_a_gpu_process_names_its_threads_and_changes_nothing_else_in_proc(rung: Rung) -> None:
    code = """
    open(f"/proc/self/task/{os.getpid()}/comm", "w").write("named")
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj"):
        assert refused(lambda: open(path, "w")), path
    assert refused(lambda: open(f"/proc/{os.getppid()}/comm", "w"))
    """
    finished = inside(code, rung, policy=Policy(gpu=True))
    assert finished.exit == SUCCESS, finished.stderr


_MEETING = """
import socket, subprocess
def named(): return open(f"/proc/self/task/{os.getpid()}/comm", "w").close()
if sys.argv[1:]:
    own = socket.socket(socket.AF_UNIX)
    own.bind("\\0child")
    own.listen()
    print(refused(named), flush=True)
    sys.stdin.read()
else:
    child = subprocess.Popen([sys.executable, "-I", "-c", CODE, "child"], stdin=-1, stdout=-1, text=True)
    met = socket.socket(socket.AF_UNIX)
    kept_apart = [child.stdout.readline() == "True\\n", refused(lambda: met.connect("\\0child"))]
    child.communicate()
    sys.exit(sum(kept_apart))
"""


@pytest.mark.parametrize("rung", [rung for rung in jail.probe() if rung is not Rung.LANDLOCK], ids=lambda r: r.value)
@pytest.mark.parametrize(("peers", "kept_apart"), [(True, 0), (False, 2)])
def test_processes_of_a_jail_meet_only_where_the_policy_says_so(rung: Rung, peers: bool, kept_apart: int) -> None:
    prelude = "import os, sys\ndef refused(action):\n  try: action()\n  except OSError: return True\n  return False\n"
    code = prelude + _MEETING
    finished = inside(f"CODE = {code!r}\n" + _MEETING, rung, policy=Policy(gpu=True, peers=peers))
    assert finished.exit == Exit(kept_apart, None), finished.stderr


def test_the_rung_without_namespaces_refuses_a_jail_whose_processes_meet() -> None:
    with pytest.raises(ValueError, match="apart"):
        inside("", Rung.LANDLOCK, policy=Policy(peers=True))


@on_every_rung
def test_files_that_the_policy_does_not_name_are_closed(rung: Rung, tmp_path: Path) -> None:
    keys = tmp_path / "home" / ".ssh"
    keys.mkdir(parents=True)
    (keys / "id_ed25519").write_text("secret")
    code = """
    keys = sys.argv[1]
    assert refused(lambda: open(keys + "/id_ed25519"))
    assert refused(lambda: os.listdir(keys))
    for path in ("/etc/shadow", "/root/.bashrc", "/proc/1/environ", "/proc/kcore", "/dev/mem", "/dev/vda"):
        assert refused(lambda: open(path, "rb").read(1)), path
    assert refused(lambda: os.listdir("/home"))
    """
    finished = inside(code, rung, keys)
    assert finished.exit == SUCCESS, finished.stderr


@on_every_rung
def test_readable_paths_can_be_read_and_not_changed(rung: Rung, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.py").write_text("x = 1")
    code = """
    source = sys.argv[1]
    assert open(source + "/model.py").read() == "x = 1"
    assert refused(lambda: open(source + "/model.py", "w"))
    assert refused(lambda: os.truncate(source + "/model.py", 0))
    assert refused(lambda: os.chmod(source + "/model.py", 0o777))
    assert refused(lambda: os.utime(source + "/model.py"))
    assert refused(lambda: os.unlink(source + "/model.py"))
    assert refused(lambda: os.symlink("/etc", source + "/link"))
    assert refused(lambda: os.rename(source + "/model.py", os.environ["TMPDIR"] + "/model.py"))
    """
    finished = inside(code, rung, source, policy=Policy(readable=(source,)))
    assert finished.exit == SUCCESS, finished.stderr
    assert [path.name for path in source.iterdir()] == ["model.py"]


@on_every_rung
def test_only_the_writable_directory_keeps_what_is_written(rung: Rung, tmp_path: Path) -> None:
    shared, closed = tmp_path / "shared", tmp_path / "closed"
    shared.mkdir()
    closed.mkdir()
    code = """
    shared, closed = sys.argv[1:]
    open(shared + "/kept", "w").write("kept")
    open(os.environ["TMPDIR"] + "/lost", "w").write("lost")
    refused(lambda: open(closed + "/escaped", "w"))  # may land in private temporary space, never outside
    for path in ("/usr", "/etc", "/dev", "/proc/sys/kernel/core_pattern", "/var/tmp", "/"):
        assert refused(lambda: open(path + "/escaped" if os.path.isdir(path) else path, "w")), path
    print(os.environ["TMPDIR"])
    """
    finished = inside(code, rung, shared, closed, policy=Policy(writable=(shared,)))
    assert finished.exit == SUCCESS, finished.stderr
    assert (shared / "kept").read_text() == "kept"
    assert not any(closed.iterdir())
    scratch = Path(finished.stdout.decode().strip())
    assert not (scratch / "lost").exists()
    assert rung is not Rung.LANDLOCK or not scratch.exists()


@on_every_rung
def test_processes_outside_can_neither_be_seen_nor_signalled(rung: Rung) -> None:
    with subprocess.Popen(["sleep", unique_sleep()]) as outsider:
        code = """
        import signal
        pid = int(sys.argv[1])
        assert refused(lambda: os.kill(pid, 0))
        assert refused(lambda: open(f"/proc/{pid}/environ").read())
        assert refused(lambda: open(f"/proc/{pid}/cmdline").read())
        assert refused(lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)))
        try:
            seen = [name for name in os.listdir("/proc") if name.isdigit()]
        except OSError:
            seen = []
        assert len(seen) < 5, seen
        """
        finished = inside(code, rung, outsider.pid)
        outsider.kill()
    assert finished.exit == SUCCESS, finished.stderr


@on_every_rung
def test_no_privilege_is_left_or_can_be_gained(rung: Rung) -> None:
    code = """
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    assert not any(int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")), status
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2"
    import ctypes
    call = ctypes.CDLL(None, use_errno=True).syscall
    arm = os.uname().machine == "aarch64"
    numbers = {"ptrace": (101, 117), "unshare": (272, 97), "mount": (165, 40), "bpf": (321, 280),
               "keyctl": (250, 219), "io_uring_setup": (425, 425), "open_by_handle_at": (304, 265)}
    for name, number in numbers.items():
        assert call(number[arm], 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1, name
    """
    finished = inside(code, rung)
    assert finished.exit == SUCCESS, finished.stderr


@on_every_rung
def test_a_fork_bomb_stays_small_and_ends(rung: Rung) -> None:
    # At most 2^8 processes even if nothing stopped it. Each waits, so that a limit shows as a refused fork.
    sleep = unique_sleep()
    code = f"""
    import time
    for _ in range(8):
        os.fork()
    os.execvp("sleep", ["sleep", "{sleep}"])
    """
    finished = inside(code, rung, policy=Policy(processes=64), deadline_s=3.0)
    refused = b"BlockingIOError" in finished.stderr
    watched = b"more than 64 processes" in finished.stderr and finished.exit.signal_number == signal.SIGKILL
    assert refused or watched, finished
    assert gone_within(sleep, 20.0)


@on_every_rung
def test_a_jail_whose_first_process_does_not_answer_leaves_no_files(
    rung: Rung, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after a fork bomb on a busy machine: it has not killed them all when it is killed itself.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Jailed, "wait", lambda jailed, _seconds=None, wait=Jailed.wait: wait(jailed, 0.5))
    jailed = Jailed(["sleep", "1000"], Policy(), rung)
    end = time.monotonic() + 10.0
    while not jail_init.descendants(jailed.process.pid) and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(jailed.process.pid, signal.SIGSTOP)
    jailed.close()
    assert list(tmp_path.iterdir()) == []


def test_processes_of_the_same_user_elsewhere_on_the_node_take_none_of_a_jails() -> None:
    # Other pods' processes count against the user and cannot be seen from here: the kernel's limit leaves room for
    # them where it counts the user's, and the jail's first process counts the jail's own.
    policy = Policy(processes=64)
    spec = {rung: specify(policy, rung, control_fd=0) for rung in (Rung.LANDLOCK, Rung.UNSHARE)}
    assert spec[Rung.LANDLOCK]["limits"]["NPROC"] > 64 + 4000
    assert (spec[Rung.LANDLOCK]["watched"], spec[Rung.LANDLOCK]["tasks"]) == (True, 64)
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 14):
        assert (spec[Rung.UNSHARE]["watched"], spec[Rung.UNSHARE]["limits"]["NPROC"]) == (False, 68)


def test_a_thread_that_has_ended_hides_no_child_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = os.listdir("/proc/self/task")
    monkeypatch.setattr(os, "listdir", lambda _: ["0", *tasks, "0"])  # as one that ended after it was listed
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert child.pid in jail_init.descendants(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_a_jail_is_watched_for_users_other_than_root_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 60000)
    monkeypatch.setattr(jail_init, "_task_count", lambda _: 65)
    (wakeup, wake), (control, held) = os.pipe(), os.pipe()
    spec = specify(Policy(processes=64), Rung.LANDLOCK, control_fd=control)
    try:
        assert jail_init._wait_for_target(0, spec, wakeup, jail_init.HostFolders([], 1)) == 128 + signal.SIGKILL
    finally:
        for each in (wakeup, wake, control, held):
            os.close(each)
    assert "more than 64 processes" in capsys.readouterr().err


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@on_every_rung
def test_a_huge_allocation_is_refused(rung: Rung, gpu: bool) -> None:
    code = """
    try:
        bytearray(8 << 30)
    except MemoryError:
        sys.exit(42)
    """
    finished = inside(code, rung, policy=Policy(gpu=gpu, memory_bytes=1 << 30))
    assert finished.exit == Exit(42, None), finished.stderr


@on_every_rung
def test_a_file_cannot_grow_past_its_limit(rung: Rung) -> None:
    code = """
    file = open(os.environ["TMPDIR"] + "/big", "wb", 0)
    file.write(bytes(1 << 20))
    assert refused(lambda: file.write(bytes(1 << 20)))
    """
    finished = inside(code, rung, policy=Policy(file_bytes=1 << 20))
    assert finished.exit == SUCCESS, finished.stderr


@on_every_rung
@pytest.mark.parametrize("how", ["many", "removed", "closed", "nested"])
def test_folders_of_the_machine_cannot_be_filled(rung: Rung, how: str, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir()
    # Files that are removed while they are open take as much, and so does what lies where nobody can look.
    code = f"""
import os, time
place = os.path.join({str(place)!r}, "in")
os.mkdir(place, {0o311 if how == "closed" else 0o755})
for _ in range(30 if {how!r} == "nested" else 0):
    os.chdir(place)
    place = "n" * 200
    os.mkdir(place)
kept = []
for number in range(64):
    kept.append(open(os.path.join(place, str(number)), "wb"))
    kept[-1].write(os.urandom(1 << 20) * 16)
    kept[-1].flush()
    if {how!r} == "removed": os.unlink(os.path.join(place, str(number)))
    time.sleep(0.02)
time.sleep(20)
"""
    policy = Policy(writable=(place,), scratch_bytes=256 << 20 if how == "closed" and os.geteuid() else 96 << 20)
    finished = inside(code, rung, policy=policy, deadline_s=15.0)
    assert not finished.timed_out
    assert b"bytes in folders of the machine's; all killed" in finished.stderr


@on_every_rung
def test_processor_time_is_bounded(rung: Rung) -> None:
    finished = inside("while True: pass", rung, policy=Policy(cpu_seconds=1))
    assert finished.exit.signal_number in (signal.SIGXCPU, signal.SIGKILL)
    assert not finished.timed_out


@on_every_rung
def test_a_hang_is_killed_in_time_with_its_grandchildren(rung: Rung) -> None:
    sleep = unique_sleep()
    began = time.monotonic()
    script = f"setsid sleep {sleep} & (setsid sleep {sleep} &) ; trap '' TERM; sleep {sleep}"
    finished = jail.run(["/bin/sh", "-c", script], Policy(), rung, deadline_s=0.5)
    assert finished.timed_out
    assert time.monotonic() - began < 20.0
    assert not running(sleep)


@on_every_rung
def test_a_daemon_that_holds_the_output_open_ends_with_its_command(rung: Rung) -> None:
    sleep = unique_sleep()
    finished = jail.run(["/bin/sh", "-c", f"setsid sleep {sleep} & echo done"], Policy(), rung, deadline_s=10.0)
    assert (finished.exit, finished.stdout, finished.timed_out) == (SUCCESS, b"done\n", False)
    assert not running(sleep)


@on_every_rung
def test_the_jail_ends_when_its_service_is_killed(rung: Rung) -> None:
    sleep = unique_sleep()
    service = f"""
import sys
from warpsmith.sandbox.jail import Jailed, Policy, Rung
jailed = Jailed(["/bin/sh", "-c", "setsid sleep {sleep} & sleep {sleep}"], Policy(), Rung("{rung.value}"))
jailed.wait()
"""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]}
    with subprocess.Popen([sys.executable, "-c", service], env=environment) as process:
        end = time.monotonic() + 10
        while not running(sleep) and time.monotonic() < end:
            time.sleep(0.02)
        assert running(sleep)
        process.kill()
    assert gone_within(sleep, 20.0)


@on_every_rung
def test_a_death_by_signal_is_told_as_one(rung: Rung) -> None:
    finished = inside("os.abort()", rung)
    assert finished.exit == Exit(None, signal.SIGABRT)
    assert "SIGABRT" in str(finished.exit)


@on_every_rung
def test_a_flood_of_output_is_cut(rung: Rung) -> None:
    finished = inside("for _ in range(100): os.write(1, bytes(1 << 20))", rung, output_bytes=1000)
    assert finished.exit == SUCCESS
    assert (len(finished.stdout), finished.truncated) == (1000, True)


@on_every_rung
def test_a_missing_program_is_an_answer(rung: Rung) -> None:
    finished = jail.run(["/usr/bin/no-such-compiler"], Policy(), rung, deadline_s=10.0)
    assert finished.exit == Exit(127, None)
    assert b"no-such-compiler" in finished.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@on_every_rung
def test_a_shared_object_compiles_and_loads(rung: Rung, tmp_path: Path) -> None:
    (tmp_path / "answer.cpp").write_text('#include <vector>\nextern "C" int answer() { return 42; }\n')
    policy = Policy(writable=(tmp_path,))
    command = ["g++", "-shared", "-fPIC", "-O1", "-o", "answer.so", "answer.cpp"]
    compiled = jail.run(command, policy, rung, deadline_s=60.0, cwd=tmp_path)
    assert compiled.exit == SUCCESS, compiled.stderr
    loaded = inside("import ctypes; sys.exit(ctypes.CDLL(sys.argv[1]).answer())", rung, tmp_path / "answer.so",
                    policy=Policy(readable=(tmp_path,)))  # fmt: skip
    assert loaded.exit == Exit(42, None), loaded.stderr


@on_every_rung
def test_an_included_host_file_cannot_be_opened(rung: Rung, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    secret, work = tmp_path / "secret.h", tmp_path / "work"
    work.mkdir()
    secret.write_text("leaked")
    (work / "thief.cpp").write_text(f'#include "{secret}"\n')
    finished = jail.run(["g++", "-E", "thief.cpp"], Policy(writable=(work,)), rung, deadline_s=30.0, cwd=work)
    assert finished.exit != SUCCESS
    assert b"leaked" not in finished.stdout + finished.stderr
