"""Beam search: several parents kept alive, unlike each other, with most of the effort on the best.

The one idea: the fastest passing trial of each kind of plan (fusion partition, algebra, schedules: the features of its
analysis that are no setting) is a parent before any second one of a kind; half of the slots go to the fastest parent,
half of the rest to the next, and so on. Branching with exploitation and repair is what published ablations favour. On a
parent, a bandit over the sources of its hypotheses fills the slots (`sources`). No more is under way at once than has
ended, four at least: what is begun blindly learns nothing from its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestrator.model_turns import asks_model
from orchestrator.search import PLAN_ZERO, Proposal, SearchState, score, with_move
from orchestrator.search.sources import RANDOM, Sources
from warpsmith.digest import of_moves
from warpsmith.v1 import hypothesis_pb2, trial_pb2

WIDTH = 4
"""Parents kept, and proposals of the first round."""
PROMISING = 0.7
"""What a hypothesis should reach of the fastest plan, by its parent's speed and its prediction; others come after."""
MOST_ASKED = 256
"""Hypotheses on one parent that are looked through for a new one."""
SPARE = 8
"""Hypotheses that a reasoner is asked for beyond the slots: a model that names the first few is not the only source."""


class Beam:
    """The default strategy."""

    def __init__(self, width: int = WIDTH, seed: int = 0) -> None:
        self._width, self._seed = width, seed
        self._barren: dict[int, int] = {}
        """Parents beyond the beam for which the reasoner had nothing (left), and how many trials had ended by then."""

    def next(self, state: SearchState) -> list[Proposal]:
        """Fills the slots from the parents in order; what one parent leaves goes to the next."""
        most = max(self._width, len(state.trials)) - state.under_way
        state = replace(state, slots=max(0, min(state.slots, most)))
        chosen: list[Proposal] = []
        parents = self.parents(state)
        taken: set[str] = set()
        hope = _hope(state)
        sources = Sources(state.trials, self._seed)
        for place, parent in enumerate(parents):
            left = state.slots - len(chosen)
            share = left if place == len(parents) - 1 else (left + 1) // 2
            chosen += _fresh(state, parent, share, taken, hope[parent], sources)
        # More rounds let the best parents use what later ones could not, then all of them try what promises little.
        for least in (hope, dict.fromkeys(parents, 0.0)):
            for parent in parents:
                chosen += _fresh(state, parent, state.slots - len(chosen), taken, least[parent], sources)
        # When the beam has nothing left, slower plans are better than an early end.
        for trial in state.passing():
            if len(chosen) == state.slots:
                break
            if trial.number in parents or not trial.candidate.moves:
                continue
            if len(state.trials) < 2 * self._barren.get(trial.number, 0):
                continue  # what has ended since may have changed the reasoner's mind, but not after every trial
            found = _fresh(state, trial.number, state.slots - len(chosen), taken, 0.0, sources)
            chosen += found
            if not found:
                self._barren[trial.number] = len(state.trials)
        return chosen

    def parents(self, state: SearchState) -> list[int]:
        """Numbers of the parents, best first; plan zero is always the last."""
        passing = state.passing()
        best_of_kind: list[trial_pb2.Trial] = []
        others: list[trial_pb2.Trial] = []
        kinds: set[tuple[str, ...]] = set()
        for trial in passing:
            kind = tuple(sorted(each for each in trial.candidate.analysis.features if "=" not in each))
            (others if kind in kinds else best_of_kind).append(trial)
            kinds.add(kind)
        kept = sorted((best_of_kind + others)[: self._width], key=passing.index)
        return [trial.number for trial in kept if trial.candidate.moves] + [PLAN_ZERO]


def _hope(state: SearchState) -> dict[int, float]:
    """Predicted speedup from which on a hypothesis is promising, by its parent."""
    passing = state.passing()
    best = score(passing[0]) if passing else 0.0
    zero = next((score(trial) for trial in passing if not trial.candidate.moves), 1.0)
    speeds = {PLAN_ZERO: zero} | {trial.number: score(trial) for trial in passing}
    return {number: PROMISING * best / max(speed, 1e-9) for number, speed in speeds.items()}


def _fresh(
    state: SearchState, parent: int, count: int, taken: set[str], least: float, sources: Sources
) -> Sequence[Proposal]:
    """Up to `count` untried hypotheses on `parent`, predicted to give `least`; adds them to `taken`."""
    if count <= 0:
        return []
    # Known ones may come back first, and not all of them ended as trials: ask for more until enough are new.
    limit = count + SPARE + len(taken) + state.child_count(parent)
    while True:
        answer = state.propose(parent, limit)
        wanted = [each for each in answer if (each.predicted_speedup or 1.0) >= least and state.is_new(each)]
        fresh = {key: each for each in wanted if (key := of_moves(each.moves)) not in taken}
        if len(fresh) >= count or len(answer) < limit or limit >= MOST_ASKED:
            return [Proposal(parent, each) for each in _filled(state, parent, count, fresh, taken, sources)]
        limit = min(4 * limit, MOST_ASKED)


def _filled(
    state: SearchState,
    parent: int,
    count: int,
    fresh: dict[str, hypothesis_pb2.Hypothesis],
    taken: set[str],
    sources: Sources,
) -> Iterator[hypothesis_pb2.Hypothesis]:
    """Up to `count` of the `fresh`, by digest, with a random legal move among them where that source gets a slot."""
    drawn = (each for each in _drawn(state, parent, sources) if of_moves(each.moves) not in taken)
    for _ in range(min(count, len(fresh))):
        source = sources.draw([*(each.source for each in fresh.values()), RANDOM])
        named = next((each for each in fresh.values() if each.source == source), None)
        chosen = named or next(drawn, None) or next(iter(fresh.values()))
        key = of_moves(chosen.moves)
        fresh.pop(key, None)
        taken.add(key)
        yield chosen


def _drawn(state: SearchState, parent: int, sources: Sources) -> Iterator[hypothesis_pb2.Hypothesis]:
    """Untried legal moves on a parent, in a random order; none that a language model has to fill in."""
    moves = list(state.trials[parent - 1].candidate.moves) if parent else []
    legal = [item for item in state.analyze(parent).legal_moves if not asks_model([item.move])]
    for item in sources.dice.sample(legal, len(legal)):
        hypothesis = with_move(moves, item, RANDOM, "drawn at random")
        if state.is_new(hypothesis):
            yield hypothesis
