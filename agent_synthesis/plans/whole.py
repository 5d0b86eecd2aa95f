"""Whole plans: all that can be in kernels of ours at once, each as large as it goes.

The one idea: from the outputs backwards, a group takes in what can move there, so that every call is in one kernel and
nothing is computed twice. A search of a network begins with that instead of finding its kernels one move at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from agent_synthesis.graphs import in_place
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.convolution import convolves
from agent_synthesis.nests.attention import attention_of
from agent_synthesis.nests.calls.attention_backward import AttentionBackward
from agent_synthesis.nests.calls.recurrence import is_call
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import multiplies_matrices
from agent_synthesis.plans import bundles, chunking, cost, fusion, row_totals, saving
from agent_synthesis.plans.partition import Group, touched
from agent_synthesis.plans.plan import Plan, schedules_for
from agent_synthesis.rewrite import attention_steps, rewritten, shared_heads, with_replacement
from agent_synthesis.rewrite.calls import operation
from agent_synthesis.rewrite.loops.layers import StackedLayers
from agent_synthesis.rewrite.loops.unrolled import Stepped, Unrolled, replacements, replacements_by_steps
from warpsmith.errors import IllegalMove
from warpsmith.program_steps import LOOP
from warpsmith.v1 import task_pb2

EVERY_GROUP = "*"
"""Group of an author move that makes a whole plan."""
LEAST_KERNELS = 3
"""That a whole plan adds where nothing convolves: fewer are a chain of moves, which a reasoner proposes."""
_LOOKUPS = frozenset({"gather", "index", "index_select", "nll_loss_forward", "take"})
_MOST_ROUNDS = 3
_MOST_SIBLINGS = 4
MOST_POINTS = 64
"""Counters that one kernel updates: each is an argument of it."""
CHOICES: Mapping[str, str] = {
    "beside_products": "computes all but products and convolutions in kernels of our own, each as large as it goes",
    "": "computes all that can be in kernels of our own, products and convolutions too, each as large as it goes",
}
"""Choices of such a move, and what it does."""


def least_kernels(plan: Plan) -> int:
    """That a whole plan adds: one beside convolutions, which may be laid out anew before, of a training step, where no
    other move computes anything again, and of a loop that was unrolled, which it makes one call of."""
    if plan.index.graph.gradients or {Unrolled.name, Stepped.name} & {*plan.rewrites}:
        return 1
    return 1 if any("conv" in operation(node) for node in plan.index.nodes.values()) else LEAST_KERNELS


def rolled(plan: Plan) -> Plan:
    """The plan with each loop that was unrolled as one call, where a kernel of ours takes all of its steps, and
    recurrent calls that read each other's sequences as layers of one."""
    result = _with_calls(plan, Unrolled.name, lambda plan: replacements(plan.index))
    result = _with_calls(result, Stepped.name, lambda plan: replacements_by_steps(plan.index))
    return _with_calls(result, StackedLayers.name, _calls) if Unrolled.name in result.rewrites else result


def _with_calls(plan: Plan, rule: str, places: Callable[[Plan], Iterable[str]]) -> Plan:
    """The plan after a rule that makes recurrent calls, at all places where a kernel takes them."""
    tried = set[str]()
    while found := [name for name in places(plan) if name not in tried]:
        tried.add(found[0])
        with contextlib.suppress(IllegalMove):
            made = rewritten(plan, found[0], rule)
            nests = [made.nest(made.group(name)) for name in _calls(made) - _calls(plan)]
            if all(isinstance(nest, Nest) and schedules_for(made.target, nest, made.hardware) for nest in nests):
                plan = made
    return plan


def with_whole_attention(plan: Plan) -> Plan:
    """The plan of a training step with attention that it writes out as calls that keep no scores, and with heads that
    share keys as they are, where it has such."""
    if any(group.engine != "library" for group in plan.groups):
        return plan
    while made := attention_steps.replacements(plan.index, is_gpu=plan.target == task_pb2.TARGET_CUDA):
        plan = replace(with_replacement(plan, *made), rewrites=(*plan.rewrites, attention_steps.NAME))
    while plan.target == task_pb2.TARGET_CUDA and (made := shared_heads.replacements(plan.index)):
        plan = with_replacement(plan, *made)
    return plan


