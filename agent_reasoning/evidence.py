"""What earlier trials of a run teach: how fast groups really are, which moves did better than predicted, what to
leave alone.

The one idea: shrinkage. A prediction is corrected by the mean of what was seen, as if two trials had agreed with
the prediction already, so one lucky or unlucky measurement does not decide. Everything comes from the request.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from warpsmith import digest
from warpsmith.contract import words
from warpsmith.v1 import analysis_pb2, timing_pb2, trial_pb2, verdict_pb2

PRIOR_TRIALS = 2.0
"""Imagined trials that agreed with the prediction."""

PLAN_ZERO = 0
"""Number of the parent of what grows from the module as library calls; that plan's own trial has another."""

INFRA = verdict_pb2.VERDICT_STATE_INFRA
PASS = verdict_pb2.VERDICT_STATE_PASS


def kind(move: analysis_pb2.Move) -> str:
    """What moves are alike: the kind with its rule or parameter, whatever the group."""
    if move.kind == analysis_pb2.MOVE_KIND_SET:
        arguments = ",".join(f"{name}={value}" for name, value in sorted(move.arguments.items()))
        return f"set {move.choice or arguments}"
    return f"rewrite {move.choice}" if move.kind == analysis_pb2.MOVE_KIND_REWRITE else words.move_kind(move.kind)


def candidate_ns(timing: timing_pb2.Timing) -> float:
    """Median of the candidate in a timing; 0 when it was not timed."""
    return next((arm.median_ns for arm in timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE), 0.0)


@dataclass
class _Seen:
    """Logarithms of measured over predicted gain, and outcomes."""

    surprises: list[float] = field(default_factory=list)
    failure_count: int = 0
    trial_count: int = 0


class Evidence:
    """The history of a run, read once."""

    def __init__(self, history: Sequence[trial_pb2.Trial]) -> None:
        self._tried: set[str] = set()
        self._measured: dict[str, trial_pb2.Trial] = {}
        self._kinds: defaultdict[str, _Seen] = defaultdict(_Seen)
        by_number = {trial.number: trial for trial in history}
        bare = [trial for trial in history if not trial.candidate.moves and not trial.hypothesis.moves]
        by_number |= {PLAN_ZERO: bare[0]} if bare else {}
        for trial in history:
            moves = trial.candidate.moves or trial.hypothesis.moves
            if trial.verdict.state != INFRA:  # nothing was learnt of the candidate: it may be tried again
                self._tried |= {digest.of_moves(moves), digest.of_moves(trial.hypothesis.moves)}
            if candidate_ns(trial.timing) > 0:
                self._measured[digest.of_moves(moves)] = trial
            self._learn(trial, by_number.get(trial.parent))

    def _learn(self, trial: trial_pb2.Trial, parent: trial_pb2.Trial | None) -> None:
        hypothesis = trial.hypothesis
        new = hypothesis.moves[len(hypothesis.moves) - hypothesis.new_move_count :]
        if not new or trial.verdict.state == INFRA:
            return
        kinds = sorted({kind(move) for move in new})
        now = candidate_ns(trial.timing)
        before = candidate_ns(parent.timing) if parent else 0.0
        for name in kinds:
            seen = self._kinds[name]
            seen.trial_count += 1
            if trial.verdict.state == verdict_pb2.VERDICT_STATE_FAIL:
                seen.failure_count += 1
            if now > 0 and before > 0:
                surprise = math.log(before / now) - math.log(max(hypothesis.predicted_speedup, 1e-3))
                # A surprise is shared among the kinds of moves of the trial: which of them it was is not known.
                seen.surprises.append(surprise / len(kinds))

    def tried(self, moves: Iterable[analysis_pb2.Move]) -> bool:
        """Whether exactly these moves have been tried."""
        return digest.of_moves(moves) in self._tried

    def trial_of(self, moves: Iterable[analysis_pb2.Move]) -> trial_pb2.Trial | None:
        """The timed trial of exactly these moves."""
        return self._measured.get(digest.of_moves(moves))

    def candidate_ns(self, moves: Iterable[analysis_pb2.Move]) -> float:
        """Nanoseconds of exactly these moves; 0 where they were not timed."""
        trial = self.trial_of(moves)
        return candidate_ns(trial.timing) if trial else 0.0

    def measured_groups(self, moves: Iterable[analysis_pb2.Move]) -> dict[str, float]:
        """Nanoseconds of each group, as timed for exactly these moves; empty when they were not timed step by step."""
        times: dict[str, float] = {}
        if trial := self.trial_of(moves):
            for step in trial.timing.steps:
                times[step.group] = times.get(step.group, 0.0) + step.median_ns
        return {name: time for name, time in times.items() if time > 0}

    def correction(self, moves: Iterable[analysis_pb2.Move]) -> float:
        """Factor on a predicted speedup: what moves of these kinds did beyond their predictions, shrunk."""
        total = 0.0
        for name in sorted({kind(move) for move in moves}):
            seen = self._kinds.get(name)
            if seen and seen.surprises:
                total += sum(seen.surprises) / (len(seen.surprises) + PRIOR_TRIALS)
        return math.exp(max(-2.0, min(2.0, total)))

    def reliability(self, moves: Iterable[analysis_pb2.Move]) -> float:
        """Share of trials with these kinds of moves that did not fail, shrunk towards 1; the worst kind counts."""
        shares = [1.0]
        for name in {kind(move) for move in moves}:
            if seen := self._kinds.get(name):
                shares.append(1.0 - seen.failure_count / (seen.trial_count + PRIOR_TRIALS))
        return min(shares)

    def library_slowness(self, predict: dict[str, float]) -> float | None:
        """How many times slower than predicted library groups were; None without any that was timed.

        `predict`: name of a library group → predicted nanoseconds.
        """
        ratios = [
            step.median_ns / predict[step.group]
            for trial in self._measured.values()
            for step in trial.timing.steps
            if step.computed_by == analysis_pb2.ENGINE_LIBRARY and step.median_ns > 0 and predict.get(step.group, 0) > 0
        ]
        return statistics.median(ratios) if ratios else None
