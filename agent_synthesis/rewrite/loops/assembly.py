"""A replacement of calls that stand far apart: what else goes with them, what moves behind them, in which order.

The one idea: what nobody reads any more goes, what reads the new results and stood before the last call that goes comes
anew behind them, and what comes is sorted by data. Linear in the graph; knows no identity of algebra.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch

from agent_synthesis.graphs import in_place
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, rename
from warpsmith.graphs import aten
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2


def assembled(
    index: GraphIndex,
    draft: Draft,
    gone: Set[str],
    dependents: Set[str],
    elements: Mapping[str, tuple[Named, int]],
    renamed: Mapping[str, str],
) -> Replacement | None:
    """The replacement of the calls that are `gone` by those of a draft; None where one would move that writes, draws or
    reads what is written.

    `dependents`: tensors that depend on what goes. `elements`: tensors that calls which go have made, as an element of
    another along its first dimension. `renamed`: as in a `Replacement`.
    """
    kept = [node for node in index.graph.nodes if node.name not in gone]
    needed = _read(index, [*kept, *draft.nodes], renamed, elements)
    removed = {*gone}
    for node in kept:
        if not _is_told(index, node) and needed.isdisjoint(index.results(node.name)):
            removed.add(node.name)
    new = [node for node in draft.nodes if any(result.name in needed for result in node.results)]
    for node in new:
        for result in node.results:
            if result.name not in needed:
                result.Clear()
    made = len(draft.nodes)
    for name in elements:
        if name in needed and not _as_element(index, draft, name, elements):
            return None
    new += draft.nodes[made:]
    writers = in_place.writers(index)
    end = max(map(index.position.__getitem__, removed))
    for node in kept:
        if index.position[node.name] > end or node.name in removed or dependents.isdisjoint(index.results(node.name)):
            continue
        roots = map(index.root.__getitem__, index.reads(node.name))
        if not index.is_pure(node.name) or node.mutates or any(writers.get(root, gone) - gone for root in roots):
            return None
        removed.add(node.name)
        moved = graph_pb2.Node()
        moved.CopyFrom(node)
        rename(moved, renamed)
        new.append(moved)
    return Replacement(tuple(sorted(removed, key=index.position.__getitem__)), tuple(_sorted(new)), renamed)


def dependents_of(index: GraphIndex, tensors: Iterable[str], first: str) -> set[str]:
    """Tensors that depend on some, by data or by memory that is written, with them; a call named `first` makes the
    first of them."""
    found, written = {*tensors}, set[str]()
    for node in index.graph.nodes[index.position[first] :]:
        reads = index.reads(node.name)
        if not found.isdisjoint(reads) or not written.isdisjoint(map(index.root.__getitem__, reads)):
            found.update(index.results(node.name))
            written |= index.writes(node.name)
    return found


def _read(
    index: GraphIndex,
    nodes: Sequence[graph_pb2.Node],
    renamed: Mapping[str, str],
    elements: Mapping[str, tuple[Named, int]],
) -> set[str]:
    """Tensors that are read for an output or for what is written or drawn, if the graph had these calls."""
    makers = {result.name: node for node in nodes for result in node.results if result.name}
    told = [node for node in nodes if node.name in index.nodes and _is_told(index, node)]
    pending = [*index.graph.outputs, *(tensor for node in told for tensor in tensor_names(aten.arguments_of(node)))]
    found = set[str]()
    while pending:
        tensor = pending.pop()
        tensor = renamed.get(tensor, tensor)
        if tensor in found:
            continue
        found.add(tensor)
        if tensor in elements and tensor not in makers:
            pending.append(elements[tensor][0].name)
        elif tensor in makers:
            pending += tensor_names(aten.arguments_of(makers[tensor]))
    return found


def _is_told(index: GraphIndex, node: graph_pb2.Node) -> bool:
    """Whether a call does something else than to make results."""
    return not index.is_pure(node.name) or not index.results(node.name)


def _as_element(index: GraphIndex, draft: Draft, name: str, elements: Mapping[str, tuple[Named, int]]) -> bool:
    """Adds a tensor as what it is an element of has it: as a view, or where an output shows it and the other has more
    to show, as a copy. Whether it has its layout."""
    of, place = elements[name]
    is_shown = index.root[name] in {index.root[output] for output in index.outputs}
    if is_shown and len(draft.meta(of.name)) > 1:
        view = draft.view(draft.free(f"{name}_view"), "aten.select.int", of, 0, place)
        draft.call(name, "aten.clone.default", view, memory_format=torch.contiguous_format)
    else:
        draft.view(name, "aten.select.int", of, 0, place)
    return draft.nodes[-1].results[0].spec == index.spec(name)


def _sorted(nodes: Sequence[graph_pb2.Node]) -> Iterator[graph_pb2.Node]:
    """Calls behind what they read, else in the order given."""
    makers = {result.name: node for node in nodes for result in node.results if result.name}
    begun, ended = set[str](), set[str]()
    for node in nodes:
        pending = [node]
        while pending:
            last = pending[-1]
            reads = [makers[name] for name in tensor_names(aten.arguments_of(last)) if name in makers]
            waits = [each for each in reads if each.name not in begun]
            begun.add(last.name)
            if waits:
                pending += waits[::-1]
                continue
            pending.pop()
            if last.name not in ended:
                ended.add(last.name)
                yield last
