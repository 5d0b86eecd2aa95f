"""Which groups may become one kernel, and the group that results.

The one idea: ask the lowering. A pair fuses when one nest computes both, a schedule takes the nest, and the
plan still has an order; the producer's result is stored as well when others read it, or computed twice where
storing it from the same kernel would tie a knot.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from agent_synthesis.emit.registry import APART, PIECES
from agent_synthesis.graphs import biases, decompositions, row_sums, splits
from agent_synthesis.graphs.graph_index import byte_count
from agent_synthesis.lowering.groups import Refusal, lower
from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.analysis.apart import apart
from agent_synthesis.nests.analysis.convolution import convolves
from agent_synthesis.nests.analysis.pieces import pieces
from agent_synthesis.nests.analysis.transposition import SECTOR_BYTES, across_bytes
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import elements_and_rows, multiplies_matrices
from agent_synthesis.plans import chunking
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan, schedule_named, schedules_for
from agent_synthesis.rewrite import with_replacement
from agent_synthesis.rewrite.calls import Replacement
from agent_synthesis.schedule import Offered
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove
from warpsmith.graphs import aten, dtypes
from warpsmith.v1 import task_pb2

_STEPS_BACK = 4
"""From a product to what both its factors lie in: a conversion, a scale, and views between them."""
_MANY = 8
"""Producers that are taken in one by one, before several are at once."""
_MOST_IN_VAIN = 8
"""Producers in a row that are computed again and stay: residual blocks would be followed back to the first."""
_MOST_CALLS = 96
"""Of a kernel that takes in all that fuses: a loop that is written out would be one that each of its steps has thought
through again."""
_FULL = 3
"""Producers that would make a kernel too large, after which no more are tried."""
Way = Literal["moved", "again"]
"""Of joining a producer to a group: it is moved there in whole, or computed there again."""
WAYS: tuple[Way, ...] = ("moved", "again")
ALL_PRODUCERS = "*"
"""Choice of a fuse move that takes in every producer, and theirs, for as long as it is legal."""


class _TooLarge(IllegalMove):
    """Groups are too much for one kernel, and stay so whatever else comes in."""


def authored(plan: Plan, name: str, schedule: str = "") -> Plan:
    """The plan with a group as a kernel of ours, its settings the schedule's defaults.

    Raises:
        IllegalMove: the group is not one nest, or the schedule (or, unnamed, any schedule) does not take it.
    """
    group = plan.group(name)
    nest = plan.nest(group)
    whole = isinstance(nest, Nest) and schedules_for(plan.target, nest, plan.hardware)
    if not whole and len(group.nodes) == 1 and not schedule:
        if (made := parts(plan, group)) is not None:
            return _authored_in_parts(plan, made)
        if (made := bias_apart(plan, group)) is not None:
            return authored(with_replacement(plan, made), name)
    trial = plan.replaced([name], [replace(group, engine="authored", text="")])
    return _set_by_default(_scheduled(trial, name, schedule), name)


def parts(plan: Plan, group: Group) -> Replacement | None:
    """The calls that a library call is made of, where they are kernels and it is none."""
    made = splits.taken_apart(plan.index, group.name)
    if made is None and not is_nest(plan, group):
        made = decompositions.taken_apart(plan.index, group.name)
    return made


def is_nest(plan: Plan, group: Group) -> bool:
    """Whether the group is one nest; of one that sums over its rows, whether the target has a schedule."""
    nest = plan.nest(group)
    return isinstance(nest, Nest) and (not nest.summed or bool(schedules_for(plan.target, nest, plan.hardware)))


def stays(plan: Plan, part: str) -> bool:
    """Whether a part of a call that is taken apart is PyTorch's to make."""
    return aten.operation(plan.index.nodes[part].target) in row_sums.STAY


def bias_apart(plan: Plan, group: Group) -> Replacement | None:
    """A library call's bias as an addition after it; None where the library adds it on its way."""
    is_library_on_gpu = plan.target == task_pb2.TARGET_CUDA and group.engine == "library"
    return biases.apart(plan.index, group.name) if is_library_on_gpu else None


