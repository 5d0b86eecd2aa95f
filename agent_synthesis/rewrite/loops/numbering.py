"""Tensors of a graph that are equal whatever is given: each is known by the first of its kind.

The one idea: calls are hashed by what they compute of what (value numbering), in one pass. A loop that was unrolled
reads `x[:, t, :]` by a slice of its own in each step, and turns its weight over anew.
"""

from __future__ import annotations

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Named, operation
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2, tensor_pb2

_SAME = frozenset({"alias", "contiguous", "detach", "dropout", "expand", "reshape", "slice", "to", "view"})
"""Views that show their whole tensor as it is where type and layout stay."""


class Numbering:
    """Of each tensor the first that is equal to it, itself where none is."""

    def __init__(self, index: GraphIndex) -> None:
        self._index, self._first = index, dict[str, str]()
        self._calls: dict[bytes, graph_pb2.Node] = {}
        for node in index.graph.nodes:
            self._number(node)

    @staticmethod
    def of(index: GraphIndex) -> Numbering:
        """That of a graph, made once."""
        made: Numbering = index.known.get(Numbering) or Numbering(index)
        index.known[Numbering] = made
        return made

    def first(self, tensor: str) -> str:
        """The first tensor that is equal to this."""
        return self._first.get(tensor, tensor)

    def maker(self, tensor: object) -> graph_pb2.Node | None:
        """The call that makes the first tensor that is equal; None for a source, a number, and memory that is written
        in place, which may hold something else by now."""
        if not isinstance(tensor, Named) or self._index.is_written(tensor.name):
            return None
        name = self._index.producer(self.first(tensor.name))
        return None if name is None else self._index.nodes[name]

    def _number(self, node: graph_pb2.Node) -> None:
        index = self._index
        names = [result.name for result in node.results]
        tensors = [*index.reads(node.name), *filter(None, names)]
        if not all(names) or not index.is_pure(node.name) or any(map(index.is_written, tensors)):
            return
        if _shows_all(index, node):
            self._first[names[0]] = self.first(node.args[0].tensor)
            return
        key = graph_pb2.Node(target=node.target, args=node.args, kwargs=node.kwargs)
        pending = aten.arguments_of(key)
        while pending:
            value = pending.pop()
            if value.WhichOneof("kind") == "tensor":
                value.tensor = self.first(value.tensor)
            pending.extend(value.list.values)
        first = self._calls.setdefault(key.SerializeToString(deterministic=True), node)
        for own, other in zip(names, first.results, strict=True):
            self._first[own] = other.name


def _shows_all(index: GraphIndex, node: graph_pb2.Node) -> bool:
    if operation(node) not in _SAME or len(node.results) != 1 or not node.results[0].alias_of:
        return False
    spec: tensor_pb2.TensorSpec = node.results[0].spec
    return node.args[0].WhichOneof("kind") == "tensor" and index.spec(node.args[0].tensor) == spec
