"""The exported file of a training step: it trains as the module does, by two halves of the verified program."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from benchmarks.timing import host_time
from orchestrator.exports import export_training, training_halves
from warpsmith import plugins
from warpsmith.errors import BadInput
from warpsmith.v1 import analysis_pb2, run_pb2, task_pb2

BLOCK = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, residual):
        y = self.batch(x) + self.down(nn.functional.gelu(self.up(self.norm(x + residual))))
        return {"y": y, "places": x.argmax(-1), "of": (x.square().sum(), None)}

def get_inputs():
    return [torch.randn(16, 32), torch.randn(16, 32)]

def get_init_inputs():
    return [32, 48]
"""
DOUBLES = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8).double()

    def forward(self, x, gate):
        return self.norm(x) * nn.functional.silu(gate)

def get_inputs():
    return [torch.randn(3, 8).double(), torch.randn(3, 8).double()]
"""
TIED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())

def get_inputs():
    return [torch.randn(4, 8)]
"""


LANGUAGE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.table, self.norm = nn.Embedding(words, width, padding_idx=0), nn.LayerNorm(width)
        self.last = nn.Linear(width, words, bias=False)

    def forward(self, words, targets):
        return nn.functional.cross_entropy(self.last(self.norm(self.table(words))), targets)

def get_inputs():
    return [torch.randint(0, 90, (24,)), torch.randint(0, 90, (24,))]

def get_init_inputs():
    return [90, 16]
"""


def run_of(folder: Path, text: str, grad: str = "all") -> run_pb2.Run:
    """A run that the whole plan of a module's training step has won."""
    (folder / "block.py").write_text(text)
    return host_time.a_step(folder / "block.py", "cpu", grad)


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(folder: Path, run: run_pb2.Run) -> ModuleType:
    made = export_training.text(run)
    (folder / made.file_name).write_text(made.text)
    return imported(folder / made.file_name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    patch.setattr(sys, "meta_path", sys.meta_path[:])
    yield tmp_path_factory.mktemp("training")
    patch.undo()


@pytest.fixture(scope="module")
def run(folder: Path) -> run_pb2.Run:
    return run_of(folder, BLOCK)


@pytest.fixture(scope="module")
def kinds(folder: Path, run: run_pb2.Run) -> tuple[type[nn.Module], type[nn.Module]]:
    """The user's class and the exported one."""
    return imported(folder / "block.py").Model, exported(folder, run).ModelNew


@pytest.fixture
def both(kinds: tuple[type[nn.Module], type[nn.Module]]) -> tuple[nn.Module, nn.Module]:
    """One of each, with equal weights."""
    torch.manual_seed(0)
    original = kinds[0](32, 48)
    ours = kinds[1](32, 48)
    ours.load_state_dict(original.state_dict())
    return original, ours


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch, kinds: tuple[type[nn.Module], type[nn.Module]]) -> list[str]:
    """Which halves have run, in order."""
    module = sys.modules.get(kinds[1].__module__) or kinds[1].forward.__globals__
    names = module if isinstance(module, dict) else vars(module)
    training, said = names["_ws_training"], list[str]()
    for name in ("forward", "backward"):
        half = getattr(training, name)
        monkeypatch.setattr(training, name, lambda given, half=half, name=name: [said.append(name), half(given)][1])
    return said


def drawn(count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(16, 32) for _ in range(count)]


