"""Attention taken apart: two products of ours with a softmax between them, where nothing stands against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention

from agent_synthesis import interpreter, moves
from agent_synthesis.graph_index import GraphIndex
from agent_synthesis.plan import Plan, plan_zero
from warpsmith.capture import capture
from warpsmith.errors import IllegalMove
from warpsmith.v1 import analysis_pb2, task_pb2

Q, K, V = (torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


class Attention(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


def authored(
    function: Callable[..., torch.Tensor],
    *args: torch.Tensor,
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA,
) -> Plan:
    plan = plan_zero(GraphIndex(capture(Attention(function), args)), target)
    return moves.apply(plan, analysis_pb2.Move(operation="author", group=plan.groups[-1].name))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (attention, (Q, K, V)),
        (lambda q, k, v: attention(q, k, v, scale=0.3), (Q, K, V)),
    ],
    ids=["plain", "scaled"],
)
def test_attention_is_two_products_and_a_softmax(
    function: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]
) -> None:
    plan = authored(function, *args)
    assert [group.schedule for group in plan.groups] == ["cuda_product", "cuda_row_reduction", "cuda_product"]
    assert not plan.rewrites
    sources = {source.name: args[source.input_index] for source in plan.index.graph.sources}
    (made,) = interpreter.run_plan(plan, sources)
    torch.testing.assert_close(made, function(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: attention(q, k, v, is_causal=True),
        lambda q, k, v: attention(q, k, v, dropout_p=0.5),
        lambda q, k, v: attention(q, k, v, attn_mask=torch.ones(64, 64, dtype=torch.bool)),
        lambda q, k, v: attention(q, k, v, attn_mask=torch.full((64, 64), -torch.inf)),
        lambda q, k, v: attention(q.half(), k.half(), v.half()),
    ],
    ids=["causal", "with dropout", "with a mask of bools", "with a mask that is added", "of halves"],
)
def test_other_attention_stays_in_the_library(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(IllegalMove):
        authored(function, Q, K, V)


def test_a_processor_has_no_products_of_ours_so_attention_stays_whole() -> None:
    with pytest.raises(IllegalMove):
        authored(attention, Q, K, V, target=task_pb2.TARGET_CPU)
