"""Conducts one run: prepare, look for headroom, search within the budgets, judge the finalists.

The one idea: several trials walk the pipeline at once, so that synthesis and compiling of one overlap with timing of
another, while the device gate lets one measurement at a time have a quiet machine. Whatever stops a search (budget,
user, fault, nothing left to try), what was found so far goes to the finalists. Runs in the caller's thread; it keeps
nothing beyond the run: `Observer` hears of every change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from orchestrator import finalists, metrics
from orchestrator.agents import Agents
from orchestrator.commands import report
from orchestrator.counsel import Counsel
from orchestrator.model_turns import REST_SECONDS, Absence, was_answered
from orchestrator.pipeline import (
    Duplicate,
    Faulted,
    Interrupted,
    Judged,
    Outcome,
    Pipeline,
    Refused,
    Unanswered,
    passed,
    without_bulk,
)
from orchestrator.prepare import Prepared, analyze, at_floor, describe_device, has_algebra, look_ahead, prepare
from orchestrator.search import PLAN_ZERO, Proposal, Search
from orchestrator.serving.device_gate import DeviceGate
from warpsmith.digest import of_moves, of_shape, of_task
from warpsmith.errors import ArchiveFault, BadInput, Infrastructure, WarpsmithError
from warpsmith.floors import is_of_products
from warpsmith.sandbox.processors import processor_count
from warpsmith.v1 import (
    analysis_pb2,
    hypothesis_pb2,
    run_pb2,
    task_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)

DEFAULT_WALL_SECONDS = 60.0
NEAR_FLOOR_PERCENT = 95.0
"""A kernel that reaches so much of the floor ends a search: what is left is less than noise (docs/measurement.md)."""
ENDED = frozenset(
    {
        run_pb2.RUN_STATE_FASTER,
        run_pb2.RUN_STATE_NO_FASTER,
        run_pb2.RUN_STATE_AT_FLOOR,
        run_pb2.RUN_STATE_CANCELLED,
        run_pb2.RUN_STATE_BAD_INPUT,
        run_pb2.RUN_STATE_FAILED,
    }
)
"""States that a run does not leave."""

_NO_REMEDY = frozenset({verdict_pb2.FAILURE_KIND_CHEAT, verdict_pb2.FAILURE_KIND_SUSPECT})


class Observer(Protocol):
    """Hears what happens in a run, in the run's thread."""

    def run_changed(self, run: run_pb2.Run) -> None:
        """The run took another state, or its counts changed."""
        ...

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        """A trial ended; it carries its program, and no binary."""
        ...


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


_Walking = dict[Future[Outcome], int]
"""Trials under way; the value counts the repairs that led to each."""

ResultT = TypeVar("ResultT")


