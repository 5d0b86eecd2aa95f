"""Attention of floats in one kernel: which calls become one, what it costs, and that it compiles without spilling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_forms import causal, grouped_causal, masked, some
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis.emit.cuda.attention import CudaAttention, require_fits
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import analysis, cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200, H200_MEASURED
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2, task_pb2

attention = F.scaled_dot_product_attention
Function = Callable[..., torch.Tensor]


def of(queries: int, keys: int, depth: int, columns: int = 0, *, heads: int = 3, group: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(heads * group, queries, depth), (heads, keys, depth), (heads, keys, columns or depth)]
    return [torch.randn(2, *shape, generator=generator) for shape in shapes]


def heads_last(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in x.chunk(3, -1))
    return attention(q, k, v).transpose(1, 2).flatten(2)


FORMS: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "heads of 32": (attention, of(77, 50, 32)),
    "heads of 64": (attention, of(77, 50, 64)),
    "heads of 80": (attention, of(77, 150, 80)),
    "heads of 128": (attention, of(77, 50, 128)),
    "odd rows": (attention, of(77, 50, 33, 17)),
    "wider values": (attention, of(77, 50, 32, 128)),
    "causal": (causal, of(77, 66, 64)),
    "causal in wide rows": (causal, of(77, 66, 128)),
    "a mask of bools": (masked, [*of(77, 66, 64), some(2, 3, 77, 66)]),
    "a mask of bools and wide rows": (masked, [*of(77, 66, 128), some(2, 1, 77, 66)]),
    "a mask of odd rows": (masked, [*of(77, 65, 64), some(2, 1, 77, 65)]),
    "a mask of floats": (masked, [*of(77, 66, 64), torch.zeros(77, 66).masked_fill(~some(77, 66), -torch.inf)]),
    "shared heads": (grouped_causal, of(77, 66, 64, group=3)),
    "heads last": (heads_last, [torch.randn(2, 77, 384)]),
    "an end": (lambda q, k, v, r: F.gelu(attention(q, k, v)) + r, [*of(77, 66, 64), torch.randn(77, 64)]),
}  # fmt: skip


def as_one_kernel(function: Function, args: list[torch.Tensor]) -> Plan:
    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    kind, choice = analysis_pb2.MOVE_KIND_AUTHOR, ""
    if len(plan.groups) > 1:
        kind, choice = analysis_pb2.MOVE_KIND_FUSE, "*"
    return moves.apply(plan, analysis_pb2.Move(kind=kind, group=plan.groups[-1].name, choice=choice))


def nest_of(plan: Plan) -> Nest:
    nest = plan.nest(plan.groups[-1])
    assert isinstance(nest, Nest), nest
    return nest


@pytest.mark.parametrize("name", FORMS)
def test_one_kernel_means_what_the_module_does(name: str) -> None:
    function, args = FORMS[name]
    plan = as_one_kernel(function, args)
    assert [group.schedule for group in plan.groups] == ["cuda_attention"]
    sources = {source.name: args[source.input_index] for source in plan.index.graph.sources}
    (made,) = interpreter.run_plan(plan, sources)
    torch.testing.assert_close(made, function(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_every_setting_compiles_without_spilling(name: str, compile_cuda: Callable[[Emission], str]) -> None:
    function, args = FORMS[name]
    plan, schedule = as_one_kernel(function, args), CudaAttention(H200)
    settings = plan.groups[-1].settings
    possible = schedule.alternatives(nest_of(plan), settings)
    others = [each for each in possible if each.warpgroups == 3 or each.promote == 32]
    for each in [settings, *others]:
        report = compile_cuda(schedule.emit(nest_of(plan), each))
        assert report.count(" 0 bytes spill stores") == 4
        assert "serializ" not in report
        assert "injected" not in report
        assert "setmaxnreg ignored" not in report


def test_wide_rows_masks_of_floats_in_them_and_few_queries_are_taken_in_parts() -> None:
    for function, args in (
        (attention, of(77, 50, 136)), (attention, of(63, 50, 64)), (attention, of(77, 50, 64, 200)),
        (masked, [*of(77, 66, 128), torch.randn(77, 66)]),
    ):  # fmt: skip
        index = GraphIndex(capture(Applied(function), args))
        plan = plan_zero(index, task_pb2.TARGET_CUDA)
        assert not CudaAttention(H200).accepts(nest_of(plan))


def test_tiles_have_64_keys_and_weights_that_do_not_exceed_one() -> None:
    plan = as_one_kernel(*FORMS["heads of 64"])
    settings = plan.groups[-1].settings
    assert (settings.keys, settings.lag) == (64, 0)
    for change in ({"lag": 8}, {"keys": 128}):
        with pytest.raises(IllegalMove, match=r"64 keys at a time|registers"):
            require_fits(H200, nest_of(plan), replace(settings, stages=2, **change))
    wide = as_one_kernel(*FORMS["heads of 128"])
    with pytest.raises(IllegalMove, match="shared memory"):
        require_fits(H200, nest_of(wide), replace(settings, stages=3))
    hidden = as_one_kernel(*FORMS["a mask of bools"])
    with pytest.raises(IllegalMove, match="registers"):
        require_fits(H200, nest_of(hidden), replace(settings, stages=2, warpgroups=3))


def test_the_cost_is_three_products_for_each_and_halves_that_are_written_and_read() -> None:
    q, k, v = args = of(128, 256, 64, 32)
    plan = as_one_kernel(attention, args)
    found = cost.of_group(plan, plan.groups[-1])
    assert found.tensor_flop_count == 3 * 2 * 6 * 128 * 256 * (64 + 32)
    assert (found.product_flop_count, found.launch_count) == (0, 4)
    moved = found.read_bytes + found.write_bytes + found.extra_bytes
    operands = q.numel() + k.numel() + v.numel()
    assert moved == 4 * (operands + 6 * 128 * 32) + 12 * operands


def test_no_scores_are_kept_so_that_long_sequences_fit() -> None:
    with FakeTensorMode():
        many = torch.empty(2, 64, 65536, 32)
        plan = as_one_kernel(attention, [many, torch.empty_like(many), torch.empty_like(many)])
    emission = CudaAttention(H200).emit(nest_of(plan), plan.groups[-1].settings)
    elements = sum(torch.Size(each.spec.shape).numel() for each in emission.workspaces if "halves" in each.name)
    assert elements == 3 * 2 * many.numel()


class SelfAttention(nn.Module):
    """What KernelBench's VisionAttention is: weights that nobody reads are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(64, 2), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2).permute(2, 0, 1)
        attended, _ = self.attention(x, x, x)
        return self.norm(attended + x).permute(1, 2, 0)


def test_a_search_soon_tries_one_kernel_for_attention_that_a_module_writes_out() -> None:
    with torch.no_grad():
        index = GraphIndex(capture(SelfAttention(), (torch.randn(2, 64, 64, 64),)))
    plan = plan_zero(index, task_pb2.TARGET_CUDA)
    described = analysis.describe(plan, with_legal_moves=True)
    rewrites = [each.move.choice for each in described.legal_moves if each.move.kind == analysis_pb2.MOVE_KIND_REWRITE]
    assert rewrites == ["whole_attention"]  # which takes what is never read along
    request = reasoning_service_pb2.ProposeHypothesesRequest(
        task=task_pb2.Task(target=task_pb2.TARGET_CUDA), analysis=described, device=H200_MEASURED, limit=2
    )
    made = []
    for hypothesis in RooflineReasoner().propose(request).hypotheses:
        after = plan
        for move in hypothesis.moves:
            after = moves.apply(after, move)
        made.append([group.schedule for group in after.groups if group.engine == "authored"])
    assert any("cuda_attention" in each for each in made)
