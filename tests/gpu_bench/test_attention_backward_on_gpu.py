"""Attention of training steps on a GPU: PyTorch's calls as a program makes them, and kernels of ours, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from training_steps import Case, Tried, of

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.graphs.library import attention_products
from warpsmith.graphs.library.attention import BACKWARD, FORWARD
from warpsmith.v1 import analysis_pb2, task_pb2

pytestmark = pytest.mark.gpu


def case(
    heads: int, key_heads: int, rows: int, keys: int, depth: int, *, causal: bool = False, mask: bool = False
) -> Case:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, *(each > 0 for each in masks), is_causal=causal, enable_gqa=heads != key_heads)

    def drawn() -> list[torch.Tensor]:
        shapes = [(2, heads, rows, depth), *[(2, key_heads, keys, depth)] * 2]
        masks = [torch.ones(rows, keys, dtype=torch.int32).tril(3)] if mask else []
        return [*(torch.randn(shape).bfloat16() for shape in shapes), *masks]

    return of(attend), drawn


CASES = {
    "all keys": case(2, 2, 1000, 1100, 128),
    "causal": case(2, 2, 1100, 1100, 128, causal=True),
    "causal of 64": case(4, 4, 2048, 2048, 64, causal=True),
    "more keys than blocks": case(1, 1, 512, 17408, 128),
    "shared keys": case(8, 2, 700, 700, 128, causal=True),
    "a mask": case(2, 2, 512, 520, 64, mask=True),
}


def authored(plan: Plan) -> Plan:
    for node in plan.index.graph.nodes:
        if node.target in (FORWARD, BACKWARD):
            plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=node.name))
    return plan


def ran(plan: Plan, args: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Outputs of a few runs."""
    made = generator.generate(plan)
    call = CudaExecutor().load(made, cubin_of(made), torch.device("cuda", 0)).bind(Sources(args, {}, {}))
    return [[each.clone() for each in call()] for _ in range(4)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("whose", ["library", "ours"])
def test_a_step_is_right_and_ours_repeats(name: str, whose: str) -> None:
    tried = Tried.of(CASES[name], task_pb2.TARGET_CUDA)
    args = [each.cuda() for each in tried.args]
    runs = ran(authored(tried.plan) if whose == "ours" else tried.plan, args)
    truth = [each.cuda() for each in tried.truth()]
    for made, exact in zip(runs[0], truth, strict=True):
        error = (made.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert error < 1e-2
    if whose == "ours":
        assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True))


def test_products_stand_in_where_a_gpu_has_no_call() -> None:
    operands = [torch.randn(2, 4, 96, 32, dtype=torch.float64) for _ in range(3)]
    given = [each.cuda().requires_grad_() for each in operands]
    out = attention(*given, is_causal=True)
    gradient = torch.randn_like(out)
    wanted = torch.autograd.grad(out, given, gradient)
    made, statistics = attention_products.forward(*given, 0.0, True)
    found = attention_products.backward(gradient, *given, made, statistics, 0.0, True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
