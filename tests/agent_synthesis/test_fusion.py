"""What becomes of calls that every reader computes again: no kernel is left over, and every plan has its moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import analysis, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2


class NormByHand(nn.Module):
    """A layer norm as people write it: what is subtracted from is read twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = x - x.mean(1, keepdim=True)
        return c * torch.rsqrt((c * c).mean(1, keepdim=True) + 1e-5) * 2.0


class Share(nn.Module):
    """A scan and a sum of the same, which have no loop in common."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x.abs()
        return a.cumsum(1) / (a.sum(1, keepdim=True) + 1.0)


def zero(module: nn.Module, target: task_pb2.Target.ValueType) -> Plan:
    return plan_zero(GraphIndex(capture(module, (torch.randn(6, 40),))), target)


def fuse(group: str, producer: str = "*") -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=group, choice=producer)


@pytest.mark.parametrize("target", [task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA])
def test_a_kernel_that_all_its_readers_compute_again_goes_to_the_first_of_them(
    target: task_pb2.Target.ValueType,
) -> None:
    plan = zero(NormByHand(), target)
    last = plan.groups[-1].name
    plan = moves.apply_all(plan, [analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="sub"), fuse(last)])
    assert [group.name for group in plan.groups if group.engine == "authored"] == [last]
    assert "sub" in plan.group(last).nodes
    assert analysis.describe(plan, with_legal_moves=True).legal_moves
    apart = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LIBRARY, group=last))
    x = torch.randn(6, 40)
    for each in (plan, apart):
        torch.testing.assert_close(next(iter(interpreter.run_plan(each, {"x": x}))), NormByHand()(x))


@pytest.mark.parametrize("module", [NormByHand(), Share()])
@pytest.mark.parametrize("target", [task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA])
def test_every_plan_two_moves_away_can_be_described(module: nn.Module, target: task_pb2.Target.ValueType) -> None:
    start = zero(module, target)
    fusing = [
        legal.move
        for legal in moves.legal(start)
        if legal.move.kind in (analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_FUSE)
    ]
    for first in fusing:
        once = moves.apply(start, first)
        for second in (
            each.move
            for each in moves.legal(once)
            if each.move.kind in (analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_FUSE)
        ):
            try:
                twice = moves.apply(once, second)
            except IllegalMove:
                continue
            assert analysis.describe(twice, with_legal_moves=False).groups


def _siblings(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.sum(1), x.amax(1), x.cumsum(0)


@pytest.mark.parametrize("target", [task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA])
def test_siblings_that_read_one_tensor_become_one_kernel_that_reads_it_once(target: task_pb2.Target.ValueType) -> None:
    plan = zero(Applied(_siblings), target)
    (move,) = (each for each in moves.legal(plan) if each.move.kind == analysis_pb2.MOVE_KIND_FUSE)
    assert (move.move.group, move.move.choice) == ("amax", "sum_1")
    assert "reads once" in move.effect
    assert move.after.read_bytes == move.before.read_bytes // 2
    assert move.after.launch_count == 1
    plan = moves.apply(plan, move.move)
    assert [(group.name, group.engine) for group in plan.groups] == [("amax", "authored"), ("cumsum", "library")]
    x = torch.randn(6, 40)
    for got, wanted in zip(interpreter.run_plan(plan, {"args_0": x}), _siblings(x), strict=True):
        torch.testing.assert_close(got, wanted)


def _loop(x: torch.Tensor) -> torch.Tensor:
    weight, state = torch.eye(40), x[0]
    for step in range(24):
        state = torch.tanh((x[step % 6] + state) @ weight)
    return state


def test_a_network_written_as_a_loop_has_moves_in_proportion_to_its_steps() -> None:
    plan = zero(Applied(_loop), task_pb2.TARGET_CUDA)
    products = [group.name for group in plan.groups if "matmul" in group.name]
    assert len(plan.siblings(plan.group(products[-1]))) > moves.MOST_SIBLINGS
    offered = [each for each, _ in moves._candidates(plan) if each.group == products[-1] and each.choice in products]
    assert [each.choice for each in offered] == products[-1 - moves.MOST_SIBLINGS : -1]


SEPARATE = {
    "nothing in common": (lambda x, y, _: (x.relu(), y.exp()), "nothing large"),
    "only something small": (lambda x, y, z: (x * z, y + z), "nothing large"),
    "one needs the other by way of a third": (lambda x, *_: x + x.exp().cumsum(1), "both before"),
    "loops of other sizes": (lambda x, *_: (x.sum(1), x.sum(0)), "cannot be one kernel"),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_siblings_that_are_none_stay_apart(name: str) -> None:
    function, reason = SEPARATE[name]
    args = (torch.randn(6, 40), torch.randn(6, 40), torch.randn(40))
    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    first, last = plan.groups[0].name, plan.groups[-1].name
    with pytest.raises(IllegalMove, match=reason):
        moves.apply(plan, fuse(last, first))
