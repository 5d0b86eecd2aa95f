"""Exports: the file is written, imported in plain Python, and compared with the module."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.exports.carried import gradient, guard
from orchestrator.exports.export_kernelbench import KernelBenchExporter, inline_headers, refusals
from orchestrator.exports.export_module import ModuleExporter
from warpsmith.errors import BadInput, NotFound
from warpsmith.processor_flags import FLAGS, LINKED
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2, timing_pb2

MODULE = '''
import torch


class Model(torch.nn.Module):
    """Scales and shifts."""

    def __init__(self, width, offset=0.0):
        super().__init__()
        self.offset = offset
        self.weight = torch.nn.Parameter(torch.randn(width))

    def forward(self, x, gain):
        return torch.relu(x * self.weight * gain + self.offset)


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
import sys, torch
sys.path.insert(0, {directory!r})
import {module} as made
torch.set_default_device({device!r})
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
    torch.testing.assert_close(ours(gain=2.0, x=x), theirs(x, 2.0))
    assert len(calls) == 2, "arguments by name are the same call"
    unaligned = torch.empty(33)[1:].view(4, 8).copy_(x)
    others = [(torch.randn(3, 8), 2.0), (x, 3.0), (x.double(), 2.0), (x.t().contiguous().t(), 2.0), (unaligned, 2.0)]
    for arguments in others:
        torch.testing.assert_close(ours(*arguments), theirs(*arguments))
    with torch.autocast({device!r}, torch.bfloat16):
        ours(x, 2.0)
    shifted = made.ModelNew(8, offset=1.0)
    torch.testing.assert_close(shifted(x, 2.0), torch.relu(x * shifted.weight * 2.0 + 1.0))
    theirs.offset = ours.offset = 1.0
    torch.testing.assert_close(ours(x, 2.0), theirs(x, 2.0))
    assert len(calls) == 2, "any other call runs the original forward"
    ours.offset = 0.0
    assert made.ModelNew(width=8)(x, 2.0).shape == ours(x, 2.0).shape and len(calls) == 4
ours(x, 2.0).sum().backward()
torch.relu(x * theirs.weight * 2.0).sum().backward()
torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
assert len(calls) == {calls}, "who answers where a gradient is wanted depends on the flavour"
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
    run.best.candidate.moves.add(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="mul")
    run.best.timing.faster = True
    return run


def test_the_exported_module_gives_the_modules_results_and_falls_back(tmp_path: Path) -> None:
    exported = ModuleExporter().export(_run(task_pb2.TARGET_CPU, KERNEL))
    assert exported.file_name == "scale_warpsmith.py"
    (tmp_path / exported.file_name).write_text(exported.text)
    assert f"(_WS_SOURCES, {list(FLAGS)!r}, {list(LINKED)!r}, _ws_require)" in exported.text  # as what was measured
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    check = CHECK.format(directory=str(tmp_path), module="scale_warpsmith", device="cpu", calls=4)
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)


@pytest.mark.gpu
@pytest.mark.parametrize("flavour", [ModuleExporter, KernelBenchExporter])
def test_the_exported_cuda_file_gives_the_modules_results_and_falls_back(
    tmp_path: Path, flavour: type[ModuleExporter] | type[KernelBenchExporter]
) -> None:
    exported = flavour().export(_run(task_pb2.TARGET_CUDA, CUDA_KERNEL))
    (tmp_path / exported.file_name).write_text(exported.text)
    calls = 5 if flavour is KernelBenchExporter else 4
    module = exported.file_name.removesuffix(".py")
    check = CHECK.format(directory=str(tmp_path), module=module, device="cuda", calls=calls)
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)


def test_the_exported_cuda_module_is_valid_python_that_names_its_moves() -> None:
    text = ModuleExporter().export(_run(task_pb2.TARGET_CUDA, CUDA_KERNEL)).text
    compile(text, "scale_warpsmith.py", "exec")
    assert "#   1. author mul" in text
    assert (
        "_ws_launch_0 = _WsLaunch(_ws_kernels, 'scaled', (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, False, False, 3)" in text
    )


def test_a_program_that_is_launched_as_a_graph_is_so_in_its_file() -> None:
    run = _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    run.best.candidate.program.cuda_graph = True
    counters = run.best.candidate.program.buffers.add(name="counters", role=candidate_pb2.ROLE_WORKSPACE)
    counters.spec.CopyFrom(_spec((4,)))
    counters.zero_between_calls = True
    text = ModuleExporter().export(run).text
    compile(text, "scale_warpsmith.py", "exec")
    assert "_ws_graphs = _WsGraphs(_ws_run, _ws_stream)" in text
    assert "lambda_, = _ws_graphs(leaves)\n    return lambda_" in text.replace("t_lambda", "lambda_")
    assert "_ws_zeros('counters', (4,), torch.float32, device, owner)" in text, "a capture has a stream of its own"
    text = KernelBenchExporter().export(run).text
    assert "_ws_graphs" not in text
    assert "# Timed as a CUDA graph; launched step by step here" in text
    assert refusals(text) == []


def test_an_exported_launch_says_how_its_bulk_copies_see_a_tensor() -> None:
    run = _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    seen = candidate_pb2.TensorMap(
        buffer="weight", dtype=tensor_pb2.DTYPE_FLOAT32, extents=[8], box=[8], swizzle_bytes=32
    )
    run.best.candidate.program.steps[0].launch.arguments[1].tensor_map.CopyFrom(seen)
    text = ModuleExporter().export(run).text
    compile(text, "scale_warpsmith.py", "exec")
    assert "False, False, 3, {1: _WsTensorMap('FLOAT32', [8], [], [8], 32)})" in text
    text = KernelBenchExporter().export(run).text
    assert "map_of(t1, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {8}, {}, {8}, CU_TENSOR_MAP_SWIZZLE_32B)" in text
    assert "cudaGetDriverEntryPointByVersion" in text
    run.best.candidate.program.steps[0].launch.arguments[1].tensor_map.rounds_to_tf32 = True
    assert "map_of(t1, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32," in KernelBenchExporter().export(run).text
    assert refusals(text) == []


def test_the_kernelbench_flavour_has_what_its_checker_wants_and_nothing_it_refuses() -> None:
    text = KernelBenchExporter().export(_run(task_pb2.TARGET_CUDA, CUDA_KERNEL)).text
    compile(text, "scale_kernelbench.py", "exec")
    assert "__global__" in text
    assert "load_inline(" in text
    assert "compute_90a,code=sm_90a" in text
    assert "__future__" not in text
    assert refusals(text) == []
    assert "reinterpret_cast<const float*>(t0)" in text
    assert all(line.startswith(("_ws_", "_Ws", "_WS_", "ModelNew")) for line in _names_bound_by(text))


def _names_bound_by(text: str) -> list[str]:
    """Names that a file defines for itself: its harness runs it where the reference's own names are."""
    found = []
    for statement in ast.parse(text).body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                found.append(name)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "    try:", "    except ValueError:", "x = 'one pass'", "import threading", "from multiprocessing import Pool",
        "class Lazy(torch.Tensor): ...", "torch.cuda.synchronize = print", "time.perf_counter = lambda: 0",
    ],
)  # fmt: skip
def test_what_the_static_checker_of_kernelbench_refuses_is_known(line: str) -> None:
    assert len(refusals(line)) == 1
    assert refusals(f"x = 1  # {line}") == []