def _authored_in_parts(plan: Plan, made: Replacement) -> Plan:
    """The plan with a call taken apart, and its parts in as few kernels as they fuse to.

    A part that is the same operation with less to do may stay the library's.
    """
    whole = plan.index.nodes[made.removed[0]].target
    result = with_replacement(plan, made)
    names = [node.name for node in made.added]
    for name in reversed(names):
        if all(group.name != name for group in result.groups) or result.is_kept(result.group(name)):
            continue
        try:
            result = authored(result, name)
        except IllegalMove:
            if result.index.nodes[name].target != whole and not stays(result, name):
                raise
            continue
        for producer in reversed(names):
            if producer in result.producers(result.group(name)):
                with contextlib.suppress(IllegalMove):
                    result = fused(result, name, producer)
    return result


def fused(plan: Plan, name: str, producer: str, ways: Sequence[Way] = WAYS) -> Plan:
    """The plan with a producer computed inside a group, or with a sibling that reads the same tensor beside it.

    `ways`: those that are tried, in order.

    Raises:
        IllegalMove: they have nothing in common, are not one nest together, or no schedule takes it.
    """
    if producer == ALL_PRODUCERS:
        return fused_with_all(plan, name)
    return _set_by_default(_fused(plan, name, producer, ways), name)


def _joined(plan: Plan, name: str, producer: str, way: Way) -> Plan:
    if len(plan.group(name).nodes) + len(plan.group(producer).nodes) > _MOST_CALLS:
        raise IllegalMove(f"{name} would have more than {_MOST_CALLS} calls with {producer}")
    return _checked(plan, _fused(plan, name, producer, [way]), name, [producer])


def _checked(plan: Plan, made: Plan, name: str, joined: Sequence[str]) -> Plan:
    """A plan in which a group has taken in others of `plan`.

    Raises:
        IllegalMove: they are a kernel, but one that had better be several.
    """
    if _reduces_product(made, name) and not _reduces_product(plan, name):
        raise IllegalMove(f"{name} reduces the product of {joined[-1]}, which is a move of its own")
    if chunking.holds_more(made, plan):
        raise IllegalMove(f"{name} would keep what {joined[-1]} reads of other chunks")
    groups = [plan.group(each) for each in (name, *joined)]
    read = {tensor for group in groups for tensor in plan.reads(group)}
    between = read.intersection(tensor for group in groups[1:] for tensor in plan.outputs(group))
    apart = sum(_across_bytes(plan, group.name) for group in groups)
    if _across_bytes(made, name) > apart + 2 * sum(byte_count(plan.index.spec(tensor)) for tensor in between):
        raise IllegalMove(f"{name} lies across {joined[-1]} in memory: apart, each moves what lies together")
    return made


def _fused(plan: Plan, name: str, producer: str, ways: Sequence[Way] = WAYS) -> Plan:
    """The same by the first way that there is, with no settings chosen."""
    group, other = plan.group(name), plan.group(producer)
    if producer not in plan.producers(group) and producer not in plan.siblings(group):
        raise IllegalMove(f"{name} reads no result of {producer}, and nothing large that {producer} reads too")
    if group.members or other.members:
        raise IllegalMove(f"{name} and {producer}: kernels that are launched together stay as they are")
    if "written" in (group.engine, other.engine):
        raise IllegalMove(f"{name} and {producer}: a kernel that was written does not fuse; author it first")
    refusal, near = IllegalMove(""), [producer, *plan.producers(group), *plan.producers(other)]
    for way in ways:
        if way == "again" and producer not in plan.producers(group):
            continue
        try:
            made = _tried(plan, group, other, way)
            if made.partition.is_knotted:  # which is known at once, and a kernel is not
                made = made.ordered()
            return _without_unread(_scheduled(made, name, group.schedule, other.schedule, may_part=True), near)
        except IllegalMove as error:
            refusal = refusal if refusal.args[0] else error
    raise refusal


