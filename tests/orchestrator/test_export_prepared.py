"""Exports of the prepared track: what parameters give is kept, for each module, until one of them is written."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.exports import export
from orchestrator.exports.carried.kept import _WsKept
from orchestrator.exports.export_kernelbench import KernelBenchExporter
from orchestrator.exports.export_module import ModuleExporter
from warpsmith.v1 import candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2

MODULE = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x * torch.exp(2 * self.weight)


def get_inputs():
    return [torch.rand(4, 8)]


def get_init_inputs():
    return []
"""
KERNEL = """extern "C" void twice(void* const* arguments) {
  for (int i = 0; i < 8; ++i) static_cast<float*>(arguments[1])[i] = 2 * static_cast<const float*>(arguments[0])[i];
}
"""
CUDA_KERNEL = """extern "C" __global__ void twice(const float* __restrict__ x, float* __restrict__ y) {
  y[threadIdx.x] = 2 * x[threadIdx.x];
}
"""
LEAF = '[1, {"type": null, "context": null, "children_spec": []}]'


def a_run(target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU) -> run_pb2.Run:
    """A kernel and a library call on the weight, kept; a product with what they give."""
    wide = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=(4, 8), strides=(8, 1))
    row = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=(8,), strides=(1,))
    run = run_pb2.Run(id="r1", state=run_pb2.RUN_STATE_FASTER)
    run.task.name, run.task.target, run.task.prepared = "scaled", target, True
    run.task.sources.add(path="scaled.py", content=MODULE.encode())
    run.task.entry_path, run.task.class_name = "scaled.py", "Model"
    run.task.inputs.append(wide)
    run.task.input_literals.append("")
    run.best.timing.faster = True
    program = run.best.candidate.program
    program.target, program.digest, program.output_tree = target, "d" * 64, LEAF
    is_cuda = target == task_pb2.TARGET_CUDA
    program.sources.add(name="kernel.cu" if is_cuda else "kernel.cpp", text=CUDA_KERNEL if is_cuda else KERNEL)
    x = graph_pb2.Source(name="x", origin=graph_pb2.ORIGIN_INPUT, spec=wide)
    weight = graph_pb2.Source(name="w", origin=graph_pb2.ORIGIN_PARAMETER, qualified_name="weight", spec=row)
    program.buffers.add(name="x", role=candidate_pb2.ROLE_SOURCE, source=x, spec=wide)
    program.buffers.add(name="w", role=candidate_pb2.ROLE_SOURCE, source=weight, spec=row)
    program.buffers.add(name="double", role=candidate_pb2.ROLE_WORKSPACE, spec=row)
    program.buffers.add(name="power", role=candidate_pb2.ROLE_LIBRARY, spec=row)
    program.buffers.add(name="y", role=candidate_pb2.ROLE_LIBRARY, spec=wide)
    step = program.steps.add(group="double", prepared=True)
    step.launch.entry = "twice"
    step.launch.arguments.add(buffer="w")
    step.launch.arguments.add(buffer="double")
    step.launch.writes.append("double")
    step = program.steps.add(group="power", prepared=True)
    step.library.target = "aten.exp.default"
    step.library.args.add(tensor="double")
    step.library.results.append("power")
    step = program.steps.add(group="y")
    step.library.target = "aten.mul.Tensor"
    step.library.args.add(tensor="x")
    step.library.args.add(tensor="power")
    step.library.results.append("y")
    program.outputs.append("y")
    return run


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exported file as a module that counts how often it prepares."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # the file adds a finder for the sources in it
    module = types.ModuleType("made")
    text = ModuleExporter().export(a_run()).text
    exec(compile(text, "made.py", "exec"), module.__dict__)
    found: Any = module
    found.text, found.times = text, 0
    prepare = found._ws_kept._prepare

    def counting(tensors: Any) -> Any:
        found.times += 1
        return prepare(tensors)

    found._ws_kept._prepare = counting
    return found


def test_it_is_made_once_and_again_after_each_kind_of_change(made: Any) -> None:
    module, x = made.ModelNew(), torch.rand(4, 8)

    def times() -> int:
        torch.testing.assert_close(module(x), made._WsReference.forward(module, x))
        return int(made.times)

    with torch.no_grad():
        assert (times(), times()) == (1, 1)
        module.weight.add_(1.0)
        assert (times(), times()) == (2, 2)
        module.load_state_dict({"weight": torch.zeros(8)})
        assert (times(), times()) == (3, 3)
        module.weight = torch.nn.Parameter(torch.ones(8))
        assert (times(), times()) == (4, 4)
        module.weight.data = torch.full((8,), 0.5)
        assert (times(), times()) == (5, 5)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        module.weight.grad = torch.ones(8)
        optimizer.step()
        assert (times(), times()) == (6, 6)
    assert export.PREPARED in made.text.replace("\n# ", " ")


