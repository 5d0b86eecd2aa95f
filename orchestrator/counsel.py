"""What a strategy sees of a run, and its thinking, which nothing else waits for.

The one idea: a strategy asks a reasoner, which may ask a language model, and that takes minutes. So it thinks in a
thread of its own, one thought at a time, while trials walk, end and are mended. A plan is analysed once, and a reasoner
asked once for as long as nothing has ended since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from orchestrator.model_turns import with_write
from orchestrator.pipeline import passed
from orchestrator.search import PLAN_ZERO, Proposal, Search, SearchState
from warpsmith.errors import Infrastructure
from warpsmith.service import tracing
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, reasoning_service_pb2, run_pb2, trial_pb2

RECENT_COUNT = 128
"""Trials that a reasoner is told of, beside the parent and its children: a message must not grow with the run."""
LEAST_ASKED = 4
"""Hypotheses that a reasoner is asked for at least: several of one answer cost little more than one."""


@dataclass
class _Answer:
    """What the reasoner said of a plan, and when."""

    trial_count: int
    hypotheses: Sequence[hypothesis_pb2.Hypothesis]
    is_all: bool
    """Whether it had no more."""


class Counsel:
    """The strategy of one run, what it is told, and what it thinks of. One thread uses it; the strategy has another.

    `analyze` gives the plan of a list of moves; `ask` what the reasoner says, None where it has no answer; `go_on`
    whether the search still needs one.
    """

    def __init__(
        self,
        run: run_pb2.Run,
        search: Search,
        is_new: Callable[[hypothesis_pb2.Hypothesis], bool],
        analyze: Callable[[Sequence[analysis_pb2.Move]], analysis_pb2.Analysis],
        ask: Callable[
            [reasoning_service_pb2.ProposeHypothesesRequest], reasoning_service_pb2.ProposeHypothesesResponse | None
        ],
        go_on: Callable[[], bool],
        plan_zero: analysis_pb2.Analysis,
    ) -> None:
        self.history: list[trial_pb2.Trial] = []
        """Ended trials, sources and binaries left out."""
        self.floor_reason = self.model_away = ""
        """Why the reasoner sees no headroom in plan zero; why its model did not answer last."""
        self._run, self._search, self._is_new = run, search, is_new
        self._analyze, self._ask, self._go_on = analyze, ask, go_on
        self._kin: dict[int, list[trial_pb2.Trial]] = {}
        """By number: the trial itself and those that grew from it, in order, so that no look-up goes through all."""
        self._analyses = {PLAN_ZERO: plan_zero}
        self._answers: dict[int, _Answer] = {}
        self._thread = tracing.Pool(1, thread_name_prefix="strategy")
        self._thought: Future[list[Proposal]] | None = None
        self._seen: tuple[trial_pb2.Trial, ...] = ()
        """What had ended when the thought began."""

    def add(self, trial: trial_pb2.Trial) -> None:
        """A numbered trial ended."""
        self.history.append(trial)
        for number in (trial.number, trial.parent):
            self._kin.setdefault(number, []).append(trial)

    def numbered(self, number: int) -> trial_pb2.Trial | None:
        """The ended trial of a number; for plan zero the one that timed it, if it has ended."""
        if number:
            return self.history[number - 1]
        return next((trial for trial in self.history if passed(trial) and not trial.candidate.moves), None)

    @property
    def thinking(self) -> list[Future[list[Proposal]]]:
        """The thought under way, to wait for; none after it was taken."""
        return [self._thought] if self._thought is not None else []

    def think(self, slots: int, under_way: int) -> None:
        """Lets the strategy begin to think of what to try next."""
        self._seen = tuple(self.history)
        state = SearchState(
            trials=self._seen,
            slots=slots,
            is_new=self._is_new,
            analyze=self._analysis,
            propose=self._propose,
            under_way=under_way,
        )
        self._thought = self._thread.submit(self._search.next, state)

    def thought(self) -> tuple[list[Proposal], bool] | None:
        """What the strategy came to, and whether no trial has ended since it began; None while it thinks.

        Raises:
            Infrastructure: the reasoning agent or the strategy itself failed.
        """
        if self._thought is None or not self._thought.done():
            return None
        thought, self._thought = self._thought, None
        try:
            return thought.result(), len(self._seen) == len(self.history)
        except Infrastructure:
            raise
        except Exception as error:
            kind = type(self._search).__name__
            raise Infrastructure(f"the strategy {kind} failed: {type(error).__name__}: {error}") from error

    def end(self) -> None:
        """Nothing more is asked; a thought under way is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _analysis(self, parent: int) -> analysis_pb2.Analysis:
        if parent not in self._analyses:
            self._analyses[parent] = self._analyze(self._seen[parent - 1].candidate.moves)
        return self._analyses[parent]

    def _propose(self, parent: int, limit: int) -> Sequence[hypothesis_pb2.Hypothesis]:
        known = self._answers.get(parent)
        is_fresh = known is not None and known.trial_count == len(self._seen)
        if known is None or not is_fresh or (limit > len(known.hypotheses) and not known.is_all):
            known = self._asked(parent, max(limit, LEAST_ASKED))
            if known is None:
                return []
            self._answers[parent] = known
        return known.hypotheses[:limit]

    def _asked(self, parent: int, limit: int) -> _Answer | None:
        if not self._go_on():
            return None
        history = self._seen
        recent = history[-RECENT_COUNT:]
        oldest = len(history) - len(recent)
        family = [trial for trial in tuple(self._kin.get(parent, ())) if trial.number <= oldest]
        request = reasoning_service_pb2.ProposeHypothesesRequest(
            task=self._run.task,
            analysis=self._analysis(parent),
            device=self._run.device,
            reference=self._run.reference,
            history=[*family, *recent],
            limit=limit,
        )
        reply = self._ask(request)
        if reply is None:
            return None
        self.model_away = reply.model_away
        if reply.at_floor:
            if parent == PLAN_ZERO:
                self.floor_reason = reply.at_floor
            return _Answer(len(history), reply.hypotheses, is_all=True)
        made = with_write(request.analysis, reply.hypotheses, history[parent - 1] if parent else None)
        return _Answer(len(history), made, is_all=len(reply.hypotheses) < limit)
