"""What earlier runs found, and what a new one makes of it.

The one idea: a layer norm of 768 is one problem in whatever network it stands. Settings that a winner has are kept by
what its groups compute (`Group.form`) and by the device; a plan whose groups have known forms is tried with them. It
neither keeps anything itself (`archive`) nor judges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.prepare import KnownReference, nothing_known
from warpsmith.errors import WarpsmithError
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, run_pb2, task_pb2, timing_pb2, trial_pb2

_WHOLE = (analysis_pb2.MOVE_KIND_LAYOUT, analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_LAUNCH)
"""Moves on a whole plan, in the order in which they are made."""


@dataclass(frozen=True)
class Memory:
    """Where a run asks what is known; nothing is, unless said otherwise."""

    moves: Callable[[run_pb2.Run], Sequence[Sequence[analysis_pb2.Move]]] = lambda _: ()
    """Lists of moves that runs of the task, or of tasks of its shape, found best."""
    reference: KnownReference = nothing_known
    """Times of the task's baselines."""
    groups: Callable[[str, Sequence[str]], Mapping[str, analysis_pb2.KnownGroup]] = lambda _, __: {}
    """By form, what is known of groups on a device."""


NOTHING_KNOWN = Memory()


def known_first(own: timing_pb2.ReferenceReport, others: KnownReference) -> KnownReference:
    """What a run has found itself before it was left, where it was on such a device; else what `others` give."""

    def known(task: task_pb2.Task, device: timing_pb2.Device) -> timing_pb2.ReferenceReport | None:
        is_own = own.arms and not own.is_kept and is_same_place(own.environment, device.environment)
        return own if is_own else others(task, device)

    return known


def is_same_place(one: timing_pb2.Environment, other: timing_pb2.Environment) -> bool:
    """Whether times of baselines that were taken in one may hold in the other."""
    places = [(of.device, of.driver, of.torch, of.python, of.thread_count) for of in (one, other)]
    return places[0] == places[1]


def first_hypotheses(
    memory: Memory,
    run: run_pb2.Run,
    plan_zero: analysis_pb2.Analysis,
    analyze: Callable[[Sequence[analysis_pb2.Move]], analysis_pb2.Analysis],
) -> list[hypothesis_pb2.Hypothesis]:
    """What a run begins with: what earlier ones found best, then the whole plan with what is known of its groups."""
    found = [_hypothesis(moves, "an earlier run found it best") for moves in memory.moves(run)]
    if memory is not NOTHING_KNOWN and (moves := whole_plan(plan_zero.legal_moves)):
        with contextlib.suppress(WarpsmithError):  # the moves do not go together
            groups = analyze(moves).groups
            known = memory.groups(run.device.name, [group.form for group in groups if group.schedule])
            settings, count = settings_for(groups, known)
            if settings:
                why = f"settings that other tasks found best for {count} of {len(groups)} groups"
                found.append(_hypothesis([*moves, *settings], why))
    return found


def _hypothesis(moves: Sequence[analysis_pb2.Move], why: str) -> hypothesis_pb2.Hypothesis:
    return hypothesis_pb2.Hypothesis(
        moves=moves, new_move_count=len(moves), predicted_speedup=1.0, rationale=why, source="archive"
    )


def learned(best: trial_pb2.Trial, analysis: analysis_pb2.Analysis) -> list[analysis_pb2.KnownGroup]:
    """What is worth keeping of a winner whose plan this is: authored groups whose settings were changed, once each."""
    found: dict[str, analysis_pb2.KnownGroup] = {}
    for group in analysis.groups:
        settings = _settings_of(group.name, best.candidate.moves)
        time_ns = sum(step.median_ns for step in best.timing.steps if step.group == group.name)
        if not group.form or not settings or time_ns <= 0:
            continue
        known = analysis_pb2.KnownGroup(form=group.form, schedule=group.schedule, settings=settings, median_ns=time_ns)
        if group.form not in found or time_ns < found[group.form].median_ns:
            found[group.form] = known
    return list(found.values())


def _settings_of(group: str, moves: Sequence[analysis_pb2.Move]) -> list[analysis_pb2.Move]:
    """The "set" moves on a group since it was authored, without names."""
    found: list[analysis_pb2.Move] = []
    for move in moves:
        if group not in (move.group, *move.also):
            continue
        if move.kind == analysis_pb2.MOVE_KIND_SET:
            found.append(analysis_pb2.Move(kind=move.kind, choice=move.choice, arguments=move.arguments))
        elif move.kind in (analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_LIBRARY):
            found.clear()
    return found


def whole_plan(legal: Sequence[analysis_pb2.LegalMove]) -> list[analysis_pb2.Move]:
    """The first offered move of each kind on a whole plan, if one makes kernels; else nothing."""
    first = {each.move.kind: each.move for each in reversed(legal) if each.move.group == "*"}
    return [first[kind] for kind in _WHOLE if kind in first] if analysis_pb2.MOVE_KIND_AUTHOR in first else []


def settings_for(
    groups: Sequence[analysis_pb2.Group], known: Mapping[str, analysis_pb2.KnownGroup]
) -> tuple[list[analysis_pb2.Move], int]:
    """Moves that give groups of known forms their settings, those that are alike at once; and how many groups."""
    alike: dict[str, list[str]] = {}
    for group in groups:
        if (found := known.get(group.form)) is not None and found.schedule == group.schedule:
            alike.setdefault(group.form, []).append(group.name)
    moves = []
    for form, (first, *others) in alike.items():
        for each in known[form].settings:
            move = analysis_pb2.Move(group=first, also=others)
            move.MergeFrom(each)
            moves.append(move)
    return moves, sum(map(len, alike.values()))