def test_a_module_whose_docstrings_speak_of_a_forward_pass_exports_without_them() -> None:
    run = _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    wordy = MODULE.replace("Scales and shifts.", "One forward pass.") + "\n\ndef later():\n    pass\n"
    run.task.sources[0].content = wordy.encode()
    text = KernelBenchExporter().export(run).text
    assert refusals(text) == []
    assert "def later():" in text
    assert "One forward pass." in ModuleExporter().export(run).text


def test_a_module_that_catches_exceptions_is_refused_with_the_reason() -> None:
    run = _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    run.task.sources[0].content = (MODULE + "\ntry:\n    import numpy\nexcept ImportError:\n    ...\n").encode()
    with pytest.raises(BadInput, match="a try statement, an except clause; export with --flavour module"):
        KernelBenchExporter().export(run)


def test_counters_between_blocks_are_zeroed_once_and_kept() -> None:
    run = _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_INT64, shape=[4], strides=[1])
    run.best.candidate.program.buffers.add(
        name="flags", role=candidate_pb2.ROLE_WORKSPACE, spec=spec, zero_between_calls=True
    )
    for exporter in (ModuleExporter(), KernelBenchExporter()):
        assert "flags = _ws_zeros('flags', (4,), torch.int64, device, stream)" in exporter.export(run).text


