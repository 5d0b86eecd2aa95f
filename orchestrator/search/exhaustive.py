"""Exhaustive search: every plan that legal moves reach, breadth first. The yardstick of what there was to find.

The one idea: trials are parents in the order in which they ended, each with all its legal moves, so a run without
limits walks the whole space once and a limited one walks the plans with the fewest moves. Plans that different moves
reach are the same program and are timed once. It asks no reasoner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.pipeline import passed
from orchestrator.search import PLAN_ZERO, Proposal, SearchState, moves_of, with_move
from warpsmith.digest import of_moves
from warpsmith.v1 import analysis_pb2


class Exhaustive:
    """Breadth first over legal moves."""

    def __init__(self) -> None:
        self._done: set[int] = set()
        """Parents with no untried move left."""

    def next(self, state: SearchState) -> list[Proposal]:
        """The next untried moves, of the earliest parent that has some."""
        proposals: list[Proposal] = []
        taken: set[str] = set()
        for proposal in self._untried(state):
            if len(proposals) >= state.slots:
                break
            key = of_moves(proposal.hypothesis.moves)
            if key not in taken:
                taken.add(key)
                proposals.append(proposal)
        return proposals

    def _untried(self, state: SearchState) -> Iterator[Proposal]:
        parents: dict[int, Sequence[analysis_pb2.Move]] = {PLAN_ZERO: []}
        parents |= {trial.number: moves_of(trial) for trial in filter(passed, state.trials)}
        for number, moves in parents.items():
            if number in self._done:
                continue
            fresh = False
            for legal in state.analyze(number).legal_moves:
                hypothesis = with_move(moves, legal, "exhaustive", "next in order")
                if state.is_new(hypothesis):
                    fresh = True
                    yield Proposal(number, hypothesis)
            if not fresh:
                self._done.add(number)
