"""Local mode with small stand-ins for the services: they start, find each other, and none is left behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from authority import Authority

from orchestrator.serving import local
from orchestrator.serving.dialing import orchestrator_at
from orchestrator.serving.local import METRICS, SERVICES_FILE, TARGETS_FILE, LocalServices
from warpsmith import local_sockets, service
from warpsmith.errors import BadInput, Infrastructure, ModelFault, ServiceFault, ServiceGone
from warpsmith.models.language_model import Message
from warpsmith.models.openai_client import OpenAiClient
from warpsmith.models.openai_client import Patience as ModelPatience
from warpsmith.settings import TLS_VARIABLES, ModelSettings
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import optimization_service_pb2_grpc as api

STAND_IN = """
import subprocess, sys
from warpsmith import settings
from warpsmith.service import serve
from warpsmith.v1 import correctness_service_pb2_grpc as pb

def make(read):
    open("{note}", "a").write(" ".join([str(__import__("os").getpid()), *sorted(read.addresses)]) + "\\n")
    {body}
    return pb.CorrectnessServiceServicer()

serve("stand-in", pb.add_CorrectnessServiceServicer_to_server, make)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Packages `good` and `bad` on the path of children; each notes its process and its peers."""
    note = tmp_path / "note"
    for name, body in (("good", "pass"), ("bad", "raise settings.BadInput('no compiler is here')"), ("late", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(STAND_IN.format(note=note, body=body))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return {"benchmark": "good", "correctness": "good"}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def pids(tmp_path: Path) -> list[int]:
    return [int(line.split()[0]) for line in (tmp_path / "note").read_text().splitlines()]


def check_for(check: Callable[[], None], seconds: float) -> None:
    """Looks again and again whether all services are up: the threads of one that is killed end one after another."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check()
        time.sleep(0.02)


def test_services_start_know_their_peers_and_stop(tmp_path: Path, modules: dict[str, str]) -> None:
    runs = tmp_path / "runs"
    environment = {METRICS: "0"}
    with LocalServices(runs, modules=modules | {"orchestrator": "good"}, environment=environment) as services:
        targets = json.loads((runs / TARGETS_FILE).read_text())
        assert [target["labels"]["service"] for target in targets] == ["benchmark", "correctness", "orchestrator"]
        assert json.loads((runs / SERVICES_FILE).read_text())["benchmark"] == services.address("benchmark")
        assert (tmp_path / "note").read_text().splitlines()[1].split()[1:] == ["benchmark"]
        services.check()
    with pytest.raises(Infrastructure, match="were stopped"):  # who waits in another thread for one to come back
        services.check()
    assert not any(alive(pid) for pid in pids(tmp_path))
    assert not (runs / TARGETS_FILE).exists()
    assert "serving on" in (runs / "logs" / "benchmark.log").read_text()


def test_a_service_that_does_not_start_stops_the_others_and_says_why(tmp_path: Path, modules: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="no compiler is here"):
        LocalServices(tmp_path / "runs", modules=modules | {"correctness": "bad"}).start()
    assert not any(alive(pid) for pid in pids(tmp_path))
    with pytest.raises(Infrastructure, match="ZeroDivisionError"):
        LocalServices(tmp_path / "runs", modules={"benchmark": "late"}).start()


@pytest.mark.usefixtures("modules")
def test_declared_trust_reaches_services_on_a_machine_without_a_jail(tmp_path: Path) -> None:
    body = "from warpsmith.sandbox import jail; jail.probe = lambda: (); print('rung', jail.choose().value, flush=True)"
    (tmp_path / "jailless.py").write_text(STAND_IN.format(note=tmp_path / "note", body=body))
    runs = tmp_path / "runs"
    with LocalServices(runs, modules={"benchmark": "jailless"}, environment={"WARPSMITH_TRUST_INPUT": "1"}):
        assert "rung none" in (runs / "logs" / "benchmark.log").read_text()
    with pytest.raises(BadInput, match="pass --trust-input"):
        LocalServices(runs, modules={"benchmark": "jailless"}).start()


def test_a_service_that_ends_is_noticed(tmp_path: Path, modules: dict[str, str]) -> None:
    with LocalServices(tmp_path / "runs", modules=modules) as services:
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        with pytest.raises(Infrastructure, match="benchmark service ended"):
            check_for(services.check, 20)


