"""Calls of a graph read and written: arguments by name, and new calls whose results have the shapes PyTorch gives them.

Rules speak in these words; nothing here knows an identity of algebra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from agent_synthesis.graphs.graph_index import GraphIndex
from warpsmith.graphs import aten, dtypes, result_specs
from warpsmith.v1 import graph_pb2, tensor_pb2


@dataclass(frozen=True)
class Named:
    """A tensor of the graph, where a call's arguments are Python values."""

    name: str


@dataclass(frozen=True)
class Replacement:
    """Calls that go, and calls that come in the place of the last of them, in order."""

    removed: tuple[str, ...]
    added: tuple[graph_pb2.Node, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensor that goes → tensor that is read in its stead."""


def arguments(node: graph_pb2.Node) -> dict[str, Any]:
    """Every argument of a call by ATen's name for it and in ATen's order, defaults included; tensors are `Named`.

    None of an operation outside ATen, whose schema its own module's process alone knows.
    """
    if aten.is_outside(node.target):
        return {}
    schema = aten.resolve(node.target)._schema.arguments

    def named(tensor: str) -> Any:
        return Named(tensor)

    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    for argument, value in zip(schema, node.args, strict=False):
        found[argument.name] = aten.decode(value, named)
    found |= {each.name: aten.decode(each.value, named) for each in node.kwargs}
    return {argument.name: found[argument.name] for argument in schema}


def operation(node: graph_pb2.Node | None) -> str:
    """The operation without its overload, such as "sum"; "" for no call."""
    return aten.operation(node.target) if node is not None else ""


def maker(index: GraphIndex, tensor: object) -> graph_pb2.Node | None:
    """The call that makes a tensor; None for a source or a number."""
    name = index.producer(tensor.name) if isinstance(tensor, Named) else None
    return None if name is None else index.nodes[name]


def only_use(index: GraphIndex, tensor: object, user: str) -> graph_pb2.Node | None:
    """The call that makes a tensor which only `user` reads and nothing writes in place."""
    node = maker(index, tensor)
    if node is None or not isinstance(tensor, Named) or list(index.users(tensor.name)) != [user]:
        return None
    if tensor.name in index.outputs or index.is_written(tensor.name) or not index.is_pure(node.name):
        return None
    return node


def shape(index: GraphIndex, tensor: object) -> list[int]:
    """Extents of a tensor; none for a number."""
    return list(index.spec(tensor.name).shape) if isinstance(tensor, Named) else []


def dims_of(value: object, rank: int) -> list[int]:
    """The dimensions that an argument `dim` names, sorted; all for None and for an empty list."""
    if value is None or value == []:
        return list(range(rank))
    return sorted({dim % max(rank, 1) for dim in ([value] if isinstance(value, int) else list(value))})  # type: ignore[call-overload]


class Draft:
    """New calls in order; each is tried on tensors without data, so that its results have their real layouts."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._made: dict[str, torch.Tensor] = {}
        self.nodes: list[graph_pb2.Node] = []

    def call(self, name: str, target: str, *args: Any, **kwargs: Any) -> Named:
        """Adds a call with one result of the same name. Raises BadInput, or what ATen raises on bad arguments."""
        return self.calls(name, [name], target, *args, **kwargs)[0]

    def calls(self, name: str, results: Sequence[str], target: str, *args: Any, **kwargs: Any) -> list[Named]:
        """Adds a call with several results, of which some have names: "" for one that nobody reads. Raises likewise.

        They are laid out as on a processor unless it is drafted within `result_specs.known`.
        """
        call = call_of(name, target, args, kwargs)
        if (laid_out := result_specs.SHAPES.get(aten.resolve(target))) is None:
            return self._add(call, results, aten.call(target, call.args, call.kwargs, self.meta, torch.device("meta")))
        given, named = pytree.tree_map_only(Named, lambda each: self.meta(each.name), (args, kwargs))
        return self._add(call, results, laid_out(*given, **named))

    def into(self, name: str, target: str, of: Named, *args: Any, **kwargs: Any) -> Named:
        """Adds a call that writes its result over `of`, which is its first argument and may be its `out` too.

        It is not tried: the result lies as `of` does, and PyTorch 2.11 cannot try `addmm.dtype_out`.
        """
        call = call_of(name, target, (of, *args), kwargs)
        call.mutates.append(of.name)
        [result] = self._add(call, [name], [self.meta(of.name)])
        call.results[0].alias_of = of.name
        return result

    def _add(self, call: graph_pb2.Node, names: Sequence[str], results: Sequence[torch.Tensor | None]) -> list[Named]:
        for name, result in zip(names, results, strict=True):
            assert result is not None
            call.results.add(name=name, spec=dtypes.spec_of(result) if name else None)
            self._made |= {name: result} if name else {}
        self.nodes.append(call)
        return [Named(name) for name in names]

    def take(self, node: graph_pb2.Node) -> None:
        """Adds a call of one result as it is, with the layout that it has. Raises what ATen raises on bad arguments."""
        result = aten.call(node.target, node.args, node.kwargs, self.meta, torch.device("meta"))[0]
        assert result is not None
        self._made[node.results[0].name] = result
        node.results[0].spec.CopyFrom(dtypes.spec_of(result))
        self.nodes.append(node)

    def view(self, name: str, target: str, of: Named, *args: Any) -> Named:
        """Adds a call that only looks at `of` in another way."""
        result = self.call(name, target, of, *args)
        self.nodes[-1].results[0].alias_of = of.name
        return result

    def free(self, name: str) -> str:
        """The name, or one like it that nothing in the graph or the draft has."""
        while name in self._index.root or name in self._index.nodes or name in self._made:
            name += "_"
        return name

    def name_last(self, name: str) -> None:
        """Has the last call's result, which no other reads, be called so."""
        self.rename(Named(self.nodes[-1].name), name)

    def rename(self, made: Named, name: str) -> None:
        """Has the result of a call of that name, which no other reads, be called so."""
        call = next(node for node in self.nodes if node.name == made.name)
        self._made[name] = self._made.pop(call.name)
        call.name = call.results[0].name = name

    def meta(self, name: str) -> torch.Tensor:
        """A tensor without data, as one of the graph or of this draft lies."""
        if name not in self._made:
            spec = self._index.spec(name)
            self._made[name] = torch.empty_strided(
                list(spec.shape), list(spec.strides), dtype=dtypes.to_torch(spec.dtype), device="meta"
            )
        return self._made[name]


def call_of(name: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> graph_pb2.Node:
    """A call without results yet."""
    named = [tensor_pb2.NamedValue(name=key, value=aten.encode(value, _name_of)) for key, value in kwargs.items()]
    return graph_pb2.Node(name=name, target=target, args=[aten.encode(value, _name_of) for value in args], kwargs=named)


def _name_of(value: object) -> str | None:
    return value.name if isinstance(value, Named) else None


def replaced(graph: graph_pb2.Graph, made: Replacement) -> graph_pb2.Graph:
    """The graph after a replacement, its digest not yet renewed."""
    result = graph_pb2.Graph()
    result.CopyFrom(graph)
    del result.nodes[:]
    for node in graph.nodes:
        if node.name == made.removed[-1]:
            result.nodes.extend(made.added)
        if node.name not in made.removed:
            kept = result.nodes.add()
            kept.CopyFrom(node)
            rename(kept, made.renamed)
    result.outputs[:] = [made.renamed.get(name, name) for name in graph.outputs]
    return result


def rename(node: graph_pb2.Node, names: Mapping[str, str]) -> None:
    """Has a call read and write other tensors, by name."""
    pending = aten.arguments_of(node)
    while pending:
        value = pending.pop()
        if value.WhichOneof("kind") == "tensor" and value.tensor in names:
            value.tensor = names[value.tensor]
        pending.extend(value.list.values)
    for result in node.results:
        result.alias_of = names.get(result.alias_of, result.alias_of)
    node.mutates[:] = [names.get(name, name) for name in node.mutates]
