"""Conducts one run: prepare, look for headroom, search within the budgets, judge the finalists.

The one idea: whatever stops a search (budget, user, fault, nothing left to try), what was found so far goes to the
finalists; only who leaves a run for another orchestrator judges nothing. Trials walk in `walks`; what they find and
cost stands in `ledger`, also of a run that was begun elsewhere. Runs in the caller's thread; it keeps nothing beyond
the run: `Observer` hears of every change.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from orchestrator import finalists, metrics
from orchestrator.agents import Agents
from orchestrator.commands import report
from orchestrator.counsel import Counsel
from orchestrator.ledger import Ledger, Observer
from orchestrator.pipeline import (
    Pipeline,
    passed,
    without_bulk,
)
from orchestrator.prepare import (
    Prepared,
    analyze,
    at_floor,
    describe_device,
    has_algebra,
    look_ahead,
    prepare,
)
from orchestrator.search import PLAN_ZERO, Proposal, Search
from orchestrator.search.memory import NOTHING_KNOWN, Memory, first_hypotheses, known_first, learned
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.walks import Effort, Walks
from warpsmith.contract import words
from warpsmith.digest import of_shape, of_task
from warpsmith.errors import ArchiveFault, BadInput, Infrastructure, RunLost, WarpsmithError
from warpsmith.floors import is_of_products
from warpsmith.sandbox.processors import processor_count
from warpsmith.service import tracing
from warpsmith.v1 import (
    analysis_pb2,
    hypothesis_pb2,
    run_pb2,
    task_pb2,
    trial_pb2,
)

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

_PHASES = (run_pb2.RUN_STATE_PREPARING, run_pb2.RUN_STATE_SEARCHING, run_pb2.RUN_STATE_FINISHING)
_ZERO = hypothesis_pb2.Hypothesis(predicted_speedup=1.0, rationale="the module as library calls", source="plan zero")
_LEAVE_SECONDS = 2.0
"""How long trials under way may take to end their stage when the run is left."""

ResultT = TypeVar("ResultT")


class SearchRun:
    """One run, executed once. `memory`: what earlier runs found. `past`: of a run that was begun elsewhere, its trials
    in order, with their programs; None for one that begins here. `seal` signs the run when it ends."""

    def __init__(
        self,
        run: run_pb2.Run,
        agents: Agents,
        gate: DeviceGate,
        search: Search,
        observer: Observer,
        memory: Memory = NOTHING_KNOWN,
        effort: Effort | None = None,
        past: Sequence[trial_pb2.Trial] | None = None,
        seal: Callable[[run_pb2.Run], None] = lambda _: None,
    ) -> None:
        self.run, self._seal, self._past, self._is_begun = run, seal, past or (), past is None
        self._agents, self._gate, self._search = agents, gate, search
        self._observer, self._memory, self._chosen_effort = observer, memory, effort
        self._cancelled, self._left, self._stop_walks = threading.Event(), threading.Event(), threading.Event()
        self._settled = threading.Event()
        """What walks beyond the end of the search is measured no more."""
        self._ledger = Ledger(run, observer)
        self._cut_short = self._refusal = ""
        self._deadline, self._waited = float("inf"), 0.0
        """Seconds that the phase under way stood still for another run."""

    def cancel(self) -> None:
        """Asks for an end: the best so far is judged and kept. From any thread."""
        self._cancelled.set()
        self._stop_walks.set()

    def leave(self) -> None:
        """Asks for an end soon, with nothing judged: another orchestrator goes on with the run. From any thread."""
        self._left.set()
        self._stop_walks.set()

    def execute(self) -> run_pb2.Run:
        """Runs to the end and returns the run in an ended state; never raises for what a run can meet.

        Raises:
            RunLost: it was left. Infrastructure: a run that was begun elsewhere could not be prepared here.
        """
        try:
            return self._executed()
        except BadInput as error:
            return self._end(run_pb2.RUN_STATE_BAD_INPUT, str(error))
        except WarpsmithError as error:
            self._require_kept()
            if isinstance(error, RunLost) or not self._is_begun:
                raise
            finalists.keep_best(self.run, self._ledger.trials)
            return self._end(run_pb2.RUN_STATE_FAILED, str(error))

    def _executed(self) -> run_pb2.Run:
        is_searched = len(self.run.phase_seconds) > 1  # before it was left
        with ExitStack() as turn:
            prepared = self._phase(run_pb2.RUN_STATE_PREPARING, lambda: self._prepare(turn))
            if prepared is None:
                return self._end(run_pb2.RUN_STATE_CANCELLED, "stopped by the user before the search began")
            self._is_begun = True
            if not self._past and (reason := at_floor(prepared.reference, prepared.analysis)):
                return self._end(run_pb2.RUN_STATE_AT_FLOOR, reason)
            if not is_searched:
                self._phase(run_pb2.RUN_STATE_SEARCHING, self._search_all)
            self._phase(run_pb2.RUN_STATE_FINISHING, self._judge_finalists)
        return self._conclude()

    def _phase(self, state: run_pb2.RunState.ValueType, work: Callable[[], ResultT]) -> ResultT:
        place, seconds = _PHASES.index(state), self.run.phase_seconds
        is_again = place == 0 and self._past  # then it says that it was taken up
        self.run.state, self.run.message = state, self.run.message if is_again else ""
        self._observer.run_changed(self.run)
        start = time.monotonic()
        try:
            with tracing.span(words.run_state(state), run=self.run.id):
                return work()
        finally:
            self._require_kept()
            waited, self._waited = self._waited, 0.0
            before = sum(seconds[place : place + 1])
            seconds[place : place + 1] = [before + time.monotonic() - start - waited]

    def _require_kept(self) -> None:
        if self._left.is_set():
            raise RunLost(f"run {self.run.id} was left")

    def _waits_for(self, what: str) -> None:
        """Shows what is under way."""
        if what != self.run.message:
            self.run.message = what
            self._observer.run_changed(self.run)

    def _end(self, state: run_pb2.RunState.ValueType, message: str) -> run_pb2.Run:
        self.run.state, self.run.message = state, message
        self._seal(self.run)
        self._observer.run_changed(self.run)
        return self.run

    # ---- prepare -------------------------------------------------------------------------------------

    def _prepare(self, turn: ExitStack) -> Prepared | None:
        """Takes the run's turn with the device into `turn`, after all that needs none."""
        task = self.run.task
        if not task.target:
            task.target = describe_device(self._gate, task.target, self._ledger.took).target
            task.digest = of_task(task)
        if task.target == task_pb2.TARGET_CUDA:
            look_ahead(self._agents, self._gate, task)  # on a processor it would disturb what others time
        start = time.monotonic()
        if self._gate.is_taken:
            self._waits_for("waiting until another run is done with the device")
        if not turn.enter_context(self._gate.turn(self._may_prepare)):
            return None
        turn.enter_context(metrics.listening(self.run.id))
        self._waited = time.monotonic() - start
        self.run.stage_seconds["wait"] += self._waited
        self._effort = self._chosen_effort or Effort.of(task.target, processor_count(), self._gate.device_count)
        self._pipeline = Pipeline(
            self._agents,
            self._gate,
            task,
            go_on=lambda: not self._stop_walks.is_set(),
            go_on_to_timing=lambda: not (self._cancelled.is_set() or self._settled.is_set()),
            claim=self._ledger.claim,
            retry_pause_seconds=self._effort.retry_pause_seconds,
            took=self._ledger.took,
            run_id=self.run.id,
            numbered=lambda number: self._counsel.numbered(number),  # noqa: PLW0108 (it is made later)
            spent=self._ledger.took_tokens,
        )
        known = known_first(self.run.reference, self._memory.reference)
        prepared = prepare(
            self._agents, self._gate, task, self._may_prepare, known, self._waits_for, took=self._ledger.took
        )
        if prepared is not None:
            self.run.device.CopyFrom(prepared.device)
            self.run.reference.CopyFrom(prepared.reference)
            self.run.shape_digest = of_shape(task, prepared.analysis)
            self._ledger.may_pass_floor = has_algebra(prepared.analysis) or is_of_products(
                prepared.analysis.minimum, prepared.device, prepared.reference.floor_ns
            )
            self._plan_zero = prepared.analysis
            self._counsel = Counsel(
                self.run,
                self._search,
                is_new=lambda hypothesis: self._ledger.is_new(hypothesis.moves),
                analyze=self._analyze,
                ask=self._pipeline.propose,
                go_on=lambda: not self._spent(),
                plan_zero=prepared.analysis,
            )
            self._ledger.take_up(self._past, self._counsel)
            self._observer.run_changed(self.run)
        return prepared

    def _analyze(self, moves: Sequence[analysis_pb2.Move]) -> analysis_pb2.Analysis:
        return analyze(self._agents, self._gate, self.run.task, list(moves), lambda: not self._stop_walks.is_set())

    def _may_prepare(self) -> bool:  # what was found before is judged also where its user wants no more of it
        return not self._left.is_set() and (bool(self._past) or not self._cancelled.is_set())

    # ---- search --------------------------------------------------------------------------------------

    def _search_all(self) -> None:
        """Searches until the strategy, a budget, the user or a fault ends it."""
        first = self._first_proposals()
        self._deadline = time.monotonic() + self._ledger.begin()
        walks = Walks(self._effort, self._pipeline, self._counsel, self._ledger, self._spent, self._waits)
        try:
            walks.search(first)
            if self._ledger.is_near_floor:
                reached = f"a kernel reaches {self._ledger.floor_percent:.0f} % of the floor"
                self._cut_short = f"; {reached}, which ended the search"
        except Infrastructure as error:
            if isinstance(error, ArchiveFault) or not any(passed(trial) for trial in self._ledger.trials):
                raise
            self._cut_short = f"; the search ended early: {error}"
        finally:
            walks.forget_waiting()
            self._counsel.end()
            if not self._stop_walks.is_set() and not any(trial.candidate.moves for trial in self._ledger.trials):
                walks.settle(self._effort.settle_seconds)  # a short budget still tries something
            self._stop_walks.set()
            ended = walks.settle(_LEAVE_SECONDS if self._left.is_set() else self._effort.settle_seconds)
            self._settled.set()
            walks.close()
            self._ledger.note_time()
            for outcome in ended:
                self._ledger.record(outcome, self._counsel)

    def _first_proposals(self) -> list[Proposal]:
        """Plan zero itself, which every later plan is compared with, then what earlier runs found."""
        known = first_hypotheses(self._memory, self.run, self._plan_zero, self._analyze)
        return [Proposal(PLAN_ZERO, each) for each in (_ZERO, *known)]

    def _spent(self) -> bool:
        return self._stop_walks.is_set() or time.monotonic() >= self._deadline or self._ledger.is_spent

    def _waits(self, reason: str) -> None:
        """Shows that the run misses a language model (why), or (empty) that it no longer does."""
        self.run.state = run_pb2.RUN_STATE_WAITING_LLM if reason else run_pb2.RUN_STATE_SEARCHING
        self.run.message = reason
        metrics.waiting_for_model.inc(1 if reason else -1)
        self._observer.run_changed(self.run)

    # ---- finish --------------------------------------------------------------------------------------

    def _judge_finalists(self) -> None:
        count = 1 if self._cancelled.is_set() else finalists.COUNT
        # Judging is not interrupted by the stop of the search, and a finalist's program is known by nature.
        pipeline = Pipeline(
            self._agents,
            self._gate,
            self.run.task,
            go_on=lambda: not self._left.is_set(),
            retry_pause_seconds=self._effort.retry_pause_seconds,
            took=lambda stage, seconds: self._ledger.took(f"final {stage}", seconds),
            run_id=self.run.id,
        )
        selected = finalists.select(self._ledger.trials, count)
        judged = finalists.judge(
            pipeline, selected, has_kept_baselines=self.run.reference.is_kept, waits_for=self._waits_for
        )
        untried = "" if selected else _untried(self.run.id, self._ledger.trials, self._plan_zero)
        self._refusal = finalists.refusals(judged) or untried
        best = finalists.winner(judged)
        if best is not None:
            self.run.best_trial = best.number
            self.run.best.CopyFrom(without_bulk(best, keep_sources=True, keep_samples=True))
            if best.timing.faster:
                self.run.learned.extend(self._learned(best))

    def _learned(self, best: trial_pb2.Trial) -> list[analysis_pb2.KnownGroup]:
        """What the winner's groups are set to."""
        if any(move.kind == analysis_pb2.MOVE_KIND_SET for move in best.candidate.moves):
            with contextlib.suppress(WarpsmithError):  # what could not be analysed is not kept
                return learned(best, self._analyze(best.candidate.moves))
        return []

    def _conclude(self) -> run_pb2.Run:
        faster = self.run.HasField("best") and self.run.best.timing.faster
        message = _conclusion(self.run, self._refusal) + self._cut_short
        if self._cancelled.is_set():
            return self._end(run_pb2.RUN_STATE_CANCELLED, f"stopped by the user; {message}")
        if self._counsel.floor_reason and not faster:
            return self._end(run_pb2.RUN_STATE_AT_FLOOR, self._counsel.floor_reason)
        if self._ledger.last_fault and not self.run.pass_count:
            return self._end(run_pb2.RUN_STATE_FAILED, self._ledger.last_fault)
        return self._end(run_pb2.RUN_STATE_FASTER if faster else run_pb2.RUN_STATE_NO_FASTER, message)


