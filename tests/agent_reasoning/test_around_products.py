"""What is proposed first around a matrix product: it and its end in one kernel, each reduction in its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import analysis, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2, task_pb2, timing_pb2


class Layers(nn.Module):
    """Two linear layers and a function of them, in the order that it wants."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1024, 2048), nn.Linear(2048, 512)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first, self.second, x)


def first_plan(function: Callable[..., torch.Tensor]) -> Plan:
    """The plan of the first hypothesis that is legal and rewrites nothing."""
    with FakeTensorMode():
        args = (torch.empty(4096, 1024),)
    plan = plan_zero(GraphIndex(capture(Layers(function), args)), task_pb2.TARGET_CUDA)
    reference = timing_pb2.ReferenceReport(fastest_arm=timing_pb2.ARM_KIND_EAGER, floor_ns=1e5)
    reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=1e6)
    request = reasoning_service_pb2.ProposeHypothesesRequest(
        task=task_pb2.Task(target=task_pb2.TARGET_CUDA),
        analysis=analysis.describe(plan, with_legal_moves=True),
        reference=reference,
    )
    proposed = RooflineReasoner().propose(request).hypotheses
    wanted = next(each for each in proposed if all(move.kind != analysis_pb2.MOVE_KIND_REWRITE for move in each.moves))
    return moves.apply_all(plan, wanted.moves)


def _gated(line: nn.Linear, _: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    made = line(x)
    return made * torch.sigmoid(made) + made


FIRST: dict[str, tuple[Callable[..., torch.Tensor], list[str]]] = {
    "a pointwise end": (lambda line, _, x: F.gelu(line(x) * 2), ["cuda_product"]),
    "an end that reads the product thrice": (_gated, ["cuda_product"]),
    "a norm of rows": (
        lambda line, _, x: F.relu(F.layer_norm(line(x), [2048])), ["cuda_product", "cuda_row_reduction"]),
    "a sum behind an activation": (
        lambda line, _, x: F.mish(line(x)).logsumexp(1, keepdim=True).exp(), ["cuda_product", "cuda_row_reduction"]),
    "two layers": (
        lambda line, other, x: other(torch.sigmoid(line(x))).logsumexp(1),
        ["cuda_product", "cuda_product", "cuda_row_reduction"]),
}  # fmt: skip


@pytest.mark.parametrize("what", FIRST)
def test_the_first_proposal_makes_the_product_and_all_that_follows(what: str) -> None:
    function, schedules = FIRST[what]
    assert [group.schedule for group in first_plan(function).groups] == schedules