def _calls(plan: Plan) -> set[str]:
    return {name for name, node in plan.index.nodes.items() if is_call(node) or node.target == LOOP}


def choices(plan: Plan) -> Iterator[str]:
    """Those that may be legal and differ: without matrix products all is beside them."""
    plan = rolled(plan)
    if sum(group.engine == "library" for group in plan.groups) < least_kernels(plan):
        return
    multiplies = any(_multiplies(plan, group) for group in plan.groups)
    yield from (choice for choice in CHOICES if choice or multiplies)


def authored(plan: Plan, choice: str) -> Plan:
    """The plan with every library group that can be in a kernel of ours.

    Raises:
        IllegalMove: no such choice, or fewer than `least_kernels` come of it.
    """
    if choice not in CHOICES:
        raise IllegalMove(f"a whole plan may be {', '.join(map(repr, CHOICES))}, not {choice!r}")

    def may_join(plan: Plan, group: Group) -> bool:
        is_kept = plan.prepared and plan.is_kept(group)  # constants are often as cheap to make as to read
        return group.engine != "written" and not is_kept and (choice == "" or not _multiplies(plan, group))

    plan = with_whole_attention(rolled(plan))
    result = saving.with_least_traffic(row_totals.apart(plan))
    if written := in_place.out_of_place(result.index):
        result = with_replacement(result, *written)
    apart = [made for group in result.groups if (made := fusion.bias_apart(result, group)) is not None]
    result = with_replacement(result, *apart) if apart else result
    for name in [group.name for group in reversed(result.groups)]:
        group = result.partition.by_name.get(name)
        if group is None or group.engine != "library" or result.is_kept(group):
            continue
        if may_join(result, group):
            with contextlib.suppress(IllegalMove):
                result = fusion.authored(result, name)
                result = fusion.fused_with_all(
                    result, name, ["moved"], lambda *given: may_join(*given) and not _looks_up(*given)
                )
    if result.index.graph.gradients:
        result = _with_schedules_that_take_them(_with_less_traffic(result, may_join))
    result = _with_points_together(result)
    count = sum(group.engine == "authored" for group in result.groups)
    least = least_kernels(plan)
    if count - sum(group.engine == "authored" for group in plan.groups) < least:
        raise IllegalMove(f"fewer than {least} kernels of our own would come of it")
    return bundles.together(result, bundles.LEAST_OF_WHOLE_PLAN)


def _looks_up(plan: Plan, group: Group) -> bool:
    """Whether a call of a training step takes few elements of what others make: it goes with those, not with what reads
    it, and so they need not be stored."""
    if not plan.index.graph.gradients:
        return False
    outside = plan.reads(group)
    for node in group.nodes:
        if operation(plan.index.nodes[node]) in _LOOKUPS:
            most = max(_count(plan, each) for each in plan.index.results(node))
            read = [each for each in plan.index.reads_from_outside((node,)) if each in outside]
            if any(plan.index.producer(each) is not None and _count(plan, each) > most for each in read):
                return True
    return False


def _count(plan: Plan, tensor: str) -> int:
    return math.prod(plan.index.spec(tensor).shape)


def _with_less_traffic(plan: Plan, may_join: Callable[[Plan, Group], bool]) -> Plan:
    """The plan in which kernels join others, or compute again what others make, as long as less memory is moved.

    Of a training step: its forward and its backward read the same tensors, as do the gradients of several inputs.
    """
    for _ in range(_MOST_ROUNDS):
        before = plan
        for name in [group.name for group in reversed(plan.groups)]:
            if name in plan.partition.by_name and plan.group(name).engine == "authored":
                plan = _joined_where_less_is_moved(plan, name, may_join)
                plan = _spread_where_less_is_moved(plan, name)
        if plan is before:
            break
    return plan


