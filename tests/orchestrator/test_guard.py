"""Which calls an exported file takes for the one that was verified."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.exports.carried.guard import _ws_tell_once, _WsGuard


class Scaled(nn.Module):
    def forward(self, x: Any, scale: float = 2.0, *, shift: Any, negate: bool = False, **others: Any) -> Any:
        del negate, others
        return x * scale + shift


class Module(Scaled):
    """As an exported file's class is made: it keeps what a call has to find unchanged."""

    def __init__(self, guard: _WsGuard) -> None:
        super().__init__()
        self._ws_settings = guard.settings(self, (), {})


X, Y = torch.ones(2, 8), torch.zeros(8)


@pytest.fixture
def guard() -> _WsGuard:
    kinds = [((2, 8), (8, 1), torch.float32), (2.0,), ((8,), (1,), torch.float32), (False,)]
    return _WsGuard(Scaled, [], device="cpu", leaves=kinds, members={}, by_mode=False, capability=(9, 0), units=0)


@pytest.mark.parametrize(
    ("args", "kwargs", "is_verified"),
    [
        ((X, 2.0), {"shift": Y, "negate": False}, True),
        ((), {"negate": False, "x": X, "shift": Y, "scale": 2.0}, True),
        ((X, 2.0), {"shift": Y, "negate": True}, False),
        ((X, 2.0), {"shift": Y}, False),
        ((X,), {"shift": Y, "negate": False}, False),
        ((X, 2.0), {"shift": Y, "other": False}, False),
        ((X, 2.0), {"shift": X[0], "negate": False}, True),
        ((X, 2.0), {"shift": X, "negate": False}, False),
    ],
)
def test_what_is_given_by_name_only_is_looked_at_like_the_rest(
    guard: _WsGuard, args: tuple[Any, ...], kwargs: dict[str, Any], is_verified: bool
) -> None:
    tensors = guard.read(Module(guard), args, kwargs)
    assert (tensors is not None) is is_verified
    if tensors is not None:
        assert tensors[0] is X
        assert tensors[1].shape == (8,)


