"""Exports of matrix products: their host code makes tensor maps, and both flavours give the module's results."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agent_synthesis.graphs.capture_worker import capture_task
from agent_synthesis.synthesizer import BuiltInSynthesizer
from orchestrator.exports.export import Exporter
from orchestrator.exports.export_kernelbench import KernelBenchExporter
from orchestrator.exports.export_module import ModuleExporter
from orchestrator.tasks import intake
from warpsmith.graphs import dtypes
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, run_pb2

MODULE = """
import torch


class Model(torch.nn.Module):
    def __init__(self, depth, width):
        super().__init__()
        self.linear = torch.nn.Linear(depth, width)

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x) * 2.0)


def get_inputs():
    return [torch.rand(192, 320)]


def get_init_inputs():
    return [320, 256]
"""

CHECK = """
import sys, torch
sys.path.insert(0, {directory!r})
import {module} as made
torch.set_default_device("cuda")
torch.manual_seed(0)
ours = made.ModelNew(320, 256)
theirs = made._WsReference(320, 256)
theirs.load_state_dict(ours.state_dict())
calls = []
inner = made._ws_forward
made._ws_forward = lambda *arguments: calls.append(1) or inner(*arguments)
wide = torch.randn(192, 320)
wide[5, 7] = 1e30
endless = torch.randn(192, 320)
endless[100, 3] = float("inf")
with torch.no_grad():
    for x in (torch.randn(192, 320), torch.rand(192, 320), wide, endless, torch.randn(192, 320)):
        expected, found = theirs.double()(x.double()).float(), ours(x)
        scale = expected.abs().amax(1, keepdim=True).clamp(1.0)
        torch.testing.assert_close(found / scale, expected / scale, rtol=2e-6, atol=2e-6, equal_nan=True)
        theirs.float()
    assert len(calls) == 5
    torch.testing.assert_close(ours(x[:7]), theirs(x[:7]))
    assert len(calls) == 5, "any other call runs the original forward"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> run_pb2.Run:
    """A finished run whose winner is the layer and what follows it in one kernel."""
    path = tmp_path_factory.mktemp("task") / "layer.py"
    path.write_text(MODULE)
    task = intake.read(intake.Request(str(path), target="cuda"))
    task.inputs.append(dtypes.spec_of(torch.empty(192, 320)))
    made = run_pb2.Run(id="r1", state=run_pb2.RUN_STATE_FASTER, task=task)
    moves = [analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="gelu", choice="*")]
    synthesizer = BuiltInSynthesizer(capture=capture_task)
    made.best.candidate.CopyFrom(synthesizer.synthesize(task, hypothesis_pb2.Hypothesis(moves=moves)))
    made.best.timing.faster = True
    assert {step.group for step in made.best.candidate.program.steps} == {"gelu"}
    return made


def test_both_flavours_say_how_each_operand_is_copied(run: run_pb2.Run) -> None:
    launches = [step.launch for step in run.best.candidate.program.steps]
    count = sum(argument.HasField("tensor_map") for launch in launches for argument in launch.arguments)
    assert count >= 2
    assert ModuleExporter().export(run).text.count("_WsTensorMap('FLOAT16'") == count
    assert KernelBenchExporter().export(run).text.count("map_of(t") == count


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_host_code_of_a_product_compiles(run: run_pb2.Run, tmp_path: Path) -> None:
    text = KernelBenchExporter().export(run).text
    (tmp_path / "layer.cu").write_text(text.split("_WS_CUDA = r'''")[1].split("'''")[0])
    command = ["nvcc", "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "-c", "layer.cu", "-o", "layer.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("exporter", [ModuleExporter(), KernelBenchExporter()])
def test_an_exported_product_gives_the_modules_results_whatever_the_range(
    run: run_pb2.Run, exporter: Exporter, tmp_path: Path
) -> None:
    exported = exporter.export(run)
    (tmp_path / exported.file_name).write_text(exported.text)
    check = CHECK.format(directory=str(tmp_path), module=exported.file_name.removesuffix(".py"))
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)
