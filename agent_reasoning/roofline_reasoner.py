"""The built-in reasoner: ranks single moves and chains of moves by predicted gain, corrected by what was measured.

The one idea: predicted speedup × correction from evidence × chance of working orders the list; ties keep the order
of the analysis, so equal requests give equal answers. It never calls a prediction a result.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent_reasoning import chains, headroom, wording
from agent_reasoning.evidence import Evidence, candidate_ns
from agent_reasoning.plan_model import PlanModel, summed
from agent_reasoning.prediction import Predictor, predictor
from agent_reasoning.roofline import bound, machine, traffic_bytes
from warpsmith.errors import BadInput
from warpsmith.floors import is_of_products
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, reasoning_service_pb2

SOURCE = "roofline"
EVIDENCE = "evidence"
"""Source of a prediction that earlier trials have corrected."""

DEFAULT_LIMIT = 8

EVERY_GROUP = "*"
"""Group of a move that changes the whole plan."""
_IN_ORDER = (analysis_pb2.MOVE_KIND_LAYOUT, analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_LAUNCH)
"""Kinds of such moves, in the order in which one leaves the next legal."""

_FUSABLE = 1.02
"""What algebra before kernels is thought to gain by what can be fused after it, which no roofline of the plan tells."""
_MOST_SPEEDUP = 50.0
"""That is predicted of several such moves, whose savings may add up to more than there is."""

LEAST_SPEEDUP = 0.8
"""Predictions below this are dropped: the model is not wrong by more than that often enough to pay. Where that leaves
nothing for a module, the best one stays: no module goes without a kernel that was tried and judged."""

_SET_PRIOR = 0.06
"""What a change of a schedule parameter gives at best, on average: it makes parameters of slow groups come before
those of fast ones, although the roofline sees no difference between most of them."""


@dataclass(frozen=True)
class _Option:
    """A hypothesis in the making; `score` orders, `speedup` is told."""

    moves: tuple[analysis_pb2.Move, ...]
    speedup: float
    score: float
    rationale: str
    source: str = SOURCE


class RooflineReasoner:
    """Proposes by roofline and evidence; needs no model server."""

    def propose(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        """Ranks chains and single moves; see `Reasoner`."""
        analysis = request.analysis
        if not request.HasField("analysis") or not analysis.groups:
            raise BadInput("the request has no analysis with groups: call AnalyzePlan first")
        response = reasoning_service_pb2.ProposeHypothesesResponse()
        evidence = Evidence(request.history)
        predicted = predictor(analysis, machine(request.device, request.task.target), request.reference, evidence)
        every = list(_options(analysis, predicted, evidence))
        options = [option for option in every if option.speedup >= LEAST_SPEEDUP]
        if not options and not any(trial.hypothesis.moves for trial in request.history):
            options = sorted(every, key=lambda option: -option.score)[:1]
        # A rewrite may do with less work than the floor was counted from, so it is worth a look even there.
        rewrites = any(
            o.moves[0].kind == analysis_pb2.MOVE_KIND_REWRITE and o.speedup > headroom.AT_FLOOR for o in options
        )
        if not rewrites and (reason := headroom.at_floor(request.reference)):
            response.at_floor = reason
            return response
        parent = evidence.trial_of(analysis.moves)
        floor = request.reference.floor_ns
        may_pass = rewrites or is_of_products(analysis.minimum, request.device, floor)
        if parent and not may_pass and 0 < candidate_ns(parent.timing) <= headroom.AT_FLOOR * floor:
            return response
        fresh = [o for o in options if not evidence.tried([*analysis.moves, *o.moves])]
        ranked = _whole_plans_early(sorted(fresh, key=lambda option: -option.score))
        for option in ranked[: request.limit or DEFAULT_LIMIT]:
            response.hypotheses.append(
                hypothesis_pb2.Hypothesis(
                    moves=[*analysis.moves, *option.moves],
                    new_move_count=len(option.moves),
                    predicted_speedup=option.speedup,
                    rationale=option.rationale,
                    source=option.source,
                )
            )
        return response


def _whole_plans_early(ranked: Sequence[_Option]) -> list[_Option]:
    """The options with the best plan of kernels throughout as the module lies, and the best laid out anew, next to the
    first: how a library's calls compare in two layouts no roofline tells, and what a chain of moves is predicted to
    make of a network leaves out what kernels lose by being fused. Where there are layouts, what convolves is a call in
    some of these plans and a kernel in others: of both there is one, for a library's convolutions no roofline tells."""
    chosen = [{move.kind: move.choice for move in each.moves if move.group == EVERY_GROUP} for each in ranked]
    convolves = any(analysis_pb2.MOVE_KIND_LAYOUT in kinds for kinds in chosen)
    best: dict[tuple[bool, str], _Option] = {}
    for option, kinds in zip(ranked, chosen, strict=True):
        if (choice := kinds.get(analysis_pb2.MOVE_KIND_AUTHOR)) is not None:
            best.setdefault((analysis_pb2.MOVE_KIND_LAYOUT in kinds, choice if convolves else ""), option)
    early = [*ranked[:1], *(option for option in best.values() if option is not ranked[0])]
    return [*early, *(option for option in ranked if not any(option is other for other in early))]


