"""What is written of a live module: a file that computes the same, whatever its weights are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from live_modules import KINDS, loaded, made, member, require_equal, task_of
from torch import nn
from torch.utils import _pytree as pytree

import warpsmith
from orchestrator.live import calls
from orchestrator.tasks import intake
from warpsmith.errors import BadInput


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_computes_what_the_module_does_and_draws_such_inputs(kind: str) -> None:
    module, args, kwargs = made(kind)
    call = calls.captured(module, args, kwargs, "cpu")
    task = task_of(module, call)
    file, drawn = loaded(task, module)
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    for mine, own in zip(drawn, tensors, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (own.shape, own.stride(), own.dtype)
    require_equal(file(*tensors), module(*args, **kwargs))
    for name, tensor in file.named_buffers():  # batch norm has changed its own
        assert torch.equal(tensor, member(module, name))
    assert file(*drawn)[0].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_other_values_make_the_same_task(kind: str) -> None:
    digests = set()
    for seed in range(3):
        torch.manual_seed(seed)
        module, args, kwargs = made(kind)[0], *KINDS[kind][1:]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.rand_like(parameter) * 0.3)  # as training does
        args = pytree.tree_map_only(
            torch.Tensor, lambda own: torch.randn_like(own) if own.is_floating_point() else own, args
        )
        digests.add(task_of(module, calls.captured(module, args, kwargs, "cpu")).digest)
    assert len(digests) == 1


def test_the_task_is_what_intake_makes_of_the_file(tmp_path: Path) -> None:
    module, args, kwargs = made("tied tables and indices")
    task = task_of(module, calls.captured(module, args, kwargs, "cpu"))
    (tmp_path / "module.py").write_bytes(task.sources[0].content)
    read = intake.inspect(intake.read(intake.Request(str(tmp_path / "module.py"), target="cpu")))
    intake.accept(task)
    read.name = task.name
    assert read.inputs == task.inputs
    assert read.outputs == task.outputs
    assert read.precision == task.precision


def test_capturing_changes_nothing_and_takes_no_memory_for_weights() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.BatchNorm1d(1 << 16))
    call = calls.captured(module, (torch.empty(4, 1 << 16, device="meta"),), {}, "cpu")
    assert [source.qualified_name for source in call.graph.sources][:2] == ["0.weight", "0.bias"]
    norm = nn.BatchNorm1d(8)
    calls.captured(norm, (torch.randn(4, 8),), {}, "cpu")
    assert int(norm.num_batches_tracked) == 0


class Refusing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"too long\n{x}")


class Deciding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Choosing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Named(torch.Tensor): ...


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.eye(3).to_sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.table, x)


def _pair(x: torch.Tensor) -> Any:
    @dataclasses.dataclass
    class Pair:
        one: torch.Tensor

    return Pair(x * 2)


class Told(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return _pair(x)


DECIDES = Deciding.forward.__code__.co_firstlineno + 1
"""The line of its `if`."""


@pytest.mark.parametrize(
    ("module", "args", "message"),
    [
        (Refusing(), (torch.ones(2),), "Refusing: the forward failed on the example arguments: ValueError: too long$"),
        (nn.Linear(3, 3), (torch.ones(2),), "Linear: the forward failed on the example arguments: RuntimeError: "),
        (Deciding(), (torch.ones(2),), rf"^Deciding: the module does not export .* \({__file__}:{DECIDES}\)$"),
        (Choosing(), (torch.ones(2),), rf"^Choosing: .* shape depends on values, .* \({__file__}:{DECIDES + 5}\)$"),
        (nn.ReLU(), (2.0,), r"hold no tensor: give those of one call, such as optimize\(module, \(x,\)\)"),
        (
            nn.Linear(3, 3, device="meta"),
            (torch.ones(2, 3),),
            "are on cpu and meta: move all to one GPU, or to the CPU; what is on meta has no values",
        ),
        (nn.LazyLinear(3), (torch.ones(2, 3),), "LazyLinear: weight has no shape before a first call"),
        (nn.ReLU(), (torch.eye(3).to_sparse(),), "ReLU: an example argument is torch.sparse_coo; kernels read plain"),
        (nn.ReLU(), (torch.ones(3).as_subclass(Named),), "ReLU: an example argument is a Named; kernels read plain"),
        (Holding(), (torch.ones(3, 3),), "Holding: an attribute is torch.sparse_coo; kernels read plain"),
        (torch.compile(nn.ReLU(), backend="eager"), (torch.ones(3),), "ReLU is compiled already: give the module that"),
        (Told(), (torch.ones(3),), r"has a .*<locals>\.Pair among its outputs, .* \(torch.export.register_dataclass"),
    ],
)
def test_what_cannot_be_optimized_is_said_in_one_line(module: nn.Module, args: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        warpsmith.optimize(module, args)
    assert "\n" not in str(refused.value)


def test_what_is_asked_for_under_autocast_is_refused_before_a_search() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BadInput, match="autocast is on for cpu"):
        warpsmith.optimize(nn.Linear(3, 3), torch.ones(2, 3))


@pytest.mark.parametrize(("option", "value"), [("server", 5), ("runs", 5), ("match", 3), ("most", 0), ("most", "two")])
def test_an_option_of_another_type_is_named(option: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"{option}={value!r}: "):
        warpsmith.optimize_submodules(nn.Sequential(nn.ReLU()), torch.ones(2), **{option: value})


@pytest.mark.parametrize(("option", "value"), [("budget", "soon"), ("precision", "int3")])
def test_an_option_that_is_none_is_named(option: str, value: str) -> None:
    with pytest.raises(BadInput, match=f"{option} {value}: "):
        warpsmith.optimize(nn.ReLU(), torch.ones(2), **{option: value})  # type: ignore[arg-type]
