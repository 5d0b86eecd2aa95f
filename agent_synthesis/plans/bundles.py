"""Small kernels that need nothing of each other, launched as one.

The one idea: a launch takes some microseconds however little it moves, and one that fills a part of the card leaves
the rest idle. Weights that are laid out anew or rounded, counters and running statistics depend on nothing that is
computed, so that all of them are one kernel (`emit.cuda.parts.bundle`) in the beginning; what is computed is launched
with others at the place of the last. Members stay groups as they were, and can be taken apart again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent_synthesis.emit.cuda.parts.bundle import LEAST_MEMBERS, MOST_TENSORS
from agent_synthesis.emit.registry import MAY_BE_BUNDLED
from agent_synthesis.graphs.graph_index import byte_count
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import chunking, cost
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan, schedules_for
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

EVERY_GROUP = "*"
"""Group of such a move."""
TOGETHER, APART = "together", "apart"
CHOICES: Mapping[str, str] = {
    TOGETHER: "launches small kernels that need nothing of each other together",
    APART: "launches each kernel by itself that was launched together with others",
}
"""Choices of such a move, and what it does."""
LEAST_OF_WHOLE_PLAN = 3
"""Kernels that a whole plan launches as one."""
_MOST_BYTES = 32 << 20
"""That a member moves which reads nothing computed: some launches' time, at the speed of a GPU's memory."""
_MOST_COMPUTED_BYTES = 4 << 20
"""The same of one that reads what others have just made, which is in the cache, as its results are for whom is next."""
_COMPUTED_SHARE = 1 / 16
"""Of what a member moves, the computed part from which on it counts as that; an optimizer reads single numbers."""
_MOST_TOGETHER_BYTES = 256 << 20
"""That all members move: their results are held from one place on, so that this bounds what is held more."""


@dataclass(frozen=True)
class _Kind:
    """What only goes with its own kind."""

    is_computed: bool
    """Whether another group makes something that it reads."""
    is_of_forward: bool
    is_of_backward: bool


@dataclass
class _Bundle:
    """Groups that may be one so far."""

    kind: _Kind
    names: list[str] = field(default_factory=list)
    moved_bytes: int = 0
    tensors: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    """Groups that need what they make."""

    def may_take(self, name: str, kind: _Kind, moved_bytes: int, tensors: set[str]) -> bool:
        return (
            kind == self.kind
            and name not in self.after
            and self.moved_bytes + moved_bytes <= _MOST_TOGETHER_BYTES
            and len(self.tensors | tensors) <= MOST_TENSORS
        )


def launched(plan: Plan, group: str, choice: str) -> Plan:
    """The plan with kernels launched together, or each by itself.

    Raises:
        IllegalMove: no such choice, or nothing would change.
    """
    if group != EVERY_GROUP or choice not in CHOICES:
        raise IllegalMove(f"kernels are launched {' or '.join(CHOICES)}, all of a plan ({EVERY_GROUP})")
    made = together(plan) if choice == TOGETHER else _apart(plan)
    if made is plan and choice == TOGETHER:
        raise IllegalMove("there are no two small kernels of elements or tiles that need nothing of each other")
    if made is plan:
        raise IllegalMove("no kernels are launched together")
    return made


def together(plan: Plan, least: int = LEAST_MEMBERS) -> Plan:
    """The plan with small kernels in bundles of at least so many; itself where there are none."""
    result = plan
    for names in _bundles(plan):
        if len(names) >= least:
            with contextlib.suppress(IllegalMove):
                result = _joined(result, names)
    return result


def _bundles(plan: Plan) -> list[list[str]]:
    """Names of groups that may be launched together, by their order: each goes to the first others that it does not
    need and that have room."""
    if plan.target != task_pb2.TARGET_CUDA:
        return []
    followers = plan.partition.ordered().followers()
    needs: dict[str, set[str]] = {}
    for name, after in followers.items():
        for follower in after:
            needs.setdefault(follower, set()).add(name)
    found: list[_Bundle] = []
    for group in plan.groups:
        own = needs.get(group.name, set())
        for bundle in found:
            if not own.isdisjoint(bundle.names) or not own.isdisjoint(bundle.after):
                bundle.after.add(group.name)
        if group.engine != "authored" or group.schedule not in MAY_BE_BUNDLED or plan.is_kept(group):
            continue
        kind, moved = _kind(plan, group), _moved_bytes(plan, group)
        if moved > (_MOST_COMPUTED_BYTES if _is_in_cache(plan, group, moved) else _MOST_BYTES):
            continue
        tensors = {*plan.reads(group), *plan.outputs(group)}
        for bundle in found:
            if bundle.may_take(group.name, kind, moved, tensors):
                break
        else:
            bundle = _Bundle(kind)
            found.append(bundle)
        bundle.names.append(group.name)
        bundle.moved_bytes += moved
        bundle.tensors |= tensors
    return [bundle.names for bundle in found]


def _kind(plan: Plan, group: Group) -> _Kind:
    index, nodes = plan.index, plan.all_nodes(group)
    is_computed = any(not plan.is_kept(plan.group(name)) for name in plan.producers(group))
    late = not index.of_backward.isdisjoint(nodes)
    return _Kind(is_computed, is_of_forward=not index.of_forward.isdisjoint(nodes), is_of_backward=late)


def _is_in_cache(plan: Plan, group: Group, moved_bytes: int) -> bool:
    """Whether a part of what a group moves that counts is made by others."""
    index, kept = plan.index, {None, *plan.kept_calls}
    made = (tensor for tensor in plan.reads(group) if index.producer(tensor) not in kept)
    return sum(byte_count(index.spec(tensor)) for tensor in made) > _COMPUTED_SHARE * moved_bytes


def _moved_bytes(plan: Plan, group: Group) -> int:
    work = cost.of_group(plan, group)
    return work.read_bytes + work.write_bytes + work.extra_bytes


def _joined(plan: Plan, names: list[str]) -> Plan:
    """The plan with some groups in one kernel, named after the last call.

    Raises:
        IllegalMove: one needs another, or more would be held than their results.
    """
    index, members = plan.index, tuple(plan.group(name) for name in names)
    nodes = tuple(sorted((node for each in members for node in each.nodes), key=index.position.__getitem__))
    recomputed = {node for each in members for node in each.recomputed} - {*nodes}
    last = Group(
        plan.partition.owner[nodes[-1]], nodes, tuple(sorted(recomputed, key=index.position.__getitem__)), "authored",
        members=members,
    )  # fmt: skip
    made = plan.replaced(names, [last]).ordered()
    nest = made.nest(last)
    taking = schedules_for(made.target, nest, made.hardware) if isinstance(nest, Nest) else ()
    if not isinstance(nest, Nest) or not taking:
        raise IllegalMove(f"{', '.join(names)} are not one launch")
    results = sum(byte_count(index.spec(tensor)) for tensor in made.outputs(last))
    if chunking.holds_more(made, plan) or chunking.held_bytes(made) > chunking.held_bytes(plan) + results:
        raise IllegalMove(f"{last.name}: more would be held at once than what they give")
    return made.exchanged(replace(last, schedule=taking[0].name, settings=taking[0].defaults(nest)))


def _apart(plan: Plan) -> Plan:
    result = plan
    for group in plan.groups:
        if group.members:
            result = result.replaced([group.name], group.members).ordered()
    return result
