"""A second user of the machine gets no call answered, reads or writes none of our bytes, and takes none of our paths.

The second user is a process of the user `nobody`, where the tests run as root; else they are skipped, because one user
cannot keep a secret from itself. `test_packed` has what a stranger has packed, which needs no second user.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from warpsmith import local_sockets, service
from warpsmith.errors import BadInput, ServiceFault
from warpsmith.sandbox import jail_init
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import optimization_service_pb2_grpc as api

pytestmark = pytest.mark.hostile

MODULE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2
def get_inputs():
    return [torch.ones(4)]
"""
COMMAND = [sys.executable, "-c", "from orchestrator.commands.cli import main; main()"]
STRANGER = pwd.getpwnam("nobody")

second_user = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user of the machine: run as root")

TRY_EVERYTHING = """
import json, os, socket, sys

places, tcp, folders = json.loads(sys.argv[1])
done = []

def attempt(what, call):
    try:
        done.append([what, repr(call())])
    except OSError:
        pass

def ask_unix(path):
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(2)
        asked.connect(path)
        asked.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(9))
        return asked.recv(100)

def ask_tcp(port):
    with socket.socket() as asked:
        asked.settimeout(2)
        asked.connect(("127.0.0.1", port))
        asked.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        return asked.recv(100)

def bind(path):
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(path)

for path in places:
    attempt(f"connect {path}", lambda: ask_unix(path))
    attempt(f"remove {path}", lambda: os.unlink(path))
    attempt(f"bind beside {path}", lambda: bind(path + "x"))
    attempt(f"move {os.path.dirname(path)}", lambda: os.rename(os.path.dirname(path), "/tmp/taken"))
for port in tcp:
    attempt(f"connect {port}", lambda: ask_tcp(port))
for folder in folders:
    attempt(f"list {folder}", lambda: os.listdir(folder))
    for name in ("warpsmith.sqlite3", "services.json", "logs/benchmark.log", "new"):
        attempt(f"read {folder}/{name}", lambda: open(f"{folder}/{name}").read(10))
        attempt(f"write {folder}/{name}", lambda: open(f"{folder}/{name}", "a").write("x"))
        attempt(f"link {folder}/{name}", lambda: os.symlink("/etc/passwd", f"{folder}/{name}.x"))
print(json.dumps(done))
"""


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that every user may look into; pytest's own folders are for their owner alone."""
    place = Path(tempfile.mkdtemp(prefix="between-", dir="/tmp"))  # wherever the folder of other tests is
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def as_stranger(program: str, *arguments: str) -> str:
    """Runs a program as the user `nobody`, who may have no right to start root's Python; returns what it prints."""
    becoming = f"""
import os
os.setgroups([])
os.setresgid({STRANGER.pw_gid}, {STRANGER.pw_gid}, {STRANGER.pw_gid})
os.setresuid({STRANGER.pw_uid}, {STRANGER.pw_uid}, {STRANGER.pw_uid})
"""
    imports, _, rest = program.partition("\n\n")  # Python reads its files before it changes the user
    command = [sys.executable, "-I", "-c", f"{imports}\n{becoming}\n{rest}", *arguments]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def listening(ancestor: int) -> tuple[list[str], list[int]]:
    """Paths of Unix sockets and numbers of TCP ports at which a process and its descendants listen."""
    inodes = set()
    for process in [ancestor, *jail_init.descendants(ancestor)]:
        for entry in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(entry)))
    unix, tcp = [], []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if fields[6] in inodes and int(fields[3], 16) & 0x10000 and len(fields) == 8:  # it accepts connections
            unix.append(fields[7])
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == "0A":
                tcp.append(int(fields[1].rpartition(":")[2], 16))
    return unix, tcp


