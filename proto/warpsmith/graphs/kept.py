"""What of a graph may be computed once and kept: the calls that depend on nothing that changes between two calls.

The one idea: constants never change; on the prepared track parameters and state are taken not to, so that they may be
split, packed or folded before the first call. That is decided by what a call reads, so nobody has to be believed.
"""

from __future__ import annotations

import torch

from warpsmith.graphs import aten
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2


def varying_origins(prepared: bool) -> frozenset[graph_pb2.Origin.ValueType]:
    """Where tensors come from that two calls may have others of."""
    members = () if prepared else (graph_pb2.ORIGIN_PARAMETER, graph_pb2.ORIGIN_STATE)
    return frozenset({graph_pb2.ORIGIN_INPUT, *members})


def is_function(target: str) -> bool:
    """Whether what an operation gives depends on its arguments alone, of which it writes none: as far as is known."""
    if aten.is_outside(target):
        return False
    overload = aten.resolve(target)
    is_random = torch.Tag.nondeterministic_seeded in overload.tags
    return not (is_random or overload._schema.is_mutable or aten.operation(target) in aten.HIDDEN_WRITES)


def kept_calls(graph: graph_pb2.Graph, *, prepared: bool) -> frozenset[str]:
    """Names of those calls, views among them. `prepared`: whether parameters and state are among what stays.

    Not: what is random or written in place, whatever is done by operations of others, and what the module gives as a
    result, which is new in each call.
    """
    root = aten.roots(graph)
    changing = {root[name] for node in graph.nodes for name in node.mutates} | {root[name] for name in graph.outputs}
    varying = changing | {source.name for source in graph.sources if source.origin in varying_origins(prepared)}
    found = set()
    for node in graph.nodes:
        tensors = [*tensor_names(aten.arguments_of(node)), *(result.name for result in node.results if result.name)]
        if (
            node.mutates
            or not is_function(node.target)
            or any(name in varying or root[name] in varying for name in tensors)
        ):
            varying.update(result.name for result in node.results if result.name)
        else:
            found.add(node.name)
    return frozenset(found)
