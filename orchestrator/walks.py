"""Trials under way: several walk the pipeline at once, are mended where they fail, and others follow.

The one idea: synthesis and compiling of one trial overlap with timing of another, while the device gate lets one
measurement at a time have a quiet machine; and nothing waits for the strategy, or for a language model that is away.
What a run spends, and when it ends, is not decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from orchestrator.counsel import Counsel
from orchestrator.ledger import Ledger
from orchestrator.model_turns import REST_SECONDS, Absence, was_answered
from orchestrator.pipeline import Faulted, Interrupted, Judged, Outcome, Pipeline, Unanswered
from orchestrator.search import Proposal
from warpsmith.errors import Infrastructure
from warpsmith.service import tracing
from warpsmith.v1 import task_pb2, timing_pb2, trial_pb2, verdict_pb2

_NO_REMEDY = frozenset({
    verdict_pb2.FAILURE_KIND_CHEAT, verdict_pb2.FAILURE_KIND_SUSPECT, verdict_pb2.FAILURE_KIND_SET_ASIDE,
})  # fmt: skip


@dataclass(frozen=True)
class Effort:
    """How a run spends a machine."""

    parallel_trials: int = 2
    """Trials that walk at once."""
    refill_at: int = 1
    """Asks the strategy for more when so few trials are under way."""
    proposal_count: int = 4
    """How many it is asked for: enough that no thread waits for a strategy."""
    repair_count: int = 2
    """How often one line of failures is repaired."""
    fault_count: int = 3
    """Faults in a row after which the services are taken for broken."""
    settle_seconds: float = 60.0
    """How long trials under way may take to end their stage after the search stopped."""
    retry_pause_seconds: float = 0.5
    model_rest_seconds: float = REST_SECONDS
    """How long a language model that is away is left alone."""

    @staticmethod
    def of(target: task_pb2.Target.ValueType, processor_count: int, device_count: int = 1) -> Effort:
        """Two at once on a CPU, which also runs the candidates; more where GPUs do, half of them waiting for one."""
        if target == task_pb2.TARGET_CUDA:
            count = max(2 * device_count, 4, min(12, processor_count))  # agents may have processors of their own
            # Each of many devices has a trial that waits for it while the strategy thinks.
            return Effort(parallel_trials=count, refill_at=max(count // 2, 2 * device_count), proposal_count=count)
        count = min(2, processor_count)
        return Effort(parallel_trials=count, proposal_count=2 * count)


class Walks:
    """Of one search, in one thread. `is_spent`: whether to begin nothing more; `waits` hears why a model is missed."""

    def __init__(
        self,
        effort: Effort,
        pipeline: Pipeline,
        counsel: Counsel,
        ledger: Ledger,
        is_spent: Callable[[], bool],
        waits: Callable[[str], None],
    ) -> None:
        self._effort, self._pipeline, self._counsel = effort, pipeline, counsel
        self._ledger, self._is_spent = ledger, is_spent
        self._absence = Absence[tuple[Unanswered, int]](waits, effort.model_rest_seconds)
        self._pool = tracing.Pool(effort.parallel_trials, thread_name_prefix="trial")
        self._walking: dict[Future[Outcome], int] = {}
        """Trials under way; the value counts the repairs that led to each."""

    def search(self, waiting: list[Proposal]) -> None:
        """Walks what waits, and then what the strategy proposes, until it has nothing left or all is spent.

        Raises Infrastructure for faults in a row and for a strategy that failed.
        """
        walking = self._walking
        faults_in_a_row = 0
        dry = False  # the strategy had nothing, and nothing has ended since
        while not self._is_spent():
            waiting = self._taken_up() + waiting
            if not waiting and not dry and not self._counsel.thinking and len(walking) <= self._effort.refill_at:
                self._counsel.think(self._effort.proposal_count, len(walking))
            while waiting and len(walking) < 2 * self._effort.parallel_trials and self._may_start():
                self._start(waiting.pop(0))
            if not walking and not self._counsel.thinking:
                if dry and not self._absence.waiting:
                    return
                time.sleep(0.05 if dry else 0.0)
                continue
            under_way: list[Future[Any]] = [*walking, *self._counsel.thinking]
            ended, _ = wait(under_way, timeout=0.1, return_when=FIRST_COMPLETED)
            for future in [each for each in walking if each in ended]:  # in the order in which they were begun
                repairs, outcome = walking.pop(future), future.result()
                self._ledger.record(outcome, self._counsel)
                dry = False
                faults_in_a_row = faults_in_a_row + 1 if isinstance(outcome, Faulted) else 0
                self._heard(outcome, repairs)
                if isinstance(outcome, Faulted) and faults_in_a_row >= self._effort.fault_count:
                    raise Infrastructure(outcome.reason)
                if isinstance(outcome, Judged) and self._may_mend(outcome, repairs) and self._may_start():
                    walking[self._pool.submit(self._pipeline.mend, outcome)] = repairs + 1
            if (thought := self._counsel.thought()) is not None:
                proposals, is_of_now = thought
                fresh = [each for each in proposals if self._ledger.is_new(each.hypothesis.moves)]
                waiting, dry = waiting + fresh, is_of_now and not fresh
                self._absence.heard("reasoning", self._counsel.model_away)

    def forget_waiting(self) -> None:
        """Nothing waits for a language model any more: the search is over."""
        self._absence.forget()

    def settle(self, seconds: float) -> Iterator[Outcome]:
        """Gives trials under way so long to end, and then the outcomes of those that did."""
        ended, _ = wait(self._walking, timeout=seconds)
        return (future.result() for future in ended if not future.cancelled())

    def close(self) -> None:
        """Begins no more; who still walks is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, proposal: Proposal) -> None:
        if not self._ledger.is_new(proposal.hypothesis.moves):
            return
        self._ledger.note_tried(proposal.hypothesis.moves)
        generation = self._counsel.history[proposal.parent - 1].generation + 1 if proposal.parent else 0
        trial = trial_pb2.Trial(parent=proposal.parent, generation=generation, hypothesis=proposal.hypothesis)
        self._walking[self._pool.submit(self._pipeline.walk, trial, timing_pb2.TIER_SCREENING)] = 0

    def _heard(self, outcome: Outcome, repairs: int) -> None:
        """Notes whether the synthesis agent's model answered; what it could not answer waits."""
        if isinstance(outcome, Unanswered):
            self._absence.heard("synthesis", outcome.reason)
            self._absence.postpone((outcome, repairs))
        elif was_answered(outcome.trial.hypothesis) and not isinstance(outcome, Interrupted | Faulted):
            self._absence.heard("synthesis", "")

    def _taken_up(self) -> list[Proposal]:
        """Starts repairs that waited for a model long enough, and gives such proposals."""
        proposals = []
        for asked, repairs in self._absence.due():
            if asked.failure is None:
                self._ledger.note_untried(asked.trial.hypothesis.moves)
                proposals.append(Proposal(asked.trial.parent, asked.trial.hypothesis))
            elif self._may_start():
                self._walking[self._pool.submit(self._pipeline.mend, asked.failure)] = repairs
            else:
                self._absence.postpone((asked, repairs))
        return proposals

    def _may_start(self) -> bool:
        return not self._is_spent() and self._ledger.may_start(len(self._walking))

    def _may_mend(self, failure: Judged, repairs: int) -> bool:
        verdict = failure.trial.verdict
        return (
            verdict.state == verdict_pb2.VERDICT_STATE_FAIL
            and verdict.kind not in _NO_REMEDY
            and repairs < self._effort.repair_count
        )
