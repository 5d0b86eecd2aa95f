"""Whole plans: all that can be in kernels of ours at once, each as large as it goes.

The one idea: from the outputs backwards, a group takes in what can move there, so that every call is in one kernel and
nothing is computed twice. A search of a network begins with that instead of finding its kernels one move at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import multiplies_matrices
from agent_synthesis.plans import fusion
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan
from agent_synthesis.rewrite import with_replacement
from agent_synthesis.rewrite.calls import operation
from warpsmith.errors import IllegalMove

EVERY_GROUP = "*"
"""Group of an author move that makes a whole plan."""
LEAST_KERNELS = 3
"""That a whole plan adds where nothing convolves: fewer are a chain of moves, which a reasoner proposes."""
MOST_POINTS = 64
"""Counters that one kernel updates: each is an argument of it."""
CHOICES: Mapping[str, str] = {
    "beside_products": "computes all but matrix products in kernels of our own, each as large as it goes",
    "": "computes all that can be in kernels of our own, matrix products too, each as large as it goes",
}
"""Choices of such a move, and what it does."""


def least_kernels(plan: Plan) -> int:
    """That a whole plan adds: one beside convolutions, which may be laid out anew before."""
    return 1 if any("conv" in operation(node) for node in plan.index.nodes.values()) else LEAST_KERNELS


def choices(plan: Plan) -> Iterator[str]:
    """Those that may be legal and differ: without matrix products all is beside them."""
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

    apart = [made for group in plan.groups if (made := fusion.bias_apart(plan, group)) is not None]
    result = with_replacement(plan, *apart) if apart else plan
    for name in [group.name for group in reversed(result.groups)]:
        group = result.partition.by_name.get(name)
        if group is None or group.engine != "library" or result.is_kept(group):
            continue
        if may_join(result, group):
            with contextlib.suppress(IllegalMove):
                result = fusion.authored(result, name)
                result = fusion.fused_with_all(result, name, ["moved"], may_join)
    result = _with_points_together(result)
    count = sum(group.engine == "authored" for group in result.groups)
    least = least_kernels(plan)
    if count - sum(group.engine == "authored" for group in plan.groups) < least:
        raise IllegalMove(f"fewer than {least} kernels of our own would come of it")
    return result


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
    nest = plan.nest(group)
    return isinstance(nest, Nest) and multiplies_matrices(nest)
