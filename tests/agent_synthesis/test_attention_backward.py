"""Attention's backward in kernels of ours: which calls become some, what they mean, and that they compile."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from training_steps import Tried, of

from agent_synthesis.emit.cuda.attention_backward import AttentionBackwardSettings, CudaAttentionBackward
from agent_synthesis.lowering.groups import Refusal, lower
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.calls.attention_backward import AttentionBackward
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan
from agent_synthesis.schedule import Emission
from warpsmith.errors import IllegalMove
from warpsmith.graphs.library.attention import BACKWARD
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, task_pb2

Function = Callable[..., torch.Tensor]
SCHEDULE = CudaAttentionBackward(H200)
MOST_SPILLED = 160
"""Bytes, of what does not change in a loop."""


def drawn(rows: int, keys: int, depth: int, heads: int = 2, key_heads: int = 2) -> Callable[[], list[torch.Tensor]]:
    shapes = [(2, heads, rows, depth), *[(2, key_heads, keys, depth)] * 2]
    return lambda: [torch.randn(shape).bfloat16() for shape in shapes]


def heads_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return attention(q, k, v).transpose(1, 2).flatten(2)


FORMS: dict[str, tuple[Function, Callable[[], list[torch.Tensor]]]] = {
    "all keys": (attention, drawn(70, 90, 64)),
    "causal": (lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.3), drawn(70, 90, 128)),
    "shared keys": (lambda q, k, v: attention(q, k, v, enable_gqa=True), drawn(70, 90, 80, heads=4)),
    "a mask": (lambda q, k, v: attention(q, k, v, torch.ones(96, 72).tril() > 0), drawn(96, 72, 128)),
    "heads last": (heads_last, lambda: [each.transpose(1, 2).contiguous() for each in drawn(70, 90, 64)()]),
}


def tried(form: str) -> Tried:
    function, operands = FORMS[form]
    return Tried.of((of(function), operands), task_pb2.TARGET_CUDA)


def backward(plan: Plan) -> str:
    (found,) = (node.name for node in plan.index.graph.nodes if node.target == BACKWARD)
    return found


def nest_of(plan: Plan) -> Nest | Refusal:
    name = backward(plan)
    return lower(plan.index, (name,), tuple(plan.index.results(name)))


@pytest.mark.parametrize("form", FORMS)
def test_it_becomes_kernels_that_mean_the_same(form: str) -> None:
    step = tried(form)
    move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=backward(step.plan))
    plan = moves.apply(step.plan, move)
    assert plan.group(backward(plan)).schedule == SCHEDULE.name
    ours, theirs = interpreter.run_plan(plan, step.sources()), step.run()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", FORMS)
def test_kernels_compile_and_hardly_spill(form: str, compile_cuda: Callable[[Emission], str]) -> None:
    nest = nest_of(tried(form).plan)
    assert isinstance(nest, AttentionBackward)
    report = compile_cuda(SCHEDULE.emit(nest, SCHEDULE.defaults(nest)))
    assert "serializ" not in report  # what ptxas says of products that it cannot keep in flight
    assert "wait is injected" not in report  # that it adds between them
    assert "setmaxnreg ignored" not in report
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", report))) <= MOST_SPILLED


REFUSED = {
    "rows of 192": drawn(70, 90, 192),
    "few queries": drawn(40, 90, 64),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_room_or_fills_no_tile_stays_the_librarys(name: str) -> None:
    nest = nest_of(Tried.of((of(attention), REFUSED[name]), task_pb2.TARGET_CUDA).plan)
    assert isinstance(nest, AttentionBackward)
    assert not SCHEDULE.accepts(nest)


def test_a_gradient_that_nobody_reads_is_none_of_ours() -> None:
    plan = Tried.of((of(lambda q, k, v: attention(q, k, v.detach())), drawn(70, 90, 64)), task_pb2.TARGET_CUDA).plan
    nest = lower(plan.index, (backward(plan),), tuple(plan.index.results(backward(plan))[:2]))
    assert isinstance(nest, Refusal)
    assert "is not read" in nest.reason


def test_a_block_has_only_so_much_memory() -> None:
    nest = nest_of(tried("causal").plan)
    assert isinstance(nest, AttentionBackward)
    small = CudaAttentionBackward(replace(H200, shared_bytes=180 << 10))
    assert small.defaults(nest) == AttentionBackwardSettings(stages=2)
    with pytest.raises(IllegalMove, match="bytes of shared memory"):
        small.emit(nest, AttentionBackwardSettings(stages=3))


def test_a_causal_one_costs_five_products_of_what_is_seen() -> None:
    plan = tried("causal").plan
    move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=backward(plan))
    ours = moves.apply(plan, move)
    seen = 70 * 71 // 2
    assert cost.of_group(ours, ours.group(backward(ours))).tensor_flop_count == 2 * 5 * 4 * seen * 128
