"""Peers of a training step beside PyTorch's arms, on a processor with a package that is made up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.training import peers

MODULE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(32))

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, (32,), self.weight, 1e-6)

def get_inputs():
    return [torch.rand(8, 32)]

def get_init_inputs():
    return []
"""


def in_place(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Right, and it leaves nothing of its input."""
    result = torch.nn.functional.rms_norm(x.clone(), weight.shape, weight, eps)
    x.detach().zero_()
    return result


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_each_peer_has_a_row_with_its_time_and_error_and_one_that_is_missing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = ModuleType("made_up")
    package.liger_rms_norm = in_place  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up", package)
    monkeypatch.setitem(peers.PEERS, "liger", ("made_up", peers.PEERS["liger"][1]))  # type: ignore[misc]
    monkeypatch.setitem(peers.PEERS, "quack", ("not_there", peers.PEERS["quack"][1]))  # type: ignore[misc]
    file = tmp_path / "rms_norm.py"
    file.write_text(MODULE)
    peers.main([str(file), "--target", "cpu", "--seconds", "0.1", "--out", str(tmp_path / "peers.md")])
    printed = capsys.readouterr().out
    assert (tmp_path / "peers.md").read_text() == printed
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()[2:]]
    assert [row[1] for row in table] == ["quack", "eager", "compile", "liger"]
    assert "No module named 'not_there'" in table[0][4]
    for _, _, time, share, off in table[1:]:
        assert float(time) > 0
        assert share.endswith("x")
        assert float(off) < 1e-5
