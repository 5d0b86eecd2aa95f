"""What a search strategy is: given all that is known of a run, it names what to try next.

The one idea: a strategy is a function of the state it is shown. It walks nothing itself; repairs of failed
candidates, budgets and finalists are the same for every strategy: `walks`, `ledger`, `finalists`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from orchestrator.pipeline import passed
from warpsmith.contract import words
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, trial_pb2

PLAN_ZERO = 0
"""Number that stands for plan zero where a parent is named."""


@dataclass(frozen=True)
class Proposal:
    """A hypothesis to walk, grown from the trial numbered `parent` (0: plan zero)."""

    parent: int
    hypothesis: hypothesis_pb2.Hypothesis


@dataclass(frozen=True)
class SearchState:
    """All that a strategy may look at."""

    trials: Sequence[trial_pb2.Trial]
    """Ended trials in order, sources and binaries left out."""
    slots: int
    """How many proposals can be walked now."""
    is_new: Callable[[hypothesis_pb2.Hypothesis], bool]
    """Whether its list of moves has not been walked or proposed yet."""
    analyze: Callable[[int], analysis_pb2.Analysis]
    """The plan of a trial (0: plan zero), with its legal moves; remembered."""
    propose: Callable[[int, int], Sequence[hypothesis_pb2.Hypothesis]]
    """(parent, limit) → the reasoning agent's hypotheses on that plan, best first."""
    under_way: int = 0
    """Trials that have begun and not ended."""

    def passing(self) -> list[trial_pb2.Trial]:
        """Trials that are right and timed, fastest first."""
        return list(self._passing)

    def child_count(self, parent: int) -> int:
        """How many trials grew from a parent."""
        return self._children[parent]

    @cached_property
    def _passing(self) -> list[trial_pb2.Trial]:
        return sorted(filter(passed, self.trials), key=score, reverse=True)

    @cached_property
    def _children(self) -> Counter[int]:
        return Counter(trial.parent for trial in self.trials)


class Search(Protocol):
    """A strategy. One object serves one run."""

    def next(self, state: SearchState) -> list[Proposal]:
        """At most `state.slots` new proposals, best first; empty when there is nothing to try as things stand."""
        ...


def score(trial: trial_pb2.Trial) -> float:
    """How good a timed trial is: its speedup against the fastest baseline, or against eager where that is all."""
    return trial.timing.speedup_fastest.median or trial.timing.speedup_eager.median


def moves_of(trial: trial_pb2.Trial) -> Sequence[analysis_pb2.Move]:
    """All moves of a trial, from plan zero on."""
    return trial.candidate.moves or trial.hypothesis.moves


def with_move(
    moves: Sequence[analysis_pb2.Move], legal: analysis_pb2.LegalMove, source: str, reason: str
) -> hypothesis_pb2.Hypothesis:
    """The hypothesis of one more legal move, by a strategy that predicts nothing."""
    return hypothesis_pb2.Hypothesis(
        moves=[*moves, legal.move],
        new_move_count=1,
        predicted_speedup=1.0,
        rationale=f"{reason}: {legal.effect or words.move_kind(legal.move.kind)}",
        source=source,
    )