@pytest.mark.usefixtures("modules")
def test_commands_that_share_a_runs_directory_leave_each_other_alone(tmp_path: Path) -> None:
    runs, modules = tmp_path / "runs", {"orchestrator": "good"}

    def published() -> str:
        assert not (runs / TARGETS_FILE).exists()
        return str(json.loads((runs / SERVICES_FILE).read_text())["orchestrator"])

    with LocalServices(runs, modules=modules) as first:
        log = (runs / "logs" / "orchestrator.log").read_text()
        with LocalServices(runs, modules={"benchmark": "good"}):
            assert published() == first.address("orchestrator")
        second = LocalServices(runs, modules=modules)
        second.start()
        assert published() == second.address("orchestrator")
        assert (runs / "logs" / "orchestrator.log").read_text() == log
        assert "serving on" in (runs / "logs" / f"orchestrator.{os.getpid()}.log").read_text()
        second.stop()
        assert published() == first.address("orchestrator")
        third = LocalServices(runs, modules=modules)
        third.start()
    try:
        assert published() == third.address("orchestrator")
    finally:
        third.stop()
    assert sorted(os.listdir(runs)) == ["logs"]


def test_children_end_when_their_parent_is_killed(tmp_path: Path, modules: dict[str, str]) -> None:
    program = (
        f"from orchestrator.serving.local import LocalServices; from pathlib import Path; import time\n"
        f"made = LocalServices(Path({str(tmp_path / 'runs')!r}), modules={modules!r}); made.start()\n"
        "print(made.address('benchmark'), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        folder = local_sockets.path_of(parent.stdout.readline().decode().strip()).parent
        assert (folder / "benchmark").is_socket()
        parent.kill()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids(tmp_path))
    assert not folder.exists()


def test_a_runs_directory_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        LocalServices(tmp_path / "file" / "runs").start()


def test_a_service_elsewhere_is_used_and_none_started(tmp_path: Path, modules: dict[str, str]) -> None:
    with LocalServices(tmp_path / "runs", modules=modules) as services:
        elsewhere = services.address("benchmark")
        environment = {"WARPSMITH_REASONING_ADDRESS": elsewhere}
        both = {"reasoning": "good", "orchestrator": "good"}
        with LocalServices(tmp_path / "others", modules=both, environment=environment) as others:
            assert others.address("reasoning") == elsewhere
    peers = [line.split()[1:] for line in (tmp_path / "note").read_text().splitlines()]
    assert peers == [[], ["benchmark"], ["reasoning"]]


