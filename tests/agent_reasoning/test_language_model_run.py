"""A whole optimisation on this processor with a model in it: the command, six services, and a scripted server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import model_replies as replies
import pytest
from scripted_model import ScriptedModel

from warpsmith import plugins

# Ten passes over memory that can be one: a busy machine does not hide that. Not compiled as a baseline, which would be
# a fourth of the test's time on the processor.
MODULE = """import torch


class Model(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        y = torch.clamp(torch.relu(x * 1.5 - 0.25), 0.5, 2.0) + x
        return torch.abs((y * 0.5 + 1.0) * x - 0.75) * 1.25


def get_inputs():
    return [torch.randn(512, 1024)]


def get_init_inputs():
    return []
"""


def warpsmith(directory: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WARPSMITH_MODEL_URL": url, "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        [sys.executable, "-c", "from orchestrator.commands.cli import main; main()", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


@pytest.mark.services
@pytest.mark.timeout(600)
def test_a_run_whose_moves_a_model_chooses_ends_with_a_right_kernel(tmp_path: Path) -> None:
    assert "vllm" in plugins.names("reasoner"), "install again: the entry point is new"
    (tmp_path / "chain.py").write_text(MODULE)
    with ScriptedModel(replies.illegal, replies.good) as server:
        done = warpsmith(
            tmp_path, server.url, "optimize", "chain.py", "--target", "cpu", "--budget", "60s", "--trials", "2",
            "--plugin", "reasoner=vllm", "--json",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["tasks"][0]
    assert result["verdict"] in ("PASS", "NO_FASTER")  # of a right kernel: a loaded machine's noise hides any gain
    assert result["trials"]["passed"] == 2
    assert len(server.asked) >= 2  # the first answer was illegal, and asked for again
    shown = warpsmith(tmp_path, server.url, "show").stdout
    assert "it saves a pass over memory" in shown
    assert result["model_tokens"] >= 120 * 2  # each of the scripted answers takes 120, one that is of no use too
    assert f"model: {result['model_tokens']} tokens" in shown


def test_a_model_that_the_server_does_not_have_is_said_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "chain.py").write_text(MODULE)
    with ScriptedModel(replies.good, names=("qwen",)) as server:
        environment = {**os.environ, "WARPSMITH_MODEL_URL": server.url, "WARPSMITH_MODEL": "llama"}
        done = subprocess.run(
            [sys.executable, "-m", "agent_reasoning"],
            env={**environment, "WARPSMITH_REASONER": "vllm"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("it has no model 'llama'; it has: qwen; set WARPSMITH_MODEL")
