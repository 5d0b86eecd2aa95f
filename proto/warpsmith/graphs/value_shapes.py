"""Which calls of an exported forward have shapes that depend on values, and those calls written down as blocks.

The one idea: whatever has such a shape, or takes such a size, is in a block together with whoever makes it and reads
it; what goes into a block and comes out is static. Where something is written in place between its first call and its
last, the block takes all calls in between, for their order counts; else those that need a result of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from warpsmith import program_steps
from warpsmith.graphs import aten, blocks, checks, dtypes, schemas
from warpsmith.graphs.refusals import CaptureRefused, telling_where
from warpsmith.v1 import graph_pb2, tensor_pb2

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

# They give their argument's own memory where they can, which no schema says.
_MAY_VIEW = frozenset({
    "reshape", "reshape_as", "contiguous", "to", "type_as", "flatten", "ravel", "expand_as", "view_as", "unflatten",
    "squeeze", "chunk", "tensor_split", "broadcast_to", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T",
    "narrow", "float", "double", "half", "matrix_H", "mT", "mH", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d",
})  # fmt: skip

NameOf = Callable[[Any], str | None]


@dataclass(frozen=True)
class Block:
    """Calls in order."""

    nodes: tuple[torch.fx.Node, ...]
    inside: frozenset[torch.fx.Node]
    """Those of them that are made nowhere else; numbers out of static tensors may be needed outside as well."""
    outputs: tuple[torch.fx.Node, ...]
    """Calls whose results are used outside."""


@dataclass(frozen=True)
class Written:
    """A block as data."""

    graph: graph_pb2.Graph
    writes: Sequence[str]
    """Tensors that it writes in place, the first of its sources."""
    reads: Sequence[str]
    is_random: bool
    results: Mapping[torch.fx.Node, Any]
    """For each call whose results are used outside their names, nested as they come."""

    def as_call(self, unique: Callable[[str], str]) -> tuple[graph_pb2.Node, dict[str, torch.Tensor]]:
        """The call of a graph, with names that `unique` makes of these, and for each output a tensor like it."""
        like = {
            name: value
            for node, names in self.results.items()
            for name, value in zip(pytree.tree_leaves(names), pytree.tree_leaves(node.meta["val"]), strict=True)
        }
        made = {
            name: torch.empty_strided(like[name].shape, like[name].stride(), dtype=like[name].dtype, device="cpu")
            for name in self.graph.outputs
        }
        call = graph_pb2.Node(
            name=unique("block"), target=program_steps.BLOCK, random=self.is_random, mutates=self.writes
        )
        call.args.add(text=program_steps.body_text(self.graph))
        for names in (self.writes, self.reads):
            call.args.add().list.values.extend(tensor_pb2.Value(tensor=name) for name in names)
        for name, tensor in made.items():
            call.results.add(name=unique(name.replace(".", "_"))).spec.CopyFrom(dtypes.spec_of(tensor))
        return call, made


# ---- which calls ---------------------------------------------------------------------------------------------


def in_order(graph: torch.fx.Graph, given_numbers: Collection[torch.fx.Node] = ()) -> Iterator[torch.fx.Node | Block]:
    """The nodes of a graph and, in the place of those that only they make, its blocks; each behind what it is given.

    `given_numbers`: calls that are in a block though their shapes are static.
    """
    blocks = _blocks_of(graph, given_numbers)
    unmade = {node for block in blocks for node in block.inside}
    ends = {block.nodes[-1]: block for block in blocks}
    inside = frozenset(unmade)
    waiting: list[torch.fx.Node] = []
    for node in graph.nodes:
        if block := ends.get(node):
            yield block
            unmade -= block.inside
            for each in list(waiting):
                if unmade.isdisjoint(each.all_input_nodes):  # one may wait for another
                    waiting.remove(each)
                    unmade.discard(each)
                    yield each
        if node in inside:
            continue
        if unmade.isdisjoint(node.all_input_nodes):
            yield node
        else:  # a number out of what a block makes
            waiting.append(node)
            unmade.add(node)


def _blocks_of(graph: torch.fx.Graph, given_numbers: Collection[torch.fx.Node]) -> list[Block]:
    nodes = [node for node in graph.nodes if node.op == "call_function" and not _is_of_checks(node)]
    dynamic, members = set[torch.fx.Node](), set[torch.fx.Node]()
    for node in nodes:
        reads_dynamic = any(given in dynamic for given in node.all_input_nodes)
        if _has_open_shape(node) or (reads_dynamic and _is_number(node)):
            dynamic.add(node)
        if reads_dynamic or node in dynamic or node in given_numbers:
            members.add(node)
    if not members:
        return []
    numbers = {node for node in nodes if _is_number(node) and node not in dynamic}
    place = {node: at for at, node in enumerate(nodes)}
    groups = _connected(members, dynamic)
    while True:
        for group in groups:
            group.update(_numbers_for(group))
        closed = [_closed(group, numbers, nodes, place) for group in groups]
        merged: list[set[torch.fx.Node]] = []
        for group in closed:
            touching = [known for known in merged if _meet(known, group, numbers)]
            merged = [known for known in merged if known not in touching] + [group.union(*touching)]
        if merged == groups:
            return _blocks(groups, numbers, place)
        groups = merged


def _has_open_shape(node: torch.fx.Node) -> bool:
    tensors = (leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor))
    return any(isinstance(extent, torch.SymInt) for tensor in tensors for extent in tensor.shape)


def _is_number(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), _SYMBOLS)


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [user for user in node.users if not _is_of_checks(user)]


def _is_of_checks(node: torch.fx.Node) -> bool:
    return checks.is_check(node) or checks.is_only_checked(node)


def _numbers_for(members: Collection[torch.fx.Node]) -> set[torch.fx.Node]:
    """Numbers out of static tensors that members are given, which each block takes out for itself."""
    found = set[torch.fx.Node]()
    pending = list(members)
    while pending:
        for given in pending.pop().all_input_nodes:
            if given.op == "call_function" and _is_number(given) and given not in found and given not in members:
                found.add(given)
                pending.append(given)
    return found


def _connected(nodes: set[torch.fx.Node], joining: set[torch.fx.Node]) -> list[set[torch.fx.Node]]:
    """Nodes that belong together, because one of `joining` goes from one to the other."""
    groups = {node: {node} for node in nodes}
    for node in nodes:
        for given in node.all_input_nodes:
            if given in joining and groups[given] is not groups[node]:
                groups[node] |= groups[given]
                for other in groups[given]:
                    groups[other] = groups[node]
    return list({id(group): group for group in groups.values()}.values())


def _closed(
    group: set[torch.fx.Node],
    numbers: set[torch.fx.Node],
    nodes: Sequence[torch.fx.Node],
    place: Mapping[torch.fx.Node, int],
) -> set[torch.fx.Node]:
    """The group with what lies between its calls and has to."""
    places = [place[node] for node in group]
    between = nodes[min(places) : max(places) + 1]
    if any(map(_may_write, between)):
        return {*group, *between}
    closed = set(group)
    for node in between:
        if any(given in closed - numbers for given in node.all_input_nodes):
            closed.add(node)
    return closed


def _may_write(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    schema = node.target._schema
    return schema.is_mutable or schema.name.removeprefix("aten::") in aten.HIDDEN_WRITES


def _meet(one: set[torch.fx.Node], other: set[torch.fx.Node], numbers: set[torch.fx.Node]) -> bool:
    """Whether two groups have a call in common, or one takes a number out of what the other makes."""
    return any(
        not (second - numbers).isdisjoint(
            {*first - numbers, *(n for each in first & numbers for n in each.all_input_nodes)}
        )
        for first, second in ((one, other), (other, one))
    )


def _blocks(
    groups: Sequence[set[torch.fx.Node]], numbers: set[torch.fx.Node], place: Mapping[torch.fx.Node, int]
) -> list[Block]:
    """The groups as blocks. A number that only blocks need is made in none but them."""
    inside = set[torch.fx.Node]().union(*groups)
    for node in sorted(inside & numbers, key=place.__getitem__, reverse=True):
        if any(user not in inside for user in _readers(node)):
            inside.discard(node)
    blocks = []
    for group in groups:
        nodes = tuple(sorted(group, key=place.__getitem__))
        own = frozenset(group & inside)
        outputs = (n for n in nodes if n not in numbers and any(user not in own for user in _readers(n)))
        blocks.append(Block(nodes, own, tuple(outputs)))
    return blocks


# ---- written down ----------------------------------------------------------------------------------------------


def written(block: Block, given: Mapping[torch.fx.Node, Any], name_of: NameOf) -> Written:
    """A block as data; `given`: what the calls outside gave, fake tensors whose names `name_of` knows.

    Raises:
        CaptureRefused: a call, or a result that is used outside, has no form in a block.
    """
    return _Writer(block, given, name_of).write()


@dataclass(frozen=True)
class _Name:
    """A value of the block."""

    text: str


class _Writer:
    def __init__(self, block: Block, given: Mapping[torch.fx.Node, Any], name_of: NameOf) -> None:
        self._block, self._given, self._name_of = block, given, name_of
        self._graph = graph_pb2.Graph()
        self._sources: dict[str, tensor_pb2.TensorSpec] = {}
        self._values: dict[torch.fx.Node, Any] = {}
        self._roots: dict[str, str] = {}
        """For what may be a view, the value or source whose memory it is."""
        self._writes: dict[str, None] = {}
        self._is_random = False

    def write(self) -> Written:
        results = dict[torch.fx.Node, Any]()
        for node in self._block.nodes:
            with telling_where(node):
                self._values[node] = self._call(node)
        for node in self._block.outputs:
            with telling_where(node):
                results[node] = self._result(node)
        writes = [name for name in self._writes if name in self._sources]
        reads = [name for name in self._sources if name not in self._writes]
        for name in (*writes, *reads):
            self._graph.sources.add(name=name).spec.CopyFrom(self._sources[name])
        return Written(self._graph, writes, reads, self._is_random, results)

    def _value(self, node: torch.fx.Node) -> Any:
        if node in self._values:
            return self._values[node]
        return pytree.tree_map_only(torch.Tensor, self._source, self._given[node])

    def _source(self, tensor: torch.Tensor) -> _Name:
        name = self._name_of(tensor)
        assert name is not None
        self._sources.setdefault(name, dtypes.spec_of(tensor))
        return _Name(name)

    def _call(self, node: torch.fx.Node) -> Any:
        target: Any = node.target
        args, kwargs = pytree.tree_map_only(torch.fx.Node, self._value, (tuple(node.args), dict(node.kwargs)))
        if not isinstance(target, OpOverload):
            if target is blocks.PICK and not isinstance(args[0], _Name):
                return args[0][args[1]]
            return self._added(node, blocks.target_of(target), args, kwargs)
        name = target._schema.name.removeprefix("aten::")
        if target.namespace != "aten":
            aten.admit(target)
        elif name in aten.IDENTITIES and args:
            return args[0]
        args = schemas.with_cudnn(target, args)
        self._is_random |= schemas.is_random(target, args, kwargs)
        made = self._added(node, aten.INITIALISED.get(str(target), aten.target_of(target)), args, kwargs)
        return self._noted(target, name, made, schemas.written(target, args, kwargs), args)

    def _added(self, node: torch.fx.Node, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if target not in program_steps.NUMBERS and not aten.is_allowed(target):
            raise CaptureRefused(f"forward calls {target} where shapes depend on values, which is not supported")
        made = self._graph.nodes.add(name=node.name, target=target)
        made.args.extend(aten.encode(value, _text) for value in args)
        for keyword, value in kwargs.items():
            made.kwargs.add(name=keyword).value.CopyFrom(aten.encode(value, _text))
        value = node.meta.get("val")
        if not isinstance(value, (list, tuple)):
            made.results.add(name=node.name)
            return _Name(node.name)
        names = [f"{node.name}.{at}" for at in range(len(value))]  # as no call is called
        for name in names:
            made.results.add(name=name)
        return list(map(_Name, names))

    def _noted(self, target: OpOverload, name: str, made: Any, written: Sequence[Any], args: Sequence[Any]) -> Any:
        """What a call gives, once what it writes and what it may view are known."""
        self._writes |= {self._root(each.text): None for each in pytree.tree_leaves(written) if isinstance(each, _Name)}
        aliased = [given.alias_info for given in target._schema.returns if given.alias_info is not None]
        if isinstance(made, _Name) and any(alias.is_write for alias in aliased):
            return written[0]
        first = next((each for each in args if isinstance(each, _Name)), None)
        if first is not None and (aliased or name in _MAY_VIEW):
            self._roots |= {each.text: self._root(first.text) for each in pytree.tree_leaves(made)}
        return made

    def _root(self, name: str) -> str:
        return self._roots.get(name, name)

    # -- what comes out

    def _result(self, node: torch.fx.Node) -> Any:
        shapes = [leaf for leaf in pytree.tree_leaves(node.meta["val"]) if not isinstance(leaf, torch.Tensor)]
        if shapes or _has_open_shape(node):
            raise CaptureRefused(
                "forward returns a tensor whose shape depends on values, or such a size: return all of it under a mask "
                "(torch.where), or leave that step outside of the module"
            )
        return pytree.tree_map_only(_Name, self._out, self._values[node])

    def _out(self, name: _Name) -> str:
        """The name under which a value leaves: a source's own, or one of the outputs, in memory of its own."""
        text = name.text
        if text in self._sources:
            return text
        if self._root(text) != text:
            copy = f"{text}.out"
            if all(node.name != copy for node in self._graph.nodes):
                made = self._graph.nodes.add(name=copy, target="aten.clone.default")
                made.args.add(tensor=text)
                made.results.add(name=copy)
            text = copy
        if text not in self._graph.outputs:
            self._graph.outputs.append(text)
        return text


def _text(value: Any) -> str | None:
    return value.text if isinstance(value, _Name) else None
