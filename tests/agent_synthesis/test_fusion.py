"""What becomes of calls that every reader computes again: no kernel is left over, and every plan has its moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent_synthesis import analysis, interpreter, moves
from agent_synthesis.graph_index import GraphIndex
from agent_synthesis.plan import Plan, plan_zero
from warpsmith.capture import capture
from warpsmith.errors import IllegalMove
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
    return analysis_pb2.Move(operation="fuse", group=group, choice=producer)


@pytest.mark.parametrize("target", [task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA])
def test_a_kernel_that_all_its_readers_compute_again_goes_to_the_first_of_them(
    target: task_pb2.Target.ValueType,
) -> None:
    plan = zero(NormByHand(), target)
    last = plan.groups[-1].name
    plan = moves.apply_all(plan, [analysis_pb2.Move(operation="author", group="sub"), fuse(last)])
    assert [group.name for group in plan.groups if group.engine == "authored"] == [last]
    assert "sub" in plan.group(last).nodes
    assert analysis.describe(plan, with_legal_moves=True).legal_moves
    apart = moves.apply(plan, analysis_pb2.Move(operation="library", group=last))
    x = torch.randn(6, 40)
    for each in (plan, apart):
        torch.testing.assert_close(next(iter(interpreter.run_plan(each, {"x": x}))), NormByHand()(x))


@pytest.mark.parametrize("module", [NormByHand(), Share()])
@pytest.mark.parametrize("target", [task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA])
def test_every_plan_two_moves_away_can_be_described(module: nn.Module, target: task_pb2.Target.ValueType) -> None:
    start = zero(module, target)
    fusing = [legal.move for legal in moves.legal(start) if legal.move.operation in ("author", "fuse")]
    for first in fusing:
        once = moves.apply(start, first)
        for second in (each.move for each in moves.legal(once) if each.move.operation in ("author", "fuse")):
            try:
                twice = moves.apply(once, second)
            except IllegalMove:
                continue
            assert analysis.describe(twice, with_legal_moves=False).groups
