"""Both agents on a real vLLM that serves a tiny random model: `make test-vllm`. It needs form here, not sense.

A model that knows nothing chooses among legal moves at random, so what is found, and how fast it is, is not asked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fuzz_model
import httpx
import pytest
from prometheus_client import REGISTRY

from agent_reasoning.model import language_model_options
from agent_reasoning.model.language_model import LanguageModelReasoner, Lost
from warpsmith import local_sockets
from warpsmith.models.openai_client import OpenAiClient
from warpsmith.settings import ModelSettings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm" / "bin"
COMMAND_SECONDS = 1500.0
"""Of one command, which ends by itself: 100 s on a quiet machine, many times that beside other suites."""
TURNS = 20
TRIALS = 8
"""Of the whole run; a plan of the module has half as many moves."""
COMMAND_TRIALS = 4
"""Of the command as users type it, with services of its own: plan zero, a kernel, one that the model is to write."""
MOST_TOKENS = 200_000
"""Of the same; more than its trials take."""


@dataclass(frozen=True)
class Served:
    """`warpsmith up --with-vllm` under way."""

    orchestrator: str
    model: str
    """Where the model's API is: a Unix socket."""
    runs: Path

    def metrics(self, service: str) -> dict[str, float]:
        """Every sample of a service of ours, by name with labels; "model" for vLLM's own."""
        if service == "model":
            transport = httpx.HTTPTransport(uds=str(local_sockets.path_of(self.model)))
            address = "localhost"
        else:
            transport = httpx.HTTPTransport()
            targets = json.loads((self.runs / "prometheus_targets.json").read_text())
            address = next(each["targets"][0] for each in targets if each["labels"]["service"] == service)
        with httpx.Client(transport=transport, timeout=10.0) as client:
            lines = client.get(f"http://{address}/metrics", follow_redirects=True).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Services and model, up."""
    if not (VLLM / "vllm").exists():
        pytest.skip("no .venv-vllm: make test-vllm makes it")
    directory = tmp_path_factory.mktemp("vllm")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ours = {
        "WARPSMITH_VLLM": str(VLLM / "vllm"),
        "WARPSMITH_MODEL_ANSWER_TOKENS": "256",
        "OMP_NUM_THREADS": "2",
        "WARPSMITH_METRICS_PORT": "0",
    }
    environment = {**os.environ, **quiet, **ours}
    script = ROOT / "tests" / "model_server" / "tiny_model.py"
    subprocess.run([VLLM / "python", script, directory / "tiny"], env=environment, check=True, timeout=300)
    command = [sys.executable, "-c", "from orchestrator.commands.cli import main; main()", "up"]
    command += ["--with-vllm", str(directory / "tiny"), "--runs", str(directory / "runs")]
    command += ["--vllm-arguments", "--dtype bfloat16 --enforce-eager --max-model-len 2048 --served-model-name tiny"]
    log = directory / "up.log"
    with log.open("wb") as said:
        up = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True)
    try:
        assert up.stdout is not None
        address = up.stdout.readline().strip()  # ends when the process does
        assert address, log.read_text()[-3000:]
        model = next(line.split()[-1] for line in log.read_text().splitlines() if line.startswith("model "))
        yield Served(address, model, directory / "runs")
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(120)
        assert up.stdout is not None
        up.stdout.close()


def test_nineteen_of_twenty_answers_are_legal_at_once_and_tokens_are_counted(served: Served) -> None:
    client = OpenAiClient(ModelSettings(url=served.model, total_seconds=120.0))
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
    theirs = sum(
        value for name, value in served.metrics("model").items() if name.startswith("vllm:generation_tokens_total")
    )
    assert 0 < ours <= theirs


def test_a_whole_run_of_both_agents_on_it_ends_with_a_verdict(served: Served, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from orchestrator.commands.cli import main; main()"]
    module = str(ROOT / "examples" / "fused_linear_row_sum.py")
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "optimize", module, "--target", "cpu", "--budget", "6m", "--trials", str(TRIALS), "--json",
         "--server", served.orchestrator],
        cwd=tmp_path, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False,
    )  # fmt: skip
    print(f"{done.stderr}\n{done.stdout}\n{time.monotonic() - begin:.0f} s")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["tasks"][0]
    assert result["verdict"] in ("PASS", "NO_FASTER"), result  # the latter where a busy machine's noise drowns the gain
    assert result["trials"]["passed"] > 1, result

    reasoning, synthesis = served.metrics("reasoning"), served.metrics("synthesis")
    answers = {name: value for name, value in reasoning.items() if name.startswith("warpsmith_model_answers_total")}
    chosen = answers.pop('warpsmith_model_answers_total{outcome="chosen"}')
    print(f"the reasoner's answers: {chosen:.0f} chosen; others {answers}")
    assert chosen > 0
    assert sum(answers.values()) <= chosen / 19, "at least 95 % of the answers are legal at once"
    assert reasoning['warpsmith_model_choices_total{kind="dropped"}'] <= chosen / 19
    kernels = {name: value for name, value in synthesis.items() if name.startswith("warpsmith_model_kernels_total")}
    print(f"the synthesizer's answers: {kernels}")
    assert sum(kernels.values()) > 0, "it was asked for a kernel; what it says is none, and costs nothing else"


def test_the_command_of_the_manual_runs_to_its_end_on_it_and_says_what_it_took(served: Served, tmp_path: Path) -> None:
    def warpsmith(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from orchestrator.commands.cli import main; main()", *arguments]
        ours = {"WARPSMITH_MODEL_URL": served.model, "WARPSMITH_MODEL_ANSWER_TOKENS": "256", "OMP_NUM_THREADS": "2"}
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **ours}, capture_output=True, text=True, timeout=COMMAND_SECONDS,
            check=False,
        )  # fmt: skip

    begin = time.monotonic()
    done = warpsmith(
        "optimize", str(ROOT / "examples" / "softmax.py"), "--reasoner", "vllm", "--synthesizer", "vllm",
        "--target", "cpu", "--budget", "60s", "--trials", str(COMMAND_TRIALS), "--tokens", str(MOST_TOKENS), "--json",
    )  # fmt: skip
    print(f"{done.stderr}\n{done.stdout}\n{time.monotonic() - begin:.0f} s")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["tasks"][0]
    assert result["verdict"] in ("PASS", "NO_FASTER"), result  # on softmax a random model has no margin
    assert result["trials"]["passed"] > 0, result
    assert 0 < result["model_tokens"] < 2 * MOST_TOKENS, result
    assert f"model: {result['model_tokens']} tokens" in warpsmith("show").stdout
