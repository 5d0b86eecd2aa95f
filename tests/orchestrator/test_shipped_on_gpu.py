"""Folders and files that are shipped, on a GPU: a package's operator, and the launcher of a file for nvcc alone."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.timing import host_time
from orchestrator.exports import export_files
from orchestrator.exports.export_cu import CudaExporter
from orchestrator.exports.export_package import PackageExporter

pytestmark = pytest.mark.gpu

FORWARDS = {
    "pointwise": ("torch.tanh(x + self.bias) * 0.5", "64, 257"),
    "softmax": ("torch.softmax(x + self.bias, -1)", "300, 1000"),
    "one_number": ("((x + self.bias) ** 2).sum()", "512, 8192"),
    "product": ("torch.relu(x @ x.t()) + self.bias[0]", "512, 512, dtype=torch.bfloat16"),
}


def source(folder: Path, name: str) -> Path:
    """A module folder's one file."""
    forward, shape = FORWARDS[name]
    width = re.sub(r"^\d+, ", "", shape)
    text = f"""import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn({width}))

    def forward(self, x):
        return {forward}


def get_inputs():
    return [torch.randn({shape})]


def get_init_inputs():
    return []
"""
    (folder / f"shipped_{name}.py").write_text(text)
    return folder / f"shipped_{name}.py"


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", FORWARDS)
def test_the_launcher_of_a_cu_file_gives_the_modules_result_as_it_is_and_in_a_graph(tmp_path: Path, name: str) -> None:
    path = source(tmp_path, name)
    exported = CudaExporter().export(host_time.a_run(path, "cuda"))
    (tmp_path / exported.file_name).write_text(exported.text)
    (command,) = re.findall(r"^// Compile: (nvcc .*) -c \S+$", exported.text, re.MULTILINE)
    build = [*command.split(), "-shared", "-Xcompiler", "-fPIC", "-o", "launch.so", exported.file_name]
    subprocess.run(build, cwd=tmp_path, check=True)
    launch = getattr(ctypes.CDLL(str(tmp_path / "launch.so")), Path(exported.file_name).stem)
    (size,) = re.findall(r"^//   workspace: (\d+) bytes", exported.text, re.MULTILINE)
    workspace = torch.zeros(max(1, int(size)), dtype=torch.uint8, device="cuda")

    original = loaded(path)
    model, x = original.Model().cuda(), original.get_inputs()[0].cuda()
    kinds = re.findall(r"^//   (\w+): (read|written), ", exported.text, re.MULTILINE)
    assert [kind for _, kind in kinds][-1] == "written"
    with torch.no_grad():
        out = torch.full_like(model(x), float("nan"))
    by_name = {"x": x, "bias": model.bias.data}
    tensors = [out if kind == "written" else by_name[given.rpartition("_")[2]] for given, kind in kinds]

    def call() -> None:
        addresses = [ctypes.c_void_p(each.data_ptr()) for each in (*tensors, workspace)]
        assert launch(*addresses, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)) == 0

    def is_right() -> None:
        with torch.no_grad():
            torch.testing.assert_close(out, model(x), rtol=1.6e-2, atol=1e-2)

    for _ in range(3):
        x.normal_()
        call()
        is_right()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    x.normal_()
    out.fill_(float("nan"))
    graph.replay()
    is_right()


@pytest.mark.parametrize("name", FORWARDS)
def test_a_package_answers_by_its_kernels_in_eager_and_as_one_graph(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source(tmp_path, name)
    exported = PackageExporter().export(host_time.a_run(path, "cuda"))
    export_files.write_folder(tmp_path / exported.name, exported.files)
    monkeypatch.syspath_prepend(str(tmp_path / exported.name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = importlib.import_module(f"{exported.name}.kernel")
    original = loaded(path)
    plain, ours, x = original.Model().cuda(), kernel.ModelNew().cuda(), original.get_inputs()[0].cuda()
    ours.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert kernel._ws_guard.read(ours, [x], {}) is not None, "the kernels are to answer this call"
        torch.testing.assert_close(ours(x), plain(x), rtol=1.6e-2, atol=1e-2)
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), plain(x), rtol=1.6e-2, atol=1e-2)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / exported.name / "tests")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / exported.name)}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "skipped" not in ran.stdout
