"""The flavour `package`: it installs, passes its own tests, and is one operator wherever a compiler looks."""

from __future__ import annotations

import importlib
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_synthesis.synthesizer import BuiltInSynthesizer
from benchmarks.timing import host_time
from orchestrator.exports import export_files
from orchestrator.exports.export_hub import HubExporter
from orchestrator.exports.export_module import ModuleExporter
from orchestrator.exports.export_package import PackageExporter
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files
from warpsmith.v1 import hypothesis_pb2, run_pb2

Installed = Callable[[Path], tuple[Path, str]]
MODULE = """import torch


class Model(torch.nn.Module):
    def __init__(self, width, offset=0.0):
        super().__init__()
        self.offset = offset
        self.half = torch.tensor(0.5)
        self.bias = torch.nn.Parameter(torch.randn(width))

    def forward(self, x, y):
        return {"sum": torch.tanh(x + self.bias) * self.half + self.offset, "same": [y, torch.tanh(y - self.bias)]}


def get_inputs():
    return [torch.randn(4, 8), torch.randn(4, 8)]


def get_init_inputs():
    return [8]
"""


def a_run(folder: Path, target: str) -> run_pb2.Run:
    """A run that what a search begins with has won."""
    (folder / "gated.py").write_text(MODULE)
    return host_time.a_run(folder / "gated.py", target)


def written(folder: Path, target: str) -> Path:
    """The folder of a package."""
    exported = PackageExporter().export(a_run(folder, target))
    assert exported.name == "gated_warpsmith"
    export_files.write_folder(folder / exported.name, exported.files)
    return folder / exported.name


def test_a_package_installs_into_a_clean_folder_and_passes_its_own_tests(tmp_path: Path, installed: Installed) -> None:
    folder, said = installed(written(tmp_path, "cpu"))
    assert "3 passed" in said
    assert {"record.json", "kernel.py", "kernel.cpp"} <= {path.name for path in folder.rglob("*")}


def test_the_wheel_of_a_cuda_kernel_holds_machine_code_for_its_architecture(
    tmp_path: Path, wheel_of: Callable[[Path], Path]
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    wheel = zipfile.ZipFile(wheel_of(written(tmp_path, "cuda")))
    assert wheel.read("gated_warpsmith/kernels/sm_90a.cubin").startswith(b"\x7fELF")
    text = wheel.read("gated_warpsmith/kernel.py").decode()
    assert "_ws_cubin(pathlib.Path(__file__).parent / 'kernels' / 'sm_90a.cubin')" in text


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An imported package's own module, which stays: an operator is registered once in a process."""
    folder = tmp_path_factory.mktemp("imported")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(written(folder, "cpu")))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr(sys, "meta_path", sys.meta_path[:])
    yield importlib.import_module("gated_warpsmith.kernel")
    patch.undo()


def operator_of(kernel: Any) -> Any:
    space, _, name = kernel._ws_operator._name.partition("::")
    return getattr(getattr(torch.ops, space), name).default


X, Y = torch.randn(4, 8), torch.randn(4, 8)
Change = Callable[[Any], object]
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], Change, bool]] = {
    # what is different: arguments, those by name, a change of both modules, whether the operator is in the graph
    "nothing": ((X, Y), {}, lambda _: None, True),
    "given by name": ((), {"y": Y, "x": X}, lambda _: None, True),
    "where it lies": ((torch.randn(33)[1:].view(4, 8), Y), {}, lambda _: None, True),
    "a shape": ((X[:3], Y[:3]), {}, lambda _: None, False),
    "a layout": ((torch.randn(8, 4).t(), Y), {}, lambda _: None, False),
    "a type": ((X.double(), Y), {}, lambda _: None, False),
    "an attribute": ((X, Y), {}, lambda module: setattr(module, "offset", 1.0), False),
    "the constructor": ((X, Y), {}, lambda module: module.__init__(8, offset=2.0), False),
}


