"""Constant outputs: whether a program has less to do that leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpu_bench.judging import spared
from warpsmith.graphs import training_step
from warpsmith.graphs.capture import capture
from warpsmith.v1 import graph_pb2

X = torch.rand(256, 64)
TARGETS = torch.arange(256) % 64


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


def step(loss: Callable[..., Any]) -> graph_pb2.Graph:
    """Of the gradient of rows of scores for a loss, a scalar."""
    module = Function(loss)
    module.__class__ = training_step.stepping(Function, training_step.Step((0,), (), (0,)))
    return capture(module, (X, torch.tensor(1.0)))


LOSSES: dict[str, Callable[..., Any]] = {
    "cross-entropy": lambda x: F.cross_entropy(x, TARGETS),
    "with smoothing": lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1),
    "mean square": lambda x: F.mse_loss(x, torch.ones_like(x)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_no_work_beside_its_gradient(name: str) -> None:
    graph = step(LOSSES[name])
    assert not spared.by_leaving_out(graph, {0})
    assert spared.by_leaving_out(graph, {1}), "the gradient is as large as what it is of"


@pytest.mark.parametrize(
    ("function", "positions", "is_spared"),
    [
        (lambda x: (x.exp(), x.exp().sum()), {1}, True),  # written twice, and PyTorch does it twice
        (lambda x: (x.exp(), x.sum()), {1}, False),
        (lambda x: (x.exp(), x.t().reshape(-1).sum()), {1}, True),  # a copy
        (lambda x: (x.exp(), x.t().sum(0).mean()), {1}, False),
        (lambda x: (x.exp(), x.sum(1).exp().mean()), {1}, False),
        (lambda x: (x.exp(), x.median()), {1}, True),
        (lambda x: (x.exp(), (x - x.mean()).square().mean()), {1}, True),
        (lambda x: (x.exp(), x @ x[0]), {1}, True),
        (lambda x: (x[:2].exp(), x.sum()), {1}, True),  # what the other output does not read
        (lambda x: (x.exp(), x.sigmoid()), {1}, True),
        (lambda x: (x.exp(), x.sum(1, keepdim=True).repeat(1, 64)), {1}, True),
        (lambda x: (x.exp(), x.sum(), x.amax()), {1, 2}, False),
        (lambda x: (x.exp(),), {1}, True),  # state
    ],
)
def test_what_is_made_for_an_output_alone_is_spared_without_it(
    function: Callable[..., Any], positions: Collection[int], is_spared: bool
) -> None:
    graph = capture(Function(function), (X,))
    assert spared.by_leaving_out(graph, positions) is is_spared