def _without_unread(plan: Plan, near: Iterable[str]) -> Plan:
    """The plan in which calls that every reader of a group computes again by now belong to the first of these readers.

    `near`: the groups that may have lost their last reader; some may be gone.

    Raises:
        IllegalMove: a kernel would be left whose result is never read.
    """
    groups = plan.partition.by_name
    for group in sorted((groups[name] for name in {*near} & {*groups}), key=lambda g: plan.partition.places[g.name]):
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
        moved = plan.replaced([group.name, heir.name], [made]).ordered()
        return _without_unread(moved, [*near, *plan.producers(group), *plan.producers(heir)])
    return plan


def fused_with_all(
    plan: Plan, name: str, ways: Sequence[Way] = WAYS, may_join: Callable[[Plan, Group], bool] = lambda *_: True
) -> Plan:
    """The plan with a group and everything before it that fuses: what can move there, nearest first, then the rest.

    What is computed again is worth that only if the group that computed it is gone in the end, or if no more is read:
    the best plan on the way is the answer. A product stays apart from what reduces its rows: to join them is a move of
    its own, since it gains little (1.00 to 1.01 times on KernelBench's level 2) and does not end as many products.
    `may_join`: whether a group of a plan may be taken in.

    Raises:
        IllegalMove: nothing fuses.
    """
    begun = _with_factors(plan, name, may_join)
    result, best, least, vain = begun, begun, _work(begun, name), 0
    at_once, halves = 0, False
    refused, too_large = set[tuple[Way, str]](), set[tuple[Way, str]]()
    reason = f"{name} has no producer"
    while vain < _MOST_IN_VAIN and len(too_large) < _FULL:
        if ways[0] == "moved" and (at_once > _MANY or halves) and at_once > 1:
            try:
                made = _with_many(result, name, at_once, may_join)
            except IllegalMove:
                at_once, halves = at_once // 2, True
            else:
                result, at_once, vain = made, at_once if halves else 2 * at_once, 0
                refused = {*too_large}
                if (work := _work(made, name)) <= least:
                    best, least = made, work
            continue
        if halves:
            at_once, halves = 0, False
        nearest = result.producers(result.group(name))[::-1]
        nearest = [other for other in nearest if may_join(result, result.group(other))]
        tried = [(way, other) for way in ways for other in nearest if (way, other) not in refused]
        if not tried:
            break
        for way, other in tried:
            try:
                made = _joined(result, name, other, way)
            except IllegalMove as error:
                refused.add((way, other))
                if isinstance(error, _TooLarge):
                    too_large.add((way, other))
                reason = str(error) if way == "moved" else reason
                continue
            before, result = result, made
            refused -= {(way, each) for way in ways for each in before.producers(before.group(other))}  # may fuse now
            refused |= too_large
            vain = vain + 1 if len(made.groups) == len(before.groups) else 0
            at_once += 1
            if (work := _work(made, name)) <= least:
                best, least = made, work
            break
    if best is plan:
        raise IllegalMove(reason)
    return _set_by_default(best, name)


def _with_many(plan: Plan, name: str, count: int, may_join: Callable[[Plan, Group], bool]) -> Plan:
    """The plan with the nearest groups that compute element by element moved into a group, up to `count` at once: one
    by one, each would have all of the kernel thought through again, and a loop that is written out takes minutes.

    Raises:
        IllegalMove: there are fewer than two, or they are not one kernel together.
    """
    group, places, taken = plan.group(name), plan.partition.places, list[str]()
    calls = len(group.nodes)
    ahead, seen = [(-places[each], each) for each in plan.producers(group)], {name, *plan.producers(group)}
    heapq.heapify(ahead)
    while ahead and len(taken) < count:
        other = plan.group(heapq.heappop(ahead)[1])
        if not (may_join(plan, other) and _is_elementwise(plan, other)):
            continue
        calls += len(other.nodes)
        if calls > _MOST_CALLS:
            break
        taken.append(other.name)
        for each in plan.producers(other):
            if each not in seen:
                seen.add(each)
                heapq.heappush(ahead, (-places[each], each))
    if len(taken) < 2:
        raise IllegalMove(f"{name} reads little that is computed element by element")
    groups = [group, *map(plan.group, taken)]
    nodes = tuple(sorted((node for each in groups for node in each.nodes), key=plan.index.position.__getitem__))
    again = {node for each in groups for node in each.recomputed} - {*nodes}
    recomputed = tuple(sorted(again, key=plan.index.position.__getitem__))
    made = plan.replaced([name, *taken], [replace(group, nodes=nodes, recomputed=recomputed, engine="authored")])
    made = _without_unread(_scheduled(made, name, group.schedule, may_part=True), sorted(seen))
    return _checked(plan, made, name, taken)


