"""Calls that write a source in place, one after the other, as calls that make new tensors and one copy at the end.

The one idea: an optimizer scales a moment, adds to it and reads it, in place each time, so that each step has to be a
pass over memory. As plain calls they fuse, and what is written back is one more store of the same kernel. The value
stays; it is no algebra.
"""

from __future__ import annotations

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Replacement
from warpsmith.errors import BadInput
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2

_COPY = "aten.copy_.default"


def out_of_place(index: GraphIndex) -> list[Replacement]:
    """For each source that is written more than once, or read by the name of what was written: its calls anew."""
    writers: dict[str, list[graph_pb2.Node]] = {}
    for node in index.nodes.values():
        for tensor in node.mutates:
            writers.setdefault(index.root[tensor], []).append(node)
    found: list[Replacement] = []
    for source, nodes in writers.items():
        if source in index.sources and not (len(nodes) == 1 and index.writes_back(nodes[0].name)):
            found += _of_source(index, source, nodes)
    return found


def writers(index: GraphIndex) -> dict[str, set[str]]:
    """Memory that is written in place → the calls that do it."""
    found: dict[str, set[str]] = {}
    for name in index.nodes:
        for root in index.writes(name):
            found.setdefault(root, set()).add(name)
    return found


def with_new_results(index: GraphIndex) -> GraphIndex:
    """The graph in which calls that write over what nobody reads after them make new tensors instead, as far as they
    have such a form of the same type and layout; itself where none does."""
    draft, new = Draft(index), dict[str, graph_pb2.Node]()
    for node in index.graph.nodes:
        if node.mutates and index.is_pure(node.name) and len(node.results) == 1 and _pure(node.target):
            made = _with_new_result(index, draft, node)
            new |= {node.name: made} if made is not None else {}
    if not new:
        return index
    graph = graph_pb2.Graph()
    graph.CopyFrom(index.graph)
    del graph.nodes[:]
    graph.nodes.extend(new.get(node.name, node) for node in index.graph.nodes)
    return GraphIndex(graph, allows_tf32=index.allows_tf32)


def _with_new_result(index: GraphIndex, draft: Draft, node: graph_pb2.Node) -> graph_pb2.Node | None:
    made = graph_pb2.Node()
    made.CopyFrom(node)
    made.target = _pure(node.target)
    del made.mutates[:]
    made.results[0].alias_of = ""
    try:
        draft.take(made)
    except (BadInput, RuntimeError):
        return None
    return made if draft.nodes[-1].results[0].spec == index.spec(node.results[0].name) else None


def _of_source(index: GraphIndex, source: str, nodes: list[graph_pb2.Node]) -> list[Replacement]:
    """Nothing where another name shows its memory, the source is read after it was written, or a call has no other
    form of the same type and layout."""
    results = [node.results[0].name for node in nodes if len(node.results) == 1]
    names = {name for name, root in index.root.items() if root == source}
    is_chain = [list(node.mutates) for node in nodes] == [[name] for name in (source, *results[:-1])]
    if not is_chain or names != {source, *results} or any(name in index.outputs for name in names):
        return []
    begin = index.position[nodes[0].name]
    if any(index.position[user] > begin for user in index.users(source)):
        return []
    draft = Draft(index)
    for node in nodes:
        if not _pure(node.target) or _with_new_result(index, draft, node) is None:
            return []
    back = graph_pb2.Node(name=draft.free(f"{source}_written"), target=_COPY, mutates=[source])
    back.args.add(tensor=source)
    back.args.add(tensor=results[-1])
    back.results.add(name=back.name, alias_of=source).spec.CopyFrom(index.spec(source))
    *first, last = (Replacement((node.name,), (made,)) for node, made in zip(nodes, draft.nodes, strict=True))
    return [*first, Replacement(last.removed, (*last.added, back))]


def _pure(target: str) -> str:
    """The operation that makes a new tensor, element by element; "" where there is none.

    Others, such as a write into a part of a cache, would make all of it anew.
    """
    namespace, name, overload = target.split(".")
    made = f"{namespace}.{name.removesuffix('_')}.{overload}"
    try:
        tags = aten.resolve(made).tags
    except BadInput:
        return ""
    return made if name.endswith("_") and target != _COPY and torch.Tag.pointwise in tags else ""