def _options(analysis: analysis_pb2.Analysis, predicted: Predictor, evidence: Evidence) -> Iterator[_Option]:
    if not analysis.legal_moves:
        return
    proposed = (_rewrites, _whole_plans, _chains, _singles)
    for option in (option for propose in proposed for option in propose(analysis, predicted)):
        correction = evidence.correction(option.moves)
        speedup = option.speedup * correction
        score = option.score * correction * evidence.reliability(option.moves)
        source = EVIDENCE if correction != 1.0 else SOURCE
        yield _Option(option.moves, speedup, score, option.rationale, source)


def _chains(analysis: analysis_pb2.Analysis, predicted: Predictor) -> Iterator[_Option]:
    for chain in chains.chains(analysis):
        speedup = predicted.speedup(chain.plan)
        fused = any(move.kind == analysis_pb2.MOVE_KIND_FUSE for move in chain.moves)
        kernel_count = len({move.group for move in chain.moves})
        labels = _labels(predicted.parent, chain.touched)
        where = "one kernel" if fused and kernel_count == 1 else f"{kernel_count} kernels of our own"
        rationale = _reason(f"{labels} in {where}", predicted, chain.plan, speedup, chain.touched)
        yield _Option(chain.moves, speedup, speedup, rationale)


def _rewrites(analysis: analysis_pb2.Analysis, predicted: Predictor) -> Iterator[_Option]:
    """All rewrites at once, where there is more than one; single ones are single moves."""
    if len(chosen := _all_rewrites(analysis)) > 1:
        before, after = summed(item.before for item in chosen), summed(item.after for item in chosen)
        speedup = predicted.rewrite_speedup(before, after)
        saved = _saved_text(_named(chosen), before, after, speedup)
        yield _Option(tuple(item.move for item in chosen), speedup, speedup, saved)


def _all_rewrites(analysis: analysis_pb2.Analysis) -> list[analysis_pb2.LegalMove]:
    """The first rewrite by algebra that each group offers; chunks of rows are no algebra, and spare memory alone."""
    rewrites = (item for item in analysis.legal_moves if item.move.kind == analysis_pb2.MOVE_KIND_REWRITE)
    legal = [item for item in rewrites if not item.move.arguments]
    first = {item.move.group: item for item in reversed(legal)}
    return [item for item in legal if first[item.move.group] is item]


def _named(rewrites: Sequence[analysis_pb2.LegalMove]) -> str:
    return f"all rewrites, of {wording.names([item.move.group for item in rewrites])}"


