"""Modules as people write them, in which something beside the arguments decides: never a wrong result in silence."""

from __future__ import annotations

import copy
import pickle
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from live_modules import TOLD, loaded, require_equal, task_of, told, won
from torch import nn
from torch.nn.utils import parametrizations

import warpsmith
from orchestrator.archive import Archive
from orchestrator.live import calls
from warpsmith.errors import BadInput

X = torch.linspace(-2.0, 2.0, 32).view(4, 8)


def optimized(module: nn.Module, runs: Path, *args: Any, **kwargs: Any) -> nn.Module:
    """With a kernel that tells on itself, for these arguments or X."""
    archive = Archive.in_directory(runs)
    archive.put_run(won(module, args or (X,), kwargs))
    archive.close()
    return warpsmith.optimize(module, args or (X,), kwargs, runs=runs, budget="")


def quiet(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return module(*(args or (X,)), **kwargs)


def helper(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if module.training else x


class Set(nn.Module):
    """Settings of all kinds, and places for tensors that may be none."""

    def __init__(self) -> None:
        super().__init__()
        self._power, self.table, self.ends = 2.0, {"k": 1.0, "in": {"l": [1.0]}}, [0.5]
        self.config = types.SimpleNamespace(scale=3.0, inner=types.SimpleNamespace(shift=1.0))
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid
        self.scale: Any = 3.0
        self.register_buffer("offset", None)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(x) * self._power * self.table["k"] + self.ends[0] * self.scale + self.table["in"]["l"][0]
        y = helper(self, y) * self.config.scale + self.config.inner.shift
        y = y if self.offset is None else y + self.offset
        return y if self.bias is None else y + self.bias


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a private number": lambda m: setattr(m, "_power", 5.0),
    "a dict": lambda m: m.table.update(k=5.0),
    "a list in a dict in a dict": lambda m: m.table["in"]["l"].__setitem__(0, 5.0),
    "a list": lambda m: m.ends.__setitem__(0, 5.0),
    "an object": lambda m: setattr(m.config, "scale", 5.0),
    "an object in an object": lambda m: setattr(m.config.inner, "shift", 5.0),
    "a function": lambda m: setattr(m, "act", torch.tanh),
    "a number that is a tensor now": lambda m: setattr(m, "scale", torch.ones(8)),
    "a buffer that was none": lambda m: setattr(m, "offset", torch.ones(8)),
    "a parameter that was none": lambda m: setattr(m, "bias", nn.Parameter(torch.ones(8))),
    "the mode, which a helper reads": lambda m: m.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_once_a_setting_has_changed_the_modules_own_forward_runs(change: str, tmp_path: Path) -> None:
    fast = optimized(Set(), tmp_path)
    assert torch.equal(quiet(fast), told(quiet(Set())))
    CHANGES[change](fast)
    with torch.no_grad():
        assert torch.equal(fast(X), Set.forward(fast, X))  # type: ignore[arg-type]


# ---- calls ---------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Which parameters it reads hangs on a literal, and what it computes on whether two tensors are one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor, which: str = "a", by: float = 1.0) -> torch.Tensor:
        return (q * 2 if q is k else q + 3 * k) / by + getattr(self, which)(q)


def test_kernels_for_several_calls_of_a_module_stand_side_by_side(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, other = Two(), X.clone()
    fast = optimized(module, tmp_path, X, other, which="a")
    fast = optimized(fast, tmp_path, X, other, which="b")
    fast = optimized(fast, tmp_path, X, X, which="b")
    for args, which, is_kernels in (
        ((X, other), "a", True), ((X, other), "b", True), ((X, X), "b", True), ((X, X), "a", False),
    ):  # fmt: skip
        own = quiet(module, *args, which=which)
        assert torch.equal(quiet(fast, *args, which=which), own * TOLD if is_kernels else own)


def test_a_zero_of_another_sign_is_another_call(tmp_path: Path) -> None:
    module, other = Two(), X.clone()
    fast = optimized(module, tmp_path, X, other, by=0.0)
    assert torch.equal(quiet(fast, X, other, by=-0.0), quiet(module, X, other, by=-0.0))


@pytest.mark.parametrize("build", [lambda: nn.Linear(8, 8), lambda: nn.Dropout(0.0)], ids=["plain", "random"])
def test_hooks_of_the_module_are_called_once(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    module = build()
    module.register_forward_hook(lambda _, __, result: {"out": result * 8})
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    fast = optimized(module, tmp_path)
    require_equal(quiet(fast), told(quiet(module)))


# ---- tensors -------------------------------------------------------------------------------------------------


class Keeping(nn.Module):
    """Tensors where no graph can name them."""

    offset: Any = None

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "a list":
            self.kept: Any = [torch.randn(8)]
        elif where == "a module in a list":
            self.kept = [nn.Linear(8, 8)]
        else:
            self.offset = torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.where:
            case "a list":
                return x + self.kept[0]
            case "a module in a list":
                return self.kept[0](x)
        return x + self.offset


@pytest.mark.parametrize("where", ["a list", "a module in a list", "an attribute whose class has a default"])
def test_tensors_that_no_graph_can_name_are_refused(where: str) -> None:
    with pytest.raises(
        BadInput, match=r"^Keeping: the forward reads a tensor of shape \[8.*\] that lies in a list, an"
    ):
        calls.captured(Keeping(where), (X,), {}, "cpu")


class Writing(nn.Module):
    """Writes to its state, by every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.rand(8)), nn.Parameter(torch.zeros(8), requires_grad=False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.copy_(self.mean * 0.5 + x.mean(0))
        self.calls += 1
        with torch.no_grad():
            self.frozen.add_(x.mean(0))
            self.weight.clamp_(0.0, 0.5)
        return x * self.weight + self.mean


def test_what_a_forward_writes_is_as_it_was_and_the_file_writes_it_too(tmp_path: Path) -> None:
    module = Writing()
    before = copy.deepcopy(module.state_dict())
    call = calls.captured(module, (X,), {}, "cpu")
    optimized(module, tmp_path)
    require_equal(module.state_dict(), before)
    file, (drawn,) = loaded(task_of(module, call), module)
    file(drawn)


class Replacing(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "mean":
            self.mean = self.mean * 0.5 + x.mean(0)
        elif self.what == "calls":
            self.calls += 1
        else:
            self.last = x * 2
        return x + self.mean


@pytest.mark.parametrize("what", ["mean", "calls", "last"])
def test_what_a_forward_replaces_in_each_call_is_named(what: str) -> None:
    with pytest.raises(BadInput, match=f"^Sequential: the forward replaces its attribute 0.{what} in each call"):
        calls.captured(nn.Sequential(Replacing(what)), (X,), {}, "cpu")


def test_a_backward_that_waits_is_not_spoiled(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    loss = model(X).sum()
    optimized(model, tmp_path)
    warpsmith.optimize_submodules(model, X, match="0", runs=tmp_path, budget="")
    loss.backward()


# ---- classes -------------------------------------------------------------------------------------------------


def test_hooks_and_parts_of_what_is_returned_are_its_own(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    fast: Any = optimized(module, tmp_path)
    fast.register_forward_hook(lambda *_: torch.zeros(1))
    fast[1] = nn.Tanh()
    assert type(module[1]) is nn.GELU
    assert torch.equal(quiet(module), nn.functional.gelu(quiet(module[0])))


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_modules_are_optimized(kind: str, tmp_path: Path) -> None:
    module = getattr(parametrizations, kind)(nn.Linear(8, 8)).eval()
    require_equal(quiet(optimized(module, tmp_path)), told(quiet(module)))


class Demanding(nn.Linear):
    def __init_subclass__(cls, *, name: str) -> None:
        del name


def of_its_own() -> nn.Module:
    module = nn.Linear(8, 8)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8))
    module[0].register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "build",
    [lambda: Demanding(8, 8), of_its_own, hooked],
    ids=["a class that takes no other forward", "a forward of its own", "an inner hook"],
)
def test_a_kernel_that_never_answers_is_not_told_as_a_speedup(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    module = build()
    same = optimized(module, tmp_path)
    assert (same.warpsmith.verdict, same.warpsmith.speedup) == ("DIFFERS", 1.0)
    require_equal(quiet(same), quiet(module))


def test_copies_in_files_are_the_plain_module(tmp_path: Path) -> None:
    module = nn.Linear(8, 8)
    fast = optimized(module, tmp_path)
    for plain in (pickle.loads(pickle.dumps(fast)), copy.copy(fast)):
        assert type(plain) is nn.Linear
        require_equal(quiet(plain), quiet(module))


def test_what_cannot_be_copied_is_said_in_one_line() -> None:
    module = nn.Linear(8, 8)
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(BadInput, match=r"^Linear: cannot be copied: TypeError: cannot pickle '_thread.lock' object$"):
        warpsmith.optimize(module, X)


def test_a_part_that_stands_in_several_places_is_served_in_all(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)
    archive = Archive.in_directory(tmp_path)
    archive.put_run(won(layer, (X,), {}))
    archive.close()
    model = nn.ModuleDict({"rows": nn.ModuleList([layer] * 3), "last": layer})
    model.forward = lambda x: model["rows"][1](model["last"](x))  # type: ignore[method-assign]
    fast: Any = warpsmith.optimize_submodules(model, X, match=nn.Linear, runs=tmp_path, budget="")
    assert [*fast.warpsmith] == ["rows.0"]
    assert len({*fast["rows"], fast["last"]}) == 1
    require_equal(quiet(fast["last"]), told(quiet(layer)))


def test_a_kernel_of_the_whole_does_not_answer_for_a_copy_with_other_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    whole = optimized(model, tmp_path)
    optimized(model[0], tmp_path)  # so that it is known
    parts = warpsmith.optimize_submodules(whole, X, match="0", runs=tmp_path, budget="")
    assert torch.equal(quiet(parts), torch.tanh(quiet(model[0]) * TOLD))


@pytest.mark.parametrize("place", [0, 1])
def test_a_kernel_of_tied_weights_does_not_answer_once_they_are_two(place: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    fast: Any = optimized(module, tmp_path)
    assert torch.equal(quiet(fast), quiet(module) * TOLD)
    fast[place].weight = nn.Parameter(torch.zeros(8, 8))
    assert not quiet(fast).any()


def test_a_module_that_compiles_its_calls_is_answered_by_the_kernel(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    own = quiet(module)
    module.compile(backend="eager")
    assert torch.equal(quiet(optimized(module, tmp_path)), own * TOLD)
    assert vars(module)["_compiled_call_impl"] is not None


# ---- files ---------------------------------------------------------------------------------------------------


LOSSES: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "classes, some of which do not count": (nn.CrossEntropyLoss(), (X, torch.tensor([1, -100, 7, -100]))),
    "probabilities": (nn.BCELoss(), (torch.rand(4, 8), torch.rand(4, 8))),
    "cosines": (nn.CosineEmbeddingLoss(), (X, X + 1, torch.tensor([1, -1, 1, 1]))),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_inputs_are_drawn_where_the_module_is_defined(kind: str) -> None:
    module, args = LOSSES[kind]
    file, drawn = loaded(task_of(module, calls.captured(module, args, {}, "cpu")), module)
    assert file(*drawn)[0].isfinite().all()


@pytest.mark.parametrize("is_training", [False, True])
def test_a_batch_norm_has_one_task_before_and_after_training(is_training: bool) -> None:
    norm, digests = nn.BatchNorm1d(8), set()
    for _ in range(2):
        norm.train(is_training)
        digests.add(task_of(norm, calls.captured(norm, (X,), {}, "cpu")).digest)
        norm.train()(X)
    assert len(digests) == 1


def test_large_constants_are_in_the_file_as_they_are() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + TABLE

    module = Constant()
    file, _ = loaded(task_of(module, calls.captured(module, (X,), {}, "cpu")), module)
    require_equal(file(X)[0], module(X))


TABLE = torch.randn(5000, 1, 1).expand(5000, 4, 8).contiguous()[:, :, :1].clone()
"""Does not pack into 64 KiB."""
