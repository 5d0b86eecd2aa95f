"""The table of a plan's steps, on a processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_synthesis.synthesizer import BuiltInSynthesizer
from benchmarks.timing import step_times

MODULE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x @ x) + 1.0

def get_inputs():
    return [torch.rand(64, 64)]

def get_init_inputs():
    return []
"""


def test_each_step_of_a_plan_has_a_row_and_the_file_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "relu_of_a_product.py", tmp_path / "steps.md"
    file.write_text(MODULE)
    step_times.main([str(file), "--target", "cpu", "--plans", "1", "--out", str(out)])
    printed = capsys.readouterr().out
    assert out.read_text() == printed
    assert "## relu_of_a_product" in printed
    assert "µs in 2 steps" in printed
    assert "| aten.matmul.default (matmul) | library |" in printed
    assert "| ours |" in printed


def test_steps_whose_results_are_kept_from_call_to_call_have_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synthesizer = BuiltInSynthesizer()
    monkeypatch.setattr(step_times, "plans", lambda task, _: [("plan zero", synthesizer.plan(task, []))])
    file = tmp_path / "masked.py"
    file.write_text(MODULE.replace("torch.relu(x @ x) + 1.0", "torch.mm(x, x) * torch.ones(64, 64).tril()"))
    step_times.main([str(file), "--target", "cpu"])
    printed = capsys.readouterr().out
    assert "aten.mm.default" in printed
    assert "aten.tril" not in printed


def test_of_each_kernel_the_settings_are_told_that_are_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "norm.py"
    file.write_text(MODULE.replace("torch.relu(x @ x) + 1.0", "torch.nn.functional.layer_norm(x, (64,))"))
    step_times.main([str(file), "--grad", "all", "--target", "cpu", "--plans", "1", "--settings", "2"])
    table = capsys.readouterr().out.partition("| kernel | µs |")[2].splitlines()[2:]
    assert table
    assert all(row.count(";") == 1 and "=" in row for row in table)
