"""The layout of a whole graph as a move: plan zero over the graph with its convolutions channels-last.

The one idea: a layout is chosen before anything is a kernel of ours, so groups keep their names and all other moves
work on the graph as it is laid out. What becomes of the graph is the business of `graphs.layouts`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from agent_synthesis.graphs import layouts
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans.partition import Group, Partition
from agent_synthesis.plans.plan import Plan
from warpsmith.errors import IllegalMove

EVERY_GROUP = "*"
"""Group of such a move."""
CHANNELS_LAST = "channels_last"
"""The choice that there is."""
EFFECT = "lays convolutions and what follows them out channels-last, with copies where other calls need another layout"


def laid_out(plan: Plan, name: str, choice: str) -> Plan:
    """The plan over the graph that is laid out; new copies are library groups, all others keep their names.

    Raises:
        IllegalMove: it is no layout of the whole graph, kernels of ours are there already, or nothing would change.
    """
    if name != EVERY_GROUP or choice != CHANNELS_LAST:
        raise IllegalMove(f"a layout is that of group {EVERY_GROUP!r} and may be {CHANNELS_LAST!r}, not {choice!r}")
    if any(group.engine != "library" for group in plan.groups):
        raise IllegalMove("a layout is chosen while all groups are library calls: make it the first move")
    index = _laid_out(plan.index)
    if index is None:
        raise IllegalMove("there is no convolution that reads another layout than channels-last and could read that")
    groups = tuple(Group(node.name, (node.name,)) for node in index.graph.nodes if not index.is_view(node.name))
    return replace(plan, partition=Partition(index, groups))


@functools.lru_cache(maxsize=8)
def _laid_out(index: GraphIndex) -> GraphIndex | None:
    """One for each graph: what was found out about its calls is kept by it."""
    graph = layouts.channels_last(index)
    return None if graph is None else GraphIndex(graph, allows_tf32=index.allows_tf32)
