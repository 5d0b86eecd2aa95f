"""A plan described for those who choose the next move: groups, their work, features, and what is legal."""

from __future__ import annotations

from agent_synthesis.lowering.groups import form_key
from agent_synthesis.plans import chunking, cost, moves
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan
from warpsmith import digest
from warpsmith.v1 import analysis_pb2


def describe(plan: Plan, *, with_legal_moves: bool) -> analysis_pb2.Analysis:
    """The analysis of a plan; legal moves cost a lowering each, so they are left out where they are not needed."""
    groups = [_describe_group(plan, group) for group in plan.groups]
    return analysis_pb2.Analysis(
        plan_digest=_plan_digest(plan),
        moves=plan.moves,
        groups=groups,
        legal_moves=moves.legal(plan) if with_legal_moves else [],
        minimum=cost.minimum(plan),
        features=_features(plan),
    )


def _describe_group(plan: Plan, group: Group) -> analysis_pb2.Group:
    choices, integers = group.settings.to_wire()
    return analysis_pb2.Group(
        name=group.name,
        computed_by=analysis_pb2.ENGINE_LIBRARY if group.engine == "library" else analysis_pb2.ENGINE_AUTHORED,
        schedule=group.schedule,
        operations=[plan.index.nodes[node].target for node in plan.all_nodes(group)],
        producers=plan.producers(group),
        cost=cost.of_group(plan, group),
        parameters=integers,
        choices=choices,
        form=digest.digest(repr(form_key(plan.index, plan.all_nodes(group), plan.outputs(group)))),
    )


def _plan_digest(plan: Plan) -> str:
    """Equal for equal plans, whatever moves led there."""
    parts: list[str | bytes | int] = ["plan", plan.index.digest, plan.target]
    parts += ["cuda_graph"] if plan.cuda_graph else []
    parts += ["prepared"] if plan.prepared else []
    for group in plan.groups:
        parts += [group.name, group.engine, group.schedule, ",".join(group.nodes), ",".join(group.recomputed)]
        parts += [group.text] if group.text else []
        parts += [f"{name}={value}" for name, value in sorted(group.settings.words().items())]
    return digest.digest(*parts)


def _features(plan: Plan) -> list[str]:
    """How a search tells kinds of plans apart: the partition, the engines and schedules, the strategies."""
    partition = ["+".join(plan.all_nodes(group)) for group in plan.groups if len(plan.all_nodes(group)) > 1]
    features = [f"partition:{digest.short(digest.digest(*sorted(partition)))}"] if partition else ["partition:none"]
    features += [f"rewrite:{rule}" for rule in plan.rewrites]
    features += ["launch:cuda_graph"] if plan.cuda_graph else []
    features += [f"layout:{move.choice}" for move in plan.moves if move.kind == analysis_pb2.MOVE_KIND_LAYOUT]
    chunked = [move for move in plan.moves if move.choice == chunking.CHOICE]
    features += [f"chunks:{move.group}:{move.arguments[chunking.CHOICE]}" for move in chunked]
    for group in plan.groups:
        if group.engine != "library":
            features.append(f"{group.name}:{group.schedule}")
            features += [f"{group.name}:{key}={value}" for key, value in sorted(group.settings.to_wire()[0].items())]
    return features
