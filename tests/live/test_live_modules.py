"""What `warpsmith.optimize` gives back: the module with a kernel, found before or now."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from live_modules import KINDS, RUN_ID, TOLD, made, require_equal, served, told, won
from torch import nn
from torch.utils import _pytree as pytree

import warpsmith
from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.exports.export_module import ModuleExporter
from warpsmith.errors import BadInput


def no_search(*_: object) -> NoReturn:
    raise AssertionError("a search begins")


@pytest.fixture
def optimized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    """Optimizes a module for which the archive has a result."""
    monkeypatch.setattr(client, "searching", no_search)

    def optimize_it(module: nn.Module, args: Any, kwargs: Mapping[str, Any] = {}) -> nn.Module:
        archive = Archive.in_directory(tmp_path)
        archive.put_run(won(module, args, kwargs))
        archive.close()
        return warpsmith.optimize(module, args, kwargs, runs=tmp_path)

    return optimize_it


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_kernel_answers_at_once_in_the_modules_own_structure(
    kind: str, optimized: Callable[..., nn.Module]
) -> None:
    module, args, kwargs = made(kind)
    fast = optimized(module, args, kwargs)
    assert type(fast).__name__ == type(module).__name__
    assert isinstance(fast, type(module))
    with torch.no_grad():
        theirs, ours = copy.deepcopy(module)(*args, **kwargs), fast(*args, **kwargs)
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    require_equal(ours, told(theirs))
    assert (fast.warpsmith.run, fast.warpsmith.verdict, fast.warpsmith.speedup) == (RUN_ID, "PASS", 1.5)


def test_all_other_calls_are_the_modules_own(optimized: Callable[..., nn.Module]) -> None:
    module, args, kwargs = made("parts, and arguments by name")
    fast = optimized(module, args, kwargs)
    (x,), shift = args, kwargs["extra"]["shift"]

    def is_kernels(*args: Any, **kwargs: Any) -> bool:
        with torch.no_grad():
            ours, theirs = fast(*args, **kwargs)["y"], module(*args, **kwargs)["y"]
        return not torch.equal(ours, theirs)

    assert is_kernels(x, gain=2.0, extra={"shift": shift})
    assert is_kernels(x, extra={"shift": shift}, gain=2.0)
    assert not is_kernels(x, gain=2.5, extra={"shift": shift})
    assert not is_kernels(x, gain=2, extra={"shift": shift})
    assert not is_kernels(x, gain=2.0)
    assert not is_kernels(x[:1], gain=2.0, extra={"shift": shift})
    assert not is_kernels(x.double().float().transpose(0, 1).contiguous().transpose(0, 1), **kwargs)
    with torch.autocast("cpu"):
        assert not is_kernels(x, **kwargs)
    assert torch.equal(fast(x, **kwargs)["y"], module(x, **kwargs)["y"]), "gradients are wanted"
    fast(x, **kwargs)["y"].sum().backward()
    assert module.layers[0].weight.grad is not None  # type: ignore[union-attr, index]
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        fast(x, other=1)


def test_a_call_that_may_want_gradients_says_once_why_the_kernel_does_not_answer(
    optimized: Callable[..., nn.Module],
) -> None:
    module, args, kwargs = made("parts, and arguments by name")
    fast = optimized(module, args, kwargs)
    with pytest.warns(UserWarning, match=r"may be asked for gradients .*, so the original forward answers it") as told:
        fast(*args, **kwargs)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(*args, **kwargs)


def test_it_is_the_same_module_beside_its_forward(optimized: Callable[..., nn.Module]) -> None:
    module, args, kwargs = made("parts, and arguments by name")
    fast, x = optimized(module, args, kwargs), args[0]
    assert fast.state_dict().keys() == module.state_dict().keys()
    assert fast.layers is module.layers
    with torch.no_grad():
        module.layers[0].weight.mul_(2.0)  # type: ignore[union-attr, index, operator]
        assert torch.equal(fast(x, **kwargs)["y"], module(x, **kwargs)["y"] * TOLD)
        twin = copy.deepcopy(fast)
        module.layers[0].weight.mul_(2.0)  # type: ignore[union-attr, index, operator]
        assert torch.equal(twin(x, **kwargs)["y"], fast(x, **kwargs)["y"]) is False
        twin.load_state_dict(module.state_dict())
        assert torch.equal(twin(x, **kwargs)["y"], module(x, **kwargs)["y"] * TOLD)
        module.layers[0].register_forward_hook(lambda *_: None)  # type: ignore[union-attr, index]
        assert torch.equal(fast(x, **kwargs)["y"], module(x, **kwargs)["y"]), "an inner hook has to be called"
    assert not hasattr(module, "warpsmith")
    assert fast.half().layers is module.layers


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "compile": lambda module, x: torch.compile(module, backend="eager", fullgraph=True)(x),
    "export": lambda module, x: torch.export.export(module, (x,)).module()(x),
    "trace": lambda module, x: torch.jit.trace(module, (x,))(x),
    "vmap": lambda module, x: torch.func.vmap(module)(x.expand(3, *x.shape)),
    "grad": lambda module, x: torch.func.grad(lambda y: module(y).sum())(x),
    "jvp": lambda module, x: torch.func.jvp(module, (x,), (torch.ones_like(x),)),
    "functional call": lambda module, x: torch.func.functional_call(
        module, {name: tensor * 2 for name, tensor in module.named_parameters()}, (x,)
    ),
}


def dual(module: nn.Module, x: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        result = module(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return tuple(torch.autograd.forward_ad.unpack_dual(result))


@pytest.mark.filterwarnings("ignore")  # torch's own, of its tracer
@pytest.mark.parametrize("transform", [*TRANSFORMS, "forward mode"])
def test_what_transforms_a_module_sees_its_own_forward(transform: str, optimized: Callable[..., nn.Module]) -> None:
    torch.manual_seed(1)
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval(), torch.randn(4, 8)
    apply = TRANSFORMS.get(transform, dual)
    with torch.no_grad() if transform in ("compile", "export", "trace", "vmap") else contextlib.nullcontext():
        require_equal(apply(optimized(module, (x,)), x), apply(module, x))


@pytest.mark.parametrize("factor", [0.9, float("nan")])
def test_a_kernel_that_is_wrong_on_the_modules_own_values_is_not_used(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "searching", no_search)
    module, x, archive = nn.Linear(4, 4), torch.randn(4, 4), Archive.in_directory(tmp_path)
    archive.put_run(won(module, (x,), {}, factor))
    archive.close()
    same = warpsmith.optimize(module, x, runs=tmp_path)
    assert type(same) is nn.Linear
    assert (same.warpsmith.verdict, same.warpsmith.speedup) == ("DIFFERS", 1.0)
    assert "not used: on the example arguments and weights result 0 is off by" in same.warpsmith.message


@pytest.mark.parametrize("why", ["another torch", "nothing faster", "asked for afresh", "no runs", "logs alone"])
def test_what_is_not_known_is_searched_for(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = nn.Sequential(nn.Linear(4, 4), nn.GELU()).eval(), (torch.randn(4, 4),)
    run = won(module, args, {})
    if why == "another torch":
        run.best.timing.environment.torch = "1.0"
    if why == "nothing faster":
        run.best.timing.faster = False
    runs, elsewhere = tmp_path / "runs", Archive.in_directory(tmp_path / "elsewhere")
    if why == "logs alone":  # as `judge` and `verify` leave it
        (runs / "logs").mkdir(parents=True)
    elif why != "no runs":
        archive = Archive.in_directory(runs)
        archive.put_run(run)
        archive.close()
    monkeypatch.setattr(client, "searching", lambda *_: served(elsewhere, testing.World(), text))
    text, fresh = ModuleExporter().export(won(module, args, {})).text, why == "asked for afresh"
    fast = warpsmith.optimize(module, args, budget="30s", fresh=fresh, runs=runs, progress=False)
    assert fast.warpsmith.verdict == "PASS"
    assert fast.warpsmith.speedup > 1
    assert fast.warpsmith.run != run.id
    elsewhere.close()


@pytest.mark.parametrize(
    ("world", "verdict"),
    [(testing.World(gains={}), "NO_FASTER"), (testing.World(bad_module="line 3: no"), BadInput)],
    ids=["nothing faster", "refused"],
)
def test_where_nothing_is_found_the_module_is_as_it_was(
    world: testing.World, verdict: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x, archive = nn.Linear(4, 4), torch.randn(4, 4), Archive.in_directory(tmp_path)
    monkeypatch.setattr(client, "searching", lambda *_: served(archive, world))
    if verdict is BadInput:
        with pytest.raises(BadInput, match=r"Linear_\w+: module.py: line 3: no"):
            warpsmith.optimize(module, x, runs=tmp_path, progress=False)
    else:
        same = warpsmith.optimize(module, x, runs=tmp_path, progress=False)
        assert (same.warpsmith.verdict, same.warpsmith.speedup) == (verdict, 1.0)
        assert type(same) is nn.Linear
        assert torch.equal(same(x), module(x))
    archive.close()


# ---- inner modules -------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Equal blocks, of which one is called twice, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()) for _ in range(3)])
        self.head, self.spare = nn.Linear(8, 2), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("match", "names"),
    [
        (nn.Sequential, ["blocks.0", "blocks.1", "blocks.2"]),
        ("BatchNorm1d", ["blocks.0.1", "blocks.1.1", "blocks.2.1"]),
        ("blocks.[12]", ["blocks.1", "blocks.2"]),
        (lambda name, part: isinstance(part, nn.Linear) and name != "head", ["blocks.0.0", "blocks.1.0", "blocks.2.0"]),
    ],
    ids=["a class", "a class's name", "a pattern", "a predicate"],
)
def test_equal_parts_are_searched_for_once_and_all_are_served(
    match: Any, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    model, x, archive, world = Stack(), torch.randn(6, 8), Archive.in_directory(tmp_path), testing.World()
    part = model.get_submodule(names[0])
    text = ModuleExporter().export(won(part, (torch.randn(6, 8),), {})).text
    monkeypatch.setattr(client, "searching", lambda *_: served(archive, world, text))
    before = copy.deepcopy(model.state_dict())
    fast = warpsmith.optimize_submodules(model, x, match=match, runs=tmp_path / "none", progress=False)
    assert [*fast.warpsmith] == names
    assert len({outcome.run for outcome in fast.warpsmith.values()}) == 1
    assert len(archive.runs()) == 1
    archive.close()
    require_equal(model.state_dict(), before)
    for name in names:
        assert type(fast.get_submodule(name)) is not type(model.get_submodule(name))
    assert fast.head is model.head
    with torch.no_grad():
        assert not torch.equal(copy.deepcopy(fast)(x), copy.deepcopy(model)(x)), "the kernel tells on itself"
    assert fast.state_dict().keys() == before.keys()


@pytest.mark.parametrize(
    ("match", "message"),
    [("Conv2d", "match='Conv2d': names no inner module of Stack"), ("spare", "spare is not called by Stack")],
)
def test_parts_that_are_not_there_or_not_called_are_named(match: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        warpsmith.optimize_submodules(Stack(), torch.randn(6, 8), match=match)


class _Branch(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("module", "args", "message"),
    [
        (lambda x: x, (torch.ones(2, 8),), "function: give a torch.nn.Module"),
        (torch.nn.GELU(), 5, "example arguments are int: give a tuple"),
        (torch.nn.GELU(), {"input": torch.ones(2)}, "example arguments are dict: give a tuple"),
        (torch.nn.Linear(8, 8), torch.ones(2, 9), "the forward failed on the example arguments: RuntimeError: mat1"),
        (torch.nn.Linear(8, 8), torch.ones(2, 8).double(), "the forward failed on the example arguments: .*same dtype"),
        (_Branch(), torch.ones(2, 8), r"needs the value of a tensor .*test_live_modules\.py:\d+\)"),
    ],
    ids=["a function", "a number", "a dict", "a shape", "a type", "a branch"],
)
def test_what_cannot_be_called_is_told_in_one_line_before_a_search(
    module: Any, args: Any, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadInput, match=message):
        warpsmith.optimize(module, args, server="127.0.0.1:1", runs=tmp_path / "none")
    assert capfd.readouterr() == ("", ""), "PyTorch tells of it too"
