"""Attention that a training step writes out: which steps keep no scores, and that both halves stay what they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from training_steps import Case, Function, Tried, of, x

from agent_synthesis.nests import interpreter
from agent_synthesis.plans import moves, saving
from agent_synthesis.plans.plan import Plan
from agent_synthesis.plans.whole import with_whole_attention
from warpsmith.graphs.library.attention import BACKWARD, FORWARD
from warpsmith.v1 import analysis_pb2, task_pb2

WHOLE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
LENGTH = 64
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
Operands = Callable[[], Sequence[torch.Tensor]]


def drawn(heads: int = 4, key_heads: int = 4, keys: int = LENGTH) -> Operands:
    return lambda: [x(2, heads, LENGTH, 8), x(2, key_heads, keys, 8), x(2, key_heads, keys, 8)]


def by_hand(change: Callable[[torch.Tensor], Any] = lambda scores: scores) -> Callable[..., Any]:
    return lambda q, k, v: change(q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v


def packed(x: torch.Tensor) -> Any:
    q, k, v = x.view(2, LENGTH, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind()
    scores = (q / math.sqrt(8)) @ k.transpose(2, 3) + torch.full((LENGTH, LENGTH), -math.inf).triu(1)
    return (torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype) @ v).transpose(1, 2).flatten(2)


def of_fewer_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    k, v = (each[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (k, v))
    return by_hand(lambda scores: scores.masked_fill(LATER, -math.inf))(q, k, v)


def by_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).masked_fill(LATER | LATER.T.roll(-8, 1), -1e30)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


class Alibi(nn.Module):
    """Scores less by how far a key is, and causal."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes: torch.Tensor
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 5.0))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        places = torch.arange(LENGTH)
        bias = (places[None] - places[:, None]) * self.slopes[:, None, None]
        return by_hand(lambda scores: (scores + bias).masked_fill(LATER, -math.inf))(q, k, v)