@contextlib.contextmanager
def up(place: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`warpsmith up` with all of its real services, and the address that it prints."""
    command = [*COMMAND, "up", "--runs", str(place / "runs")]
    with (place / "err").open("wb") as err:
        process = subprocess.Popen(
            command, cwd=place, stdout=subprocess.PIPE, stderr=err, env={**os.environ, **environment}
        )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().decode().strip()
        assert address, (place / "err").read_text()
        yield process, address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


@second_user
def test_nothing_of_a_running_command_answers_a_second_user(open_place: Path) -> None:
    with up(open_place) as (process, address):
        unix, tcp = listening(process.pid)
        ours = [path for path in unix if path.startswith(str(local_sockets.path_of(address).parent))]
        assert len(ours) == 6, unix
        assert not tcp, "a port is a public place"
        assert not set(unix) - set(ours)
        folders = [str(open_place / "runs"), str(open_place / "runs" / "logs"), str(Path(ours[0]).parent)]
        assert json.loads(as_stranger(TRY_EVERYTHING, json.dumps([ours, tcp, folders]))) == []
        # The same user finds the services by the runs directory.
        shown = subprocess.run(
            [*COMMAND, "runs", "--server", "runs"],
            cwd=open_place,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "")
    assert not Path(ours[0]).parent.exists()


@second_user
def test_the_stranger_of_these_tests_is_able_to_do_what_is_not_forbidden(open_place: Path) -> None:
    open_place.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as public, socket.create_server(("127.0.0.1", 0)) as port:
        public.bind(str(open_place / "s"))
        (open_place / "s").chmod(0o777)
        public.listen()

        def answer(server: socket.socket) -> None:
            with server.accept()[0] as asked:
                asked.recv(1000)
                asked.sendall(b"x")

        answering = [threading.Thread(target=answer, args=(server,)) for server in (public, port)]
        for each in answering:
            each.start()
        asked = [[str(open_place / "s")], [port.getsockname()[1]], [str(open_place)]]
        done = json.loads(as_stranger(TRY_EVERYTHING, json.dumps(asked)))
        for each in answering:
            each.join()
    assert {what.split()[0] for what, _ in done} >= {"connect", "remove", "bind", "list", "write", "link"}
    assert [what.split()[0] for what, got in done if got == "b'x'"] == ["connect", "connect"]


class _Listener(grpc.GenericRpcHandler):
    """A gRPC server of a stranger's, which notes every call, whatever its name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.server = grpc.server(ThreadPoolExecutor(2))
        self.server.add_generic_rpc_handlers((self,))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """Knows no method."""
        self.calls.append(handler_call_details.method)


@second_user
def test_who_listens_in_a_folder_of_his_own_gets_no_call(open_place: Path) -> None:
    stranger = _Listener()
    place = open_place / "theirs"
    place.mkdir()
    assert stranger.server.add_insecure_port(f"unix:{place}/orchestrator")
    stranger.server.start()
    try:
        for path in (place / "orchestrator", place):
            os.chown(path, STRANGER.pw_uid, STRANGER.pw_gid)
        for mode in (0o700, 0o755, 0o777, 0o1777):
            place.chmod(mode)
            with pytest.raises(BadInput, match="belongs to nobody"):
                service.dial(api.OptimizationServiceStub, f"unix:{place}/orchestrator")
        os.chown(place, 0, 0)  # a folder of ours in which the stranger may write
        place.chmod(0o1777)
        with pytest.raises(BadInput, match="everybody may write there"):
            service.dial(api.OptimizationServiceStub, f"unix:{place}/orchestrator")
        place.chmod(0o755)
        with pytest.raises(BadInput, match="is no socket of yours"):
            service.dial(api.OptimizationServiceStub, f"unix:{place}/orchestrator")
        assert stranger.calls == []
        os.chown(place / "orchestrator", 0, 0)  # the same server, trusted: it would have heard us
        stub = service.dial(api.OptimizationServiceStub, f"unix:{place}/orchestrator", service.Patience(attempts=1))
        with pytest.raises(ServiceFault, match="UNIMPLEMENTED"):
            stub.GetRun(messages.GetRunRequest(run_id="last"))
        assert stranger.calls == ["/warpsmith.v1.OptimizationService/GetRun"]
    finally:
        stranger.server.stop(None)


@second_user
def test_a_runs_folder_in_which_somebody_else_may_write_is_refused_by_every_command(open_place: Path) -> None:
    (open_place / "m.py").write_text(MODULE)
    (open_place / "s.py").write_text(MODULE.replace("Model", "ModelNew"))
    runs = open_place / "runs"
    runs.mkdir()
    for owner, mode, why in ((0, 0o777, "everybody may write there"), (STRANGER.pw_uid, 0o755, "belongs to nobody")):
        os.chown(runs, owner, -1)
        runs.chmod(mode)
        for command in (["optimize", "m.py"], ["up"], ["runs"], ["watch"], ["cancel"], ["judge", "s.py", "m.py"]):
            said = subprocess.run(
                [*COMMAND, *command], cwd=open_place, capture_output=True, text=True, timeout=120, check=False
            )
            assert said.returncode == 2, said
            assert f"{runs}: {why}" in said.stderr, command
    assert os.listdir(runs) == []
