"""Groups of a graph's calls in execution order, and what follows from them: who owns, reads and makes what.

The one idea: a move changes a few groups. What follows from the others is taken over from the partition that it was
made of, so that to try a move on a thousand calls takes little longer than on ten. It knows no kernels.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove

_KNOT = "a group would have to run both before and after another one"
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
    members: tuple[Group, ...] = ()
    """Of kernels that are launched as one, each as it would be alone: together, their calls are the group's."""

    @property
    def arrangement(self) -> Hashable:
        """Which of the group's calls are whose, and how each member is run; equal without names."""
        calls = {node: place for place, node in enumerate((*self.nodes, *self.recomputed))}
        return tuple(
            (tuple(map(calls.__getitem__, (*each.nodes, *each.recomputed))), each.schedule, each.settings)
            for each in self.members
        )


@dataclass(frozen=True)
class Partition:
    """All groups of a graph. Immutable."""

    index: GraphIndex
    """The graph with its lookups."""
    groups: tuple[Group, ...]
    """In execution order where `is_ordered`."""
    is_ordered: bool = True
    is_knotted: bool = False
    """Whether it is known that two groups would each have to run before the other."""

    @functools.cached_property
    def by_name(self) -> Mapping[str, Group]:
        """Groups by their names."""
        return {group.name: group for group in self.groups}

    @functools.cached_property
    def owner(self) -> Mapping[str, str]:
        """Call → name of the group that owns it."""
        return {node: group.name for group in self.groups for node in group.nodes}

    @functools.cached_property
    def readers(self) -> Mapping[str, frozenset[str]]:
        """Tensor → names of the groups that read it from outside; "" stands for the graph's outputs."""
        readers: dict[str, set[str]] = {}
        for tensor in self.index.base_tensors(self.index.graph.outputs)[0]:
            readers.setdefault(tensor, set()).add("")
        for group in self.groups:
            for tensor in self.reads(group):
                readers.setdefault(tensor, set()).add(group.name)
        return {tensor: frozenset(names) for tensor, names in readers.items()}

    @functools.cached_property
    def places(self) -> Mapping[str, int]:
        """Name → place in the order."""
        return {group.name: place for place, group in enumerate(self.groups)}

    # -- what follows for a group

    def all_nodes(self, group: Group) -> tuple[str, ...]:
        """Calls that the group computes, in order of execution."""
        return tuple(sorted({*group.nodes, *group.recomputed}, key=self.index.position.__getitem__))

    def reads(self, group: Group) -> list[str]:
        """Tensors that the group reads and does not make; views are seen through to what they look at."""
        return self.index.reads_from_outside(self.all_nodes(group))

    def outputs(self, group: Group) -> list[str]:
        """Tensors that the group makes for others: read by another group, or looked at by the graph's outputs."""
        return [tensor for tensor in self._made(group) if self.readers.get(tensor, frozenset()) - {group.name}]

    def producers(self, group: Group) -> list[str]:
        """Names of the groups whose results it reads, in order."""
        makers = filter(None, map(self.index.producer, self.reads(group)))
        return list(dict.fromkeys(self.owner[maker] for maker in makers))

    def siblings(self, group: Group) -> list[str]:
        """Names of the groups before it that read what it reads: the largest tensor of one of the two. No producers."""
        own, place = self.reads(group), self.places[group.name]
        near = {name for tensor in own for name in self.readers.get(tensor, ()) if self.places.get(name, place) < place}
        found = []
        for name in sorted(near - {*self.producers(group)}, key=self.places.__getitem__):
            theirs = self.reads(self.by_name[name])
            if {max(each, key=self._size) for each in (own, theirs)} & {*own} & {*theirs}:
                found.append(name)
        return found

    def _made(self, group: Group) -> list[str]:
        return [tensor for node in group.nodes for tensor in self.index.results(node)]

    def _size(self, tensor: str) -> int:
        return math.prod(self.index.spec(tensor).shape)

    # -- other partitions

    def replaced(self, removed: Collection[str], added: Sequence[Group]) -> Partition:
        """With groups replaced: in order where a few looks show that there is one, else the caller asks for `ordered`.

        The calls of the removed groups have to be those of the added ones.

        Raises:
            IllegalMove: a group of a training step would give what the forward gives and need a gradient.
        """
        for group in added:
            late = self.index.of_backward.intersection(self.all_nodes(group))
            if late and not self.index.of_forward.isdisjoint(group.nodes):
                raise IllegalMove(f"{group.name}: the forward gives its results before {min(late)} is given a gradient")
        place = self._common_place(removed, added)
        groups = [group for group in self.groups if group.name not in removed]
        if place is None:
            groups += added
        else:
            before = sum(self.places[name] < place for name in removed)
            groups.insert(place - before, added[0])
        is_knotted = place is None and len(removed) > 1 and self._are_apart(removed)
        made = Partition(self.index, tuple(groups), is_ordered=place is not None, is_knotted=is_knotted)
        readers = dict(self.readers)
        for name in removed:
            for tensor in self.reads(self.by_name[name]):
                readers[tensor] -= {name}
        for group in added:
            for tensor in self.reads(group):
                readers[tensor] = readers.get(tensor, frozenset()) | {group.name}
        owner = {**self.owner, **{node: group.name for group in added for node in group.nodes}}
        return made._knowing(owner, readers)

    def exchanged(self, group: Group) -> Partition:
        """With a group of the same name and calls in the place of one."""
        groups = tuple(group if each.name == group.name else each for each in self.groups)
        return replace(self, groups=groups)._knowing(self.owner, self.readers)

    def _knowing(self, owner: Mapping[str, str], readers: Mapping[str, frozenset[str]]) -> Partition:
        self.__dict__.update(owner=owner, readers=readers)  # as `cached_property` keeps them
        return self

    def _common_place(self, removed: Collection[str], added: Sequence[Group]) -> int | None:
        """The place of the last removed group, if a single new one can take it and `ordered` would put it there.

        It has to run as late as that one by its own calls, its producers come before, and nobody in between reads what
        the removed ones made. Calls that are tied to others by memory written in place are left to `ordered`.
        """
        if len(added) != 1 or not self.is_ordered:
            return None
        (new,), place = added, max(self.places[name] for name in removed)
        if self._rank(new) != self._rank(self.groups[place]):
            return None
        gone = [self.by_name[name] for name in removed]
        if any(node in self.index.tied for group in (new, *gone) for node in self.all_nodes(group)):
            return None
        if any(self.places[name] > place for name in self.producers(new)):
            return None
        return None if self._early(removed, place, without=removed) else place

    def _early(self, names: Iterable[str], place: int, without: Collection[str] = ()) -> set[str]:
        """Groups before a place that read what some groups make."""
        made = (tensor for name in names for tensor in self._made(self.by_name[name]))
        readers = {name for tensor in made for name in self.readers.get(tensor, ())}
        return {name for name in readers - {""} if name not in without and self.places[name] < place}

    def _are_apart(self, names: Collection[str]) -> bool:
        """Whether a group in between needs one of some groups and is needed by another: they cannot be one."""
        if not self.is_ordered:
            return False
        last = max(self.places[name] for name in names)
        seen, ahead = set[str](), self._early(names, last, without=names)
        while ahead:
            seen |= ahead
            if not self._early(ahead, last + 1).isdisjoint(names):
                return True
            ahead = self._early(ahead, last) - seen
        return False

    def _rank(self, group: Group) -> int:
        return max(self.index.position[node] for node in group.nodes)

    def ordered(self) -> Partition:
        """In order: after what they read, around in-place writes as the module has them, else as the module's calls.

        Raises:
            IllegalMove: two groups would each have to run before the other.
        """
        if self.is_ordered:
            return self
        if self.is_knotted:
            raise IllegalMove(_KNOT)
        after = self.followers()
        waiting = dict.fromkeys(self.by_name, 0)
        for followers in after.values():
            for follower in followers:
                waiting[follower] += 1
        rank = {group.name: self._rank(group) for group in self.groups}
        ready = [(rank[name], name) for name, count in waiting.items() if not count]
        heapq.heapify(ready)
        result = []
        while ready:
            _, name = heapq.heappop(ready)
            result.append(self.by_name[name])
            for follower in after.get(name, ()):
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready, (rank[follower], follower))
        if len(result) != len(self.by_name):
            raise IllegalMove(_KNOT)
        return Partition(self.index, tuple(result))._knowing(self.owner, self.readers)

    def followers(self) -> dict[str, set[str]]:
        """Group → groups that must run after it, by its results or by memory that is written in place."""
        runs: dict[str, list[str]] = {}  # call → groups that compute it
        after: dict[str, set[str]] = {}
        elsewhere: set[str] = set()  # in-place calls that write other memory, being kernels
        for group in self.groups:
            nodes = self.all_nodes(group)
            for node in nodes:
                runs.setdefault(node, []).append(group.name)
            if group.engine == "authored":
                elsewhere.update(nodes)
            for producer in self.producers(group):
                if producer != group.name:
                    after.setdefault(producer, set()).add(group.name)
        for earlier, later, writers in self.index.ordered_pairs:
            if writers and writers <= elsewhere:
                continue
            for first in runs.get(earlier, ()):
                for second in runs.get(later, ()):
                    if first != second:
                        after.setdefault(first, set()).add(second)
        return after


