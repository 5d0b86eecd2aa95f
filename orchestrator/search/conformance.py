"""Tells the author of a search strategy whether it fits its role; `python -m warpsmith.testing search NAME` asks it.

The one idea: it is walked through a run without services, of a few legal moves, one of which gives wrong results. That
says nothing of how well it searches: `benchmarks/search/skill.py` measures that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from orchestrator import testing
from orchestrator.pipeline import passed
from orchestrator.search import PLAN_ZERO, Proposal, Search, SearchState
from warpsmith.digest import of_moves
from warpsmith.errors import IllegalMove
from warpsmith.testing import asking
from warpsmith.v1 import (
    analysis_pb2,
    candidate_pb2,
    hypothesis_pb2,
    reasoning_service_pb2,
    synthesis_service_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)

SLOTS = 4
MOST_ROUNDS = 100
"""The space has fewer than 50 lists of moves: a strategy that names each once has ended by then."""


class _Run:
    """What a run shows a strategy, one trial after another; plan zero is the first."""

    def __init__(self) -> None:
        self._world = testing.World(choices={"vector": ("2", "4"), "tile": ("8", "wrong")})
        self.trials: list[trial_pb2.Trial] = []
        self.tried: set[str] = set()
        self.reasoner_answers = True

    def state(self, slots: int = SLOTS) -> SearchState:
        """All that has ended so far."""
        return SearchState(tuple(self.trials), slots, self._is_new, self._analyze, self._propose)

    def end(self, parent: int, hypothesis: hypothesis_pb2.Hypothesis) -> None:
        """Judges a hypothesis and times it where it is right."""
        self.tried.add(of_moves(hypothesis.moves))
        analysis = self._world.AnalyzePlan(synthesis_service_pb2.AnalyzePlanRequest(moves=hypothesis.moves)).analysis
        candidate = candidate_pb2.Candidate(moves=hypothesis.moves, analysis=analysis)
        trial = trial_pb2.Trial(number=len(self.trials) + 1, parent=parent, hypothesis=hypothesis, candidate=candidate)
        trial.verdict.state, trial.ended_at = verdict_pb2.VERDICT_STATE_FAIL, trial_pb2.STAGE_VERIFY
        if all(testing.choice_of(move) != "wrong" for move in hypothesis.moves):
            trial.verdict.state, trial.ended_at = verdict_pb2.VERDICT_STATE_PASS, trial_pb2.STAGE_TIMED
            speedup = timing_pb2.Speedup(median=1.0)
            for move in hypothesis.moves:
                speedup.median *= self._world.gains[testing.name_of(move)]
            trial.timing.CopyFrom(timing_pb2.Timing(speedup_fastest=speedup, speedup_eager=speedup))
        self.trials.append(trial)

    def moves(self, number: int) -> Sequence[analysis_pb2.Move]:
        """Of a trial; none for plan zero."""
        return self.trials[number - 1].candidate.moves if number != PLAN_ZERO else ()

    def is_legal(self, moves: Sequence[analysis_pb2.Move]) -> bool:
        """Whether the moves apply, one after another."""
        try:
            self._world.AnalyzePlan(synthesis_service_pb2.AnalyzePlanRequest(moves=moves))
        except IllegalMove:
            return False
        return True

    def _is_new(self, hypothesis: hypothesis_pb2.Hypothesis) -> bool:
        return of_moves(hypothesis.moves) not in self.tried

    def _analyze(self, parent: int) -> analysis_pb2.Analysis:
        request = synthesis_service_pb2.AnalyzePlanRequest(moves=self.moves(parent))
        return self._world.AnalyzePlan(request).analysis

    def _propose(self, parent: int, limit: int) -> Sequence[hypothesis_pb2.Hypothesis]:
        request = reasoning_service_pb2.ProposeHypothesesRequest(analysis=self._analyze(parent), limit=limit)
        return self._world.ProposeHypotheses(request).hypotheses if self.reasoner_answers else []


def check_search(make: Callable[[], Search]) -> list[str]:
    """Findings about the strategy that `make` gives, a new one with each call; empty when it fits."""
    return asking.findings(_findings(make))


def _next(search: Search, state: SearchState) -> Sequence[Proposal]:
    found: list[Proposal] = asking.method(search, "next", state, gives=list)
    if strange := [each for each in found if not isinstance(each, Proposal)]:
        raise asking.Unfit(f"next gives a list of {type(strange[0]).__name__}, not of Proposal")
    return found


def _findings(make: Callable[[], Search]) -> Iterator[str]:
    if _next(asking.made(make), _Run().state(slots=0)):
        yield "proposes something where no slot is free"
    if _next(asking.made(make), _Run().state()) != _next(asking.made(make), _Run().state()):
        yield "equal runs get different proposals: what it draws must come from a seed"
    silent = _Run()
    silent.reasoner_answers = False
    _next(asking.made(make), silent.state())  # whatever it does then, it does not fail
    run, search = _Run(), asking.made(make)
    run.end(PLAN_ZERO, hypothesis_pb2.Hypothesis(source="plan zero"))
    for _ in range(MOST_ROUNDS):
        proposals = _next(search, run.state())
        if not proposals:
            break
        yield from _proposals(run, proposals)
        for each in proposals:
            if 0 <= each.parent <= len(run.trials) and run.is_legal(each.hypothesis.moves):
                run.end(each.parent, each.hypothesis)
    else:
        yield f"goes on after {MOST_ROUNDS} rounds in a space of fewer than 50 lists of moves"
    if len(run.trials) == 1:
        yield "proposes nothing where moves are legal and the reasoner has hypotheses"
    elif not any(trial.parent for trial in run.trials):
        yield "never builds on a trial that passed"


def _proposals(run: _Run, proposals: Sequence[Proposal]) -> Iterator[str]:
    if len(proposals) > SLOTS:
        yield f"proposes {len(proposals)} where {SLOTS} slots are free"
    keys = [of_moves(each.hypothesis.moves) for each in proposals]
    if len(set(keys)) < len(keys):
        yield "proposes the same list of moves twice at once"
    if run.tried & set(keys):
        yield "proposes what has been tried: ask `is_new`"
    parents = {trial.number for trial in filter(passed, run.trials)} | {PLAN_ZERO}
    for parent, hypothesis in ((each.parent, each.hypothesis) for each in proposals):
        if parent not in parents:
            yield "the parent of a proposal is neither plan zero nor a trial that passed"
            continue
        kept = len(hypothesis.moves) - hypothesis.new_move_count
        if hypothesis.new_move_count < 1 or list(hypothesis.moves[:kept]) != list(run.moves(parent)):
            yield "a proposal is not its parent's moves with new_move_count more"
        elif not run.is_legal(hypothesis.moves):
            yield "a proposal has a move that is not legal"
        if not hypothesis.source or not hypothesis.rationale or hypothesis.predicted_speedup <= 0:
            yield "a proposal lacks its source, its rationale or a predicted_speedup above 0"