def _is_elementwise(plan: Plan, group: Group) -> bool:
    """Whether a group may move as it is and computes single elements."""
    if group.members or group.engine == "written" or not all(map(plan.index.is_pure, group.nodes)):
        return False
    nest = plan.nest(group)
    return isinstance(nest, Nest) and not nest.reductions and not multiplies_matrices(nest)


def _with_factors(plan: Plan, name: str, may_join: Callable[[Plan, Group], bool]) -> Plan:
    """The plan with both factors of a product computed inside it, where a schedule takes that and neither one alone.

    As many steps back as are needed, and no more: what is before them stays in memory, in as few bits as it has there.
    """
    nest = plan.nest(plan.group(name))
    if not isinstance(nest, Nest) or not multiplies_matrices(nest) or len(plan.producers(plan.group(name))) < 2:
        return plan
    taken, last = {name}, [name]
    for _ in range(_STEPS_BACK):
        found = {each for one in last for each in plan.producers(plan.group(one))} - taken
        last = [each for each in found if _is_for(plan, each, taken) and may_join(plan, plan.group(each))]
        if not last:
            break
        taken |= {*last}
        read = {tensor for each in taken for tensor in plan.reads(plan.group(each))}
        if not any(dtypes.to_torch(plan.index.spec(each).dtype) in dtypes.FLOATS_OF_8_BITS for each in read):
            continue  # no schedule computes both
        with contextlib.suppress(IllegalMove):
            return together(plan, sorted(taken, key=plan.partition.places.__getitem__))
    return plan


def _is_for(plan: Plan, name: str, readers: Collection[str]) -> bool:
    """Whether a group computes element by element what these groups alone read."""
    is_read = any(name in plan.producers(other) for other in plan.groups if other.name not in readers)
    return not is_read and _is_elementwise(plan, plan.group(name))


def together(plan: Plan, names: Sequence[str]) -> Plan:
    """The plan with groups that have nothing to do with each other in one kernel, named after the last.

    Raises:
        IllegalMove: one nest does not compute them.
    """
    nodes = sorted((node for name in names for node in plan.group(name).nodes), key=plan.index.position.__getitem__)
    name = plan.partition.owner[nodes[-1]]
    joined = plan.replaced(names, [replace(plan.group(name), nodes=tuple(nodes), engine="authored")])
    return _set_by_default(_scheduled(joined, name, ""), name)


def _work(plan: Plan, name: str) -> tuple[int, int]:
    """Groups, and bytes that one of them reads: what is computed again may read more than the result that it spares."""
    read = plan.reads(plan.group(name))
    return len(plan.groups), sum(byte_count(plan.index.spec(tensor)) for tensor in read)


def _across_bytes(plan: Plan, name: str) -> int:
    """What a group's kernel moves in vain where a reduction of a GPU goes through memory in strides."""
    nest = plan.nest(plan.group(name))
    if plan.target != task_pb2.TARGET_CUDA or not isinstance(nest, Nest):
        return 0
    if not passes.is_reduction(nest) or multiplies_matrices(nest):
        return 0
    halves = apart(nest) if plan.group(name).schedule == APART else None
    parts = pieces(nest) if plan.group(name).schedule == PIECES else [nest if halves is None else halves.reducing]
    nests = map(iteration_space.simplified, parts)
    return sum(across_bytes(each, passes.axis_across(each, 2) or each.reduced[-1], SECTOR_BYTES) for each in nests)


def _reduces_product(plan: Plan, name: str) -> bool:
    nest = plan.nest(plan.group(name))
    return isinstance(nest, Nest) and elements_and_rows(nest) is not None


