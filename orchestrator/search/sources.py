"""Which source of hypotheses gets a slot: a bandit over the sources, each judged by what came of its trials.

The one idea: Thompson sampling. How likely a source's next trial passes and beats its parent has a Beta distribution,
which its trials sharpen; one number is drawn from each, and the highest gets the slot. The sources are those that the
reasoning agent names (roofline, evidence, a model) and a legal move drawn at random, which begins with imagined
losses: it gets a slot rarely until it earns. The agent's order counts too: a source's number is discounted by the
place of its best hypothesis, as in ranking, and its own hypotheses keep their order.

Sources of the rules: Thompson 1933, with Chapelle and Li, "An Empirical Evaluation of Thompson Sampling", 2011; the
discount is that of Järvelin and Kekäläinen, "Cumulated Gain-Based Evaluation of IR Techniques", 2002.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from orchestrator.pipeline import passed
from orchestrator.search import PLAN_ZERO, score
from warpsmith.v1 import trial_pb2, verdict_pb2

RANDOM = "random"
"""The source that is a legal move drawn at random."""
PRIOR_LOSSES = {RANDOM: 9}
"""Imagined trials that did not beat their parent; 1 for all other sources, and 1 that did for every one."""

REMEMBERED = 256
"""Trials that count: the last ones, since what a source is good for changes in the course of a search."""


class Sources:
    """The sources as the trials so far show them. Equal trials and seeds give equal choices."""

    def __init__(self, trials: Sequence[trial_pb2.Trial], seed: int = 0) -> None:
        self.dice = random.Random(f"{seed} {len(trials)}")
        self._wins, self._losses = Counter[str](), Counter[str]()
        zero = next((score(trial) for trial in trials if passed(trial) and not trial.candidate.moves), 1.0)

        def speed(trial: trial_pb2.Trial) -> float:
            return score(trial) if passed(trial) else 0.0

        for trial in trials[-REMEMBERED:]:
            before = zero if trial.parent == PLAN_ZERO else speed(trials[trial.parent - 1])
            # A failure's child is its repair, which was not chosen among sources; a machine's fault counts for none.
            if before > 0 and trial.verdict.state != verdict_pb2.VERDICT_STATE_INFRA:
                beaten = speed(trial) > before * (1 + trial.timing.noise_floor)
                (self._wins if beaten else self._losses)[trial.hypothesis.source] += 1

    def draw(self, ranked: Sequence[str]) -> str:
        """The source that gets the next slot; `ranked`: that of each hypothesis, best first."""
        places = {source: place for place, source in reversed(list(enumerate(ranked)))}
        return max(sorted(places), key=lambda source: self._chance(source) / math.log2(2 + places[source]))

    def _chance(self, source: str) -> float:
        losses = self._losses[source] + PRIOR_LOSSES.get(source, 1)
        return self.dice.betavariate(1 + self._wins[source], losses)