def test_a_service_elsewhere_that_does_not_answer_is_said(
    tmp_path: Path, modules: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.serving.local.REACH_SECONDS", 0.2)
    environment = {"WARPSMITH_REASONING_ADDRESS": "127.0.0.1:1"}
    with pytest.raises(BadInput, match=r"reasoning service at 127.0.0.1:1 does not answer"):
        LocalServices(tmp_path / "runs", modules={"reasoning": "good", **modules}, environment=environment).start()


@pytest.mark.usefixtures("modules")
def test_services_that_stay_ask_everybody_for_a_certificate_where_there_is_one(tmp_path: Path) -> None:
    authority = Authority("test")
    tls = authority.issue(tmp_path / "tls", "orchestrator")
    environment = dict(zip(TLS_VARIABLES, map(str, (tls.certificate, tls.key, tls.authority)), strict=True))
    listen = ("127.0.0.1", 0)
    with LocalServices(
        tmp_path / "runs", modules={"orchestrator": "good"}, listen=listen, stays=True, environment=environment
    ) as services:
        here = services.address("orchestrator")
        for address in (services.listening, here):
            with pytest.raises(ServiceFault, match="UNIMPLEMENTED"):  # the stand-in has been reached
                orchestrator_at(address, tls).GetRun(messages.GetRunRequest())
        with grpc.insecure_channel(here) as plain, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            api.OptimizationServiceStub(plain).GetRun(messages.GetRunRequest())
        stub = service.dial(api.OptimizationServiceStub, services.listening, service.Patience(attempts=1))
        with pytest.raises(ServiceGone):
            stub.GetRun(messages.GetRunRequest())
        with pytest.raises(BadInput, match=f"^{here}: is served by mutual TLS: set WARPSMITH_TLS_CERTIFICATE, "):
            orchestrator_at(here)


@pytest.mark.usefixtures("modules")
def test_services_of_a_command_ask_for_no_token_that_its_user_has_for_others(tmp_path: Path) -> None:
    environment = {"WARPSMITH_TOKEN_FILE": str(tmp_path / "not-there")}
    with (
        LocalServices(tmp_path / "runs", modules={"orchestrator": "good"}, environment=environment) as services,
        pytest.raises(ServiceFault, match="UNIMPLEMENTED"),  # the stand-in has been reached
    ):
        orchestrator_at(services.address("orchestrator")).GetRun(messages.GetRunRequest())


@pytest.mark.usefixtures("modules")
def test_a_command_without_metrics_listens_at_no_port(tmp_path: Path) -> None:
    with LocalServices(tmp_path / "runs", modules={"orchestrator": "good"}) as services:
        (pid,) = pids(tmp_path)
        sockets = set()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(os.readlink(entry))
        rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
        assert not [row for row in rows if f"socket:[{row[9]}]" in sockets]
        assert local_sockets.path_of(services.address("orchestrator")).is_socket()


def test_a_folder_for_sockets_is_ours_alone_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # any user could move a folder in it away and put another one there
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for place in (shared, tmp_path / ("x" * 90), tmp_path / "with, comma"):
        place.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        made = local_sockets.make_folder()
        assert made.parent == Path(f"/tmp/warpsmith-{os.geteuid()}")
        # Nor can anybody make a folder of that name once it is gone, for a command that calls again.
        assert [stat.S_IMODE(each.stat().st_mode) for each in (made, made.parent)] == [0o700, 0o700]
        made.rmdir()
        assert os.listdir(place) == []
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    with pytest.raises(BadInput, match=r"shared: everybody may write there .* set TMPDIR to another folder"):
        LocalServices(tmp_path / "runs").start()


@pytest.mark.usefixtures("modules")
def test_no_service_runs_what_lies_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, mark = tmp_path / "here", tmp_path / "mark"
    here.mkdir()
    for name in ("good", "random", "grpc", "sitecustomize"):
        (here / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.chdir(here)
    with LocalServices(tmp_path / "runs", modules={"benchmark": "good"}):
        assert not mark.exists()


def test_every_process_of_ours_is_started_without_the_current_directory() -> None:
    root = Path(__file__).parents[2]
    texts = [
        (file, file.read_text())
        for folder in ("orchestrator", "gpu_bench", "proto/warpsmith", "agent_compile", "agent_correctness")
        for file in (root / folder).rglob("*.py")
    ]
    starts = [
        (file.name, line)
        for file, text in texts
        for line in text.splitlines()
        if re.search(r"sys\.executable, .*\"-m\"", line)
    ]
    assert len(starts) >= 6
    assert [each for each in starts if '"-P"' not in each[1]] == []


@pytest.mark.usefixtures("modules")
def test_what_a_service_that_is_killed_has_left_goes_with_the_others(tmp_path: Path) -> None:
    with LocalServices(tmp_path / "runs", modules={"benchmark": "good"}):
        (pid,) = pids(tmp_path)
        named = dict(each.partition("=")[::2] for each in Path(f"/proc/{pid}/environ").read_text().split("\0"))
        scratch = Path(named["TMPDIR"])
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
        (scratch / "left").mkdir(0o000)
        os.kill(pid, signal.SIGKILL)
    assert not scratch.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as another user")
def test_a_port_of_somebody_else_on_loopback_gets_no_call() -> None:
    program = "import os, socket; os.setresuid(65534, 65534, 65534); s = socket.create_server(('127.0.0.1', 0))\n"
    program += "print(s.getsockname()[1], flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as stranger:  # type: ignore[call-overload]
        port = int(stranger.stdout.readline())
        for address in (f"127.0.0.1:{port}", f"localhost:{port}", f"dns:///localhost:{port}", f"ipv4:127.0.0.1:{port}"):
            with pytest.raises(BadInput, match="the port belongs to nobody"):
                service.dial(api.OptimizationServiceStub, address)
        client = OpenAiClient(ModelSettings(url=f"http://127.0.0.1:{port}/v1", name="any"), ModelPatience(attempts=1))
        with contextlib.closing(client), pytest.raises(ModelFault, match="the port belongs to nobody"):
            client.answer([Message("user", "the module")], None)
        stranger.stdin.write("\n")


def test_several_sets_of_services_of_one_command_have_logs_of_their_own(tmp_path: Path) -> None:
    held = [local.open_log(tmp_path / "benchmark.log") for _ in range(3)]
    names = [Path(log.name).name for log in held]
    assert names == ["benchmark.log", f"benchmark.{os.getpid()}.log", f"benchmark.{os.getpid()}-2.log"]
    held.pop(1).close()
    with local.open_log(tmp_path / "benchmark.log") as again:
        assert Path(again.name).name == names[1]
    for log in held:
        log.close()


def test_logs_where_nothing_can_be_locked_are_named_after_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(local.fcntl, "flock", refused)
    with local.open_log(tmp_path / "benchmark.log") as log:
        assert Path(log.name).name == f"benchmark.{os.getpid()}.log"