class SearchRun:
    """One run, executed once. `known`: lists of moves that earlier runs of the task found best."""

    def __init__(
        self,
        run: run_pb2.Run,
        agents: Agents,
        gate: DeviceGate,
        search: Search,
        observer: Observer,
        known: Callable[[run_pb2.Run], Sequence[Sequence[analysis_pb2.Move]]] = lambda _: (),
        effort: Effort | None = None,
    ) -> None:
        self.run = run
        self._agents, self._gate, self._search = agents, gate, search
        self._observer, self._known = observer, known
        self._chosen_effort = effort
        self._cancelled = threading.Event()
        self._stop_walks = threading.Event()
        self._settled = threading.Event()
        """What walks beyond the end of the search is measured no more."""
        self._lock = threading.Lock()
        self._programs: set[str] = set()
        self._tried: set[str] = set()
        self._trials: list[trial_pb2.Trial] = []
        self._device_seconds = self._floor_percent = 0.0
        self._last_fault = self._cut_short = self._refusal = ""
        self._deadline = float("inf")
        self._waited = 0.0
        """Seconds that the phase under way stood still for another run."""

    def cancel(self) -> None:
        """Asks for an end: the best so far is judged and kept. From any thread."""
        self._cancelled.set()
        self._stop_walks.set()

    def execute(self) -> run_pb2.Run:
        """Runs to the end and returns the run in an ended state; never raises for what a run can meet."""
        try:
            with ExitStack() as turn:
                prepared = self._phase(run_pb2.RUN_STATE_PREPARING, lambda: self._prepare(turn))
                if prepared is None:
                    return self._end(run_pb2.RUN_STATE_CANCELLED, "stopped by the user before the search began")
                if reason := at_floor(prepared.reference, prepared.analysis):
                    return self._end(run_pb2.RUN_STATE_AT_FLOOR, reason)
                self._phase(run_pb2.RUN_STATE_SEARCHING, self._search_all)
                self._phase(run_pb2.RUN_STATE_FINISHING, self._judge_finalists)
            return self._conclude()
        except BadInput as error:
            return self._end(run_pb2.RUN_STATE_BAD_INPUT, str(error))
        except WarpsmithError as error:
            return self._end(run_pb2.RUN_STATE_FAILED, str(error))

    def _phase(self, state: run_pb2.RunState.ValueType, work: Callable[[], ResultT]) -> ResultT:
        self.run.state = state
        self._observer.run_changed(self.run)
        start = time.monotonic()
        try:
            return work()
        finally:
            waited, self._waited = self._waited, 0.0
            self.run.phase_seconds.append(time.monotonic() - start - waited)

    def _numbered(self, number: int) -> trial_pb2.Trial | None:
        """The ended trial of a number; for plan zero the one that timed it, if it has ended."""
        history = self._counsel.history
        if number:
            return history[number - 1]
        return next((trial for trial in history if passed(trial) and not trial.candidate.moves), None)

    def _took(self, stage: str, seconds: float) -> None:
        with self._lock:
            self.run.stage_seconds[stage] += seconds
            if stage in ("verify", "measure"):
                self._device_seconds += seconds

    def _took_tokens(self, count: int) -> None:
        with self._lock:
            self.run.model_tokens += count

    def _end(self, state: run_pb2.RunState.ValueType, message: str) -> run_pb2.Run:
        self.run.state, self.run.message = state, message
        self._observer.run_changed(self.run)
        return self.run

    # ---- prepare -------------------------------------------------------------------------------------

    def _prepare(self, turn: ExitStack) -> Prepared | None:
        """Takes the run's turn with the device into `turn`, after all that needs none."""
        task = self.run.task
        if not task.target:
            task.target = describe_device(self._gate, task.target).target
            task.digest = of_task(task)
        if task.target == task_pb2.TARGET_CUDA:
            look_ahead(self._agents, self._gate, task)  # on a processor it would disturb what others time
        start = time.monotonic()
        if not turn.enter_context(self._gate.turn(lambda: not self._cancelled.is_set())):
            return None
        self._waited = time.monotonic() - start
        self.run.stage_seconds["wait"] = self._waited
        self._effort = self._chosen_effort or Effort.of(task.target, processor_count(), self._gate.device_count)
        self._pipeline = Pipeline(
            self._agents,
            self._gate,
            task,
            go_on=lambda: not self._stop_walks.is_set(),
            go_on_to_timing=lambda: not (self._cancelled.is_set() or self._settled.is_set()),
            claim=self._claim,
            retry_pause_seconds=self._effort.retry_pause_seconds,
            took=self._took,
            numbered=self._numbered,
            spent=self._took_tokens,
        )
        self._absence = Absence[tuple[Unanswered, int]](self._waits, self._effort.model_rest_seconds)
        prepared = prepare(self._agents, self._gate, task, go_on=lambda: not self._cancelled.is_set())
        if prepared is not None:
            self.run.device.CopyFrom(prepared.device)
            self.run.reference.CopyFrom(prepared.reference)
            self.run.shape_digest = of_shape(task, prepared.analysis)
            self._may_pass_floor = has_algebra(prepared.analysis) or is_of_products(
                prepared.analysis.minimum, prepared.device, prepared.reference.floor_ns
            )
            self._counsel = Counsel(
                self.run,
                self._search,
                is_new=lambda hypothesis: of_moves(hypothesis.moves) not in self._tried,
                analyze=lambda moves: analyze(self._agents, self._gate, task, list(moves)),
                ask=self._pipeline.propose,
                go_on=lambda: not self._spent(),
                plan_zero=prepared.analysis,
            )
            self._observer.run_changed(self.run)
        return prepared

    # ---- search --------------------------------------------------------------------------------------

    def _search_all(self) -> None:
        """Searches until the strategy, a budget, the user or a fault ends it."""
        self._deadline = time.monotonic() + (self.run.budget.wall_seconds or DEFAULT_WALL_SECONDS)
        pool = ThreadPoolExecutor(self._effort.parallel_trials, thread_name_prefix="trial")
        walking: _Walking = {}
        try:
            self._loop(pool, walking, self._first_proposals())
            if self._floor_percent >= NEAR_FLOOR_PERCENT:
                self._cut_short = f"; a kernel reaches {self._floor_percent:.0f} % of the floor, which ended the search"
        except Infrastructure as error:
            if isinstance(error, ArchiveFault) or not any(passed(trial) for trial in self._trials):
                raise
            self._cut_short = f"; the search ended early: {error}"
        finally:
            self._absence.forget()
            self._counsel.end()
            if not self._cancelled.is_set() and not any(trial.candidate.moves for trial in self._trials):
                wait(walking, timeout=self._effort.settle_seconds)  # a short budget still tries something
            self._stop_walks.set()
            ended, _ = wait(walking, timeout=self._effort.settle_seconds)
            self._settled.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for future in ended:
                if not future.cancelled():
                    self._record(future.result())

    def _first_proposals(self) -> list[Proposal]:
        """Plan zero itself, which every later plan is compared with, then what earlier runs found."""
        zero = hypothesis_pb2.Hypothesis(
            predicted_speedup=1.0, rationale="the module as library calls", source="plan zero"
        )
        proposals = [Proposal(PLAN_ZERO, zero)]
        for moves in self._known(self.run):
            hypothesis = hypothesis_pb2.Hypothesis(
                moves=moves,
                new_move_count=len(moves),
                predicted_speedup=1.0,
                rationale="an earlier run found it best",
                source="archive",
            )
            proposals.append(Proposal(PLAN_ZERO, hypothesis))
        return proposals

    def _loop(self, pool: ThreadPoolExecutor, walking: _Walking, waiting: list[Proposal]) -> None:
        faults_in_a_row = 0
        dry = False  # the strategy had nothing, and nothing has ended since
        while not self._spent():
            waiting = self._taken_up(pool, walking) + waiting
            if not waiting and not dry and not self._counsel.thinking and len(walking) <= self._effort.refill_at:
                self._counsel.think(self._effort.proposal_count, len(walking))
            while waiting and len(walking) < 2 * self._effort.parallel_trials and self._may_start(walking):
                self._start(pool, walking, waiting.pop(0))
            if not walking and not self._counsel.thinking:
                if dry and not self._absence.waiting:
                    return
                time.sleep(0.05 if dry else 0.0)
                continue
            under_way: list[Future[Any]] = [*walking, *self._counsel.thinking]
            ended, _ = wait(under_way, timeout=0.1, return_when=FIRST_COMPLETED)
            for future in [each for each in walking if each in ended]:  # in the order in which they were begun
                repairs, outcome = walking.pop(future), future.result()
                self._record(outcome)
                dry = False
                faults_in_a_row = faults_in_a_row + 1 if isinstance(outcome, Faulted) else 0
                self._heard(outcome, repairs)
                if isinstance(outcome, Faulted) and faults_in_a_row >= self._effort.fault_count:
                    raise Infrastructure(outcome.reason)
                if isinstance(outcome, Judged) and self._may_mend(outcome, repairs) and self._may_start(walking):
                    walking[pool.submit(self._pipeline.mend, outcome)] = repairs + 1
            if (thought := self._counsel.thought()) is not None:
                proposals, is_of_now = thought
                fresh = [each for each in proposals if of_moves(each.hypothesis.moves) not in self._tried]
                waiting, dry = waiting + fresh, is_of_now and not fresh
                self._absence.heard("reasoning", self._counsel.model_away)

    def _start(self, pool: ThreadPoolExecutor, walking: _Walking, proposal: Proposal) -> None:
        key = of_moves(proposal.hypothesis.moves)
        if key in self._tried:
            return
        self._tried.add(key)
        generation = self._counsel.history[proposal.parent - 1].generation + 1 if proposal.parent else 0
        trial = trial_pb2.Trial(parent=proposal.parent, generation=generation, hypothesis=proposal.hypothesis)
        walking[pool.submit(self._pipeline.walk, trial, timing_pb2.TIER_SCREENING)] = 0

    def _heard(self, outcome: Outcome, repairs: int) -> None:
        """Notes whether the synthesis agent's model answered; what it could not answer waits."""
        if isinstance(outcome, Unanswered):
            self._absence.heard("synthesis", outcome.reason)
            self._absence.postpone((outcome, repairs))
        elif was_answered(outcome.trial.hypothesis) and not isinstance(outcome, Interrupted | Faulted):
            self._absence.heard("synthesis", "")

    def _taken_up(self, pool: ThreadPoolExecutor, walking: _Walking) -> list[Proposal]:
        """Starts repairs that waited for a model long enough, and gives such proposals."""
        proposals = []
        for asked, repairs in self._absence.due():
            if asked.failure is None:
                self._tried.discard(of_moves(asked.trial.hypothesis.moves))
                proposals.append(Proposal(asked.trial.parent, asked.trial.hypothesis))
            elif self._may_start(walking):
                walking[pool.submit(self._pipeline.mend, asked.failure)] = repairs
            else:
                self._absence.postpone((asked, repairs))
        return proposals

    def _waits(self, reason: str) -> None:
        """Shows that the run misses a language model (why), or (empty) that it no longer does."""
        self.run.state = run_pb2.RUN_STATE_WAITING_LLM if reason else run_pb2.RUN_STATE_SEARCHING
        self.run.message = reason
        metrics.waiting_for_model.inc(1 if reason else -1)
        self._observer.run_changed(self.run)

    def _spent(self) -> bool:
        budget = self.run.budget
        return (
            self._cancelled.is_set()
            or time.monotonic() >= self._deadline
            or 0 < budget.trial_count <= len(self._trials)
            or 0 < budget.device_seconds <= self._device_seconds
            or 0 < budget.model_tokens <= self.run.model_tokens
            or self._floor_percent >= NEAR_FLOOR_PERCENT
        )

    def _share_of_floor(self, trial: trial_pb2.Trial) -> float:
        """Percent of the floor that a trial reaches; 0 where a kernel may well pass it (by algebra, or in products).

        Nor does a time count that is too good to be true.
        """
        if not passed(trial) or self._may_pass_floor or not finalists.is_credible(trial):
            return 0.0
        return trial.timing.floor_percent

    def _may_start(self, walking: _Walking) -> bool:
        limit = self.run.budget.trial_count
        return not self._spent() and (not limit or len(self._trials) + len(walking) < limit)

    def _claim(self, digest: str) -> bool:
        with self._lock:
            is_new = digest not in self._programs
            self._programs.add(digest)
            return is_new

    def _record(self, outcome: Outcome) -> None:
        """Numbers and keeps what was judged; counts the rest."""
        match outcome:
            case Judged(trial):
                trial.number = len(self._trials) + 1
                kept = without_bulk(trial, keep_sources=True)
                self._trials.append(kept)
                self._counsel.add(without_bulk(trial))
                self._floor_percent = max(self._floor_percent, self._share_of_floor(trial))
                self.run.trial_count = len(self._trials)
                self.run.pass_count += passed(trial)
                metrics.record_trial(self.run.task.digest, _stage_reached(trial), trial)
                self._observer.trial_ended(kept)
                self._observer.run_changed(self.run)
            case Refused():
                metrics.funnel.labels("refused").inc()
            case Duplicate():
                metrics.funnel.labels("duplicate").inc()
            case Faulted(_, reason):
                self._last_fault = reason
                metrics.funnel.labels("fault").inc()
            case Interrupted() | Unanswered():
                pass

    def _may_mend(self, failure: Judged, repairs: int) -> bool:
        verdict = failure.trial.verdict
        return (
            verdict.state == verdict_pb2.VERDICT_STATE_FAIL
            and verdict.kind not in _NO_REMEDY
            and repairs < self._effort.repair_count
        )

    # ---- finish --------------------------------------------------------------------------------------

    def _judge_finalists(self) -> None:
        count = 1 if self._cancelled.is_set() else finalists.COUNT
        # Judging is not interrupted by the stop of the search, and a finalist's program is known by nature.
        pipeline = Pipeline(
            self._agents,
            self._gate,
            self.run.task,
            retry_pause_seconds=self._effort.retry_pause_seconds,
            took=lambda stage, seconds: self._took(f"final {stage}", seconds),
        )
        selected = finalists.select(self._trials, count)
        judged = finalists.judge(pipeline, selected)
        refused = [trial.verdict.detail for trial in judged if not passed(trial)]
        self._refusal = f": {refused[0]}" if refused else ""
        best = finalists.winner(judged)
        if best is not None:
            self.run.best_trial = best.number
            self.run.best.CopyFrom(without_bulk(best, keep_sources=True, keep_samples=True))

    def _conclude(self) -> run_pb2.Run:
        trivial = report.trivial(self.run)
        faster = self.run.HasField("best") and self.run.best.timing.faster
        if trivial:
            message = f"no speedup of this module means anything: it gives {trivial} whatever it is given"
        elif faster:
            speedup = self.run.best.timing.speedup_fastest
            metrics.best_speedup.observe(speedup.median)
            that_ran = " that ran" if any(arm.failure for arm in self.run.best.timing.arms) else ""
            message = f"{speedup.median:.2f}x the fastest baseline{that_ran} [{speedup.low:.2f}, {speedup.high:.2f}]"
        elif self.run.HasField("best") and not finalists.is_credible(self.run.best):
            message = "no faster kernel found: the best takes less time than the machine allows, as far as was measured"
        elif self.run.HasField("best"):
            message = f"no faster kernel found: the best reaches {self.run.best.timing.speedup_fastest.median:.2f}x"
        elif self.run.pass_count:
            message = f"no faster kernel found{self._refusal}"
        else:
            message = "no candidate passed"
        message += self._cut_short
        if self._cancelled.is_set():
            return self._end(run_pb2.RUN_STATE_CANCELLED, f"stopped by the user; {message}")
        if self._counsel.floor_reason and not faster:
            return self._end(run_pb2.RUN_STATE_AT_FLOOR, self._counsel.floor_reason)
        if self._last_fault and not self.run.pass_count:
            return self._end(run_pb2.RUN_STATE_FAILED, self._last_fault)
        return self._end(run_pb2.RUN_STATE_FASTER if faster else run_pb2.RUN_STATE_NO_FASTER, message)


def _stage_reached(trial: trial_pb2.Trial) -> str:
    if not trial.HasField("artifact"):
        return "compile_fail"
    if trial.HasField("timing"):
        return "timed"
    return "measure_fail" if trial.verdict.detail.startswith("while timed") else "verify_fail"
