"""Groups that are alike: a network of eighteen equal blocks has one problem, not eighteen.

The one idea: two groups are alike where they compute the same in the same way, names aside (`lowering.forms`), by the
same engine with the same settings. A move on one is offered for all of them at once, as one decision.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from agent_synthesis.lowering.groups import form_key
from agent_synthesis.plans.plan import Plan
from warpsmith.errors import IllegalMove
from warpsmith.v1 import analysis_pb2

_ON_SEVERAL = (analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_LIBRARY, analysis_pb2.MOVE_KIND_SET)


def classes(plan: Plan) -> Mapping[str, Sequence[str]]:
    """Each group's name with those of all that are alike, its own among them, in order of execution."""
    found: dict[Hashable, list[str]] = {}
    by_name: dict[str, list[str]] = {}
    for group in plan.groups:
        form = form_key(plan.index, plan.all_nodes(group), plan.outputs(group))
        key = (group.engine, group.schedule, group.settings, group.text, len(group.nodes), group.arrangement, form)
        by_name[group.name] = found.setdefault(key, [])
        by_name[group.name].append(group.name)
    return by_name


def on_each(move: analysis_pb2.Move) -> Sequence[analysis_pb2.Move]:
    """The move on each of its groups.

    Raises:
        IllegalMove: it cannot be made on several.
    """
    if not move.also:
        return [move]
    if move.kind not in _ON_SEVERAL or move.group == "*":
        raise IllegalMove("only author, library and set are made on several groups at once")
    singles = [analysis_pb2.Move() for _ in range(1 + len(move.also))]
    for single, group in zip(singles, (move.group, *move.also), strict=True):
        single.CopyFrom(move)
        single.group = group
        del single.also[:]
    return singles


def on_all(move: analysis_pb2.Move, effect: str, groups: Sequence[str]) -> tuple[analysis_pb2.Move, str]:
    """A move on the first of some groups that are alike, and its effect, made on all of them."""
    every = analysis_pb2.Move()
    every.CopyFrom(move)
    every.also.extend(groups[1:])
    return every, f"{effect}, in all {len(groups)} groups that are alike"