def _tried(plan: Plan, group: Group, other: Group, way: Way) -> Plan:
    """Another joined to a group, no schedule chosen.

    Raises:
        IllegalMove: a call may not move or be made twice. The plan may turn out not to exist all the same.
    """
    index = plan.index
    position = index.position.__getitem__
    if way == "moved":
        nodes = tuple(sorted((*group.nodes, *other.nodes), key=position))
        recomputed = tuple(sorted({*group.recomputed, *other.recomputed} - {*nodes}, key=position))
    else:
        nodes = group.nodes
        needed = _needed(plan, plan.reads(group), plan.all_nodes(other))
        recomputed = tuple(sorted({*group.recomputed, *needed} - {*nodes}, key=position))
    for node in (*nodes, *recomputed):  # the cheap refusal first: most pairs fail because one may not move
        if not index.is_pure(node) and (node in recomputed or not index.writes_back(node)):
            raise IllegalMove(f"{index.nodes[node].target} may not move into a kernel")
    for node in recomputed:
        if index.is_overwritten(node):
            raise IllegalMove(f"the result of {node} is written in place: computed again it would be the old one")
        if _multiplies(plan, node):
            raise IllegalMove(f"{node} multiplies matrices or windows, which is not worth computing twice")
    removed = (group.name, other.name) if way == "moved" else (group.name,)
    return plan.replaced(removed, [replace(group, nodes=nodes, recomputed=recomputed, engine="authored")])


def _needed(plan: Plan, tensors: Iterable[str], among: Collection[str]) -> set[str]:
    """Of some calls, those that tensors need; views are seen through."""
    pending, found = list(tensors), set[str]()
    while pending:
        maker = plan.index.producer(pending.pop())
        if maker is not None and maker in among and maker not in found:
            found.add(maker)
            pending += plan.index.reads_from_outside((maker,))
    return found


def _multiplies(plan: Plan, node: str) -> bool:
    results = plan.index.results(node)
    nest = lower(plan.index, (node,), tuple(results[:1])) if results else None
    return isinstance(nest, Nest) and (multiplies_matrices(nest) or convolves(nest))


def rescheduled(plan: Plan, name: str) -> Plan:
    """The plan with an authored group given the first schedule that takes it, by its defaults.

    Raises:
        IllegalMove: none does.
    """
    return _set_by_default(_scheduled(plan, name, ""), name)


def _scheduled(plan: Plan, name: str, wanted: str, otherwise: str = "", *, may_part: bool = False) -> Plan:
    """The plan with the authored group given a schedule, not set yet: the wanted one if it takes the nest, else what a
    producer that came in had, else the first. `may_part`: a kernel for each part of a concatenation comes before."""
    group = plan.group(name)
    nest = plan.nest(group)
    if isinstance(nest, Refusal):
        raise (_TooLarge if nest.is_size else IllegalMove)(f"{name} cannot be one kernel: {nest.reason}")
    schedule = _choose(plan, nest, group, PIECES if may_part else wanted, wanted, otherwise)
    return plan.exchanged(replace(group, schedule=schedule.name)).ordered()


def _set_by_default(plan: Plan, name: str) -> Plan:
    group = plan.group(name)
    nest = plan.nest(group)
    assert isinstance(nest, Nest), nest
    return with_settings(plan, name, plan.schedule(group).defaults(nest))


def _choose(plan: Plan, nest: Nest, group: Group, best: str, wanted: str, otherwise: str) -> Offered:
    taking = schedules_for(plan.target, nest, plan.hardware)
    if not taking and multiplies_matrices(nest):
        raise IllegalMove(f"{group.name} is a product of two matrices, of a form or size that no schedule takes")
    if not taking:
        raise IllegalMove(f"{group.name}: no schedule of the target takes {nest.comment or 'the nest'}")
    by_name = {schedule.name: schedule for schedule in taking}
    if found := by_name.get(best, by_name.get(wanted)):
        return found
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
    return plan.replaced([name], [Group(node, (node,)) for node in group.nodes]).ordered()


def with_settings(plan: Plan, name: str, settings: Settings) -> Plan:
    """The plan with a group's schedule set otherwise."""
    return plan.exchanged(replace(plan.group(name), settings=settings))