def test_a_cooperative_launch_wants_as_many_multiprocessors_as_it_was_verified_on() -> None:
    run = _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    run.device.unit_count = 132
    assert "units=0," in ModuleExporter().export(run).text
    run.best.candidate.program.steps[0].launch.cooperative = True
    assert "units=132," in ModuleExporter().export(run).text


def test_the_header_names_a_baseline_that_could_not_run() -> None:
    run = _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    run.best.timing.arms.add(kind=timing_pb2.ARM_KIND_COMPILE_MAX_AUTOTUNE, failure="InductorError: no")
    text = ModuleExporter().export(run).text
    assert "# compile_max_autotune could not run, so a faster baseline may exist." in text


def test_the_header_names_the_track_and_the_labels() -> None:
    run = _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    run.best.verdict.kernelbench_pass = True
    assert "Labels" not in ModuleExporter().export(run).text
    assert "allow_tf32" not in ModuleExporter().export(run).text
    run.task.precision = task_pb2.PRECISION_TF32
    run.best.candidate.rewrites.append("odd\nnot code")
    run.reference.raised.append(timing_pb2.FLAG_OUTPUT_CONSTANT)
    run.best.timing.raised.extend([timing_pb2.FLAG_BASELINE_WAS_FASTER, 999])
    for exporter in (ModuleExporter(), KernelBenchExporter()):
        text = exporter.export(run).text
        assert "# Labels: algebra:odd\n# not code, tf32, OUTPUT_CONSTANT, BASELINE_WAS_FASTER, 999." in text
        assert "were timed with torch.backends.cuda.matmul.allow_tf32 = True" in text