@pytest.mark.parametrize(("tensors", "why"), [(None, "is not the one that was verified"), ([X], "may be asked for")])
def test_a_plain_call_that_the_original_answers_is_told_once(guard: _WsGuard, tensors: Any, why: str) -> None:
    module = Module(guard)
    with pytest.warns(UserWarning, match=why):
        _ws_tell_once(module, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _ws_tell_once(module, tensors)


def test_a_call_that_is_transformed_is_told_nothing(guard: _WsGuard) -> None:
    module = Module(guard)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.vmap(lambda x: (_ws_tell_once(module, None), x)[1])(X)


def test_a_shallow_copy_is_not_answered_by_the_settings_of_its_original(guard: _WsGuard) -> None:
    module = Module(guard)
    assert guard.read(module, (X, 2.0), {"shift": Y, "negate": False}) is not None
    assert guard.read(copy.copy(module), (X, 2.0), {"shift": Y, "negate": False}) is None
    assert guard.read(copy.deepcopy(module), (X, 2.0), {"shift": Y, "negate": False}) is not None


def test_a_tensor_whose_sign_is_yet_to_be_turned_is_not_read(guard: _WsGuard) -> None:
    assert guard.read(Module(guard), (torch._neg_view(X), 2.0), {"shift": Y, "negate": False}) is None


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate, self.sizes, self.epsilon = 1.0, [[1, 2], [3]], None

    def forward(self, x: Any) -> Any:
        return x * self.rate


class Whole(nn.Module):
    def __init__(self, guard: _WsGuard | None = None) -> None:
        super().__init__()
        self.parts = nn.Sequential(Part(), nn.Linear(8, 8))
        self._ws_settings = guard.settings(self, (), {}) if guard else None

    def forward(self, x: Any) -> Any:
        return self.parts(x)


class Sharper(Part): ...


def _swapped(module: Whole) -> None:
    first, second = module.parts
    module.parts._modules.clear()
    module.parts._modules.update({"1": second, "0": first})


CHANGES: dict[str, Callable[[Whole], object]] = {
    "an attribute": lambda module: setattr(module.parts[0], "rate", 2.0),
    "one that is gone": lambda module: delattr(module.parts[0], "epsilon"),
    "a list within a list": lambda module: module.parts[0].sizes[0].append(3),
    "its class": lambda module: setattr(module.parts[0], "__class__", Sharper),
    "a hook of a part": lambda module: module.parts[1].register_forward_hook(lambda *_: None),
    "a hook before it": lambda module: module.parts[1].register_forward_pre_hook(lambda *_: None),
    "what a call of a part does": lambda module: setattr(module.parts[1], "forward", torch.relu),
    "a part": lambda module: module.parts.__setitem__(0, Part()),
    "a part more": lambda module: module.parts.append(nn.ReLU()),
    "the order of parts": _swapped,
    "a parameter's place": lambda module: setattr(
        module.parts[1], "weight", nn.Parameter(torch.empty(65)[1:].view(8, 8))
    ),
    "its memory": lambda module: setattr(module.parts[1].weight, "data", torch.empty(8, 8).t()),
    "its type": lambda module: module.double(),
}
"""What may change in a module between two calls with the same arguments, whose second is the original's."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_equal_calls_is_seen_by_the_second(change: str) -> None:
    member = {"parts.1.weight": ((8, 8), (8, 1), torch.float32)}
    leaf = ((2, 8), (8, 1), torch.float32)
    guard = _WsGuard(Whole, [], device="cpu", leaves=[leaf], members=member, by_mode=False, capability=(9, 0), units=0)
    module = Whole(guard)
    for _ in range(2):
        assert guard.read(module, (X,), {}) is not None
    CHANGES[change](module)
    assert guard.read(module, (X,), {}) is None


def test_tensors_alone_are_looked_at_in_forward_mode_too() -> None:
    leaf = ((2, 8), (8, 1), torch.float32)
    guard = _WsGuard(Whole, [], device="cpu", leaves=[leaf], members={}, by_mode=False, capability=(9, 0), units=0)
    module = Whole(guard)
    for _ in range(2):
        assert guard.read(module, (X,), {}) is not None
    with torch.autograd.forward_ad.dual_level():
        assert guard.read(module, (X,), {}) is None


def test_a_weight_that_stood_in_two_places_is_looked_for_in_both() -> None:
    leaf, member = ((2, 8), (8, 1), torch.float32), {"0.weight": ((8, 8), (8, 1), torch.float32)}
    kinds: dict[str, Any] = {"leaves": [leaf], "members": member, "by_mode": False, "capability": (9, 0), "units": 0}
    guard = _WsGuard(nn.Sequential, [], device="cpu", **kinds)
    module: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight = module[0].weight
    module._ws_settings = guard.settings(module, (), {})
    copied = copy.deepcopy(module)
    for each in (module, copied):
        assert guard.read(each, (X,), {}) is not None
        each.load_state_dict({name: value.clone() for name, value in each.state_dict().items()}, assign=True)
        assert guard.read(each, (X,), {}) is None, "they are two now"


@contextlib.contextmanager
def _hook_of_all() -> Iterator[None]:
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    hook.remove()


CALLS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "forward mode": torch.autograd.forward_ad.dual_level,
    "a hook of all modules": _hook_of_all,
}


@pytest.mark.parametrize("around", CALLS)
def test_what_is_around_a_call_is_looked_at_in_each(guard: _WsGuard, around: str) -> None:
    module, given = Module(guard), ((X, 2.0), {"shift": Y, "negate": False})
    module.inner = nn.Identity()
    module._ws_settings = guard.settings(module, (), {})
    for _ in range(2):  # by all that is looked at, and by the look that costs little
        assert guard.read(module, *given) is not None
    with CALLS[around]():
        assert guard.read(module, *given) is None
    assert guard.read(module, *given) is not None


TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], object]] = {
    "vmap": lambda looked: torch.func.vmap(looked)(torch.stack([X, X])),
    "a gradient's function": lambda looked: torch.func.grad(lambda x: looked(x).sum())(X),
    "forward mode": lambda looked: torch.func.jvp(looked, (X,), (X,)),
    "tracing": lambda looked: torch.jit.trace(looked, (X,), check_trace=False),
    "no transform": lambda looked: looked(X),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_call_within_a_transform_is_the_originals_although_its_tensors_are_known(
    guard: _WsGuard, transform: str
) -> None:
    module, given, found = Module(guard), ((X, 2.0), {"shift": Y, "negate": False}), []
    for _ in range(2):
        assert guard.read(module, *given) is not None

    def looked(x: torch.Tensor) -> torch.Tensor:
        found.append(guard.read(module, *given) is None)  # plain tensors, within the transform
        return x * 2

    TRANSFORMS[transform](looked)
    assert set(found) == {transform != "no transform"}


def test_a_tensor_that_is_changed_in_place_between_two_calls_is_looked_at_again(guard: _WsGuard) -> None:
    module, x = Module(guard), torch.ones(2, 8)
    given: tuple[Any, Any] = (x, 2.0), {"shift": Y, "negate": False}
    assert guard.read(module, *given) is not None
    x.resize_(8, 2)
    assert guard.read(module, *given) is None
    x.resize_(2, 8)
    assert guard.read(module, *given) is not None
    x.set_(torch.ones(17)[1:].view(2, 8))
    assert guard.read(module, *given) is None
