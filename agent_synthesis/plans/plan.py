"""A plan: which groups of a graph's calls run as one unit, by which engine, in which order.

The one idea: every call that is not a view belongs to exactly one group; a group may also recompute calls of
others. Order follows from data and from memory that is written in place, so a plan that exists is right.
What may be changed is in `moves`; the text of kernels is in `generator`.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from agent_synthesis.emit import registry
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal, lower
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import multiplies_matrices
from agent_synthesis.schedule import Offered
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove
from warpsmith.hardware import H200, Hardware
from warpsmith.v1 import analysis_pb2, task_pb2

Engine = Literal["library", "authored", "written"]


@dataclass(frozen=True)
class Group:
    """Calls that run as one unit."""

    name: str
    """Name of the last call, whose result the group is for."""
    nodes: tuple[str, ...]
    """The calls that it owns, in order of execution; a library group owns one."""
    recomputed: tuple[str, ...] = ()
    """Calls of other groups that an authored group computes again instead of reading their results."""
    engine: Engine = "library"
    """Library call, a kernel that a schedule emits, or one that an agent wrote (`free_form`)."""
    schedule: str = ""
    """Schedule of an authored group."""
    settings: Settings = field(default_factory=Settings)
    """How the schedule is set."""
    text: str = ""
    """The kernel of a written group."""


@dataclass(frozen=True)
class Plan:
    """Groups in execution order over a graph that may have been rewritten."""

    index: GraphIndex
    """The graph with its lookups."""
    target: task_pb2.Target.ValueType
    """What kernels are written for."""
    hardware: Hardware
    """The card that they are written for; of no meaning on a processor."""
    groups: tuple[Group, ...]
    """In execution order."""
    moves: tuple[analysis_pb2.Move, ...] = ()
    """What led here from plan zero."""
    rewrites: tuple[str, ...] = ()
    """Algebraic rules that were used, in order."""

    def group(self, name: str) -> Group:
        """The group of that name.

        Raises:
            IllegalMove: there is none.
        """
        for group in self.groups:
            if group.name == name:
                return group
        raise IllegalMove(f"the plan has no group {name!r}")

    @functools.cached_property
    def owner(self) -> Mapping[str, str]:
        """Call → name of the group that owns it."""
        return {node: group.name for group in self.groups for node in group.nodes}

    def all_nodes(self, group: Group) -> tuple[str, ...]:
        """Calls that the group computes, in order of execution."""
        return tuple(sorted({*group.nodes, *group.recomputed}, key=self.index.position.__getitem__))

    def reads(self, group: Group) -> list[str]:
        """Tensors that the group reads and does not make; views are seen through to what they look at."""
        return self.index.reads_from_outside(self.all_nodes(group))

    def outputs(self, group: Group) -> list[str]:
        """Tensors that the group makes for others: read by another group, or looked at by the graph's
        outputs."""
        made = [tensor for node in group.nodes for tensor in self.index.results(node)]
        return [tensor for tensor in made if self._readers.get(tensor, set()) - {group.name}]

    def producers(self, group: Group) -> list[str]:
        """Names of the groups whose results it reads, in order."""
        names = []
        for tensor in self.reads(group):
            maker = self.index.producer(tensor)
            if maker is not None:
                names.append(self.owner[maker])
        return list(dict.fromkeys(names))

    def siblings(self, group: Group) -> list[str]:
        """Names of the groups before it that read what it reads: the largest tensor of one of the two. No producers."""
        own, place = self.reads(group), self._places[group.name]
        near = {
            name for tensor in own for name in self._readers.get(tensor, ()) if self._places.get(name, place) < place
        }
        found = []
        for name in sorted(near - {*self.producers(group)}, key=self._places.__getitem__):
            theirs = self.reads(self.group(name))
            if {max(each, key=self._size) for each in (own, theirs)} & {*own} & {*theirs}:
                found.append(name)
        return found

    def _size(self, tensor: str) -> int:
        return math.prod(self.index.spec(tensor).shape)

    def nest(self, group: Group) -> Nest | Refusal:
        """The group as loops."""
        outputs = self.outputs(group)
        if not outputs and not any(self.index.writes_back(node) for node in group.nodes):
            return Refusal("its result is never read")
        return lower(self.index, self.all_nodes(group), tuple(outputs))

    def schedule(self, group: Group) -> Offered:
        """The schedule of an authored group."""
        return schedule_named(self.target, group.schedule, self.hardware)

    def alternatives(self, group: Group) -> Sequence[Settings]:
        """Other settings of an authored group, one change away; remembered, since every setting is held to them."""
        if group.name not in self._alternatives:
            nest = self.nest(group)
            assert isinstance(nest, Nest), nest
            self._alternatives[group.name] = self.schedule(group).alternatives(nest, group.settings)
        return self._alternatives[group.name]

    @functools.cached_property
    def _alternatives(self) -> dict[str, Sequence[Settings]]:
        return {}

    @functools.cached_property
    def _places(self) -> Mapping[str, int]:
        return {group.name: place for place, group in enumerate(self.groups)}

    @functools.cached_property
    def _readers(self) -> Mapping[str, set[str]]:
        """Tensor → names of the groups that read it from outside; "" stands for the graph's outputs."""
        readers: dict[str, set[str]] = {}
        for tensor in self.index.base_tensors(self.index.graph.outputs)[0]:
            readers.setdefault(tensor, set()).add("")
        for group in self.groups:
            for tensor in self.reads(group):
                readers.setdefault(tensor, set()).add(group.name)
        return readers


