"""A whole optimisation on this processor with a model in it that writes a kernel: composed, verified and chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kernel_replies as replies
import pytest
from scripted_model import ScriptedModel

from orchestrator.archive import Archive
from orchestrator.pipeline import passed
from warpsmith.v1 import trial_pb2

KERNEL = "(x[i] - x[i]) + x[i]"
"""Of what the scripted model writes."""


def warpsmith(directory: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from orchestrator.commands.cli import main; main()", *arguments],
        cwd=directory,
        env={**os.environ, "WARPSMITH_MODEL_URL": url, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


def is_mended(trial: trial_pb2.Trial) -> bool:
    return any(KERNEL in source.text for source in trial.candidate.program.sources)


@pytest.mark.services
@pytest.mark.timeout(600)
def test_a_kernel_that_a_model_wrote_is_mended_verified_timed_and_exported_where_it_is_best(tmp_path: Path) -> None:
    (tmp_path / "turned.py").write_text(replies.MODULE)
    # Enough trials that one is left for the mended kernel, in whatever order those beside it end.
    with ScriptedModel(replies.mended) as server:
        done = warpsmith(
            tmp_path, server.url, "optimize", "turned.py", "--target", "cpu", "--budget", "4m", "--trials", "8",
            "--synthesizer", "vllm", "--json",
        )  # fmt: skip
        prompts = [asked.prompt for asked in server.asked]
    assert done.returncode == 0, done.stderr
    assert any("expected primary-expression" in prompt for prompt in prompts)  # what the compiler said
    result = json.loads(done.stdout)["tasks"][0]
    shown = warpsmith(tmp_path, server.url, "show").stdout
    assert result["verdict"] in ("PASS", "NO_FASTER"), (result, shown)  # a loaded machine's noise hides any gain
    assert result["model_tokens"] >= 120 * 2, "a kernel and its mending"
    archive = Archive.reading(tmp_path / "runs")
    run = archive.run("last")
    mended = [trial for trial in archive.trials(run.id) if is_mended(trial)]
    assert any(passed(trial) for trial in mended), (result, shown)
    archive.close()
    if result["verdict"] == "PASS" and run.best_trial in [trial.number for trial in mended]:
        exported = warpsmith(tmp_path, server.url, "export", "--output", "-")
        assert exported.returncode == 0, exported.stderr
        assert KERNEL in exported.stdout, (result, shown)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (ScriptedModel(replies.good, names=("qwen",)), "it has no model 'llama'; it has: qwen; set WARPSMITH_MODEL"),
        (ScriptedModel(replies.good, key="secret"), "it refuses the key; set WARPSMITH_MODEL_KEY_FILE (no such key)"),
    ],
)
def test_settings_that_the_server_refuses_are_said_when_the_service_starts(server: ScriptedModel, says: str) -> None:
    with server:
        chosen = {"WARPSMITH_MODEL_URL": server.url, "WARPSMITH_MODEL": "llama", "WARPSMITH_SYNTHESIZER": "vllm"}
        done = subprocess.run(
            [sys.executable, "-m", "agent_synthesis"],
            env={**os.environ, **chosen},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.strip().endswith(says)
