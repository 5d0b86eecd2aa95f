"""What a training step keeps between its forward and its backward, and what the backward computes again.

The one idea: what is kept is written once and read once, what is computed again costs what it reads, so the least
traffic is a minimum cut between what the forward has at hand and what the backward reads. Source of the form: "Optimal
Checkpointing as a min-cut" of PyTorch's own partitioner (functorch's `min_cut_rematerialization_partition`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import networkx

from agent_synthesis.graphs import decompositions, in_place
from agent_synthesis.graphs.graph_index import GraphIndex, byte_count
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.analysis.convolution import convolves
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import multiplies_matrices
from agent_synthesis.plans import fusion
from agent_synthesis.plans.plan import Plan
from agent_synthesis.rewrite import with_replacement
from agent_synthesis.rewrite.calls import Replacement, rename
from warpsmith.v1 import graph_pb2

_BEGIN, _END = ("begin",), ("end",)


def saved(index: GraphIndex) -> list[str]:
    """Tensors that the forward makes and the backward reads, in order; views are seen through."""
    read = [tensor for node in index.nodes if node not in index.of_forward for tensor in index.reads(node)]
    read += index.graph.outputs[index.graph.forward_outputs :]
    bases, _ = index.base_tensors(dict.fromkeys(read))
    found = {tensor for tensor in bases if index.producer(tensor) in index.of_forward}
    return [tensor for node in index.nodes for tensor in index.results(node) if tensor in found]


def saved_bytes(index: GraphIndex) -> int:
    """Memory that a step holds from its forward to its backward, beside what it is given and gives."""
    return sum(byte_count(index.spec(tensor)) for tensor in saved(index) if tensor not in index.outputs)


def with_least_traffic(plan: Plan) -> Plan:
    """The plan whose backward computes again what costs less than to write it down and read it.

    Only calls of single elements are computed again, and only for kernels that take them in.
    """
    if not plan.index.graph.gradients or any(group.engine != "library" for group in plan.groups):
        return plan
    plan = _with_kernels_for(_with_parts(with_new_results(plan)))
    index = plan.index
    again = _computed_again(index)
    if not again:
        return plan
    return _without_unread(with_replacement(plan, *_copied(index, again)))


def with_new_results(plan: Plan) -> Plan:
    """The plan whose calls make new tensors where they wrote over what nobody reads after them: what a norm's
    derivative is made of can be computed again then."""
    if not plan.index.graph.gradients:
        return plan
    made = in_place.with_new_results(plan.index).nodes
    found = [Replacement((name,), (made[name],)) for name, node in plan.index.nodes.items() if node != made[name]]
    return with_replacement(plan, *found) if found else plan


def _without_unread(plan: Plan) -> Plan:
    """The plan without calls whose results nobody reads any more."""
    index = plan.index
    unread = [
        Replacement((name,))
        for name in index.nodes
        if index.is_pure(name) and not any(index.users(each) or each in index.outputs for each in index.results(name))
    ]
    return _without_unread(with_replacement(plan, *unread)) if unread else plan


def _with_parts(plan: Plan) -> Plan:
    """The plan with calls of the forward taken apart whose elements the backward reads, such as a softmax's: of their
    parts a sum of a row may be kept, and not the row."""
    index = plan.index
    found = []
    for tensor in saved(index):
        node = index.producer(tensor)
        assert node is not None
        if (
            tensor in index.outputs
            or is_elementwise(index, node)
            or byte_count(index.spec(tensor)) * 2 <= _read(index, node)
        ):
            continue
        if isinstance(lower(index, (node,), tuple(index.results(node))), Nest) and not _multiplies(index, node):
            made = decompositions.taken_apart(index, node)
            found += [made] if made is not None and made not in found else []
    return with_replacement(plan, *found) if found else plan


def _with_kernels_for(plan: Plan) -> Plan:
    """The plan with calls that are no kernel taken apart into calls that are, such as the derivative of a norm."""
    for group in plan.groups:
        if fusion.is_nest(plan, group) or not (made := fusion.parts(plan, group)):
            continue
        apart = with_replacement(plan, made)
        names = [node.name for node in made.added if node.name in apart.partition.by_name]
        if all(isinstance(apart.nest(apart.group(name)), Nest) or fusion.stays(apart, name) for name in names):
            plan = apart
    return plan


def _read(index: GraphIndex, node: str) -> int:
    return sum(byte_count(index.spec(tensor)) for tensor in index.reads_from_outside((node,)))


def _computed_again(index: GraphIndex) -> list[str]:
    """Calls of the forward that the backward makes again, in order."""
    network = networkx.DiGraph()

    def cost(tensor: str) -> float:
        bytes_ = byte_count(index.spec(tensor))
        is_there = index.producer(tensor) is None or tensor in index.outputs
        return float(bytes_ if is_there else 2 * bytes_)

    def found(tensor: str) -> None:
        if network.has_edge((tensor, "made"), (tensor, "read")):
            return
        maker = index.producer(tensor)
        is_view = maker is not None and index.is_view(maker)
        capacity = {} if is_view else {"capacity": cost(tensor)}
        network.add_edge((tensor, "made"), (tensor, "read"), **capacity)
        if maker is None or not (is_view or is_elementwise(index, maker)):
            network.add_edge(_BEGIN, (tensor, "made"))
            return
        if not is_view and _has_other_readers(index, tensor):
            network.add_edge(_BEGIN, (tensor, "made"))
        for read in index.reads(maker):
            found(read)
            network.add_edge((read, "read"), (tensor, "made"))

    for node in index.nodes:
        if node in index.of_backward:
            for tensor in index.reads(node):
                maker = index.producer(tensor)
                if maker is not None and maker not in index.of_backward:
                    found(tensor)
                    network.add_edge((tensor, "read"), _END)
    if _END not in network:
        return []
    _, (_, late) = networkx.minimum_cut(network, _BEGIN, _END)
    names = {index.producer(place[0]) for place in late if len(place) == 2 and place[1] == "made"}
    return [node for node in index.nodes if node in names]


def _has_other_readers(index: GraphIndex, tensor: str) -> bool:
    """Whether a call of the backward reads the tensor that takes in no call before it: it has to be in memory."""
    for user in index.users(tensor):
        if index.is_view(user):
            if any(_has_other_readers(index, view) for view in index.results(user)):
                return True
        elif user in index.of_backward and not _takes_in(index, user):
            return True
    return False


def is_elementwise(index: GraphIndex, node: str) -> bool:
    """Whether each element of the result is a formula of few elements."""
    call = index.nodes[node]
    if call.random or call.mutates or not index.is_pure(node):
        return False
    nest = lower(index, (node,), tuple(index.results(node)))
    return isinstance(nest, Nest) and not nest.reductions


def _takes_in(index: GraphIndex, node: str) -> bool:
    """Whether a call can be a kernel that computes what it reads."""
    parts = decompositions.taken_apart(index, node)
    nest = lower(index, (node,), tuple(index.results(node)))
    return parts is not None or (isinstance(nest, Nest) and not _multiplies(index, node))


def _multiplies(index: GraphIndex, node: str) -> bool:
    nest = lower(index, (node,), tuple(index.results(node)[:1]))
    return isinstance(nest, Nest) and (multiplies_matrices(nest) or convolves(nest))


def _copied(index: GraphIndex, again: Collection[str]) -> list[Replacement]:
    """Calls of the forward made once more where the backward first needs them, and the backward reading those."""
    names = {tensor: _free(index, tensor) for node in again for tensor in index.results(node)}
    waiting = dict.fromkeys(again)
    found = []
    for node in index.nodes:
        if node not in index.of_backward or names.keys().isdisjoint(index.reads(node)):
            continue
        needed = _makers(index, node, waiting)
        added = [_renamed(index.nodes[each], names) for each in waiting if each in needed]
        waiting = {each: None for each in waiting if each not in needed}
        found.append(Replacement((node,), (*added, _renamed(index.nodes[node], names, is_copy=False))))
    return found


def _makers(index: GraphIndex, node: str, among: Collection[str]) -> set[str]:
    pending, found = list(index.reads(node)), set[str]()
    while pending:
        maker = index.producer(pending.pop())
        if maker is not None and maker in among and maker not in found:
            found.add(maker)
            pending += index.reads(maker)
    return found


def _renamed(node: graph_pb2.Node, names: Mapping[str, str], *, is_copy: bool = True) -> graph_pb2.Node:
    made = graph_pb2.Node()
    made.CopyFrom(node)
    rename(made, names)
    if is_copy:
        made.name = names.get(node.name, f"{node.name}_again")
        for result in made.results:
            result.name = names.get(result.name, result.name)
    return made


def _free(index: GraphIndex, tensor: str) -> str:
    name = f"{tensor}_again"
    while name in index.root or name in index.nodes:
        name += "_"
    return name
