"""How a plan's steps are launched: one by one, or all at once as a CUDA graph.

The one idea: a graph is captured for the addresses of one call and replayed where they come again, so the host makes
one launch in place of one for each step, library calls included. Results lie in the graph's own memory and are copied
out. What captures and replays is `gpu_bench.running.gpu.cuda_graph`, and in an exported file `carried.cuda_graphs`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from agent_synthesis.graphs.graph_index import byte_count
from agent_synthesis.plans import bundles, cost
from agent_synthesis.plans.plan import Plan
from warpsmith.errors import IllegalMove
from warpsmith.graphs import dtypes
from warpsmith.v1 import analysis_pb2, task_pb2

WHOLE_PLAN = "*"
"""Group of a launch move."""
CUDA_GRAPH = "cuda_graph"
"""Choice of a launch move."""
EFFECT = "launches all steps at once, as a CUDA graph"
LEAST_LAUNCHES = 2
"""That a plan makes: a graph of one is launched as the one was."""


def at_once(plan: Plan, group: str, choice: str) -> Plan:
    """The plan launched as a CUDA graph.

    Raises:
        IllegalMove: no such choice, or not this plan; says why.
    """
    if (group, choice) != (WHOLE_PLAN, CUDA_GRAPH):
        of_kernels = "".join(f"{bundles.EVERY_GROUP} {each}, " for each in bundles.CHOICES)
        raise IllegalMove(
            f"a plan may be launched {of_kernels}or as {WHOLE_PLAN} {CUDA_GRAPH}, not as {group} {choice}"
        )
    if reason := _why_not(plan):
        raise IllegalMove(reason)
    return replace(plan, cuda_graph=True)


def costs(plan: Plan) -> tuple[analysis_pb2.Cost, analysis_pb2.Cost]:
    """What launching takes one by one, and as a graph, whose results are copied."""
    copied = sum(byte_count(plan.index.spec(tensor)) for tensor in plan.index.graph.outputs)
    one_by_one = analysis_pb2.Cost(launch_count=_launches(plan))
    return one_by_one, analysis_pb2.Cost(read_bytes=copied, write_bytes=copied, launch_count=1)


def _launches(plan: Plan) -> int:
    return cost.total(cost.of_group(plan, group) for group in plan.groups).launch_count


def _why_not(plan: Plan) -> str:
    if plan.target != task_pb2.TARGET_CUDA:
        return "only a GPU launches graphs"
    if plan.index.graph.gradients:
        return "what a training step's forward gives is wanted before its backward begins"
    if plan.cuda_graph:
        return "the plan is launched as a CUDA graph already"
    if _launches(plan) < LEAST_LAUNCHES:
        return f"a plan of fewer than {LEAST_LAUNCHES} launches gains nothing from a CUDA graph"
    specs = {tensor: plan.index.spec(tensor) for tensor in plan.index.graph.outputs}
    spread = next((name for name, spec in specs.items() if dtypes.element_span(spec) < math.prod(spec.shape)), None)
    if spread is not None:
        return f"elements of {spread} share memory, and a graph's results are copies"
    roots = Counter(plan.index.root[tensor] for tensor in plan.index.graph.outputs)
    shared = next((root for root, count in roots.items() if count > 1 or root in plan.index.sources), None)
    if shared is not None:
        return f"the module gives {shared} itself or several views of it, and a graph's results are copies"
    return ""