def touched(partition: Partition, other: Partition) -> list[Group]:
    """Groups of a partition that another of the same graph does not have in the same form: with other calls, settings,
    outputs or layouts."""
    if partition.index is not other.index:
        ahead: Iterable[str] = partition.by_name
    else:
        own = _apart(partition, other)
        ahead = {group.name for group in own}
        for each, groups in ((partition, own), (other, _apart(other, partition))):
            ahead |= {name for group in groups for name in each.producers(group)}
    found = []
    for name in ahead:
        group, others = partition.by_name.get(name), other.by_name.get(name)
        if group is not None and (
            group != others
            or partition.outputs(group) != other.outputs(others)
            or not _laid_alike(group, partition, other)
        ):
            found.append(group)
    return sorted(found, key=lambda group: partition.places[group.name])


def _laid_alike(group: Group, partition: Partition, other: Partition) -> bool:
    """Whether the calls of a group of both read and make tensors of the same layouts in both."""
    if partition.index is other.index:
        return True
    specs = [
        [index.spec(tensor) for node in group.nodes for tensor in (*index.reads(node), *index.results(node))]
        for index in (partition.index, other.index)
    ]
    return specs[0] == specs[1]


def _apart(partition: Partition, other: Partition) -> list[Group]:
    theirs = other.by_name
    return [group for group in partition.groups if theirs.get(group.name) is not group]
