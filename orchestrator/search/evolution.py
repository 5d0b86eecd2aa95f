"""Evolution: a population of the fastest plans, changed by one legal move or crossed with each other.

The one idea: a tournament picks parents, so the fastest have most children while slower ones keep some; a crossing
takes what the second parent chose for groups and parameters that the first left alone. It asks no reasoner. Seeded.

Source of the scheme: steady-state genetic search with tournament selection (Syswerda 1991).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from orchestrator.search import PLAN_ZERO, Proposal, SearchState, moves_of, with_move
from warpsmith.contract import words
from warpsmith.digest import of_moves
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, trial_pb2

POPULATION = 12
"""At least so many of the fastest have children."""
TOURNAMENT = 3
CROSSING_SHARE = 0.25
ATTEMPTS = 8
"""Draws for each slot before it stays empty."""


class Evolution:
    """Tournament selection, single-move mutation, crossing of move lists."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def next(self, state: SearchState) -> list[Proposal]:
        """Draws children until the slots are full or every draw was known."""
        passing = state.passing()
        population = passing[: max(POPULATION, len(passing) // 4)]  # grows with a long run, or it has no new children
        proposals: list[Proposal] = []
        taken: set[str] = set()
        for _ in range(ATTEMPTS * state.slots):
            if len(proposals) == state.slots:
                break
            # The fastest plans may have no move left; then any plan that passed has a child.
            proposal = self._child(state, population) or self._child(
                state, [self._random.choice(passing)] if passing else []
            )
            if proposal is None:
                continue
            key = of_moves(proposal.hypothesis.moves)
            if key not in taken and state.is_new(proposal.hypothesis):
                taken.add(key)
                proposals.append(proposal)
        return proposals

    def _child(self, state: SearchState, population: Sequence[trial_pb2.Trial]) -> Proposal | None:
        parent = self._tournament(population)
        if parent is not None and len(population) > 1 and self._random.random() < CROSSING_SHARE:
            other = self._tournament(population)
            return _crossed(parent, other) if other is not None else None
        number, moves = (parent.number, list(moves_of(parent))) if parent is not None else (PLAN_ZERO, [])
        legal = list(state.analyze(number).legal_moves)
        for drawn in self._random.sample(legal, len(legal)):
            hypothesis = with_move(moves, drawn, "evolution", "mutation")
            if state.is_new(hypothesis):
                return Proposal(number, hypothesis)
        return None

    def _tournament(self, population: Sequence[trial_pb2.Trial]) -> trial_pb2.Trial | None:
        """The fastest of a few drawn; the population is ordered, fastest first."""
        if not population:
            return None
        return population[min(self._random.randrange(len(population)) for _ in range(TOURNAMENT))]


def _crossed(first: trial_pb2.Trial, second: trial_pb2.Trial) -> Proposal | None:
    own = moves_of(first)
    chosen = {place for move in own for place in _places(move)}
    added = [move for move in moves_of(second) if chosen.isdisjoint(_places(move)) and not _comes_first(move)]
    if not added:
        return None
    hypothesis = hypothesis_pb2.Hypothesis(
        moves=[*own, *added],
        new_move_count=len(added),
        predicted_speedup=1.0,
        rationale=f"crossing of trials {first.number} and {second.number}",
        source="evolution",
    )
    return Proposal(first.number, hypothesis)


def _places(move: analysis_pb2.Move) -> set[tuple[str, ...]]:
    """What a move decides: two moves that have a place in common exclude each other in a crossing."""
    what = [words.move_kind(move.kind)]
    if move.kind == analysis_pb2.MOVE_KIND_SET:
        what += [move.choice.partition("=")[0], *sorted(move.arguments)]
    elif move.kind == analysis_pb2.MOVE_KIND_FUSE:
        what.append(move.choice)
    return {(group, *what) for group in (move.group, *move.also)}


def _comes_first(move: analysis_pb2.Move) -> bool:
    """Whether a move is legal before all others only."""
    return move.kind == analysis_pb2.MOVE_KIND_LAYOUT
