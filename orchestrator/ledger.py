"""What a run has found and spent so far: its trials, what was tried, and how much of its budgets is gone.

The one idea: code that asks whether to go on and code that reports what came of it read the same place. It starts
nothing and ends nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from orchestrator import finalists, metrics
from orchestrator.archiving import programs
from orchestrator.counsel import Counsel
from orchestrator.pipeline import (
    Duplicate,
    Faulted,
    Interrupted,
    Judged,
    Outcome,
    Refused,
    Unanswered,
    passed,
    without_bulk,
)
from warpsmith.digest import of_moves
from warpsmith.service import tracing
from warpsmith.v1 import analysis_pb2, run_pb2, trial_pb2

NEAR_FLOOR_PERCENT = 95.0
"""A kernel that reaches so much of the floor ends a search: what is left is less than noise (docs/measurement.md)."""


DEFAULT_WALL_SECONDS = 60.0
DEVICE_STAGES = ("describe", "reference", "verify", "measure", "final verify", "final measure")
"""Stages in which a run has a device: what it costs."""


def day_of(time_s: float) -> str:
    """The day of UTC, as costs are kept by it."""
    return time.strftime("%Y-%m-%d", time.gmtime(time_s))


def wall_seconds(budget: run_pb2.Budget) -> float:
    """Of a search."""
    return budget.wall_seconds or DEFAULT_WALL_SECONDS


def is_spent(run: run_pb2.Run) -> bool:
    """Whether a budget but that of time is spent."""
    budget = run.budget
    return (
        0 < budget.trial_count <= run.trial_count
        or 0 < budget.device_seconds <= run.spent.device_seconds
        or 0 < budget.model_tokens <= run.model_tokens
    )


def has_budget_left(run: run_pb2.Run) -> bool:
    """Whether a search that was stopped may go on."""
    return run.spent.wall_seconds < wall_seconds(run.budget) and not is_spent(run)


class Observer(Protocol):
    """Hears what happens in a run, in the run's thread."""

    def run_changed(self, run: run_pb2.Run) -> None:
        """The run took another state, or its counts changed."""
        ...

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        """A trial ended; it carries its program, and no binary."""
        ...


