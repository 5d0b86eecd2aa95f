"""The plan that measurements of single kernels begin with: a whole module as one kernel of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import fusion, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2


def into_one(plan: Plan) -> analysis_pb2.Move:
    """The move that makes the last group of a plan a kernel of ours, with all that it reads."""
    last = plan.groups[-1].name
    if len(plan.groups) == 1:
        return analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=last)
    return analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice=fusion.ALL_PRODUCERS)


def one_kernel(module: torch.nn.Module, args: Sequence[torch.Tensor]) -> Plan:
    """A module as one CUDA kernel with the settings that a search begins with; `args` may be fake tensors.

    Raises:
        IllegalMove: no schedule takes the whole of it.
    """
    plan = plan_zero(GraphIndex(capture(module, tuple(args))), task_pb2.TARGET_CUDA)
    return moves.apply(plan, into_one(plan))