def _conclusion(run: run_pb2.Run, refusal: str) -> str:
    """What came of a run, in one sentence; `refusal`: which finalists were not right, and why."""
    after = f"; {refusal}" if refusal else ""
    if trivial := report.trivial(run):
        return f"no speedup of this module means anything: it gives {trivial} whatever it is given"
    if run.HasField("best") and run.best.timing.faster:
        speedup = run.best.timing.speedup_fastest
        metrics.best_speedup.observe(speedup.median)
        that_ran = " that ran" if any(arm.failure for arm in run.best.timing.arms) else ""
        return f"{speedup.median:.2f}x the fastest baseline{that_ran} [{speedup.low:.2f}, {speedup.high:.2f}]{after}"
    if run.HasField("best"):
        return f"no faster kernel found: {finalists.shortfall(run.best)}{after}"
    return f"no faster kernel found{': ' if refusal else ''}{refusal}" if run.pass_count else "no candidate passed"


def _untried(run_id: str, trials: Iterable[trial_pb2.Trial], plan_zero: analysis_pb2.Analysis) -> str:
    """Why there is no finalist, where the module's own calls are all that passed; what would help."""
    if changed := sum(bool(trial.candidate.moves or trial.hypothesis.moves) for trial in trials):
        tree = f"`warpsmith show {run_id} --tree`"
        return f"none of the {changed} candidates that change something passed; {tree} says why"
    if plan_zero.legal_moves:
        return "nothing but the module's own calls was timed before the search was over; give it a larger budget"
    return "it has no call in whose place there is a kernel of ours here"