def trained(module: nn.Module, x: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, gradients of inputs and parameters, and state after one step."""
    given = [each.clone().requires_grad_() for each in (x, residual)]
    made = module(*given)
    (made["y"].square().sum() + made["of"][0]).backward()
    outputs = [each.detach() for each in pytree.tree_leaves(made) if isinstance(each, torch.Tensor)]
    return [*outputs, *(each.grad for each in given), *(each.grad for each in module.parameters()), *module.buffers()]


def check(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_outputs_gradients_and_state_are_the_modules(both: tuple[nn.Module, nn.Module], by_kernels: list[str]) -> None:
    x, residual = drawn()
    theirs, ours = (trained(module, x, residual) for module in both)
    check(ours, theirs)
    assert by_kernels == ["forward", "backward"]


def test_a_loss_falls_as_the_modules_does(both: tuple[nn.Module, nn.Module], by_kernels: list[str]) -> None:
    batches = [drawn(3) for _ in range(40)]
    curves = []
    for module in both:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        curve = []
        for x, residual, wanted in batches:
            loss = nn.functional.mse_loss(module(x, residual)["y"], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.detach())
        curves.append(torch.stack(curve))
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-3, atol=1e-3)
    assert curves[0][-5:].mean() < curves[0][:5].mean()
    assert by_kernels == ["forward", "backward"] * 40


def test_several_forwards_keep_what_is_theirs(both: tuple[nn.Module, nn.Module]) -> None:
    given = [drawn() for _ in range(3)]
    found = []
    for module in both:
        losses = [module(*each)["y"].square().sum() for each in given]
        found.append([torch.autograd.grad(loss, list(module.parameters())[:2]) for loss in reversed(losses)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        check(ours, theirs)


def test_a_forward_without_gradients_runs_the_first_half_alone(
    both: tuple[nn.Module, nn.Module], by_kernels: list[str]
) -> None:
    with torch.no_grad():
        check([both[1](*drawn())["y"] * 0], [torch.zeros(16, 32)])
    assert by_kernels == ["forward"]


def test_checkpointing_runs_the_forward_again(both: tuple[nn.Module, nn.Module], by_kernels: list[str]) -> None:
    x, residual = drawn()
    for module in both:
        checkpoint(module, x, residual, use_reentrant=False)["y"].sum().backward()
    check([each.grad for each in both[1].parameters()], [each.grad for each in both[0].parameters()])
    assert by_kernels == ["forward", "forward", "backward"]


def test_what_is_kept_may_not_change_before_the_backward(both: tuple[nn.Module, nn.Module]) -> None:
    x, residual = drawn()
    made = both[1](x, residual)["y"]
    with torch.no_grad():
        both[1].up.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()


def test_a_second_derivative_says_that_there_is_none(both: tuple[nn.Module, nn.Module]) -> None:
    x, residual = drawn()
    (first,) = torch.autograd.grad(both[1](x.requires_grad_(), residual)["y"].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


@pytest.mark.usefixtures("folder")
def test_gradients_that_are_no_part_of_the_step_are_the_originals(tmp_path: Path) -> None:
    made = exported(tmp_path, run_of(tmp_path, BLOCK, "residual,norm.*"))
    torch.manual_seed(0)
    ours = made.ModelNew(32, 48)
    x, residual = drawn()
    with pytest.warns(UserWarning, match="may be asked for gradients"):
        ours(x, residual)
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(name.startswith("norm."))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(x, residual.requires_grad_())["y"].sum().backward()
    assert residual.grad is not None
    assert ours.norm.weight.grad is not None


@pytest.mark.usefixtures("folder")
def test_gradients_are_right_to_the_last_bits_of_doubles(tmp_path: Path) -> None:
    ours = exported(tmp_path, run_of(tmp_path, DOUBLES)).ModelNew()
    given = [torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(ours, given)


@pytest.mark.usefixtures("folder")
def test_a_weight_of_two_names_has_the_gradient_of_both(tmp_path: Path) -> None:
    run = run_of(tmp_path, TIED)
    original, ours = imported(tmp_path / "block.py").Model(), exported(tmp_path, run).ModelNew()
    ours.load_state_dict(original.state_dict())
    x = torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the original would answer with one
        for module in (original, ours):
            module(x).square().sum().backward()
    check([each.grad for each in ours.parameters()], [each.grad for each in original.parameters()])


@pytest.mark.parametrize("flavour", ["kernelbench", "cu"])
def test_a_flavour_that_cannot_train_is_refused(run: run_pb2.Run, flavour: str) -> None:
    with pytest.raises(BadInput, match="block is a training step, which --flavour module, package and hub write"):
        export_training.export_all(plugins.load("exporter", flavour), flavour, [run])


def test_a_program_that_mixes_the_halves_is_refused(run: run_pb2.Run) -> None:
    mixed = run_pb2.Run()
    mixed.CopyFrom(run)
    program = mixed.best.candidate.program
    launch = next(step for step in program.steps if program.outputs[0] in step.launch.writes)
    gradient = next(b.name for b in program.buffers if b.source.input_index == 2)
    launch.launch.arguments.add(buffer=gradient)
    with pytest.raises(BadInput, match="gives what the forward gives and needs a gradient"):
        training_halves.halves(mixed)


def test_a_task_names_what_its_step_gives(run: run_pb2.Run) -> None:
    task: task_pb2.Task = run.task
    assert list(task.training_step.inputs) == [0, 1]
    assert list(task.training_step.outputs) == [0, 2]
    assert len(task.inputs) == 2 + 2
    assert len(task.outputs) == 3 + 2 + len(task.training_step.parameters)


@pytest.mark.parametrize("chunks", [0, 3])
def test_words_that_come_again_and_a_loss_in_chunks_train_as_the_module_does(folder: Path, chunks: int) -> None:
    (folder / f"language{chunks}.py").write_text(LANGUAGE)
    rewrite = analysis_pb2.Move(
        kind=analysis_pb2.MOVE_KIND_REWRITE, group="mm", choice="chunks", arguments={"chunks": chunks}
    )
    whole = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
    run = host_time.a_step(folder / f"language{chunks}.py", "cpu", moves=[*([rewrite] if chunks else []), whole])
    made = export_training.text(run)
    (folder / f"fast_{chunks}.py").write_text(made.text)
    original = imported(folder / f"language{chunks}.py").Model(90, 16)
    ours = imported(folder / f"fast_{chunks}.py").ModelNew(90, 16)
    ours.load_state_dict(original.state_dict())
    words, targets = torch.randint(0, 9, (24,)), torch.randint(0, 90, (24,))
    found = []
    for module in (ours, original):
        loss = module(words, targets)
        (loss * 3).backward()
        found.append([loss.detach(), *(parameter.grad for parameter in module.parameters())])
    check(*found)
