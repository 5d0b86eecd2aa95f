"""Exports: the file is written, imported in plain Python, and compared with the module."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.export_kernelbench import KernelBenchExporter, inline_headers
from orchestrator.export_module import ModuleExporter
from warpsmith.errors import BadInput, NotFound
from warpsmith.v1 import candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2

MODULE = '''
import torch


class Model(torch.nn.Module):
    """Scales and shifts."""

    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width))

    def forward(self, x, gain):
        return torch.relu(x * self.weight * gain)


def get_inputs():
    return [torch.rand(4, 8), 2.0]


def get_init_inputs():
    return [8]
'''

KERNEL = """#include "scale.hpp"
extern "C" void scaled(void* const* arguments) {
  const float* x = static_cast<const float*>(arguments[0]);
  const float* weight = static_cast<const float*>(arguments[1]);
  float* y = static_cast<float*>(arguments[2]);
  for (int i = 0; i < 32; ++i) y[i] = x[i] * weight[i % 8] * GAIN;
}
"""

CUDA_KERNEL = """#include "scale.hpp"
// One pass over the data.
extern "C" __global__ void scaled(const float* __restrict__ x, const float* weight, float* __restrict__ y) {
  y[threadIdx.x] = x[threadIdx.x] * weight[threadIdx.x % 8] * GAIN;
}
"""

CHECK = """
import sys, types, torch
sys.path.insert(0, {directory!r})
import scale_warpsmith as made
torch.manual_seed(0)
ours = made.ModelNew(8)
torch.manual_seed(0)
theirs = made._WsReference(8)
assert ours.state_dict().keys() == theirs.state_dict().keys()
assert torch.equal(ours.weight, theirs.weight)
calls = []
inner = made._ws_forward
made._ws_forward = lambda *arguments: calls.append(1) or inner(*arguments)
with torch.no_grad():
    x = torch.randn(4, 8)
    torch.testing.assert_close(ours(x, 2.0), theirs(x, 2.0))
    assert len(calls) == 1, "the verified call runs the program"
    for arguments in ((torch.randn(3, 8), 2.0), (x, 3.0), (x.double(), 2.0), (x.t().contiguous().t(), 2.0)):
        torch.testing.assert_close(ours(*arguments), theirs(*arguments))
    assert len(calls) == 1, "any other call runs the original forward"
ours(x, 2.0).sum().backward()
assert ours.weight.grad is not None and len(calls) == 1
"""


def _spec(shape: tuple[int, ...]) -> tensor_pb2.TensorSpec:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    return tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=shape, strides=strides)


def _run(target: task_pb2.Target.ValueType, kernel: str) -> run_pb2.Run:
    """A finished run whose winner computes x * weight * 2 by one launch, then relu by the library."""
    run = run_pb2.Run(id="r1", state=run_pb2.RUN_STATE_FASTER)
    run.task.name = "scale"
    run.task.sources.add(path="scale.py", content=MODULE.encode())
    run.task.entry_path, run.task.class_name, run.task.target = "scale.py", "Model", target
    run.task.inputs.append(_spec((4, 8)))
    run.task.input_literals.extend(["", "2.0"])
    program = run.best.candidate.program
    program.target, program.digest = target, "d" * 64
    program.sources.add(name="kernel.cu" if target == task_pb2.TARGET_CUDA else "kernel.cpp", text=kernel)
    program.sources.add(name="scale.hpp", text="#pragma once\n#define GAIN 2.0f\n")
    source, parameter = candidate_pb2.ROLE_SOURCE, graph_pb2.ORIGIN_PARAMETER
    x = graph_pb2.Source(name="x", origin=graph_pb2.ORIGIN_INPUT, spec=_spec((4, 8)))
    weight = graph_pb2.Source(name="weight", origin=parameter, qualified_name="weight", spec=_spec((8,)))
    program.buffers.add(name="x", role=source, source=x, spec=x.spec)
    program.buffers.add(name="weight", role=source, source=weight, spec=weight.spec)
    program.buffers.add(name="mul", role=candidate_pb2.ROLE_OUTPUT, spec=_spec((4, 8)))
    program.buffers.add(name="lambda", role=candidate_pb2.ROLE_LIBRARY, spec=_spec((4, 8)))
    launch = program.steps.add(group="mul").launch
    launch.entry = "scaled"
    launch.block.x = 32
    for name in ("x", "weight", "mul"):
        launch.arguments.add(buffer=name)
    call = program.steps.add(group="lambda").library
    call.target = "aten.relu.default"
    call.args.add(tensor="mul")
    call.results.append("lambda")
    program.outputs.append("lambda")
    program.output_tree = '[1, {"type": null, "context": null, "children_spec": []}]'
    run.best.candidate.moves.add(operation="author", group="mul")
    run.best.timing.faster = True
    return run


def test_the_exported_module_gives_the_modules_results_and_falls_back(tmp_path: Path) -> None:
    exported = ModuleExporter().export(_run(task_pb2.TARGET_CPU, KERNEL))
    assert exported.file_name == "scale_warpsmith.py"
    (tmp_path / exported.file_name).write_text(exported.text)
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", CHECK.format(directory=str(tmp_path))], check=True, env=environment)


def test_the_exported_cuda_module_is_valid_python_that_names_its_moves() -> None:
    text = ModuleExporter().export(_run(task_pb2.TARGET_CUDA, CUDA_KERNEL)).text
    compile(text, "scale_warpsmith.py", "exec")
    assert "#   1. author mul" in text
    assert "_ws_kernels.launch('scaled', (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, False, False, (x, weight, mul,))" in text


def test_the_kernelbench_flavour_has_what_its_checker_wants_and_nothing_it_refuses() -> None:
    text = KernelBenchExporter().export(_run(task_pb2.TARGET_CUDA, CUDA_KERNEL)).text
    compile(text, "scale_kernelbench.py", "exec")
    assert "__global__" in text
    assert "load_inline(" in text
    assert "compute_90a,code=sm_90a" in text
    assert not re.search(r"\btry\s*:|\bexcept\b|\bpass\b|threading|__future__", text)
    assert "reinterpret_cast<const float*>(t0.data_ptr())" in text


def test_headers_are_inlined_once_and_without_their_pragma() -> None:
    text = inline_headers(_run(task_pb2.TARGET_CUDA, CUDA_KERNEL + '#include "scale.hpp"\n').best.candidate.program)
    assert text.count("#define GAIN") == 1
    assert "pragma once" not in text
    assert '#include "scale.hpp"' not in text


def test_a_run_without_a_winner_has_nothing_to_export() -> None:
    with pytest.raises(NotFound, match="found no faster kernel"):
        ModuleExporter().export(run_pb2.Run(id="r2", state=run_pb2.RUN_STATE_NO_FASTER))


def test_the_kernelbench_flavour_refuses_a_cpu_kernel_and_says_what_to_use() -> None:
    with pytest.raises(BadInput, match="--flavour module"):
        KernelBenchExporter().export(_run(task_pb2.TARGET_CPU, KERNEL))