class Ledger:
    """Of one run. `took`, `took_tokens`, `claim` and `is_new` from any thread."""

    def __init__(self, run: run_pb2.Run, observer: Observer) -> None:
        self._run, self._observer = run, observer
        self._lock = threading.Lock()
        self._programs: set[str] = set()
        self._tried: set[str] = set()
        self._searching_since = 0.0
        """When this search began, less what was spent before, by the monotonic clock; 0 before."""
        self.trials: list[trial_pb2.Trial] = []
        """Those that ended, without binaries; with their programs while they may become finalists."""
        self._promising: list[trial_pb2.Trial] = []
        self.floor_percent = 0.0
        """Of the floor, what the best trial reaches."""
        self.may_pass_floor = False
        """Whether a kernel may take less time than the floor, which then says nothing."""
        self.last_fault = ""

    # ---- spent -----------------------------------------------------------------------------------------

    def took(self, stage: str, seconds: float) -> None:
        """A stage of the pipeline took so long."""
        with self._lock:
            self._run.stage_seconds[stage] += seconds
            if stage in DEVICE_STAGES:
                self._run.device_day_seconds[day_of(time.time())] += seconds
                metrics.note_cost(self._run.project, stage, seconds)
            if stage in ("verify", "measure"):
                self._run.spent.device_seconds += seconds

    def took_tokens(self, count: int) -> None:
        """A model wrote so many tokens."""
        with self._lock:
            self._run.model_tokens += count
            self._run.spent.model_tokens = self._run.model_tokens

    def begin(self) -> float:
        """The search begins, or goes on: the seconds of the budget that are left of it."""
        self._searching_since = time.monotonic() - self._run.spent.wall_seconds
        return wall_seconds(self._run.budget) - self._run.spent.wall_seconds

    def note_time(self) -> None:
        """Keeps how long it has searched."""
        if self._searching_since:
            self._run.spent.wall_seconds = time.monotonic() - self._searching_since

    @property
    def is_spent(self) -> bool:
        """Whether a budget but that of time is spent, or there is nothing more to gain."""
        return is_spent(self._run) or self.is_near_floor

    def may_start(self, under_way: int) -> bool:
        """Whether one more trial than those under way is within the budget of trials."""
        limit = self._run.budget.trial_count
        return not limit or len(self.trials) + under_way < limit

    @property
    def is_near_floor(self) -> bool:
        """Whether a kernel reaches so much of the floor that the search may end."""
        return self.floor_percent >= NEAR_FLOOR_PERCENT

    # ---- tried -----------------------------------------------------------------------------------------

    def claim(self, digest: str) -> bool:
        """Whether a program is new; from here on it is not."""
        with self._lock:
            is_new = digest not in self._programs
            self._programs.add(digest)
            return is_new

    def is_new(self, moves: Sequence[analysis_pb2.Move]) -> bool:
        """Whether a list of moves was not tried yet."""
        return of_moves(moves) not in self._tried

    def note_tried(self, moves: Sequence[analysis_pb2.Move]) -> None:
        """It is tried now."""
        self._tried.add(of_moves(moves))

    def note_untried(self, moves: Sequence[analysis_pb2.Move]) -> None:
        """It was not tried after all, and may be again."""
        self._tried.discard(of_moves(moves))

    def take_up(self, trials: Sequence[trial_pb2.Trial], counsel: Counsel) -> None:
        """Knows what the run had found and spent when it was left; possible finalists carry their programs."""
        for trial in trials:
            self._programs |= {trial.candidate.program.digest, trial.candidate.analysis.plan_digest}
            self.note_tried(trial.hypothesis.moves)
            self._keep(trial, counsel)
            self._spare(trial)
            spent = self._run.spent
            spent.wall_seconds = max(spent.wall_seconds, trial.spent.wall_seconds)
            spent.device_seconds = max(spent.device_seconds, trial.spent.device_seconds)
            spent.model_tokens = max(spent.model_tokens, trial.spent.model_tokens)
        self._run.model_tokens = max(self._run.model_tokens, self._run.spent.model_tokens)
        self._run.pass_count = sum(map(passed, trials))

    # ---- found -----------------------------------------------------------------------------------------

    def record(self, outcome: Outcome, counsel: Counsel) -> None:
        """Numbers and keeps what was judged; counts the rest. In the run's thread."""
        match outcome:
            case Judged(trial, place=place):
                self.note_time()
                trial.number = len(self.trials) + 1
                trial.spent.CopyFrom(self._run.spent)
                kept = without_bulk(trial, keep_sources=True)
                self._keep(kept, counsel)
                self._run.pass_count += passed(trial)
                metrics.record_trial(self._run, trial)
                try:
                    self._observer.trial_ended(kept)
                finally:
                    self._spare(kept)
                self._observer.run_changed(self._run)
                with tracing.span("record", parent=place, run=self._run.id, trial=trial.number):
                    pass
            case Refused():
                metrics.funnel.labels("refused").inc()
            case Duplicate():
                metrics.funnel.labels("duplicate").inc()
            case Faulted(_, reason):
                self.last_fault = reason
                metrics.funnel.labels("fault").inc()
            case Interrupted() | Unanswered():
                pass

    def _keep(self, trial: trial_pb2.Trial, counsel: Counsel) -> None:
        self.trials.append(trial)
        counsel.add(without_bulk(trial))
        self.floor_percent = max(self.floor_percent, self._share_of_floor(trial))
        self._run.trial_count = len(self.trials)

    def _spare(self, trial: trial_pb2.Trial) -> None:
        """Takes the program from a trial that will be no finalist: of thousands they would fill the memory."""
        every = [*self._promising, trial]
        self._promising = finalists.promising(every)
        for each in every:
            if not any(each is kept for kept in self._promising):
                programs.dropped(each)

    def _share_of_floor(self, trial: trial_pb2.Trial) -> float:
        """Percent of the floor that a trial reaches; 0 where a kernel may well pass it (by algebra, or in products).

        Nor does a time count that is too good to be true.
        """
        if not passed(trial) or self.may_pass_floor or not finalists.is_credible(trial):
            return 0.0
        return trial.timing.floor_percent
