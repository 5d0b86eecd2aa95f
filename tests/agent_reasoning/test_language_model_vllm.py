"""The reasoner on a real vLLM that serves a tiny random model: `make test-vllm`. It needs form here, not sense."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fuzz_model
import pytest
from prometheus_client import REGISTRY

from agent_reasoning import language_model_options
from agent_reasoning.language_model import LanguageModelReasoner, Lost
from warpsmith.openai_client import OpenAiClient
from warpsmith.settings import ModelSettings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm" / "bin"
START_SECONDS = 400.0
TURNS = 20


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of a server that is up."""
    if not (VLLM / "vllm").exists():
        pytest.skip("no .venv-vllm: make test-vllm makes it")
    directory = tmp_path_factory.mktemp("vllm")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment = {**os.environ, **quiet}
    script = ROOT / "tests" / "model_server" / "tiny_model.py"
    subprocess.run([VLLM / "python", script, directory / "tiny"], env=environment, check=True, timeout=300)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [VLLM / "vllm", "serve", directory / "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--served-model-name", "tiny"]
    log = directory / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail("vLLM does not start:\n" + log.read_text()[-3000:])
            time.sleep(1.0)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_nineteen_of_twenty_answers_are_legal_at_once_and_tokens_are_counted(url: str) -> None:
    client = OpenAiClient(ModelSettings(url=url, total_seconds=120.0))
    reasoner = LanguageModelReasoner(client, asked_again=0)
    request = fuzz_model.request()
    options = language_model_options.of(request)
    turns = [reasoner.choose(request, options) for _ in range(TURNS)]
    assert client.context_tokens() == 2048
    client.close()
    lost = [turn for turn in turns if isinstance(turn, Lost)]
    print(f"{TURNS - len(lost)} of {TURNS} answers were legal at once")
    assert len(lost) <= TURNS // 20, lost
    ours = REGISTRY.get_sample_value("warpsmith_model_tokens_total", {"kind": "answer"}) or 0.0
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=10.0) as reply:
        lines = reply.read().decode().splitlines()
    theirs = sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))
    assert 0 < ours <= theirs


def test_a_whole_run_on_it_ends_with_pass(url: str, tmp_path: Path) -> None:
    module = Path(__file__).with_name("test_language_model_run.py").read_text().split('MODULE = """')[1].split('"""')[0]
    (tmp_path / "chain.py").write_text(module)
    command = [sys.executable, "-c", "from orchestrator.cli import main; main()", "optimize", "chain.py"]
    command += ["--target", "cpu", "--budget", "120s", "--trials", "10", "--plugin", "reasoner=vllm", "--json"]
    environment = {**os.environ, "WARPSMITH_MODEL_URL": url, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tasks"][0]["verdict"] == "PASS"
    show = [*command[:3], "show"]
    shown = subprocess.run(show, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True)
    lost = shown.stdout.count("the model had no say")
    print(f"{shown.stdout}\ntrials of turns that the model lost: {lost}")
    assert lost <= 1
