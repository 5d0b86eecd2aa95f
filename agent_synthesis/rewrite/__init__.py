"""Algebra: rules that replace calls of the graph by cheaper calls with the same value.

The one idea: a rule turns nodes into nodes, so its result is plan zero's kind of plan again: each new call
runs in the library as it stands and composes with every other move. Rules state their condition and are
checked before use. Rounding may differ, never the meaning; reports label what was used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans.partition import Group, Partition
from agent_synthesis.plans.plan import Plan, schedules_for
from agent_synthesis.rewrite import attention, einsum, identities, linear, masks, norms, reductions
from agent_synthesis.rewrite.calls import Replacement, replaced
from agent_synthesis.rewrite.loops import layers, unrolled
from warpsmith import digest, program_steps
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2


class Rule(Protocol):
    """One identity of algebra. Its docstring says when it holds and what it does to rounding."""

    name: str
    effect: str

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        """What the rule makes of the calls that end in `node`; None where its condition does not hold."""
        ...


RULES: tuple[Rule, ...] = (
    unrolled.Unrolled(),
    unrolled.Stepped(),
    layers.StackedLayers(),
    identities.Dead(),
    attention.WholeAttention(),
    masks.ConstantMask(),
    linear.LinearRowSum(),
    linear.LinearPool(),
    linear.ScaleIntoWeights(),
    norms.NormIntoWeights(),
    einsum.EinsumPairs(),
    identities.Identity(),
    identities.Involution(),
    reductions.OfOneElement(),
    reductions.Nested(),
    reductions.OfBroadcast(),
    reductions.SoftmaxShift(),
)
"""Every rule, in the order in which they are proposed."""
_LOOPS = (unrolled.Unrolled.name, unrolled.Stepped.name)


def has_kernel(plan: Plan, node: str) -> bool:
    """Whether a kernel of ours takes a loop that is one call of its steps' calls: a library makes them one by one."""
    made = unrolled.replacements_by_steps(plan.index).get(node)
    if made is None or plan.target != task_pb2.TARGET_CUDA:
        return False
    try:
        after = with_replacement(plan, made)
    except IllegalMove:
        return False
    calls = [after.group(each.name) for each in made.added if each.target == program_steps.LOOP]
    nests = [after.nest(group) for group in calls]
    return all(isinstance(nest, Nest) and schedules_for(plan.target, nest, plan.hardware) for nest in nests)


_OFFERED: Mapping[str, Callable[[Plan, str], bool]] = {
    norms.NormIntoWeights.name: norms.is_worth_folding,
    unrolled.Stepped.name: has_kernel,
    identities.Dead.name: lambda plan, node: not attention.takes(plan.index, node),
}
"""Where a rule is proposed of those places where it holds; by default everywhere."""


def matching(plan: Plan, group: Group) -> list[Rule]:
    """Rules whose condition holds at a group, and that may gain something there."""
    holding = (rule for rule in RULES if _applicable(plan, group, rule) is not None)
    return [rule for rule in holding if rule.name not in _OFFERED or _OFFERED[rule.name](plan, group.nodes[-1])]


def in_loops(plan: Plan) -> frozenset[str]:
    """Groups that the rules of unrolled loops would replace, all of their steps at once."""
    found = [*unrolled.replacements(plan.index), *unrolled.replacements_by_steps(plan.index)]
    groups = [plan.partition.by_name[name] for name in found if name in plan.partition.by_name]
    rules = [(group, rule) for group in groups for rule in matching(plan, group) if rule.name in _LOOPS]
    legal = [made for group, rule in rules if (made := _applicable(plan, group, rule)) is not None]
    return frozenset(name for made in legal for name in made.removed if name in plan.partition.by_name)


def rewritten(plan: Plan, name: str, rule_name: str) -> Plan:
    """The plan over the rewritten graph; new calls are library groups, all others keep theirs.

    Raises:
        IllegalMove: no rule of that name, its condition does not hold, or a group of ours is in the way.
    """
    rule = next((rule for rule in RULES if rule.name == rule_name), None)
    if rule is None:
        raise IllegalMove(f"no rule is called {rule_name!r}; there are {', '.join(r.name for r in RULES)}")
    made = _applicable(plan, plan.group(name), rule)
    if made is None:
        raise IllegalMove(f"rule {rule_name} does not apply to {name}")
    after = with_replacement(plan, made)
    return replace(after, rewrites=(*plan.rewrites, rule.name))


def with_replacement(plan: Plan, *made: Replacement) -> Plan:
    """The plan over the graph after a replacement, or several of different calls.

    Raises:
        IllegalMove: its groups have no order.
    """
    graph = functools.reduce(replaced, made, plan.index.graph)
    graph.digest = digest.of_graph(graph)
    index = GraphIndex(graph, allows_tf32=plan.index.allows_tf32)
    removed = {name for each in made for name in each.removed}
    kept = [group for group in plan.groups if removed.isdisjoint(group.nodes)]
    added = (node.name for each in made for node in each.added)
    new = [Group(name, (name,)) for name in added if not index.is_view(name)]
    return replace(plan, partition=Partition(index, (*kept, *new), is_ordered=False).ordered())


def _applicable(plan: Plan, group: Group, rule: Rule) -> Replacement | None:
    if group.engine != "library":
        return None
    made = rule.replacement(plan.index, group.nodes[-1])
    if made is None or (not made.added and all(set(made.removed).issuperset(each.nodes) for each in plan.groups)):
        return None  # something must be left to run
    removed = set(made.removed)
    for other in plan.groups:
        if other.engine != "library" and not removed.isdisjoint(plan.all_nodes(other)):
            return None
    return made
