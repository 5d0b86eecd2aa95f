"""Where a graph brings tensors together: what it stacks, joins, or writes into the parts of one that it made empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import arguments, operation
from warpsmith.v1 import graph_pb2

_JOINING = ("aten.stack.default", "aten.cat.default")
_MAKING = frozenset({"full", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "zeros", "zeros_like"})
"""Operations that read no values."""


@dataclass(frozen=True)
class Join:
    """Tensors of one shape beside each other."""

    result: str
    lanes: tuple[str, ...]
    dim: int
    is_new: bool
    """Whether the dimension is one that lanes do not have."""
    calls: frozenset[str]
    """Calls that are there for it alone."""


def joins(index: GraphIndex, begin: int) -> Iterator[Join]:
    """All that ends behind a place in the graph, in order, of at least two tensors."""
    parts = _parts_that_are_written(index)
    for node in index.graph.nodes:
        if node.name in parts:
            yield from _filled(index, node, parts[node.name])
        elif node.target in _JOINING and index.position[node.name] > begin:
            result, given = node.results[0].name, arguments(node)
            lanes = tuple(each.name for each in given["tensors"])
            if len(lanes) > 1 and index.is_pure(node.name) and not index.is_written(result):
                is_new = operation(node) == "stack"
                rank = len(index.spec(lanes[0]).shape) + is_new
                yield Join(result, lanes, given["dim"] % rank, is_new, frozenset([node.name]))


def _parts_that_are_written(index: GraphIndex) -> dict[str, list[graph_pb2.Node]]:
    """For each call that makes a tensor without reading any, the copies into its memory, if nothing else writes it."""
    found: dict[str, list[graph_pb2.Node]] = {}
    others = set[str]()
    for node in index.graph.nodes:
        for root in index.writes(node.name):
            maker = index.producer(root)
            if node.target != "aten.copy_.default" or maker is None:
                others.add(maker or "")
            else:
                found.setdefault(maker, []).append(node)
    return {
        name: copies
        for name, copies in found.items()
        if name not in others and operation(index.nodes[name]) in _MAKING and not index.is_view(name)
    }


def _filled(index: GraphIndex, node: graph_pb2.Node, copies: list[graph_pb2.Node]) -> Iterator[Join]:
    """The join that copies into each element of a dimension are, where nothing looks at the tensor before the last."""
    base, lanes, places = node.results[0].name, dict[int, str](), set[tuple[str, int]]()
    for copy in copies:
        view, source = copy.args[0].tensor, copy.args[1].tensor
        part = index.nodes[index.producer(view) or node.name]
        if part.target != "aten.select.int" or part.args[0].tensor != base or index.users(view) != [copy.name]:
            return
        if index.users(copy.results[0].name) or {view, copy.results[0].name} & index.outputs:
            return
        own, given = index.spec(view), index.spec(source)
        if own.dtype != given.dtype or list(own.shape) != list(given.shape):
            return
        dim = arguments(part)["dim"] % len(index.spec(base).shape)
        lanes[arguments(part)["index"] % index.spec(base).shape[dim]] = source
        places.add((part.name, dim))
    dims = {dim for _, dim in places}
    last = max(index.position[copy.name] for copy in copies)
    others = {*index.users(base)} - {name for name, _ in places}
    if len(dims) != 1 or len(copies) != len(lanes) or any(index.position[user] < last for user in others):
        return
    (dim,) = dims
    if len(lanes) == index.spec(base).shape[dim] > 1:
        calls = frozenset([node.name, *(copy.name for copy in copies)])
        yield Join(base, tuple(lanes[place] for place in range(len(lanes))), dim, True, calls)
