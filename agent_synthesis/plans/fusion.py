"""Which groups may become one kernel, and the group that results.

The one idea: ask the lowering. A pair fuses when one nest computes both, a schedule takes the nest, and the
plan still has an order; the producer's result is stored as well when others read it, or computed twice where
storing it from the same kernel would tie a knot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from agent_synthesis.graphs import splits
from agent_synthesis.lowering.groups import Refusal, lower
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import elements_and_rows, multiplies_matrices
from agent_synthesis.plans.plan import Group, Plan, ordered, schedule_named, schedules_for, with_groups
from agent_synthesis.rewrite import with_replacement
from agent_synthesis.rewrite.calls import Replacement
from agent_synthesis.schedule import Offered
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove

ALL_PRODUCERS = "*"
"""Choice of a fuse move that takes in every producer, and theirs, for as long as it is legal."""


def authored(plan: Plan, name: str, schedule: str = "") -> Plan:
    """The plan with a group as a kernel of ours, its settings the schedule's defaults.

    Raises:
        IllegalMove: the group is not one nest, or the schedule (or, unnamed, any schedule) does not take it.
    """
    group = plan.group(name)
    nest = plan.nest(group)
    whole = isinstance(nest, Nest) and schedules_for(plan.target, nest, plan.hardware)
    made = None if whole else splits.taken_apart(plan.index, name)
    if made is not None and len(group.nodes) == 1 and not schedule:
        return _authored_in_parts(plan, made)
    trial = with_groups(plan, [name], [replace(group, engine="authored", text="")])
    return _scheduled(trial, name, schedule)


def _authored_in_parts(plan: Plan, made: Replacement) -> Plan:
    """The plan with a call taken apart, and its parts in as few kernels as they fuse to."""
    result = with_replacement(plan, made)
    names = [node.name for node in made.added]
    for name in reversed(names):
        if all(group.name != name for group in result.groups):
            continue
        result = authored(result, name)
        for producer in reversed(names):
            if producer in result.producers(result.group(name)):
                with contextlib.suppress(IllegalMove):
                    result = fused(result, name, producer)
    return result


def fused(plan: Plan, name: str, producer: str) -> Plan:
    """The plan with a producer computed inside a group, or with a sibling that reads the same tensor beside it.

    Raises:
        IllegalMove: they have nothing in common, are not one nest together, or no schedule takes it.
    """
    if producer == ALL_PRODUCERS:
        return fused_with_all(plan, name)
    group, other = plan.group(name), plan.group(producer)
    if producer not in plan.producers(group) and producer not in plan.siblings(group):
        raise IllegalMove(f"{name} reads no result of {producer}, and nothing large that {producer} reads too")
    if "written" in (group.engine, other.engine):
        raise IllegalMove(f"{name} and {producer}: a kernel that was written does not fuse; author it first")
    reason = ""
    for trial in _trials(plan, group, other):
        try:
            return _without_unread(_scheduled(trial(), name, group.schedule, other.schedule))
        except IllegalMove as error:
            reason = reason or str(error)
    raise IllegalMove(reason)


def _without_unread(plan: Plan) -> Plan:
    """The plan in which calls that every reader of a group computes again by now belong to the first of these readers.

    Raises:
        IllegalMove: a kernel would be left whose result is never read.
    """
    for group in plan.groups:
        if plan.outputs(group) or not all(plan.index.is_pure(node) for node in group.nodes):
            continue
        heir = next((other for other in plan.groups if {*group.nodes} <= {*other.recomputed}), None)
        if heir is None and group.engine != "library":
            raise IllegalMove(f"{group.name} would never be read")
        if heir is None:
            continue
        nodes = tuple(sorted((*group.nodes, *heir.nodes), key=plan.index.position.__getitem__))
        recomputed = tuple(node for node in heir.recomputed if node not in group.nodes)
        made = replace(heir, nodes=nodes, recomputed=recomputed)
        return _without_unread(ordered(with_groups(plan, [group.name, heir.name], [made])))
    return plan


def fused_with_all(plan: Plan, name: str) -> Plan:
    """The plan with a group and everything before it that fuses, nearest first.

    A product stays apart from what reduces its rows: to join them is a move of its own, since it gains little (1.00 to
    1.01 times on KernelBench's level 2) and does not end as many products.

    Raises:
        IllegalMove: nothing fuses.
    """
    result, refused, reason = plan, set[str](), f"{name} has no producer"
    while True:
        candidates = [other for other in result.producers(result.group(name)) if other not in refused]
        if not candidates:
            break
        for other in reversed(candidates):
            try:
                made = fused(result, name, other)
                if _reduces_product(made, name) and not _reduces_product(result, name):
                    raise IllegalMove(f"{name} reduces the product of {other}, which is a move of its own")
                before, result = result, made
                refused -= {*before.producers(before.group(other))}  # what both read may fuse now
            except IllegalMove as error:
                refused.add(other)
                reason = str(error)
    if result is plan:
        raise IllegalMove(reason)
    return result


def _reduces_product(plan: Plan, name: str) -> bool:
    nest = plan.nest(plan.group(name))
    return isinstance(nest, Nest) and elements_and_rows(nest) is not None


def _trials(plan: Plan, group: Group, other: Group) -> Iterator[_Trial]:
    """Ways to join another to a group, better first: moved in whole, or, if it is a producer, computed again."""
    position = plan.index.position.__getitem__
    merged = replace(
        group,
        nodes=tuple(sorted((*group.nodes, *other.nodes), key=position)),
        recomputed=tuple(sorted({*group.recomputed, *other.recomputed} - {*group.nodes, *other.nodes}, key=position)),
        engine="authored",
    )
    yield _Trial(plan, (group.name, other.name), merged)
    if other.name not in plan.producers(group):
        return
    again = tuple(sorted({*group.recomputed, *plan.all_nodes(other)} - {*group.nodes}, key=position))
    yield _Trial(plan, (group.name,), replace(group, recomputed=again, engine="authored"))


class _Trial:
    """A plan that may turn out not to exist; called, it is made or raises IllegalMove."""

    def __init__(self, plan: Plan, removed: tuple[str, ...], added: Group) -> None:
        self._plan, self._removed, self._added = plan, removed, added

    def __call__(self) -> Plan:
        # The cheap refusal first: most pairs fail because a convolution or a product is no nest.
        for node in (*self._added.nodes, *self._added.recomputed):
            index = self._plan.index
            if not index.is_pure(node) and (node in self._added.recomputed or not index.writes_back(node)):
                raise IllegalMove(f"{self._plan.index.nodes[node].target} may not move into a kernel")
        for node in self._added.recomputed:
            if self._plan.index.is_overwritten(node):
                raise IllegalMove(f"the result of {node} is written in place: computed again it would be the old one")
            if _multiplies(self._plan, node):
                raise IllegalMove(f"{node} is a matrix product, which is not worth computing twice")
        return with_groups(self._plan, self._removed, [self._added])


def _multiplies(plan: Plan, node: str) -> bool:
    results = plan.index.results(node)
    nest = lower(plan.index, (node,), tuple(results[:1])) if results else None
    return isinstance(nest, Nest) and multiplies_matrices(nest)


def _scheduled(plan: Plan, name: str, wanted: str, otherwise: str = "") -> Plan:
    """The plan with the authored group given a schedule: the wanted one if it takes the nest, else what a producer
    that came in had, else the first."""
    group = plan.group(name)
    nest = plan.nest(group)
    if isinstance(nest, Refusal):
        raise IllegalMove(f"{name} cannot be one kernel: {nest.reason}")
    schedule = _choose(plan, nest, group, wanted, otherwise)
    chosen = replace(group, schedule=schedule.name, settings=schedule.defaults(nest))
    return ordered(replace(plan, groups=tuple(chosen if g.name == name else g for g in plan.groups)))


def _choose(plan: Plan, nest: Nest, group: Group, wanted: str, otherwise: str) -> Offered:
    taking = schedules_for(plan.target, nest, plan.hardware)
    if not taking and multiplies_matrices(nest):
        raise IllegalMove(f"{group.name} is a product of two matrices, of a form or size that no schedule takes")
    if not taking:
        raise IllegalMove(f"{group.name}: no schedule of the target takes {nest.comment or 'the nest'}")
    by_name = {schedule.name: schedule for schedule in taking}
    if wanted in by_name:
        return by_name[wanted]
    if not wanted or wanted == group.schedule:  # a fusion changed the nest; its old schedule was no demand
        return by_name.get(otherwise, taking[0])
    schedule_named(plan.target, wanted, plan.hardware)
    raise IllegalMove(f"schedule {wanted} does not take {group.name}")


def as_library(plan: Plan, name: str) -> Plan:
    """The plan with a group's calls back in the library, one group each.

    Raises:
        IllegalMove: it is there already.
    """
    group = plan.group(name)
    if group.engine == "library":
        raise IllegalMove(f"{name} is a library call already")
    return ordered(with_groups(plan, [name], [Group(node, (node,)) for node in group.nodes]))


def with_settings(plan: Plan, name: str, settings: Settings) -> Plan:
    """The plan with a group's schedule set otherwise."""
    groups = tuple(replace(g, settings=settings) if g.name == name else g for g in plan.groups)
    return replace(plan, groups=groups)
