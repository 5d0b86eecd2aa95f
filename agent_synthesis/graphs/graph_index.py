"""A captured graph with its lookups: who makes, reads, views and writes a tensor.

A graph is data in order of execution; this adds nothing to it and changes nothing in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from warpsmith.graphs import aten, dtypes, kept
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2, tensor_pb2


class GraphIndex:
    """Lookups over a graph that no longer changes. Equal graphs have equal `digest`.

    `allows_tf32`: whether products of floats may round their factors to TF32, as the task says.
    """

    def __init__(self, graph: graph_pb2.Graph, *, allows_tf32: bool = False) -> None:
        self.graph = graph
        self.allows_tf32 = allows_tf32
        self.digest = graph.digest
        self.known: dict[object, Any] = {}
        """What others have worked out of the graph, by keys of theirs: kept as long as its lookups are."""
        self.nodes = {node.name: node for node in graph.nodes}
        self.position = {node.name: position for position, node in enumerate(graph.nodes)}
        self.sources = {source.name: source for source in graph.sources}
        self.outputs = frozenset(graph.outputs)
        self.root = aten.roots(graph)
        self._names: dict[str, list[str]] = {}
        """Memory → the tensors that lie in it."""
        for name, root in self.root.items():
            self._names.setdefault(root, []).append(name)
        self._specs = {source.name: source.spec for source in graph.sources}
        self._producer: dict[str, str] = {}
        self._outside: dict[tuple[str, ...], list[str]] = {}
        self._users: dict[str, list[str]] = {}
        self._reads: dict[str, list[str]] = {}
        for node in graph.nodes:
            self._reads[node.name] = list(dict.fromkeys(tensor_names(aten.arguments_of(node))))
            for name in self._reads[node.name]:
                self._users.setdefault(name, []).append(node.name)
            for result in node.results:
                if result.name:
                    self._specs[result.name] = result.spec
                    self._producer[result.name] = node.name
        self._written = frozenset(self.root[name] for node in graph.nodes for name in node.mutates)
        self._is_view = {node.name: self._views(node) for node in graph.nodes}
        self._is_pure = {node.name: self._purity(node) for node in graph.nodes}
        self._writes_back = {node.name: self._backward(node) for node in graph.nodes}

    def spec(self, tensor: str) -> tensor_pb2.TensorSpec:
        """Type and layout of a tensor."""
        return self._specs[tensor]

    def producer(self, tensor: str) -> str | None:
        """The node that makes the tensor; None for a source."""
        return self._producer.get(tensor)

    def users(self, tensor: str) -> Sequence[str]:
        """Nodes that read the tensor, in order."""
        return self._users.get(tensor, ())

    def reads(self, node: str) -> Sequence[str]:
        """Tensors that a node reads, in order of its arguments."""
        return self._reads[node]

    def results(self, node: str) -> list[str]:
        """Tensors that a node makes."""
        return [result.name for result in self.nodes[node].results if result.name]

    def is_view(self, node: str) -> bool:
        """Whether a node only looks at memory in another way: it belongs to the nodes that read it."""
        return self._is_view[node]

    def writes(self, node: str) -> frozenset[str]:
        """Memory (named by its owner) that a node writes in place."""
        return frozenset(self.root[name] for name in self.nodes[node].mutates)

    def is_pure(self, node: str) -> bool:
        """Whether a node may be computed elsewhere, later or twice: it is not random and writes nothing that
        shows.

        An in-place operation on an intermediate (`relu_`) is pure when nothing reads the old tensor after
        it: a kernel may then write its result to other memory.
        """
        return self._is_pure[node]

    def is_written(self, tensor: str) -> bool:
        """Whether some call writes to the tensor's memory in place."""
        return self.root[tensor] in self._written

    def writes_back(self, node: str) -> bool:
        """Whether all that a node writes in place are whole sources that nothing else names, as a batch norm does.

        A kernel may then do it, once and in its place in the order; nothing may compute it again.
        """
        return self._writes_back[node]

    def _backward(self, node: graph_pb2.Node) -> bool:
        if node.random or not node.mutates or any(name not in self.sources for name in node.mutates):
            return False
        written = set(node.mutates)
        shown = [result.name for result in node.results if result.alias_of and result.name]
        if any(name in self.outputs or self._users.get(name) for name in shown):
            return False
        others = {name for root in written for name in self._names.get(root, ())} - written
        return others <= set(shown)

    @functools.cached_property
    def kept_calls(self) -> frozenset[str]:
        """Calls that depend on parameters, state and constants alone."""
        return kept.kept_calls(self.graph, prepared=True)

    @functools.cached_property
    def constant_calls(self) -> frozenset[str]:
        """Calls that depend on constants alone."""
        return kept.kept_calls(self.graph, prepared=False)

    @functools.cached_property
    def of_forward(self) -> frozenset[str]:
        """Of a training step, calls whose results are wanted before gradients are given; of another graph, none."""
        graph = self.graph
        if not graph.gradients:
            return frozenset()
        writers = [name for name, node in self.nodes.items() if node.mutates and name not in self.of_backward]
        pending, found = [*graph.outputs[: graph.forward_outputs]], set(writers)
        pending += (tensor for name in writers for tensor in self._reads[name])
        while pending:
            maker = self._producer.get(pending.pop())
            if maker is not None and maker not in found:
                found.add(maker)
                pending += self._reads[maker]
        return frozenset(found)

    @functools.cached_property
    def of_backward(self) -> frozenset[str]:
        """Of a training step, calls that need a given gradient; of another graph, none."""
        tensors, found = {*self.graph.gradients}, set[str]()
        for name in self.nodes:
            if not tensors.isdisjoint(self._reads[name]):
                found.add(name)
                tensors |= {*self.results(name)}
        return frozenset(found)

    def is_overwritten(self, node: str) -> bool:
        """Whether a call writes in place to memory that the node makes, in a way that later reads must see."""
        made = {self.root[tensor] for tensor in self.results(node)}
        return not made.isdisjoint(self._visibly_written)

    @functools.cached_property
    def _visibly_written(self) -> frozenset[str]:
        """Memory that calls write in a way that later reads must see."""
        return frozenset(root for node in self.nodes if not self.is_pure(node) for root in self.writes(node))

    @functools.cached_property
    def tied(self) -> frozenset[str]:
        """Calls that others must stay before or behind for another reason than data (`ordered_pairs`)."""
        return frozenset(name for first, second, _ in self.ordered_pairs for name in (first, second))

    def _purity(self, node: graph_pb2.Node) -> bool:
        if node.random:
            return False
        if not node.mutates:
            return True
        target = node.args[0].tensor if node.args else ""
        if list(node.mutates) != [target] or [result.alias_of for result in node.results] != [target]:
            return False
        owner, position = self.root[target], self.position[node.name]
        if owner in self.sources or self.is_view(self._producer[target]):
            return False
        # Names of the same memory: the target, what came before it in place, and views of those.
        others = [name for name in self._names[owner] if self._made_at(name) < position]
        if any(name in self.outputs for name in others):
            return False
        return all(self.position[user] <= position for name in others for user in self.users(name))

    def _made_at(self, tensor: str) -> int:
        maker = self._producer.get(tensor)
        return -1 if maker is None else self.position[maker]

    @functools.cached_property
    def ordered_pairs(self) -> list[tuple[str, str, frozenset[str]]]:
        """(earlier call, later call, in-place calls of the two that are why) for all whose order matters beside data.

        Calls that touch memory which one of them writes, and random calls, which draw from one generator; those
        have no writers, because nothing takes away their reason.
        """
        written: dict[str, list[str]] = {}
        for name in self.nodes:
            for root in self.writes(name):
                written.setdefault(root, []).append(name)
        pairs = []
        for name in self.nodes:
            if self.is_view(name):
                continue
            touched = {self.root[tensor] for tensor in self._reads[name]} | self.writes(name)
            for root in touched & written.keys():
                for writer in written[root]:
                    if writer != name:
                        earlier, later = sorted((writer, name), key=self.position.__getitem__)
                        pairs.append((earlier, later, self._pure_writers(root, writer, name)))
        random = [name for name, node in self.nodes.items() if node.random]
        return list(dict.fromkeys(pairs)) + [(a, b, frozenset()) for a, b in itertools.pairwise(random)]

    def _pure_writers(self, root: str, *names: str) -> frozenset[str]:
        """Of some calls, those that write the memory; empty when one of them can do so in no other way."""
        writers = {name for name in names if root in self.writes(name)}
        return frozenset(writers if all(self.is_pure(name) for name in writers) else ())

    def base_tensors(self, tensors: Iterable[str]) -> tuple[list[str], list[str]]:
        """(tensors that are no view's result, views between them and the given ones in order of
        execution)."""
        bases: dict[str, None] = {}
        views: set[str] = set()
        pending = list(tensors)
        while pending:
            tensor = pending.pop(0)
            maker = self._producer.get(tensor)
            if maker is None or not self._is_view[maker]:
                bases[tensor] = None
            elif maker not in views:
                views.add(maker)
                pending += self._reads[maker]
        return list(bases), sorted(views, key=self.position.__getitem__)

    def reads_from_outside(self, nodes: tuple[str, ...]) -> list[str]:
        """Tensors that some calls read and do not make, views seen through to what they look at."""
        found = self._outside.get(nodes)
        if found is None:
            made = {tensor for node in nodes for tensor in self.results(node)}
            bases, _ = self.base_tensors(tensor for node in nodes for tensor in self._reads[node])
            found = self._outside[nodes] = [tensor for tensor in bases if tensor not in made]
        return found

    def constant_value(self, tensor: str) -> float | int | bool | None:
        """The value of a constant of one element that nothing writes; None for any other tensor."""
        source = self.sources.get(tensor)
        if source is None or source.origin != graph_pb2.ORIGIN_CONSTANT:
            return None
        if any(extent != 1 for extent in source.spec.shape) or tensor in self._written:
            return None
        value: float | int | bool = aten.constant(source, torch.device("cpu")).item()
        return value

    def _views(self, node: graph_pb2.Node) -> bool:
        if node.mutates or node.random or not node.results:
            return False
        return all(not result.name or result.alias_of for result in node.results)


def byte_count(spec: tensor_pb2.TensorSpec) -> int:
    """Bytes of a tensor's distinct elements: an expanded dimension counts once."""
    count = dtypes.to_torch(spec.dtype).itemsize
    for extent, stride in zip(spec.shape, spec.strides, strict=True):
        count *= extent if stride else min(extent, 1)
    return count
