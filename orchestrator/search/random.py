"""Random search: any legal move on any passing plan. The yardstick that a cleverer strategy has to beat.

It asks no reasoner. Seeded, so that a run can be repeated.
"""

from __future__ import annotations

import random

from orchestrator.search import PLAN_ZERO, Proposal, SearchState, moves_of, with_move

ATTEMPTS = 8
"""Draws for each slot before it stays empty."""


class Random:
    """Uniform over parents, then uniform over their legal moves."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def next(self, state: SearchState) -> list[Proposal]:
        """Draws until the slots are full or every draw was known."""
        moves = {trial.number: list(moves_of(trial)) for trial in state.passing()} | {PLAN_ZERO: []}
        proposals: list[Proposal] = []
        for _ in range(ATTEMPTS * state.slots):
            if len(proposals) == state.slots:
                break
            parent = self._random.choice(sorted(moves))
            legal = state.analyze(parent).legal_moves
            if not legal:
                continue
            hypothesis = with_move(moves[parent], self._random.choice(legal), "random", "drawn at random")
            if state.is_new(hypothesis) and all(hypothesis != known.hypothesis for known in proposals):
                proposals.append(Proposal(parent, hypothesis))
        return proposals