PACKAGE = {
    "entry.py": "from mypackage.blocks import Gate as Model\nimport a\n\n\ndef get_init_inputs():\n    return [8]\n",
    "mypackage/__init__.py": "from mypackage.blocks import Gate\n",
    "mypackage/blocks.py": """from __future__ import annotations

import dataclasses
import torch
import a
import plain.folder.leaf as leaf
from .rates import RATE


@dataclasses.dataclass
class Settings:
    rate: float = RATE


class Gate(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rate = Settings().rate

    def forward(self, x):
        import utils
        from mypackage import late

        return x * self.rate * utils.TWO + late.ONE + a.b.ZERO + leaf.ZERO
""",
    "mypackage/rates.py": "RATE = 3.0\n",
    "mypackage/late.py": "ONE = 1.0\n",
    "plain/folder/leaf.py": "ZERO = 0.0\n",
    "a.py": "import b\nfrom b import ZERO\n",
    "b.py": "import a\nZERO = 0.0\n\n\ndef again():\n    return a.ZERO\n",
    "utils.py": "TWO = 2.0\n",
}
"""A class whose sources import each other at every level, in a circle, and late."""


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a loaded export adds to the import system goes when the test ends."""
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    yield
    for name in [name for name in sys.modules if name.startswith("warpsmith_reference_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("imports")
@pytest.mark.parametrize("flavour", [ModuleExporter, KernelBenchExporter])
def test_sources_that_import_each_other_load_beside_the_users_own_modules(
    monkeypatch: pytest.MonkeyPatch, flavour: type[ModuleExporter] | type[KernelBenchExporter]
) -> None:
    run = _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    if flavour is ModuleExporter:
        run = _run(task_pb2.TARGET_CPU, KERNEL)
    del run.task.sources[:]
    for path, text in PACKAGE.items():
        run.task.sources.add(path=path, content=text.encode())
    run.task.entry_path = "entry.py"
    text = flavour().export(run).text
    theirs = {name: types.ModuleType(name) for name in ("utils", "mypackage")}
    for name, module in theirs.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", lambda **_: None)
    for _ in range(2):  # as a harness does that runs the text more than once
        made: dict[str, Any] = {"__name__": "made"}
        exec(text, made)
        model = made["ModelNew"](8)
        assert torch.equal(model(torch.ones(1)), torch.tensor([7.0]))
        assert inspect.getsource(made["_WsReference"]).startswith("class Gate")
    assert sum("_WsEmbedded" in type(finder).__name__ for finder in sys.meta_path) == 1
    assert all(sys.modules[name] is module for name, module in theirs.items())
    assert not {"a", "b", "mypackage.blocks"} & sys.modules.keys()


ACCENTED = f"# -*- coding: latin-1 -*-\n{MODULE}WORD = '\u00e9'\n"


@pytest.mark.usefixtures("imports")
@pytest.mark.parametrize(
    "content", [ACCENTED.encode("latin-1"), ACCENTED.replace("latin-1", "utf-8").encode("utf-8-sig")]
)
def test_a_source_is_read_by_its_coding_as_python_reads_it(content: bytes) -> None:
    run, cuda = _run(task_pb2.TARGET_CPU, KERNEL), _run(task_pb2.TARGET_CUDA, CUDA_KERNEL)
    for each in (run, cuda):
        each.task.sources[0].content = content
        each.task.sources.add(path="never_imported.py", content=b"\xff")
    made: dict[str, Any] = {"__name__": "made"}
    exec(ModuleExporter().export(run).text, made)
    assert sys.modules[made["_WsReference"].__module__].WORD == "\u00e9"
    assert "WORD = '\u00e9'" in KernelBenchExporter().export(cuda).text


FORWARDS = {
    "torch.nn.RReLU()": True,
    "torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8))": True,
    "torch.nn.Sequential(torch.nn.Sequential(torch.nn.Dropout()))": True,
    "torch.nn.LSTM(8, 8)": True,
    "torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())": False,
    "torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8))": False,
}
"""Parts of a module to whether their forward looks at the mode."""


@pytest.mark.usefixtures("imports")
@pytest.mark.parametrize("part", FORWARDS)
def test_the_kernel_answers_in_eval_exactly_where_no_part_looks_at_the_mode(part: str) -> None:
    made = _loaded(f"self.part = {part}")
    x = torch.rand(4, 8)
    with torch.no_grad():
        assert made["ModelNew"](8)(x, 2.0) == "program"
        assert (made["ModelNew"](8).eval()(x, 2.0) != "program") is FORWARDS[part]


@pytest.mark.usefixtures("imports")
@pytest.mark.parametrize(
    "text",
    [
        "def mode(m):\n    return m.training\n",
        "def mode(m):\n    return getattr(m, 'training')\n",
        "class Own(torch.nn.Module):\n    def train(self, mode=True):\n        return self\n",
    ],
)
def test_sources_that_look_at_the_mode_elsewhere_count(text: str) -> None:
    model = _loaded("", text)["ModelNew"](8)
    x = torch.rand(4, 8)
    with torch.no_grad():
        assert model(x, 2.0) == "program"
        assert torch.is_tensor(model.eval()(x, 2.0))


def test_a_look_at_the_mode_is_seen_through_decorators_properties_and_inner_functions() -> None:
    class Decorated(torch.nn.Module):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training else -x

    class Inner(torch.nn.Module):
        @property
        def sign(self) -> Any:
            return lambda: 1 if self.training else -1

    class Plain(torch.nn.Linear): ...

    assert [guard._ws_reads_mode(kind) for kind in (Decorated, Inner, Plain)] == [True, True, False]


def _loaded(statement: str, more: str = "") -> dict[str, Any]:
    """The names of an export whose constructor ends with a statement, and whose program says "program"."""
    run = _run(task_pb2.TARGET_CPU, KERNEL)
    changed = MODULE.replace("torch.randn(width))\n", f"torch.randn(width))\n        {statement}\n")
    run.task.sources[0].content = (changed + more).encode()
    made: dict[str, Any] = {"__name__": "made"}
    exec(ModuleExporter().export(run).text, made)
    made["_ws_forward"] = lambda _: "program"
    return made


def test_a_program_can_be_differentiated_by_way_of_the_original() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    x = torch.randn(4, 3, requires_grad=True)
    y = (2 * x).detach().requires_grad_()
    expected = torch.autograd.grad((module(x) * y[:, :2]).sum(), [x, y, *module.parameters()])

    def original() -> tuple[torch.Tensor, torch.Tensor]:
        return module(x) * y[:, :2], torch.arange(3)

    def program() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return torch.nn.functional.batch_norm(module[0](x), None, None, training=True) * y[:, :2], torch.arange(3)

    result, indices = gradient._ws_differentiable(module, (x, y, *module.parameters()), program, original)
    torch.testing.assert_close(result, original()[0])
    statistics = module[1].running_mean.clone()
    assert not indices.requires_grad
    for mine, theirs in zip(torch.autograd.grad(result.sum(), [x, y, *module.parameters()]), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(module[1].running_mean, statistics), "running statistics are those of the forward"


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