class Doubled(torch.autograd.Function):
    """Scores whose derivative is told to be twice what it is."""

    @staticmethod
    def forward(_: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores * 0.3

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.6


doubled: Callable[[torch.Tensor], torch.Tensor] = Doubled.apply

TAKEN: dict[str, Case] = {
    "plain": (of(by_hand()), drawn(keys=40)),
    "causal": (of(by_hand(lambda scores: torch.where(LATER, -math.inf, scores))), drawn()),
    "in three dimensions": (of(by_hand()), lambda: [x(6, LENGTH, 8) for _ in range(3)]),
    "packed operands": (of(packed), lambda: [x(2, LENGTH, 96)]),
    "heads that share keys": (of(of_fewer_heads), drawn(key_heads=2)),
    "a window by einsum": (of(by_einsum), drawn()),
    "heads last": (
        of(lambda q, k, v: torch.einsum("bhts,bshd->bthd", torch.einsum("bthd,bshd->bhts", q, k).softmax(-1), v)),
        lambda: [x(2, LENGTH, 4, 8) for _ in range(3)],
    ),
    "distances": (Alibi, drawn()),
    "a mask that is given": (
        of(lambda q, k, v, m: by_hand(lambda scores: scores.masked_fill(m == 0, -math.inf))(q, k, v)),
        lambda: [*drawn()(), torch.ones(2, 1, 1, LENGTH, dtype=torch.long).triu(-7)],
    ),
    "keys that are frozen": (
        of(lambda q, v, k: by_hand()(q, k.detach(), v), (2, 4, LENGTH, 8)),
        lambda: drawn()()[:2],
    ),
}
LEFT: dict[str, Case] = {
    "dropped weights": (
        of(lambda q, k, v, m: ((q @ k.mT).softmax(-1) * m) @ v),
        lambda: [*drawn()(), torch.randint(0, 2, (LENGTH, LENGTH)).float()],
    ),
    "a bias that learns": (of(lambda q, k, v, b: (q @ k.mT + b).softmax(-1) @ v, (4, LENGTH, LENGTH)), drawn()),
    "a cap": (of(by_hand(lambda scores: 5 * torch.tanh(scores / 5))), drawn()),
    "weights that are given back": (
        of(lambda q, k, v: ((weights := (q @ k.mT).softmax(-1)) @ v, weights)),
        drawn(),
    ),
    "rows that a number may hide": (
        of(lambda q, k, v, m: by_hand(lambda scores: scores.masked_fill(m == 0, -1e9))(q, k, v)),
        lambda: [*drawn()(), torch.ones(LENGTH, LENGTH, dtype=torch.long).tril()],
    ),
    "a derivative of its own": (of(lambda q, k, v: doubled(q @ k.mT).softmax(-1) @ v), drawn()),
    "another softmax's product": (of(lambda q, k, v: (q @ k.mT).softmax(-2) @ v), drawn()),
    "columns that weigh": (of(lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v), drawn()),
}


def targets(plan: Plan) -> set[str]:
    return {node.target for node in plan.index.graph.nodes}


@pytest.mark.parametrize("name", TAKEN)
def test_attention_that_is_written_out_keeps_no_scores_and_its_derivatives(name: str) -> None:
    tried = Tried.of(TAKEN[name])
    plan = with_whole_attention(tried.plan)
    assert {FORWARD, BACKWARD} <= targets(plan)
    assert saving.saved_bytes(plan.index) < saving.saved_bytes(tried.plan.index)
    assert plan.rewrites == ("whole_attention",)
    tried.check(plan)
    tried.check(moves.apply(tried.plan, WHOLE))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_such_attention_is_left_as_it_is(name: str) -> None:
    tried = Tried.of(LEFT[name])
    assert with_whole_attention(tried.plan) is tried.plan


@pytest.mark.parametrize("name", ["causal", "heads that share keys", "a window by einsum", "heads last"])
def test_on_a_gpu_such_attention_of_16_bits_is_two_kernels_of_ours(name: str) -> None:
    module, operands = TAKEN[name]
    half: Case = (
        lambda: module().bfloat16(),
        lambda: [torch.cat([each] * 8, -1).bfloat16() for each in operands()],
    )
    tried = Tried.of(half, task_pb2.TARGET_CUDA)
    plan = moves.apply(tried.plan, WHOLE)
    schedules = [group.schedule for group in plan.groups]
    assert {"cuda_attention", "cuda_attention_backward"} <= {*schedules}
    assert "cuda_product" not in schedules
    about(tried, plan)


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("function", [repeated, of_fewer_heads])
def test_keys_that_are_repeated_for_heads_that_share_them_are_not_written_down(function: Callable[..., Any]) -> None:
    def operands() -> list[torch.Tensor]:
        return [torch.randn(2, heads, LENGTH, LENGTH).bfloat16() for heads in (4, 2, 2)]  # turned or not

    tried = Tried.of((of(function), operands), task_pb2.TARGET_CUDA)
    plan = moves.apply(tried.plan, WHOLE)
    assert [group.schedule for group in plan.groups] == ["cuda_attention", "cuda_attention_backward"]
    about(tried, plan)


def about(tried: Tried, plan: Plan) -> None:
    """Checks what a plan means as 16 bits have it."""
    made = interpreter.run_plan(plan, tried.sources())
    for one, other in zip(made, tried.truth(), strict=True):
        assert (one.double() - other.double()).norm() <= 0.02 * other.double().norm()


def test_a_mask_of_keys_alone_is_no_trouble() -> None:
    hidden = torch.arange(LENGTH) > 50
    case: Case = (of(by_hand(lambda scores: scores.masked_fill(hidden, -math.inf))), drawn())
    tried = Tried.of(
        (lambda: case[0]().bfloat16(), lambda: [each.bfloat16() for each in case[1]()]), task_pb2.TARGET_CUDA
    )
    about(tried, moves.apply(tried.plan, WHOLE))


def test_floats_on_a_gpu_have_no_such_calls() -> None:
    plan = Tried.of(TAKEN["causal"], task_pb2.TARGET_CUDA).plan
    assert with_whole_attention(plan) is plan


def test_two_layers_of_attention_are_four_calls() -> None:
    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return by_hand()(by_hand()(q, k, v).tanh(), k, v)

    tried = Tried.of((lambda: Function(twice), drawn()))
    plan = with_whole_attention(tried.plan)
    assert sum(node.target in (FORWARD, BACKWARD) for node in plan.index.graph.nodes) == 4
    tried.check(plan)
