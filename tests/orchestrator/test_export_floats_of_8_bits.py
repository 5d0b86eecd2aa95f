"""Exports of modules whose inputs and results are floats of 8 bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.timing import host_time
from orchestrator.exports import export_files
from orchestrator.exports.export_module import ModuleExporter
from orchestrator.exports.export_package import PackageExporter

MODULE = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Buffer(torch.randn(32).to(torch.float8_e4m3fn))

    def forward(self, x, scale):
        values = x.to(torch.float32) * scale * self.weight.float()
        return torch.tanh(values).to(torch.float8_e5m2), values.amax(-1)


def get_inputs():
    return [torch.randn(16, 32).to(torch.float8_e4m3fn), torch.rand(16, 1)]


def get_init_inputs():
    return []
"""


def source(folder: Path) -> Path:
    (folder / "short.py").write_text(MODULE)
    return folder / "short.py"


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("short_export", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_module_answers_floats_of_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    exported = ModuleExporter().export(host_time.a_run(source(tmp_path), "cpu"))
    path = tmp_path / exported.file_name
    path.write_text(exported.text)
    made = imported(path)
    ours, theirs = made.ModelNew(), made._WsReference()
    theirs.load_state_dict(ours.state_dict())
    for _ in range(3):
        x, scale = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.rand(16, 1)
        with torch.no_grad():
            got, wanted = ours(x, scale), theirs(x, scale)
        assert got[0].dtype is torch.float8_e5m2
        torch.testing.assert_close(got[0].float(), wanted[0].float(), rtol=0.26, atol=1e-3)
        torch.testing.assert_close(got[1], wanted[1])


def test_a_package_of_floats_of_8_bits_passes_its_own_tests(
    tmp_path: Path, installed: Callable[[Path], tuple[Path, str]]
) -> None:
    exported = PackageExporter().export(host_time.a_run(source(tmp_path), "cpu"))
    export_files.write_folder(tmp_path / exported.name, exported.files)
    _, said = installed(tmp_path / exported.name)
    assert "3 passed" in said