def _with_schedules_that_take_them(plan: Plan) -> Plan:
    """The plan with other schedules for kernels that store less than they did, since others compute it again."""
    for group in plan.groups:
        nest = plan.nest(group)
        if group.engine == "authored" and isinstance(nest, Nest) and not plan.schedule(group).accepts(nest):
            plan = fusion.rescheduled(plan, group.name)
    return plan


def _joined_where_less_is_moved(plan: Plan, name: str, may_join: Callable[[Plan, Group], bool]) -> Plan:
    for other in (*plan.producers(plan.group(name))[::-1], *plan.siblings(plan.group(name))[-_MOST_SIBLINGS:]):
        near = plan.partition.by_name.get(other)
        if near is None or near.engine != "authored" or not may_join(plan, near) or _looks_up(plan, near):
            continue
        for way in fusion.WAYS:
            with contextlib.suppress(IllegalMove):
                made = fusion.fused(plan, name, other, [way])
                if _moves_less(made, plan):
                    return _joined_where_less_is_moved(made, name, may_join)
    return plan


def _spread_where_less_is_moved(plan: Plan, name: str) -> Plan:
    """The plan with a group computed again by all that read its results, which then are not stored."""
    if name not in plan.partition.by_name or not plan.outputs(plan.group(name)):
        return plan
    names = {reader for tensor in plan.outputs(plan.group(name)) for reader in plan.partition.readers[tensor]} - {name}
    if len(names) < 2 or not all(reader and plan.group(reader).engine == "authored" for reader in names):
        return plan
    made = plan
    with contextlib.suppress(IllegalMove):
        for reader in sorted(names, key=plan.partition.places.__getitem__):
            if reader in made.partition.by_name and name in made.producers(made.group(reader)):
                made = fusion.fused(made, reader, name, ["again"])
        return made if _moves_less(made, plan) else plan
    return plan


def _moves_less(made: Plan, plan: Plan) -> bool:
    """Whether a plan moves less memory than the one that it was made of, and computes only single elements again: what
    is reduced is small, and kept."""
    own, theirs = (touched(a.partition, b.partition) for a, b in ((plan, made), (made, plan)))
    before = {node for group in own for node in group.recomputed}
    again = {node for group in theirs for node in group.recomputed} - before
    if not all(saving.is_elementwise(plan.index, node) for node in again):
        return False
    return _moved_bytes(made, theirs) < _moved_bytes(plan, own) and not chunking.holds_more(made, plan)


def _moved_bytes(plan: Plan, groups: Iterable[Group]) -> int:
    """Of groups in one call."""
    costs = (cost.of_group(plan, group) for group in groups)
    return sum(each.read_bytes + each.write_bytes + each.extra_bytes for each in costs)


def _with_points_together(plan: Plan) -> Plan:
    """The plan with kernels of one element each, which are alone, in few: counters of batch norms are launches else."""
    points = [group.name for group in plan.groups if _is_point(plan, group)]
    result = plan
    for some in (points[first : first + MOST_POINTS] for first in range(0, len(points), MOST_POINTS)):
        if len(some) > 1:
            with contextlib.suppress(IllegalMove):
                result = fusion.together(result, some)
    return result


def _is_point(plan: Plan, group: Group) -> bool:
    nest = plan.nest(group)
    if group.engine != "authored" or not isinstance(nest, Nest) or plan.outputs(group) or plan.producers(group):
        return False
    return nest.row_count * nest.column_count == 1


def _multiplies(plan: Plan, group: Group) -> bool:
    """Whether it is a product or a convolution that a schedule takes, and that a library may make as fast. Attention of
    floats is not: a library has no tensor cores for it, unless a task allows TF32."""
    nest = plan.nest(group)
    if not isinstance(nest, Nest):
        return False
    if any(reduction.operation == "attend" for reduction in nest.reductions) and not nest.allows_tf32:
        attention = attention_of(iteration_space.simplified(nest))
        if attention is not None and attention.type is Type.F32:
            return not schedules_for(plan.target, nest, plan.hardware)
    if isinstance(nest, AttentionBackward):
        return True
    return multiplies_matrices(nest) or (convolves(nest) and bool(schedules_for(plan.target, nest, plan.hardware)))
