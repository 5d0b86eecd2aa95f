"""Which calls an exported file takes for the one that was verified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.exports.carried.guard import _WsGuard


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
