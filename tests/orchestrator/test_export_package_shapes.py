"""A package of several runs: one operator, whose tensors say which kernel answers."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.timing import host_time
from orchestrator.exports import export_files
from orchestrator.exports.export_package import PackageExporter
from warpsmith.errors import BadInput
from warpsmith.v1 import run_pb2, timing_pb2

MODULE = """import torch

ROWS, KIND = 4, torch.float32


class Model(torch.nn.Module):
    def __init__(self, width, offset=0.0):
        super().__init__()
        self.offset = offset
        self.bias = torch.nn.Parameter(torch.randn(width))

    def forward(self, x, y):
        return {"sum": torch.tanh(x + self.bias) * 0.5 + self.offset, "same": [y, torch.tanh(y)]}


def get_inputs():
    return [torch.randn(ROWS, 8).to(KIND), torch.randn(8)]


def get_init_inputs():
    return [8]
"""
KINDS = [(4, torch.float32), (16, torch.float32), (4, torch.float64)]


def runs(folder: Path, target: str) -> list[run_pb2.Run]:
    """One for each of `KINDS`."""
    found = []
    for number, (rows, kind) in enumerate(KINDS):
        place = folder / str(number)
        place.mkdir()
        (place / "picks.py").write_text(MODULE.replace("4, torch.float32", f"{rows}, {kind}"))
        run = host_time.a_run(place / "picks.py", target)
        run.id = f"run-{number}"
        run.best.timing.tier = timing_pb2.TIER_FINAL
        found.append(run)
    return found


def written(folder: Path, target: str) -> Path:
    exported = PackageExporter().export_several(runs(folder, target))
    export_files.write_folder(folder / exported.name, exported.files)
    return folder / exported.name


def test_it_installs_with_the_record_of_each_run_and_passes_its_own_tests(
    tmp_path: Path, installed: Callable[[Path], tuple[Path, str]]
) -> None:
    folder, said = installed(written(tmp_path, "cpu"))
    assert "9 passed" in said
    held = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert {f"record_{number}.json" for number in (1, 2, 3)} <= held
    assert {f"kernels/{number}/kernel.cpp" for number in (1, 2, 3)} <= held


def test_the_wheel_of_cuda_kernels_holds_machine_code_of_each(tmp_path: Path, wheel_of: Callable[[Path], Path]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    wheel = zipfile.ZipFile(wheel_of(written(tmp_path, "cuda")))
    codes = {wheel.read(f"picks_warpsmith/kernels/{number}/sm_90a.cubin") for number in (1, 2, 3)}
    assert all(code.startswith(b"\x7fELF") for code in codes)
    assert len(codes) == 3


@pytest.mark.gpu
def test_on_a_gpu_it_passes_its_own_tests(tmp_path: Path) -> None:
    package = written(tmp_path, "cuda")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(package)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package / "tests")]
    ran = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "9 passed" in ran.stdout


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An imported package's own module, which stays: an operator is registered once in a process."""
    folder = tmp_path_factory.mktemp("imported")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(written(folder, "cpu")))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr(sys, "meta_path", sys.meta_path[:])
    yield importlib.import_module("picks_warpsmith.kernel")
    patch.undo()


def inputs(case: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, kind = KINDS[case]
    return torch.randn(rows, 8).to(kind), torch.randn(8)


def operator_of(kernel: Any) -> Any:
    space, _, name = kernel._ws_operator._name.partition("::")
    return getattr(getattr(torch.ops, space), name).default


def test_every_shape_is_one_graph_with_the_operator_in_it_and_others_are_the_originals(kernel: Any) -> None:
    ours, theirs, graphs = kernel.ModelNew(8), kernel._WsReference(8), list[str]()
    theirs.load_state_dict(ours.state_dict())

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    calls = [*map(inputs, (0, 1, 2)), (torch.randn(5, 8), torch.randn(8)), *map(inputs, (1, 0))]
    with torch.no_grad():
        for call in calls:
            torch.testing.assert_close(compiled(*call), theirs(*call))
    assert ["picks_warpsmith.call_" in graph for graph in graphs[:4]] == [True, True, True, False]
    with torch.no_grad():
        ours.offset = theirs.offset = 1.0
        for case in range(3):
            torch.testing.assert_close(compiled(*inputs(case))["same"][0].shape, torch.Size([8]))
    assert not any("picks_warpsmith" in graph for graph in graphs[len(calls) :])


def test_plain_calls_are_answered_by_the_row_of_their_inputs(kernel: Any) -> None:
    ours, theirs = kernel.ModelNew(8), kernel._WsReference(8)
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for case in range(3):
            call = inputs(case)
            answer, tensors = kernel._ws_shapes.read(ours, call, {})
            assert answer is kernel._ws_shapes.rows[case][2]
            assert len(tensors) == 3
            torch.testing.assert_close(ours(*call), theirs(*call))
    assert kernel._ws_shapes.read(ours, (torch.randn(5, 8), torch.randn(8)), {}) == (None, None)


@pytest.mark.parametrize("case", range(3))
def test_the_one_operator_has_the_originals_derivative_for_each_kind_of_tensors(kernel: Any, case: int) -> None:
    x, y = (each.requires_grad_() for each in inputs(case))
    bias = torch.randn(8, requires_grad=True)
    wanted = torch.func.functional_call(kernel._WsReference(8), {"bias": bias}, (x, y))
    leaves, results = [wanted["sum"], *wanted["same"]], operator_of(kernel)(x, y, bias)
    torch.testing.assert_close(results, leaves)
    ours = torch.autograd.grad([each.sum() for each in results], [x, y, bias])
    torch.testing.assert_close(ours, torch.autograd.grad([each.sum() for each in leaves], [x, y, bias]))


def test_the_operator_takes_batches_of_each_kind(kernel: Any) -> None:
    operator, bias = operator_of(kernel), torch.randn(8)
    for case in range(3):
        calls = [inputs(case) for _ in range(3)]
        rows = torch.stack([x for x, _ in calls], 1)
        y = calls[0][1]
        expected = [torch.stack(each) for each in zip(*[operator(x, y, bias) for x, _ in calls], strict=True)]
        torch.testing.assert_close(torch.func.vmap(operator, (1, None, None))(rows, y, bias), expected)


def test_tensors_of_no_kind_are_refused_with_those_that_are_known(kernel: Any) -> None:
    for call in (operator_of(kernel), torch.func.vmap(operator_of(kernel), (None, None, 0))):
        bias = torch.randn(8) if call is operator_of(kernel) else torch.randn(2, 8)
        with pytest.raises(RuntimeError, match=r"\(5, 8\).*verified for .*\(16, 8\).*Call ModelNew"):
            call(torch.randn(5, 8), torch.randn(8), bias)


def test_runs_whose_tensors_do_not_tell_them_apart_are_refused(tmp_path: Path) -> None:
    one, two, _ = runs(tmp_path, "cpu")
    two.task.inputs[0].CopyFrom(one.task.inputs[0])
    for run, literal in ((one, "2.0"), (two, "3.0")):
        run.task.input_literals.append(literal)
    with pytest.raises(BadInput, match=r"runs run-0 and run-1 differ in values that are no tensors.*--flavour module"):
        PackageExporter().export_several([one, two])
    two.task.inputs.add().CopyFrom(one.task.inputs[0])
    two.task.input_literals.append("")
    with pytest.raises(BadInput, match=r"different numbers of tensors.*--flavour module"):
        PackageExporter().export_several([one, two])