def test_each_module_has_its_own_which_goes_with_it(made: Any) -> None:
    x = torch.rand(4, 8)
    one, other = made.ModelNew(), made.ModelNew()
    with torch.no_grad():
        for _ in range(2):
            for module in (one, other):
                torch.testing.assert_close(module(x), made._WsReference.forward(module, x))
        assert made.times == 2
        assert len(made._ws_kept._kept) == 2
        del one, module
        gc.collect()
        assert len(made._ws_kept._kept) == 1


def test_of_tensors_whose_writes_are_not_counted_nothing_is_kept(made: Any) -> None:
    with torch.inference_mode():
        module, x = made.ModelNew(), torch.rand(4, 8)
        for _ in range(2):
            torch.testing.assert_close(module(x), made._WsReference.forward(module, x))
            module.weight.add_(1.0)
    assert made.times == 2


def test_a_view_of_a_parameter_does_not_keep_it() -> None:
    kept = _WsKept(lambda tensors: (tensors[1].t(), tensors[1] + 1), [1])
    weight = torch.nn.Parameter(torch.rand(3, 4))
    with torch.no_grad():
        (turned, _) = kept([torch.rand(1), weight])
        weight.mul_(2)
        (again, _) = kept([torch.rand(1), weight])
        assert torch.equal(again, weight.t())
        assert again.data_ptr() == weight.data_ptr()
    del weight, turned, again
    gc.collect()
    assert not kept._kept


def test_memory_that_comes_back_at_the_same_address_is_other_memory() -> None:
    times = []
    kept = _WsKept(lambda tensors: (times.append(1), tensors[1] * 2)[1:], [1])
    weight = torch.nn.Parameter(torch.zeros(1 << 16))
    with torch.no_grad():
        for number in range(1, 7):
            weight.data = torch.full((1 << 16,), -1.0)
            weight.data = torch.full((1 << 16,), float(number))
            assert kept([torch.rand(1), weight])[0][0] == 2 * number
    assert len(kept._kept) == 1


def test_only_members_that_prepared_steps_read_have_it_made_anew() -> None:
    run = a_run()
    run.best.candidate.program.steps[2].library.args[0].tensor = "x"
    assert "_ws_kept = _WsKept(_ws_prepare, [1])" in ModuleExporter().export(run).text
    constant = a_run()
    program = constant.best.candidate.program
    program.steps[0].launch.arguments[0].buffer = "c"
    four = graph_pb2.Source(name="c", origin=graph_pb2.ORIGIN_CONSTANT, content=bytes(32), spec=program.buffers[1].spec)
    program.buffers.add(name="c", role=candidate_pb2.ROLE_SOURCE, source=four, spec=four.spec)
    assert "_ws_kept = _WsKept(_ws_prepare, [])" in ModuleExporter().export(constant).text


def test_so_many_are_kept_at_most() -> None:
    kept = _WsKept(lambda tensors: (tensors[1] * 2,), [1])
    weights = [torch.full((1,), float(number)) for number in range(kept.MOST + 3)]
    for weight in weights:
        (result,) = kept([torch.rand(1), weight])
        assert result == 2 * weight
    assert len(kept._kept) == kept.MOST


def test_in_a_graph_what_is_kept_is_among_the_addresses() -> None:
    run = a_run(task_pb2.TARGET_CUDA)
    run.best.candidate.program.cuda_graph = True
    text = ModuleExporter().export(run).text
    forward = text[text.index("def _ws_forward(leaves)") :]
    assert forward.index("leaves = [*leaves, *_ws_kept(leaves)]") < forward.index("= _ws_graphs(leaves)")
    steps = text[text.index("def _ws_run(leaves, owner)") : text.index("_ws_graphs = ")]
    assert "power = leaves[2]" in steps
    assert "aten.exp" not in steps
    prepare = text[text.index("def _ws_prepare(leaves)") : text.index("_ws_kept = ")]
    lines = [
        "double = _ws_empty",
        "power = torch.ops.aten.exp.default(double)",
        "del double",
        "return (power, )",
    ]
    places = [prepare.index(line) for line in lines]
    assert places == sorted(places)


def test_the_flavour_for_kernelbench_makes_it_in_each_call_and_says_so() -> None:
    text = KernelBenchExporter().export(a_run(task_pb2.TARGET_CUDA)).text
    assert "_ws_kept" not in text
    assert text.index("aten.exp.default(double)") < text.index("aten.mul.Tensor(x, power)")
    assert export.EACH_CALL in text.replace("\n# ", " ")
