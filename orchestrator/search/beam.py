"""Beam search: several parents kept alive, unlike each other, with most of the effort on the best.

The one idea: the fastest passing trial of each kind of plan (fusion partition, reductions, engines, as the analysis
names its features) is a parent before any second one of a kind; half of the slots go to the fastest parent, half of
the rest to the next, and so on. Branching with exploitation and repair is what published ablations favour.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.search import PLAN_ZERO, Proposal, SearchState
from warpsmith.digest import of_moves
from warpsmith.v1 import trial_pb2

WIDTH = 4
"""Parents kept."""


class Beam:
    """The default strategy."""

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width
        self._barren: set[int] = set()
        """Parents beyond the beam that had nothing left to try."""

    def next(self, state: SearchState) -> list[Proposal]:
        """Fills the slots from the parents in order; what one parent leaves goes to the next."""
        chosen: list[Proposal] = []
        parents = self.parents(state)
        taken: set[str] = set()
        for place, parent in enumerate(parents):
            left = state.slots - len(chosen)
            share = left if place == len(parents) - 1 else (left + 1) // 2
            chosen += _fresh(state, parent, share, taken)
        # A second round lets the best parents use what later ones could not.
        for parent in parents:
            chosen += _fresh(state, parent, state.slots - len(chosen), taken)
        # When the beam has nothing left, slower plans are better than an early end.
        for trial in state.passing():
            if len(chosen) == state.slots:
                break
            if trial.number in self._barren or trial.number in parents or not trial.candidate.moves:
                continue
            found = _fresh(state, trial.number, state.slots - len(chosen), taken)
            chosen += found
            if not found:
                self._barren.add(trial.number)
        return chosen

    def parents(self, state: SearchState) -> list[int]:
        """Numbers of the parents, best first; plan zero is always the last."""
        passing = state.passing()
        best_of_kind: list[trial_pb2.Trial] = []
        others: list[trial_pb2.Trial] = []
        kinds: set[tuple[str, ...]] = set()
        for trial in passing:
            kind = tuple(sorted(trial.candidate.analysis.features))
            (others if kind in kinds else best_of_kind).append(trial)
            kinds.add(kind)
        kept = sorted((best_of_kind + others)[: self._width], key=passing.index)
        return [trial.number for trial in kept if trial.candidate.moves] + [PLAN_ZERO]


def _fresh(state: SearchState, parent: int, count: int, taken: set[str]) -> Sequence[Proposal]:
    """Up to `count` hypotheses on `parent` that nobody has tried; adds them to `taken`."""
    if count <= 0:
        return []
    # Known ones may come back first, so ask for as many more as there are children.
    found: list[Proposal] = []
    for hypothesis in state.propose(parent, count + len(taken) + state.child_count(parent)):
        key = of_moves(hypothesis.moves)
        if len(found) < count and key not in taken and state.is_new(hypothesis):
            taken.add(key)
            found.append(Proposal(parent, hypothesis))
    return found
