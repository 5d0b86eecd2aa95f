"""Proposes several moves at once, where no single one shows the gain: author, then fuse as far as it goes.

The one idea: a fusion pays only when the last intermediate result is gone, so a search that takes one move at a time
would turn back half way. Chains start with a legal move and go on with moves that the first ones make legal, known
from what the operations mean: `author` frees a group to be fused, `fuse` hands a producer's producers on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent_reasoning.plan_model import PlanModel, Unit
from warpsmith.v1 import analysis_pb2

Move = analysis_pb2.Move

ALL_PRODUCERS = "*"
"""Choice of a fuse move that takes in every producer, and theirs, for as long as it is legal."""


@dataclass(frozen=True)
class Chain:
    """Moves in order with the plan that they should give."""

    moves: tuple[Move, ...]
    plan: PlanModel
    touched: tuple[str, ...]
    """Groups that come out as one kernel, in order of execution."""


@dataclass(frozen=True)
class _Options:
    """What the analysis allows, by kind."""

    authors: dict[str, analysis_pb2.LegalMove]
    fusions: frozenset[tuple[str, str]]
    fusing: frozenset[str]
    """Groups that are part of a fusion."""

    @staticmethod
    def of(legal_moves: Sequence[analysis_pb2.LegalMove]) -> _Options:
        authors: dict[str, analysis_pb2.LegalMove] = {}
        for legal in legal_moves:
            if legal.move.kind == analysis_pb2.MOVE_KIND_AUTHOR:
                authors.setdefault(legal.move.group, legal)
        fusions = frozenset(
            (x.move.group, x.move.choice) for x in legal_moves if x.move.kind == analysis_pb2.MOVE_KIND_FUSE
        )
        return _Options(authors, fusions, frozenset(name for pair in fusions for name in pair))

    def fused(self, plan: PlanModel, consumer: str, producer: str) -> PlanModel:
        """The plan with a producer in its consumer; a matrix product is made there as a kernel of ours makes it."""
        legal = self.authors.get(producer)
        if plan.units[producer].multiplies and legal is not None and legal.HasField("after"):
            plan = plan.authored(producer, legal.after)
        return plan.fused(consumer, producer)

    def usable(self, unit: Unit) -> bool:
        """Whether the group can be part of a kernel, as far as the legal moves tell."""
        return unit.authored or unit.name in self.authors or unit.name in self.fusing


def with_all_producers(plan: PlanModel, consumer: str, legal_moves: Sequence[analysis_pb2.LegalMove]) -> PlanModel:
    """What `fuse(consumer, "*")` should give: all that can be part of a kernel, nearest first."""
    return _with_all_producers(plan, consumer, _Options.of(legal_moves))


def _with_all_producers(plan: PlanModel, consumer: str, options: _Options) -> PlanModel:
    while candidates := [name for name in plan.units[consumer].producers if _joins(plan, options, consumer, name)]:
        fused = options.fused(plan, consumer, candidates[-1])
        if candidates[-1] in fused.units:
            break  # it had to stay: to go on would meet it again
        plan = fused
    return plan


def chains(analysis: analysis_pb2.Analysis) -> Iterator[Chain]:
    """Chains worth a look, the widest first; equal ones come once."""
    plan = PlanModel.of(analysis)
    options = _Options.of(analysis.legal_moves)
    seen: set[tuple[bytes, ...]] = set()
    for chain in _all(plan, options):
        key = tuple(move.SerializeToString(deterministic=True) for move in chain.moves)
        if len(chain.moves) > 1 and key not in seen and _starts_legally(chain.moves[0], options):
            seen.add(key)
            yield chain


def _all(plan: PlanModel, options: _Options) -> Iterator[Chain]:
    for reduction_limit in (1, len(plan.units)):
        kernels = list(_kernels(plan, options, reduction_limit))
        yield _joined(plan, options, kernels)
        if len(kernels) > 1:
            for kernel in kernels:
                yield _joined(plan, options, [kernel])
    yield _joined(plan, options, [(name, ()) for name in plan.units if name in options.authors])


_Kernel = tuple[str, tuple[str, ...]]
"""A consumer and the producers to fuse into it, in order."""


def _kernels(plan: PlanModel, options: _Options, reduction_limit: int) -> Iterator[_Kernel]:
    """Greedy clusters from the outputs backwards, each with at most `reduction_limit` reducing groups.

    A producer is taken only where no other group reads it: else its work would be done twice and no traffic saved.
    """
    taken: set[str] = set()
    products = any(unit.multiplies and options.usable(unit) for unit in plan.units.values())
    for name in reversed(tuple(plan.units)):
        if name in taken or not options.usable(plan.units[name]):
            continue
        current, fused = plan, []
        while True:
            unit = current.units[name]
            reducing = sum(plan.units[part].reducing for part in unit.parts)
            candidates = [
                producer
                for producer in reversed(unit.producers)
                if producer not in taken
                and current.consumers(producer) == (name,)
                and _joins(current, options, name, producer)
                and reducing + plan.units[producer].reducing <= max(reduction_limit, reducing)
            ]
            if not candidates:
                break
            fused.append(candidates[0])
            current = options.fused(current, name, candidates[0])
        taken |= {name, *fused}
        # A group alone is no fusion; it is authored where a single move says that it pays. Beside a product of ours,
        # which takes most of the time away, the reductions that it cannot end in count as well.
        alone = name in options.authors and (plan.units[name].multiplies or (products and plan.units[name].reducing))
        if fused or alone:
            yield name, tuple(fused)


def _joins(plan: PlanModel, options: _Options, consumer: str, producer: str) -> bool:
    """Whether the two may be one kernel, as far as can be told: a matrix product ends in pointwise work only, and what
    it multiplies is read from memory, unless a legal move says otherwise."""
    into, part = plan.units[consumer], plan.units[producer]
    if part.multiplies and (into.reducing or into.multiplies):
        return False
    is_legal = (consumer, producer) in options.fusions
    if into.multiplies and (part.reducing or (producer in into.multiplied and not is_legal)):
        return False
    return options.usable(part)


def _joined(plan: PlanModel, options: _Options, kernels: Sequence[_Kernel]) -> Chain:
    moves: list[Move] = []
    touched: list[str] = []
    for consumer, producers in kernels:
        if consumer not in plan.units:
            continue  # a fusion with all producers took it in
        before, start = plan, len(moves)
        if not plan.units[consumer].authored and consumer in options.authors:
            legal = options.authors[consumer]
            moves.append(legal.move)
            plan = plan.authored(consumer, legal.after if legal.HasField("after") else None)
        for producer in producers:
            moves.append(Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=consumer, choice=producer))
            plan = options.fused(plan, consumer, producer)
        if sum(before.units[name].reducing for name in producers) and (consumer, ALL_PRODUCERS) in options.fusions:
            # Several reductions may not be one nest: synthesis then takes what it can, instead of refusing the chain.
            moves[start:] = [Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=consumer, choice=ALL_PRODUCERS)]
            plan = _with_all_producers(before, consumer, options)
        touched += plan.units[consumer].parts
    return Chain(tuple(moves), plan, tuple(touched))


def _starts_legally(move: Move, options: _Options) -> bool:
    if move.kind == analysis_pb2.MOVE_KIND_AUTHOR:
        return move.group in options.authors
    return (move.group, move.choice) in options.fusions