def _whole_plans(analysis: analysis_pb2.Analysis, predicted: Predictor) -> Iterator[_Option]:
    """A layout, and moves of the whole plan of different kinds at once: a network is not found one move at a time.

    What each saves of the plan as it is adds up. Launches that one saves another saves no more. Where kernels are made
    of all that can be one, algebra may come first: what it leaves can be fused where its calls could not.
    """
    rewrites = _all_rewrites(analysis)
    kinds: dict[analysis_pb2.MoveKind.ValueType, list[analysis_pb2.LegalMove]] = {}
    for legal in analysis.legal_moves:
        if legal.move.group == EVERY_GROUP:
            kinds.setdefault(legal.move.kind, []).append(legal)
    for chosen in itertools.product(*([None, *kinds[kind]] for kind in _IN_ORDER if kind in kinds)):
        taken = [legal for legal in chosen if legal is not None]
        kinds_taken = {legal.move.kind for legal in taken}
        prefixes = [[], *([rewrites] if rewrites and analysis_pb2.MOVE_KIND_AUTHOR in kinds_taken else [])]
        if len(taken) < 2 and analysis_pb2.MOVE_KIND_LAYOUT not in kinds_taken:
            prefixes = prefixes[1:]  # a single move
        if not prefixes:
            continue
        costs = [_work(legal) for legal in taken]
        saved = sum(before.launch_count - after.launch_count for before, after in costs[:-1])
        if taken[-1].move.kind == analysis_pb2.MOVE_KIND_LAUNCH:
            costs[-1][0].launch_count = max(1, costs[-1][0].launch_count - saved)
        saved_shares = (
            1.0 - 1.0 / predicted.rewrite_speedup(*cost, authored=legal.move.kind == analysis_pb2.MOVE_KIND_AUTHOR)
            for legal, cost in zip(taken, costs, strict=True)
        )
        speedup = 1.0 / max(1.0 - sum(saved_shares), 1.0 / _MOST_SPEEDUP)
        before, after = summed(each[0] for each in costs), summed(each[1] for each in costs)
        what = "; then ".join(map(wording.effect, taken))
        for prefix in prefixes:
            gain = speedup
            if prefix:
                work = summed(each.before for each in prefix), summed(each.after for each in prefix)
                gain *= _FUSABLE * predicted.rewrite_speedup(*work)
            moves = tuple(each.move for each in (*prefix, *taken))
            told = "; then ".join([_named(prefix), what] if prefix else [what])
            yield _Option(moves, gain, gain, _saved_text(told, before, after, gain))


def _work(legal: analysis_pb2.LegalMove) -> tuple[analysis_pb2.Cost, analysis_pb2.Cost]:
    """Work before and after a move. A library converts layouts beside its products, not while it makes them, so of a
    layout they are left out."""
    before, after = summed([legal.before]), summed([legal.after])
    if legal.move.kind == analysis_pb2.MOVE_KIND_LAYOUT:
        for cost in (before, after):
            cost.product_flop_count = cost.tensor_flop_count = 0
    return before, after


def _singles(analysis: analysis_pb2.Analysis, predicted: Predictor) -> Iterator[_Option]:
    alike: Counter[tuple[str, ...]] = Counter()
    for legal in analysis.legal_moves:
        move, what = legal.move, wording.effect(legal)
        if move.kind in (analysis_pb2.MOVE_KIND_WRITE, analysis_pb2.MOVE_KIND_LAYOUT):
            continue  # a roofline cannot tell how fast an unwritten kernel will be; layouts have `_whole_plans`
        unit = predicted.parent.units.get(move.group)
        if unit is None or move.kind == analysis_pb2.MOVE_KIND_REWRITE:
            is_ours = move.kind == analysis_pb2.MOVE_KIND_AUTHOR
            speedup = predicted.rewrite_speedup(legal.before, legal.after, authored=is_ours)
            yield _Option((move,), speedup, speedup, _saved_text(what, legal.before, legal.after, speedup))
            continue
        plan = predicted.parent
        for single in _on_each(legal):
            plan = _after(single, plan, analysis.legal_moves)
        speedup = predicted.speedup(plan)
        score = speedup
        if move.kind == analysis_pb2.MOVE_KIND_SET:
            # Relative to the group as predicted before, so that a measured group is not compared with a guess.
            speedup = _set_speedup(legal, predicted)
            share = sum(predicted.base_ns[name] for name in (move.group, *move.also)) / max(predicted.parent_ns, 1.0)
            # The first value of every parameter comes before the second of any.
            place = (move.group, *re.findall(r"(\w+)=", move.choice), *sorted(move.arguments))
            score = speedup * (1.0 + _SET_PRIOR * share / (1 + alike[place]))
            alike[place] += 1
        touched = plan.units[move.group].parts if move.kind == analysis_pb2.MOVE_KIND_FUSE else (move.group,)
        yield _Option((move,), speedup, score, _reason(what, predicted, plan, speedup, touched))