def plan_zero(index: GraphIndex, target: task_pb2.Target.ValueType, hardware: Hardware = H200) -> Plan:
    """Every call a library group of its own, in the order of the module."""
    groups = tuple(Group(node.name, (node.name,)) for node in index.graph.nodes if not index.is_view(node.name))
    return Plan(index, target, hardware, groups)


def schedules_for(target: task_pb2.Target.ValueType, nest: Nest, hardware: Hardware = H200) -> tuple[Offered, ...]:
    """Schedules that can run the nest, preferred first; of matrix products only those that tile both operands."""
    multiplies = multiplies_matrices(nest)
    offered = [each for each in registry.schedules(target, hardware) if registry.suits(each, multiplies=multiplies)]
    return tuple(each for each in offered if each.accepts(nest))


def schedule_named(target: task_pb2.Target.ValueType, name: str, hardware: Hardware = H200) -> Offered:
    """The schedule of that name.

    Raises:
        IllegalMove: the target has none, or the card lacks what it needs.
    """
    for schedule in registry.every_schedule(target, hardware):
        if schedule.name == name:
            if reason := registry.why_not(schedule):
                raise IllegalMove(reason)
            return schedule
    raise IllegalMove(f"the target has no schedule {name!r}")


def with_groups(plan: Plan, removed: Iterable[str], added: Iterable[Group]) -> Plan:
    """The plan with groups replaced, the new ones last: the caller calls `ordered` on the plan that it keeps."""
    gone = set(removed)
    groups = [group for group in plan.groups if group.name not in gone] + list(added)
    return replace(plan, groups=tuple(groups))


def ordered(plan: Plan) -> Plan:
    """The plan with its groups sorted: after what they read, around in-place writes as the module has them.

    Raises:
        IllegalMove: two groups would each have to run before the other.
    """
    position = plan.index.position
    by_name = {group.name: group for group in plan.groups}
    after = _edges(plan)
    waiting = dict.fromkeys(by_name, 0)
    for followers in after.values():
        for follower in followers:
            waiting[follower] += 1
    rank = {group.name: max(position[node] for node in group.nodes) for group in plan.groups}
    ready = [(rank[name], name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    result = []
    while ready:
        _, name = heapq.heappop(ready)
        result.append(by_name[name])
        for follower in after.get(name, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (rank[follower], follower))
    if len(result) != len(by_name):
        raise IllegalMove("a group would have to run both before and after another one")
    return replace(plan, groups=tuple(result))


def _edges(plan: Plan) -> dict[str, set[str]]:
    """Group → groups that must run after it."""
    index = plan.index
    runs: dict[str, list[str]] = {}  # call → groups that compute it
    after: dict[str, set[str]] = {}
    elsewhere: set[str] = set()  # in-place calls that write other memory, being kernels
    for group in plan.groups:
        nodes = plan.all_nodes(group)
        for node in nodes:
            runs.setdefault(node, []).append(group.name)
        if group.engine == "authored":
            elsewhere.update(nodes)
        for producer in plan.producers(group):
            if producer != group.name:
                after.setdefault(producer, set()).add(group.name)
    for earlier, later, writers in index.ordered_pairs:
        if writers and writers <= elsewhere:
            continue
        for first in runs.get(earlier, ()):
            for second in runs.get(later, ()):
                if first != second:
                    after.setdefault(first, set()).add(second)
    return after
