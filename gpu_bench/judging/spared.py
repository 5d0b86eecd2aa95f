"""Whether a program that leaves out some outputs has less to do: their work may be that of other outputs.

The one idea: a loss is one more sum over what its gradient needs anyway. Where all that is made for some outputs alone
is such sums and what is made of them, a constant in their place spares nothing that could be timed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from warpsmith.graphs import aten
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2

_SMALL = 1 / 64
"""Of the largest tensor: what is made of as few elements takes no time beside it."""
_SUMS = frozenset({
    "sum", "mean", "amax", "amin", "max", "min", "norm", "linalg_vector_norm", "logsumexp", "nll_loss_forward",
    "nll_loss2d_forward", "mse_loss", "l1_loss",
})  # fmt: skip
"""Operations that take each element once and keep little."""


def by_leaving_out(graph: graph_pb2.Graph, positions: Collection[int]) -> bool:
    """Whether work is spared where these outputs of the graph, by position, are not computed."""
    if any(position >= len(graph.outputs) for position in positions):
        return True  # state, which is written
    wanted = {name for position, name in enumerate(graph.outputs) if position not in positions}
    needed = _needed(graph, {*wanted, *(name for node in graph.nodes for name in node.mutates)})
    counts = {source.name: math.prod(source.spec.shape) for source in graph.sources}
    counts |= {result.name: math.prod(result.spec.shape) for node in graph.nodes for result in node.results}
    most = _SMALL * max(counts.values(), default=0)
    same = _same_elements(graph, counts)
    calls = [node for node in graph.nodes if not _is_view(node)]
    kept = (name for node in calls if node.name in needed for name in (*_read(node), *_made(node)))
    there = {same.get(name, name) for name in kept}
    for node in calls:
        if node.name in needed:
            continue
        large = {same.get(name, name) for name in _read(node) if counts[name] > most}
        is_sum = aten.operation(node.target) in _SUMS and large <= there
        if any(counts[name] > most for name in _made(node)) or (large and not is_sum):
            return True
    return False


def _same_elements(graph: graph_pb2.Graph, counts: Mapping[str, int]) -> dict[str, str]:
    """View → the tensor that it shows all of."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        for result in node.results if _is_view(node) else ():
            if counts[result.name] == counts.get(result.alias_of):
                found[result.name] = found.get(result.alias_of, result.alias_of)
    return found


def _needed(graph: graph_pb2.Graph, wanted: Iterable[str]) -> set[str]:
    """The calls that these tensors are made by."""
    names, found = set(wanted), set[str]()
    for node in reversed(graph.nodes):
        if names.intersection(_made(node)):
            found.add(node.name)
            names.update(_read(node))
    return found


def _read(node: graph_pb2.Node) -> list[str]:
    return list(tensor_names(aten.arguments_of(node)))


def _made(node: graph_pb2.Node) -> list[str]:
    return [result.name for result in node.results if result.name]


def _is_view(node: graph_pb2.Node) -> bool:
    return bool(node.results) and all(result.alias_of for result in node.results if result.name)