def _after(legal: analysis_pb2.LegalMove, plan: PlanModel, legal_moves: Sequence[analysis_pb2.LegalMove]) -> PlanModel:
    move = legal.move
    told = legal.after if legal.HasField("after") else None
    match move.kind:
        case analysis_pb2.MOVE_KIND_AUTHOR:
            return plan.authored(move.group, told)
        case analysis_pb2.MOVE_KIND_FUSE if move.choice == chains.ALL_PRODUCERS or move.choice in plan.units:
            everything = move.choice == chains.ALL_PRODUCERS
            fused = (
                chains.with_all_producers(plan, move.group, legal_moves)
                if everything
                else plan.fused(move.group, move.choice)
            )
            alone = everything or move.choice not in fused.units
            return fused.changed(move.group, told, authored=True) if told and alone else fused
        case _:
            ours = move.kind != analysis_pb2.MOVE_KIND_LIBRARY
            return plan.changed(move.group, told, authored=ours) if told else plan


def _on_each(legal: analysis_pb2.LegalMove) -> Iterator[analysis_pb2.LegalMove]:
    """The move on each of its groups, which are alike, with its share of the work."""
    count = 1 + len(legal.move.also)
    for group in (legal.move.group, *legal.move.also):
        single = analysis_pb2.LegalMove()
        single.CopyFrom(legal)
        single.move.group = group
        del single.move.also[:]
        for cost in (single.before, single.after) if count > 1 and legal.HasField("after") else ():
            for field, value in cost.ListFields():
                if field.name != "parallel_count":  # the greatest, where others are sums
                    setattr(cost, field.name, value // count)
        yield single


def _set_speedup(legal: analysis_pb2.LegalMove, predicted: Predictor) -> float:
    if not legal.HasField("after"):
        return 1.0
    saved = sum(_saved_by_set(single, predicted) for single in _on_each(legal))
    return predicted.parent_ns / max(predicted.parent_ns - saved, 1.0)


def _saved_by_set(legal: analysis_pb2.LegalMove, predicted: Predictor) -> float:
    group, base = legal.move.group, predicted.base_ns[legal.move.group]
    plan = predicted.parent.changed(group, legal.after, authored=True)
    before = predicted.parent.unit_ns(group, predicted.machine)
    time = base * plan.unit_ns(group, predicted.machine) / max(before, 1.0)
    if legal.move.choice and _spread(legal.before) != _spread(legal.after):
        time = predicted.unit_ns(plan, group)  # another way to spread the work need not be held back as this one is
    return base - time


def _spread(cost: analysis_pb2.Cost) -> tuple[int, int]:
    return cost.launch_count, cost.parallel_count


def _reason(what: str, predicted: Predictor, plan: PlanModel, speedup: float, touched: Sequence[str]) -> str:
    before = predicted.parent.cost
    after = summed([before, *plan.apart_from(predicted.parent)], less=predicted.parent.apart_from(plan))
    slowest = max(touched, key=lambda name: predicted.base_ns.get(name, 0.0))
    held = bound(predicted.parent.units[slowest].cost, predicted.machine) if slowest in predicted.parent.units else ""
    return _saved_text(what, before, after, speedup, held)


def _saved_text(what: str, before: analysis_pb2.Cost, after: analysis_pb2.Cost, speedup: float, held: str = "") -> str:
    products = before.product_flop_count - after.product_flop_count
    if products > 0 and after.tensor_flop_count == before.tensor_flop_count:
        what += f" ({100 * products / before.product_flop_count:.0f} % of the product arithmetic saved)"
    return wording.reason(
        what,
        saved_bytes=traffic_bytes(before) - traffic_bytes(after),
        saved_launches=before.launch_count - after.launch_count,
        speedup=speedup,
        bound=held,
    )


def _labels(plan: PlanModel, touched: Sequence[str]) -> str:
    order = [name for name in plan.units if name in touched]
    return wording.names(order)
