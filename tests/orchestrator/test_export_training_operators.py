"""Exports of training steps as PyTorch's machinery sees them: compiled, checked, checkpointed, distributed, nested."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from agent_synthesis.synthesizer import BuiltInSynthesizer
from benchmarks.timing import host_time
from orchestrator.exports import export_files, export_training, training_halves
from warpsmith import plugins
from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2, hypothesis_pb2, run_pb2

MODULE = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width, kind=torch.float32):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=kind)
        self.up, self.down = nn.Linear(width, 12, dtype=kind), nn.Linear(12, width, dtype=kind)

    def forward(self, x, residual):
        total = x + residual
        y = total + self.down(nn.functional.silu(self.up(self.norm(total))))
        return {"y": y, "again": [y, y.argmax(-1)], "mean": y.square().mean()}


def get_inputs():
    return [torch.randn(6, 8, dtype=KIND), torch.randn(6, 8, dtype=KIND)]


def get_init_inputs():
    return [8, KIND]
"""
Graphs = list[list[str]]


def run_of(folder: Path, name: str, text: str = MODULE, kind: str = "torch.float32", target: str = "cpu") -> Any:
    (folder / f"{name}.py").write_text(text.replace("KIND", kind))
    return host_time.a_step(folder / f"{name}.py", target)


def package_of(folder: Path, run: run_pb2.Run, flavour: str = "package") -> Path:
    made: Any = export_training.export_all(plugins.load("exporter", flavour), flavour, [run])
    export_files.write_folder(folder / made.name, made.files)
    return folder / made.name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that is imported from, whose operators stay: each is registered once in a process."""
    folder = tmp_path_factory.mktemp("steps")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    patch.setattr(sys, "meta_path", sys.meta_path[:])
    patch.setattr(sys, "path", sys.path[:])
    yield folder
    patch.undo()


def kernel_in(folder: Path, name: str, **options: str) -> Any:
    sys.path.insert(0, str(package_of(folder, run_of(folder, name, **options))))
    return importlib.import_module(f"{name}_warpsmith.kernel")


@pytest.fixture(scope="module")
def kernel(place: Path) -> Any:
    return kernel_in(place, "joined")


@pytest.fixture(scope="module")
def doubles(place: Path) -> Any:
    return kernel_in(place, "doubles", kind="torch.float64")


@pytest.fixture
def both(kernel: Any) -> tuple[nn.Module, nn.Module]:
    """The original and ours, with equal weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    original, ours = kernel._WsReference(8), kernel.ModelNew(8)
    ours.load_state_dict(original.state_dict())
    return original, ours


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> list[str]:
    """Which halves have run, in order, and by an operator in which way."""
    training, said = kernel._ws_training, list[str]()
    places = [(training, "forward", "forward"), (training, "backward", "backward")]
    places += [(kernel._ws_operator, "_run", "operator"), (kernel._ws_operator_backward, "_run", "operator_backward")]
    for owner, name, told in places:
        half = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda given, half=half, told=told: [said.append(told), half(given)][1])
    return said


def drawn() -> list[torch.Tensor]:
    return [torch.randn(6, 8) for _ in range(2)]


def trained(module: nn.Module, given: list[torch.Tensor], call: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    """Outputs of a call and gradients of a sum in which each output that has some is weighed differently."""
    given = [each.detach().clone().requires_grad_() for each in given]
    made = pytree.tree_leaves((module if call is None else call)(*given))
    weighed = [(each * torch.linspace(-1, 1, each.numel()).reshape(each.shape)).sum() for each in made[:2]]
    found = torch.autograd.grad(sum(weighed) + 3 * made[3], [*given, *module.parameters()])
    return [*(each.detach() for each in made), *found]


def check(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def compiled(module: Callable[..., Any]) -> tuple[Callable[..., Any], Graphs]:
    """The module compiled as a whole, and the operators of ours in each graph, forward and backward."""
    seen = Graphs()

    def compiler(graph: torch.fx.GraphModule, _: object) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        seen.append([target.split(".")[1] for target in targets if "warpsmith" in target])
        return make_boxed_func(graph.forward)

    return torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler)), seen


def names(kernel: Any) -> Graphs:
    return [[each._name.partition("::")[2]] for each in (kernel._ws_operator, kernel._ws_operator_backward)]


# ---- the folders ---------------------------------------------------------------------------------------


def test_a_package_installs_and_passes_its_own_tests(
    tmp_path: Path, installed: Callable[[Path], tuple[Path, str]]
) -> None:
    folder, said = installed(package_of(tmp_path, run_of(tmp_path, "installed")))
    assert "4 passed" in said
    assert {"record.json", "kernel.py", "kernel.cpp"} <= {path.name for path in folder.rglob("*")}


