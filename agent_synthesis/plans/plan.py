"""A plan: which groups of a graph's calls run as one unit, by which engine, in which order.

The one idea: every call that is not a view belongs to exactly one group; a group may also recompute calls of
others. Order follows from data and from memory that is written in place, so a plan that exists is right.
What may be changed is in `moves`; the text of kernels is in `generator`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from agent_synthesis.bundle import Member, bundle
from agent_synthesis.emit import registry
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal, form_key, identifier, lower
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans.partition import Group, Partition
from agent_synthesis.schedule import Offered
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove
from warpsmith.hardware import H200, Hardware
from warpsmith.v1 import analysis_pb2, task_pb2


@dataclass(frozen=True)
class Plan:
    """A partition, and what its kernels are written for."""

    partition: Partition
    """Its groups in execution order over a graph that may have been rewritten."""
    target: task_pb2.Target.ValueType
    """What kernels are written for."""
    hardware: Hardware
    """The card that they are written for; of no meaning on a processor."""
    moves: tuple[analysis_pb2.Move, ...] = ()
    """What led here from plan zero."""
    rewrites: tuple[str, ...] = ()
    """Algebraic rules that were used, in order."""
    cuda_graph: bool = False
    """Whether its steps are launched at once, as a CUDA graph."""
    prepared: bool = False
    """Whether what depends on parameters, state and constants alone is computed once and kept."""

    @property
    def index(self) -> GraphIndex:
        """The graph with its lookups."""
        return self.partition.index

    @property
    def groups(self) -> tuple[Group, ...]:
        """In execution order."""
        return self.partition.groups

    def group(self, name: str) -> Group:
        """The group of that name.

        Raises:
            IllegalMove: there is none.
        """
        group = self.partition.by_name.get(name)
        if group is None:
            raise IllegalMove(f"the plan has no group {name!r}")
        return group

    @property
    def kept_calls(self) -> frozenset[str]:
        """Calls of the graph whose results may be kept from call to call."""
        return self.index.kept_calls if self.prepared else self.index.constant_calls

    def is_kept(self, group: Group) -> bool:
        """Whether the group is computed once and kept, so that a call does not make it: off the prepared track only
        where PyTorch computes it, so that no kernel runs that a bench does not time."""
        if not self.kept_calls.issuperset(self.all_nodes(group)):
            return False
        return self.prepared or (
            group.engine == "library" and all(self.is_kept(self.group(name)) for name in self.producers(group))
        )

    def all_nodes(self, group: Group) -> tuple[str, ...]:
        """As `Partition.all_nodes`."""
        return self.partition.all_nodes(group)

    def reads(self, group: Group) -> list[str]:
        """As `Partition.reads`."""
        return self.partition.reads(group)

    def outputs(self, group: Group) -> list[str]:
        """As `Partition.outputs`."""
        return self.partition.outputs(group)

    def producers(self, group: Group) -> list[str]:
        """As `Partition.producers`."""
        return self.partition.producers(group)

    def siblings(self, group: Group) -> list[str]:
        """As `Partition.siblings`."""
        return self.partition.siblings(group)

    def nest(self, group: Group) -> Nest | Refusal:
        """The group as loops."""
        if group.members and group.engine == "authored":
            return self._bundle(group)
        outputs = self.outputs(group)
        if not outputs and not any(self.index.writes_back(node) for node in group.nodes):
            return Refusal("its result is never read")
        return lower(self.index, self.all_nodes(group), tuple(outputs))

    def _bundle(self, group: Group) -> Nest | Refusal:
        """The members' nests, which are launched as one."""
        members, forms = list[Member](), dict[Hashable, int]()
        for each in group.members:
            nest = self.nest(each)
            if isinstance(nest, Refusal):
                return Refusal(f"{each.name}, which is launched with others: {nest.reason}")
            form = (form_key(self.index, self.all_nodes(each), self.outputs(each)), each.schedule, each.settings)
            members.append(Member(nest, each.schedule, each.settings, forms.setdefault(form, len(forms))))
        return bundle(identifier(group.name), members)

    def schedule(self, group: Group) -> Offered:
        """The schedule of an authored group."""
        return schedule_named(self.target, group.schedule, self.hardware)

    def alternatives(self, group: Group) -> Sequence[Settings]:
        """Other settings of an authored group, one change away."""
        nest = self.nest(group)
        assert isinstance(nest, Nest), nest
        return self.schedule(group).alternatives(nest, group.settings)

    def replaced(self, removed: Collection[str], added: Sequence[Group]) -> Plan:
        """With groups replaced; the caller asks for `ordered` of the plan that it keeps."""
        return replace(self, partition=self.partition.replaced(removed, added))

    def exchanged(self, group: Group) -> Plan:
        """With a group of the same name and calls in the place of one."""
        return replace(self, partition=self.partition.exchanged(group))

    def ordered(self) -> Plan:
        """With its groups in order.

        Raises:
            IllegalMove: two groups would each have to run before the other.
        """
        return replace(self, partition=self.partition.ordered())


def plan_zero(
    index: GraphIndex, target: task_pb2.Target.ValueType, hardware: Hardware = H200, *, prepared: bool = False
) -> Plan:
    """Every call a library group of its own, in the order of the module."""
    groups = tuple(Group(node.name, (node.name,)) for node in index.graph.nodes if not index.is_view(node.name))
    return Plan(Partition(index, groups), target, hardware, prepared=prepared)


def schedules_for(target: task_pb2.Target.ValueType, nest: Nest, hardware: Hardware = H200) -> tuple[Offered, ...]:
    """Schedules that can run the nest, preferred first; of matrix products only those that tile both operands."""
    taking = (each for each in registry.asked_about(nest, target, hardware) if each.accepts(nest))
    return tuple(sorted(taking, key=lambda each: not each.leads(nest)))


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