@pytest.mark.parametrize("different", CALLS)
def test_a_compiler_sees_one_graph_with_the_operator_in_verified_calls_alone(kernel: Any, different: str) -> None:
    args, kwargs, change, is_verified = CALLS[different]
    ours, theirs, graphs = kernel.ModelNew(8), kernel._WsReference(8), list[str]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(ours, fullgraph=True, backend=backend, dynamic=False)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(X, Y)  # what was made for this call has to see that the next is another
        for module in (ours, theirs):
            change(module)
        theirs.load_state_dict(ours.state_dict())
        mine, other = compiled(*args, **kwargs), theirs(*args, **kwargs)
    torch.testing.assert_close(mine, other)
    assert "gated_warpsmith.call_" in graphs[0]
    assert ("gated_warpsmith.call_" in graphs[-1]) is is_verified


def test_a_compiled_call_that_wants_a_gradient_or_autocast_is_the_originals(kernel: Any) -> None:
    ours, graphs = kernel.ModelNew(8), list[str]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    compiled(X, Y)["sum"].sum().backward()
    assert ours.bias.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        compiled(X, Y)
    assert len(graphs) == 2
    assert not any("gated_warpsmith" in graph for graph in graphs)


def test_the_operator_has_the_originals_derivative(kernel: Any) -> None:
    bias = torch.randn(8, requires_grad=True)
    x, y = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    theirs = kernel._WsReference(8)
    wanted = torch.func.functional_call(theirs, {"bias": bias}, (x, y))
    leaves = [wanted["sum"], *wanted["same"]]
    results = operator_of(kernel)(x, y, bias)
    torch.testing.assert_close(results, leaves)
    weights = [torch.randn(4, 8) for _ in leaves]
    ours = torch.autograd.grad(results, [x, y, bias], weights)
    torch.testing.assert_close(ours, torch.autograd.grad(leaves, [x, y, bias], weights))


def test_the_operator_has_the_originals_second_derivative(kernel: Any) -> None:
    def second(call: Callable[..., Any]) -> torch.Tensor:
        x = torch.linspace(-1.0, 1.0, 32).reshape(4, 8).requires_grad_()
        (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum() + (x**3).sum(), x)[0]

    ours, theirs = operator_of(kernel), kernel._WsReference(8)
    torch.testing.assert_close(second(lambda x: ours(x, Y, theirs.bias)[0]), second(lambda x: theirs(x, Y)["sum"]))