def passes_its_own_tests(folder: Path, cache: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests")]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "4 passed" in ran.stdout


def test_a_folder_of_the_hub_passes_its_own_tests(tmp_path: Path) -> None:
    passes_its_own_tests(package_of(tmp_path, run_of(tmp_path, "loaded"), "hub"), tmp_path)


def test_a_package_for_a_gpu_has_both_halves_and_says_what_it_gives(tmp_path: Path) -> None:
    made = package_of(tmp_path, run_of(tmp_path, "on_gpu", target="cuda"))
    text = (made / "on_gpu_warpsmith/kernel.py").read_text()
    compile(text, "kernel.py", "exec")
    assert text.count(" = _WsKernels(") == 1, "both halves launch the same"
    assert "_ws_launch_second_" in text
    told = (made / "README.md").read_text()
    assert "gradients of input 0, input 1, norm.weight" in told
    assert "to differentiate twice is an error" in " ".join(told.split())


@pytest.mark.gpu
@pytest.mark.parametrize("flavour", ["package", "hub"])
def test_on_a_gpu_a_folder_passes_its_own_tests(tmp_path: Path, flavour: str) -> None:
    if flavour == "hub":
        pytest.importorskip("kernels", reason="who loads from the hub has it: pip install kernels")
    passes_its_own_tests(package_of(tmp_path, run_of(tmp_path, "on_gpu", target="cuda"), flavour), tmp_path)


def test_a_step_that_writes_running_statistics_is_refused_as_an_operator(tmp_path: Path) -> None:
    run = run_of(tmp_path, "counted", MODULE.replace("nn.LayerNorm(width, dtype", "nn.BatchNorm1d(width, dtype"))
    assert "_ws_operator" not in export_training.text(run).text
    with pytest.raises(BadInput, match="export with --flavour module"):
        package_of(tmp_path, run)


# ---- compiled ------------------------------------------------------------------------------------------


def test_a_compiled_step_is_one_graph_each_way_with_an_operator(
    kernel: Any, both: tuple[nn.Module, nn.Module], by_kernels: list[str]
) -> None:
    call, seen = compiled(both[1])
    given = drawn()
    check(trained(both[1], given, call), trained(both[0], given))
    assert seen == names(kernel)
    assert by_kernels == ["operator", "operator_backward"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_inductor_compiles_a_model_around_steps(both: tuple[nn.Module, nn.Module]) -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
            once = self.inner(x * 2, residual.sin())
            return self.inner(once["y"].t().contiguous().t(), once["again"][0].cos())

    given = drawn()
    theirs, ours = (Around(each) for each in both)
    check(trained(ours, given, torch.compile(ours, fullgraph=True)), trained(theirs, given))


def test_a_compiled_call_without_gradients_is_the_first_operator(
    kernel: Any, both: tuple[nn.Module, nn.Module]
) -> None:
    call, seen = compiled(both[1])
    given = drawn()
    with torch.no_grad():
        torch.testing.assert_close(call(*given), both[0](*given), rtol=1e-4, atol=1e-4)
    assert seen == names(kernel)[:1]


def autocast(call: Callable[..., Any], *given: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call(*given)


@pytest.mark.parametrize("different", ["a shape", "a type", "autocast"])
def test_another_compiled_call_is_the_originals(both: tuple[nn.Module, nn.Module], different: str) -> None:
    call, seen = compiled(both[1].double() if different == "a type" else both[1])
    given = {"a shape": [torch.randn(5, 8)] * 2, "a type": [each.double() for each in drawn()]}.get(different, drawn())
    autocast(call, *given) if different == "autocast" else call(*given)
    assert seen == [[]]


def test_where_the_kernels_do_not_run_a_compiler_sees_the_original(
    kernel: Any, both: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_ws_fits", torch.compiler.assume_constant_result(lambda *_: False))
    call, seen = compiled(both[1])
    given = drawn()
    check(trained(both[1], given, call), trained(both[0], given))
    assert seen == [[], []]
    monkeypatch.setattr(kernel._ws_guard, "fits", lambda _: False)
    with pytest.raises(RuntimeError, match="verified for another GPU than cpu: call ModelNew"):
        operator_of(kernel)(*tensors_of(kernel, both[1]))


def test_a_file_by_itself_is_two_operators_too_however_often_it_is_imported(place: Path) -> None:
    made = export_training.text(run_of(place, "single"))
    graphs = []
    for name in ("once", "twice"):
        (place / f"{name}.py").write_text(made.text)
        spec = importlib.util.spec_from_file_location(name, place / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        ours, theirs = module.ModelNew(8), module._WsReference(8)
        theirs.load_state_dict(ours.state_dict())
        call, seen = compiled(ours)
        given = drawn()
        check(trained(ours, given, call), trained(theirs, given))
        graphs.append(seen)
    assert graphs == [[["call"], ["call_backward"]]] * 2


# ---- autocast, checkpoints, processes ------------------------------------------------------------------


def test_a_call_under_autocast_is_the_originals(both: tuple[nn.Module, nn.Module], by_kernels: list[str]) -> None:
    given = drawn()
    with pytest.warns(UserWarning, match="the original forward answers"):
        ours = autocast(both[1], *given)
    theirs = autocast(both[0], *given)
    assert ours["y"].dtype is theirs["y"].dtype
    torch.testing.assert_close(ours, theirs)
    assert by_kernels == []


def test_a_backward_under_autocast_is_that_of_its_forward(
    both: tuple[nn.Module, nn.Module], by_kernels: list[str]
) -> None:
    given, found = drawn(), []
    for module, is_enabled in zip(both, (False, True), strict=True):
        made = module(*given)
        loss = made["y"].sum() + made["mean"]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            found.append(torch.autograd.grad(loss, [*module.parameters()]))
    check(list(found[1]), list(found[0]))
    assert by_kernels == ["forward", "backward"]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_the_forward_again(
    both: tuple[nn.Module, nn.Module], by_kernels: list[str], *, is_compiled: bool, reentrant: bool
) -> None:
    def block(module: nn.Module) -> Callable[..., Any]:
        return lambda *given: checkpoint(lambda *each: module(*each)["y"], *given, use_reentrant=reentrant)

    given, found = drawn(), []
    for module in both:
        call = block(module)
        if is_compiled and module is both[1]:
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        inputs = [each.clone().requires_grad_() for each in given]
        module.zero_grad()
        call(*inputs).square().sum().backward()
        found.append([each.grad for each in (*inputs, *module.parameters())])
    check(found[1], found[0])
    way = "operator" if is_compiled else "forward"
    assert by_kernels == [way, way, "operator_backward" if is_compiled else "backward"]


def test_processes_that_train_together_have_the_mean_of_their_gradients(tmp_path: Path) -> None:
    package = package_of(tmp_path, run_of(tmp_path, "shared"))
    (tmp_path / "each.py").write_text(TOGETHER)
    own = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(package), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(tmp_path / "each.py"), str(tmp_path / "meet")]
    ran = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert sorted(ran.stdout.split()) == ["compiled:0", "compiled:1", "eager:0", "eager:1"]


TOGETHER = """
import os, sys

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel


def drawn(rank):
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 8, generator=draw) for _ in range(2)]


def loss(made):
    return made["y"].square().sum() + made["mean"]


def each(rank, place):
    from shared_warpsmith import kernel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{place}", rank=rank, world_size=2)
    torch.manual_seed(0)
    original = kernel._WsReference(8)
    wanted = [torch.autograd.grad(loss(original(*drawn(other))), [*original.parameters()]) for other in (0, 1)]
    for kind in ("eager", "compiled"):
        ours, said = kernel.ModelNew(8), []
        ours.load_state_dict(original.state_dict())
        halves = kernel._ws_training.forward, kernel._ws_training.backward
        kernel._ws_training.backward = lambda tensors: [said.append(1), halves[1](tensors)][1]
        whole = DistributedDataParallel(ours)
        call = torch.compile(whole, backend="aot_eager") if kind == "compiled" else whole
        loss(call(*drawn(rank))).backward()
        kernel._ws_training.backward = halves[1]
        for parameter, one, other in zip(ours.parameters(), *wanted, strict=True):
            torch.testing.assert_close(parameter.grad, (one + other) / 2, rtol=1e-4, atol=1e-4)
        assert kind == "compiled" or said, "a kernel answers"
        os.write(1, f"{kind}:{rank}\\n".encode())  # at once: two processes write there
    distributed.barrier()
    os._exit(0)  # taking it down, PyTorch's threads wait for each other now and then


if __name__ == "__main__":
    multiprocessing.spawn(each, (sys.argv[1],), nprocs=2)
"""


# ---- derivatives ---------------------------------------------------------------------------------------


def operator_of(kernel: Any) -> Any:
    return kernel._ws_operator.overload()


def tensors_of(kernel: Any, module: nn.Module) -> list[torch.Tensor]:
    found = kernel._ws_guard.read(module, drawn(), {})
    assert found is not None
    return [each.detach() for each in found]


def test_the_operators_gradients_are_right_to_the_last_bits_of_doubles(doubles: Any) -> None:
    module = doubles.ModelNew(8, torch.float64)
    given = [torch.randn(6, 8, dtype=torch.float64) for _ in range(2)]
    tensors = [each.detach().requires_grad_() for each in doubles._ws_guard.read(module, given, {})]

    def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each for each in operator_of(doubles)(*tensors) if each.requires_grad)

    assert len(outputs(*tensors)) == 2, "each once, and nothing of what is kept"
    assert torch.autograd.gradcheck(outputs, tensors)
    assert torch.autograd.gradcheck(lambda x, y: module(x, y)["y"], [each.requires_grad_() for each in given])


def test_what_is_returned_twice_has_the_gradients_of_both(
    both: tuple[nn.Module, nn.Module], by_kernels: list[str]
) -> None:
    given = drawn()
    found = []
    for module in both:
        made = module(*given)
        assert made["y"] is made["again"][0]
        found.append(torch.autograd.grad(made["y"].sum() + 2 * made["again"][0].square().sum(), [*module.parameters()]))
    check(list(found[1]), list(found[0]))
    assert by_kernels == ["forward", "backward"]


GRADIENTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(8, 6).t(),
    "expanded": lambda: torch.randn(1, 8).expand(6, 8),
    "unaligned": lambda: torch.randn(49)[1:].view(6, 8),
    "negated": lambda: torch._neg_view(torch.randn(6, 8)),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_gradient_may_lie_as_it_likes(
    kernel: Any, both: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    given, gradient, read = drawn(), GRADIENTS[kind](), list[torch.Tensor]()
    half = kernel._ws_training.backward
    monkeypatch.setattr(kernel._ws_training, "backward", lambda tensors: [read.extend(tensors), half(tensors)][1])
    theirs, ours = (torch.autograd.grad(m(*given)["y"], [*m.parameters()], gradient) for m in both)
    check(list(ours), list(theirs))
    assert read
    assert not any(each.data_ptr() % 16 for each in read)


@pytest.mark.parametrize("way", ["module", "operator"])
def test_a_second_derivative_says_that_there_is_none(kernel: Any, both: tuple[nn.Module, nn.Module], way: str) -> None:
    tensors = [each.requires_grad_() for each in tensors_of(kernel, both[1])]
    made = both[1](*tensors[:2])["y"] if way == "module" else operator_of(kernel)(*tensors)[0]
    (first,) = torch.autograd.grad(made.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_inputs_that_the_backward_does_not_read_are_not_kept(both: tuple[nn.Module, nn.Module]) -> None:
    given = drawn()
    node = both[1](*given)["y"].grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    biases = {id(both[1].down.bias), id(both[1].up.bias)}
    assert not biases & {*map(id, node.saved_tensors)}, "a bias is in no gradient"
    made = both[1](*given)
    with torch.no_grad():
        both[1].down.bias.zero_()
    made["y"].sum().backward()


def test_of_inputs_those_alone_are_passed_on_that_the_backward_reads(tmp_path: Path) -> None:
    text = MODULE.partition("        total")[0] + "        return self.norm(residual) + x * 2\n\n\ndef get_inputs"
    made = training_halves.halves(run_of(tmp_path, "passed", text + MODULE.partition("def get_inputs")[2]))
    assert list(made.inputs) == [1]
    assert len(made.backward.task.inputs) == 1 + len(made.forward.best.candidate.program.outputs) - 1 + 1


def test_the_operator_takes_a_batch_row_by_row(kernel: Any, both: tuple[nn.Module, nn.Module]) -> None:
    x, *others = tensors_of(kernel, both[1])
    rows = torch.stack([x, x + 1, x - 1])
    expected = [torch.stack(each) for each in zip(*[operator_of(kernel)(row, *others) for row in rows], strict=True)]
    made = torch.func.vmap(operator_of(kernel), (0, *[None] * len(others)))(rows, *others)
    torch.testing.assert_close(made, expected)


def test_views_of_a_forward_are_made_again_and_not_kept(tmp_path: Path) -> None:
    run = run_of(tmp_path, "viewed")
    run.best.candidate.CopyFrom(BuiltInSynthesizer().synthesize(run.task, hypothesis_pb2.Hypothesis()))
    views = {name for step in run.best.candidate.program.steps for name in names_of_views(step)}
    made = training_halves.halves(run)
    forward, backward = (half.best.candidate.program for half in (made.forward, made.backward))
    again = [{name for step in half.steps for name in names_of_views(step)} for half in (forward, backward)]
    assert again[0] & again[1], "a weight's, of which both make products"
    assert not views & {*forward.outputs}
    module = host_time.imported(export_training.text(run), tmp_path / "imported")
    ours, theirs, given = module.ModelNew(8), module._WsReference(8), drawn()
    theirs.load_state_dict(ours.state_dict())
    check(trained(ours, given), trained(theirs, given))


def names_of_views(step: candidate_pb2.Step) -> list[str]:
    return list(step.library.results) if step.library.target == "aten.t.default" else []
