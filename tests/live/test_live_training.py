"""`warpsmith.optimize(..., gradients=True)`: the module with a kernel of its training step."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import warpsmith
from agent_synthesis.synthesizer import BuiltInSynthesizer
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.live import calls, written
from warpsmith.errors import BadInput
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, run_pb2


class Block(nn.Module):
    """A residual block of which one weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.down.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"y": x + scale * self.down(nn.functional.gelu(self.up(self.norm(x)))), "most": x.argmax(-1)}


class Model(nn.Module):
    """Two blocks that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)["y"]
        return x


def no_search(*_: object) -> NoReturn:
    raise AssertionError("a search begins")


def win(folder: Path, module: nn.Module, x: torch.Tensor, spoil: str = "") -> None:
    """Has the archive know a kernel of a module's training step. `spoil`: a target to call in another's place."""
    call = calls.captured(module, (x,), {}, "cpu")
    task = written.task_of(call, module, "cpu", "auto", prepared=False, gradients=True)
    move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
    run = run_pb2.Run(id="20260101-000000-abc", state=run_pb2.RUN_STATE_FASTER, task=task, created_at=1.0)
    hypothesis = hypothesis_pb2.Hypothesis(moves=[] if spoil else [move])
    run.best.candidate.CopyFrom(BuiltInSynthesizer().synthesize(task, hypothesis))
    for step in run.best.candidate.program.steps:
        if spoil and step.library.target == spoil:
            step.library.target = "aten.silu_backward.default"
            del step.library.kwargs[:]
    run.best.timing.faster = True
    run.best.timing.speedup_fastest.median = 1.5
    run.best.timing.environment.torch = torch.__version__
    archive = Archive.in_directory(folder)
    archive.put_run(run)
    archive.close()


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(client, "searching", no_search)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def trained(module: nn.Module, x: torch.Tensor) -> list[Any]:
    x = x.detach().clone().requires_grad_()
    made = module(x)
    y = made["y"] if isinstance(made, dict) else made
    y.square().sum().backward()
    return [y.detach(), x.grad, *(each.grad for each in module.parameters())]


def check(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_module_trains_by_its_kernel(known: Path) -> None:
    torch.manual_seed(0)
    module, x = Block(), torch.randn(8, 16, requires_grad=True)
    win(known, module, x)
    fast = warpsmith.optimize(module, (x,), runs=known, gradients=True)
    assert fast.warpsmith.verdict == "PASS"
    before = vars(fast)["_ws_kernels"][0].count
    theirs = trained(copy.deepcopy(module), x)
    ours = trained(fast, x)
    check(ours, theirs)
    assert vars(fast)["_ws_kernels"][0].count == before + 1
    assert fast.down.weight.grad is None, "it is frozen"


def test_a_gradient_that_the_kernel_does_not_give_is_the_modules(known: Path) -> None:
    torch.manual_seed(0)
    module, x = Block(), torch.randn(8, 16, requires_grad=True)
    win(known, module, x)
    fast = warpsmith.optimize(module, (x,), runs=known, gradients=True)
    module.down.weight.requires_grad_()
    with pytest.warns(UserWarning, match="may be asked for gradients"):
        fast(x)["y"].sum().backward()
    assert module.down.weight.grad is not None


def test_blocks_that_are_alike_train_by_one_kernel(known: Path) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 16)
    win(known, model.blocks[0], torch.randn(8, 16, requires_grad=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = warpsmith.optimize_submodules(model, (x,), match="Block", runs=known, gradients=True)
        assert {name: each.verdict for name, each in fast.warpsmith.items()} == {"blocks.0": "PASS", "blocks.1": "PASS"}
        ours = trained(fast, x)
    theirs = trained(copy.deepcopy(model), x)
    model.zero_grad()
    check(ours[:2], theirs[:2])


def test_a_kernel_with_another_gradient_is_not_used(known: Path) -> None:
    torch.manual_seed(0)
    module, x = Block(), torch.randn(8, 16, requires_grad=True)
    win(known, module, x, spoil="aten.gelu_backward.default")
    fast = warpsmith.optimize(module, (x,), runs=known, gradients=True)
    assert fast.warpsmith.verdict == "DIFFERS"
    assert "gradient" in fast.warpsmith.message
    check(trained(fast, x), trained(copy.deepcopy(module), x))


def test_nothing_that_requires_a_gradient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="ReLU: neither a parameter nor an example argument requires a gradient"):
        warpsmith.optimize(nn.ReLU(), (torch.randn(3),), runs=tmp_path, gradients=True)