@pytest.mark.parametrize("is_compiled_first", [True, False])
def test_a_derivative_is_right_in_eager_and_compiled_whatever_came_first(kernel: Any, is_compiled_first: bool) -> None:
    operator, bias = operator_of(kernel), torch.randn(8)

    def slope(x: torch.Tensor) -> torch.Tensor:
        return operator(x, Y, bias)[0].square().sum()

    def derivative(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(call(x), x)[0]

    kernel._ws_operator._original._made.clear()
    torch._dynamo.reset()
    calls = [torch.compile(slope, backend="aot_eager"), slope]
    found = [derivative(call) for call in (calls if is_compiled_first else reversed(calls))]
    torch.testing.assert_close(found[0], found[1])


def test_an_empty_batch_of_calls_gives_empty_results(kernel: Any) -> None:
    made = torch.func.vmap(operator_of(kernel), (0, None, None))(torch.zeros(0, 4, 8), Y, torch.randn(8))
    assert [tuple(each.shape) for each in made] == [(0, 4, 8)] * 3


def test_an_inner_part_that_is_called_otherwise_is_seen_by_a_compiler_too(kernel: Any) -> None:
    ours = kernel.ModelNew(8)
    ours.inner = torch.nn.Identity()
    ours._ws_settings = kernel._ws_guard.settings(ours, (8,), {})
    graphs = list[str]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    with torch.no_grad():
        torch.compile(ours, backend=backend)(X, Y)
        ours.inner.forward = lambda x: x * 0  # type: ignore[method-assign]
        torch._dynamo.reset()
        torch.compile(ours, backend=backend)(X, Y)
    assert ["gated_warpsmith" in graph for graph in graphs] == [True, False]


def test_what_the_operator_gives_shares_no_memory_with_what_it_is_given(kernel: Any) -> None:
    tensors = [X.clone(), Y.clone(), torch.randn(8)]
    results = operator_of(kernel)(*tensors)
    places = [tensor.untyped_storage().data_ptr() for tensor in (*tensors, *results)]
    assert len({*places}) == len(places)


def test_the_operator_takes_a_batch_row_by_row_and_autocast_changes_nothing(kernel: Any) -> None:
    operator, bias, rows = operator_of(kernel), torch.randn(8), torch.randn(3, 4, 8)
    expected = [torch.stack(each) for each in zip(*[operator(row, Y, bias) for row in rows], strict=True)]
    torch.testing.assert_close(torch.func.vmap(operator, (0, None, None))(rows, Y, bias), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(operator(rows[0], Y, bias), operator(rows[0].clone(), Y, bias))
        assert {result.dtype for result in operator(rows[0], Y, bias)} == {torch.float32}


def test_where_the_kernels_do_not_run_the_operator_answers_by_the_original(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = X, Y, torch.randn(8)
    expected = operator_of(kernel)(*tensors)
    monkeypatch.setattr(kernel._ws_guard, "fits", lambda _: False)
    monkeypatch.setattr(kernel._ws_operator, "_run", None)
    torch.testing.assert_close(operator_of(kernel)(*tensors), expected)


def test_no_text_of_others_leaves_its_place_in_a_package(tmp_path: Path) -> None:
    run = a_run(tmp_path, "cpu")
    run.task.name = 'a"]\nname = "b\'""" $x ../../c'
    run.best.candidate.program.digest = '"""; import os'
    run.best.candidate.rewrites.append('"""\n$y\n')
    exported = PackageExporter().export(run)
    assert exported.name == "a_name_b_x_c_warpsmith"
    for path, text in exported.files.items():
        assert private_files.relative_path("file", path).parts[0] in {exported.name, "tests", path}
        if path.endswith(".py"):
            compile(text, path, "exec")
    project = tomllib.loads(exported.files["pyproject.toml"])["project"]
    assert (project["name"], project["version"]) == ("a-name-b-x-c-warpsmith", "0.1.0+p0")


def test_the_operator_names_a_tensor_of_another_kind_and_what_to_call_instead(kernel: Any) -> None:
    with pytest.raises(RuntimeError, match=r"tensor 1 is \(\(3, 8\), .* Call ModelNew"):
        operator_of(kernel)(X, Y[:3], torch.randn(8))


def test_a_program_that_may_write_to_a_buffer_is_refused_with_the_flavour_that_fits(tmp_path: Path) -> None:
    run = a_run(tmp_path, "cpu")
    run.best.candidate.program.steps.add().library.target = "aten.add_.Tensor"
    with pytest.raises(BadInput, match="export with --flavour module"):
        PackageExporter().export(run)


def test_a_module_that_returns_a_dataclass_of_its_own_is_refused(tmp_path: Path) -> None:
    text = MODULE.replace(
        "import torch\n",
        "import dataclasses\n\nimport torch\n\n\n@dataclasses.dataclass\nclass Out:\n    a: object\n",
        1,
    )
    before, _, after = text.partition("        return {")
    (tmp_path / "own.py").write_text(
        f"{before}        return Out(torch.tanh(x + self.bias + y))\n{after.partition(chr(10))[2]}"
    )
    with pytest.raises(BadInput, match=r"dataclass of its own.*--flavour module instead"):
        PackageExporter().export(host_time.a_run(tmp_path / "own.py", "cpu"))


def test_an_export_of_library_calls_alone_says_that_nothing_is_built(tmp_path: Path) -> None:
    run = a_run(tmp_path, "cpu")
    run.best.candidate.CopyFrom(BuiltInSynthesizer().synthesize(run.task, hypothesis_pb2.Hypothesis()))
    readme = PackageExporter().export(run).files["README.md"]
    assert "Nothing is built" in readme
    card = HubExporter().export(run).files["CARD.md"]
    assert "nothing is compiled" in card
    assert "g++" not in readme + card
    assert "Needs torch.\n" in ModuleExporter().export(run).text
