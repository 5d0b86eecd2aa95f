"""What is proposed first for a module whose loop capture unrolled: plans in which one kernel has all of its steps."""

from __future__ import annotations

import torch
from torch import nn

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import analysis, moves
from agent_synthesis.plans.plan import plan_zero
from warpsmith.graphs.capture import capture
from warpsmith.v1 import reasoning_service_pb2, task_pb2


class Steps(nn.Module):
    """A plain network and what it gives in each step, written as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(256 + 128, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        outputs = []
        for t in range(x.shape[0]):
            hidden = torch.tanh(self.inner(torch.cat((x[t], hidden), dim=1)))
            outputs.append(self.outer(hidden))
        return torch.stack(outputs)


def test_a_search_begins_with_plans_of_the_recurrent_kernel() -> None:
    index = GraphIndex(capture(Steps(), (torch.empty(64, 8, 256), torch.empty(8, 128))))
    plan = plan_zero(index, task_pb2.TARGET_CUDA)
    request = reasoning_service_pb2.ProposeHypothesesRequest(
        task=task_pb2.Task(target=task_pb2.TARGET_CUDA),
        analysis=analysis.describe(plan, with_legal_moves=True),
        limit=4,
    )
    proposed = RooflineReasoner().propose(request).hypotheses
    plans = [moves.apply_all(plan, hypothesis.moves) for hypothesis in proposed]
    kept = ["cuda_recurrent" in {group.schedule for group in each.groups} for each in plans]
    assert sum(kept) >= 3, kept
