"""The whole way of a kernel on one screen: a `Trial` gains candidate, artifact, verdict and timing, in that order.

The one idea: each stage is one call to one agent, and the trial says at which it ended. How it ended is a value.
Faults of machines and services are tried once more and then never charged to a candidate.
What agents are asked about a trial that ended, or about a plan, is here too: a remedy, the next hypotheses.
This chooses nothing: what to walk, with which care, and what follows is for `walks` and `finalists`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from orchestrator import agents as deadlines
from orchestrator import metrics
from orchestrator.agents import Agents, SetAsideError, noting_ends
from orchestrator.model_turns import asks_model, is_written
from orchestrator.serving.device_gate import DeviceGate
from warpsmith.contract import words
from warpsmith.errors import (
    BadInput,
    Infrastructure,
    LeaseLost,
    MethodMissing,
    ModelFault,
    NotFound,
    ServiceFault,
    WarpsmithError,
)
from warpsmith.service import tracing
from warpsmith.v1 import (
    benchmark_service_pb2,
    candidate_pb2,
    compile_service_pb2,
    correctness_service_pb2,
    hypothesis_pb2,
    reasoning_service_pb2,
    synthesis_service_pb2,
    task_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Judged:
    """The candidate got its due: a timing, or a verdict against it. `diagnostics`: what the compiler said."""

    trial: trial_pb2.Trial
    diagnostics: str = ""
    place: str = ""
    """Of the trial in its trace."""


@dataclass(frozen=True)
class Refused:
    """No candidate: the moves do not apply to the task, or a model wrote nothing that can be used. `reason` is the
    synthesis agent's."""

    trial: trial_pb2.Trial
    reason: str


@dataclass(frozen=True)
class Duplicate:
    """The candidate's plan or program is known already; nothing was compiled."""

    trial: trial_pb2.Trial


@dataclass(frozen=True)
class Faulted:
    """A machine or a service failed twice: says nothing of the candidate."""

    trial: trial_pb2.Trial
    reason: str


@dataclass(frozen=True)
class Unanswered:
    """A language model had to write the kernel and its server is away: what was asked may be asked again later.
    `failure`: what it was to mend, where that is what was asked."""

    trial: trial_pb2.Trial
    reason: str
    failure: Judged | None = None


@dataclass(frozen=True)
class Interrupted:
    """The run stopped between two stages."""

    trial: trial_pb2.Trial


Outcome = Judged | Refused | Duplicate | Faulted | Unanswered | Interrupted


class _RunStoppedError(Exception):
    """Raised between stages; never leaves `Pipeline.walk`."""


def _traced(walk: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """A walk as a span, whose place in the trace goes with a trial that was judged."""

    @functools.wraps(walk)
    def spanned(
        self: Pipeline,
        trial: trial_pb2.Trial,
        tier: timing_pb2.Tier.ValueType,
        rewritten: candidate_pb2.Program | None = None,
    ) -> Outcome:
        with tracing.span("trial", run=self.run_id, tier=words.tier(tier)) as span:
            outcome = walk(self, trial, tier, rewritten)
            tracing.note(span, program=trial.candidate.program.digest, outcome=type(outcome).__name__.lower())
            return replace(outcome, place=tracing.here()) if span and isinstance(outcome, Judged) else outcome

    return spanned


@dataclass
class Pipeline:
    """Walks trials of one task."""

    agents: Agents
    gate: DeviceGate
    task: task_pb2.Task
    go_on: Callable[[], bool] = lambda: True
    """Asked between stages; False interrupts the walk."""
    go_on_to_timing: Callable[[], bool] = lambda: True
    """Asked in its place once a candidate is verified: the end of a budget does not lose what is known to be right."""
    claim: Callable[[str], bool] = lambda _: True
    """Given a program's or a plan's digest, whether it is new: at most once True for each."""
    retry_pause_seconds: float = field(default=0.5)
    """Pause before the second attempt, in which a service replaces its worker."""
    gone_seconds: float = deadlines.AWAY_SECONDS
    """How long a service may be gone or silent."""
    took: Callable[[str, float], None] = lambda _stage, _seconds: None
    """Hears how many seconds each stage took, waiting for the device left out."""
    numbered: Callable[[int], trial_pb2.Trial | None] = lambda _: None
    """Number → the trial, so that the writer of a kernel is told how fast its parent is."""
    spent: Callable[[int], None] = lambda _: None
    """Hears how many tokens a model took, whatever came of it."""
    run_id: str = ""
    """As traces name the run."""
    _reasons_by_model: bool = field(default=False, init=False)
    """Whether the reasoner was seen to ask a model: the machine is not held while it waits for one."""

    @_traced
    def walk(
        self, trial: trial_pb2.Trial, tier: timing_pb2.Tier.ValueType, rewritten: candidate_pb2.Program | None = None
    ) -> Outcome:
        """Takes a trial with a hypothesis (or a candidate already) as far as it goes. Fills `trial` in place. Raises
        LeaseLost where a device's service says that the run is another's."""
        start = time.monotonic()
        try:
            trial.ended_at = trial_pb2.STAGE_SYNTHESIZE  # unless it goes on
            if not trial.HasField("candidate"):
                trial.candidate.CopyFrom(self._synthesize(trial))
            if not self._is_new(trial.candidate):
                return Duplicate(trial)
            trial.ended_at = trial_pb2.STAGE_COMPILE
            compiled = self._compile(trial.candidate.program)
            if compiled.HasField("rejection"):
                trial.verdict.CopyFrom(failed(compiled.rejection.kind, compiled.rejection.diagnostics))
                explained = compiled.rejection.explanation
                said = f"{explained}\n{compiled.rejection.diagnostics}" if explained else compiled.rejection.diagnostics
                return Judged(trial, said)
            trial.artifact.CopyFrom(compiled.artifact)
            trial.ended_at = trial_pb2.STAGE_VERIFY
            trial.verdict.CopyFrom(self._verify(trial, tier))
            trial.ends.extend(trial.verdict.ends)
            if trial.verdict.state != verdict_pb2.VERDICT_STATE_PASS:
                return Judged(trial)
            trial.ended_at = trial_pb2.STAGE_MEASURE
            measured = self._measure(trial, tier, rewritten)
            if measured.HasField("fault"):
                trial.ends.extend(measured.fault.ends)
                trial.verdict.CopyFrom(failed(measured.fault.kind, f"while timed: {measured.fault.detail}"))
                return Judged(trial)
            if why := impossible(measured.timing):
                trial.verdict.CopyFrom(failed(verdict_pb2.FAILURE_KIND_SUSPECT, why))
                return Judged(trial)
            trial.timing.CopyFrom(measured.timing)
            trial.ended_at = trial_pb2.STAGE_TIMED
            return Judged(trial)
        except _RunStoppedError:
            return Interrupted(trial)
        except LeaseLost:
            raise
        except SetAsideError as error:
            trial.verdict.CopyFrom(failed(verdict_pb2.FAILURE_KIND_SET_ASIDE, str(error)))
            return Judged(trial)
        except (BadInput, NotFound) as error:
            return Refused(trial, str(error))
        except ModelFault as error:
            return Unanswered(trial, str(error))
        except WarpsmithError as error:
            trial.verdict.CopyFrom(_infrastructure(str(error)))
            return Faulted(trial, str(error))
        finally:
            trial.seconds = time.monotonic() - start

    def mend(self, failure: Judged) -> Outcome:
        """Asks for a remedy of a judged failure and walks it."""
        failed = failure.trial
        request = synthesis_service_pb2.RepairCandidateRequest(
            task=self.task, failed=without_bulk(failed, keep_sources=True), diagnostics=failure.diagnostics
        )
        trial = trial_pb2.Trial(parent=failed.number, generation=failed.generation, ended_at=trial_pb2.STAGE_SYNTHESIZE)
        by_model = is_written(failed.candidate.moves)
        seconds = deadlines.WRITE_SECONDS if by_model else deadlines.SYNTHESIZE_SECONDS

        def call() -> synthesis_service_pb2.RepairCandidateResponse:
            with self._asking(by_model), self._timed("repair"):
                return self.agents.synthesis.RepairCandidate(request, timeout=seconds)

        try:
            reply = self._twice(call)
        except _RunStoppedError:
            return Interrupted(trial)
        except (BadInput, NotFound, MethodMissing) as error:
            return Refused(trial, str(error))
        except ModelFault as error:
            return Unanswered(failed, str(error), failure)
        except WarpsmithError as error:
            return Faulted(trial, str(error))
        self.spent(reply.model_tokens)
        trial.hypothesis.CopyFrom(reply.hypothesis)
        trial.candidate.CopyFrom(reply.candidate)
        return self.walk(trial, timing_pb2.TIER_SCREENING)

    def propose(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest
    ) -> reasoning_service_pb2.ProposeHypothesesResponse | None:
        """What the reasoning agent says of a plan; None where the run stopped, or it does not take the question.

        Raises:
            Infrastructure: it failed twice.
        """

        def call() -> reasoning_service_pb2.ProposeHypothesesResponse:
            with self._asking(self._reasons_by_model), self._timed("propose"):
                return self.agents.reasoning.ProposeHypotheses(request, timeout=deadlines.PROPOSE_SECONDS)

        try:
            reply = self._twice(call)
        except (_RunStoppedError, BadInput, NotFound):
            return None
        self._reasons_by_model = bool(reply.model_tokens or reply.model_away)
        self.spent(reply.model_tokens)
        return reply

    def time_again(self, trial: trial_pb2.Trial) -> trial_pb2.Trial:
        """Times a candidate that was verified before, by screening; without a timing where that does not work now."""
        try:
            compiled = self._compile(trial.candidate.program)
            trial.artifact.CopyFrom(compiled.artifact)
            trial.timing.CopyFrom(self._measure(trial, timing_pb2.TIER_SCREENING, None).timing)
        except (_RunStoppedError, SetAsideError, WarpsmithError):
            trial.ClearField("timing")
        return trial

    def program_of(self, hypothesis: hypothesis_pb2.Hypothesis) -> candidate_pb2.Program | None:
        """The program of a hypothesis that is timed beside others and never judged; None where there is none now."""
        try:
            return self._synthesize(trial_pb2.Trial(hypothesis=hypothesis)).program
        except (_RunStoppedError, WarpsmithError):
            return None

    def _is_new(self, candidate: candidate_pb2.Candidate) -> bool:
        """By its plan too: the text of a program names the moves, and many moves lead to one plan."""
        plan = candidate.analysis.plan_digest
        return self.claim(candidate.program.digest) and (not plan or self.claim(plan))

    def _synthesize(self, trial: trial_pb2.Trial) -> candidate_pb2.Candidate:
        request = synthesis_service_pb2.SynthesizeCandidateRequest(task=self.task, hypothesis=trial.hypothesis)
        by_model = asks_model(trial.hypothesis.moves)
        if by_model and (parent := self.numbered(trial.parent)) is not None:
            request.parent.CopyFrom(parent)
        seconds = deadlines.WRITE_SECONDS if by_model else deadlines.SYNTHESIZE_SECONDS

        def call() -> synthesis_service_pb2.SynthesizeCandidateResponse:
            with self._asking(by_model), self._timed("synthesize"):
                reply = self.agents.synthesis.SynthesizeCandidate(request, timeout=seconds)
            return _said(reply, bool(reply.candidate.program.digest), "SynthesizeCandidate")

        reply = self._twice(call)
        self.spent(reply.model_tokens)
        return reply.candidate

    def _compile(self, program: candidate_pb2.Program) -> compile_service_pb2.CompileCandidateResponse:
        request = compile_service_pb2.CompileCandidateRequest(program=program)

        def call() -> compile_service_pb2.CompileCandidateResponse:
            with self.gate.working(self.task.target), self._timed("compile"):
                reply = self.agents.compilation.CompileCandidate(request, timeout=deadlines.COMPILE_SECONDS)
            return _said(reply, bool(reply.WhichOneof("outcome")), "CompileCandidate")

        return self._twice(call)

    def _verify(self, trial: trial_pb2.Trial, tier: timing_pb2.Tier.ValueType) -> verdict_pb2.Verdict:
        request = correctness_service_pb2.VerifyArtifactRequest(
            task=self.task, program=trial.candidate.program, artifact=trial.artifact, tier=tier
        )

        def call() -> verdict_pb2.Verdict:
            request.lease.CopyFrom(self.agents.lease())
            with self.gate.checking(self.task.target), self._timed("verify") as waited:
                reply = self.agents.correctness.VerifyArtifact(request, timeout=deadlines.VERIFY_SECONDS)
                waited.seconds = reply.verdict.waited_seconds
            if reply.verdict.state == verdict_pb2.VERDICT_STATE_INFRA:
                raise Infrastructure(reply.verdict.detail)
            return _said(reply.verdict, bool(reply.verdict.state), "VerifyArtifact")

        return self._twice(call, failed=noting_ends(trial, "verify", self._failed))

    def _measure(
        self, trial: trial_pb2.Trial, tier: timing_pb2.Tier.ValueType, rewritten: candidate_pb2.Program | None
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        request = benchmark_service_pb2.MeasureArtifactRequest(task=self.task, tier=tier, rewritten_reference=rewritten)
        request.program.CopyFrom(trial.candidate.program)
        request.artifact.CopyFrom(trial.artifact)

        def call() -> benchmark_service_pb2.MeasureArtifactResponse:
            request.lease.CopyFrom(self.agents.lease())
            with self.gate.timing() as benchmark, self._timed("measure") as waited:
                reply = benchmark.MeasureArtifact(request, timeout=deadlines.MEASURE_SECONDS)
                waited.seconds = reply.waited_seconds
            return _said(reply, bool(reply.WhichOneof("outcome")), "MeasureArtifact")

        return self._twice(call, self.go_on_to_timing, noting_ends(trial, "measure", self._failed))

    def _asking(self, by_model: bool) -> AbstractContextManager[None]:
        """Held while an agent thinks; while it waits for a model's answer the machine is not its."""
        return nullcontext() if by_model else self.gate.working(self.task.target)

    def _failed(self, error: WarpsmithError) -> None:
        self.spent(error.model_tokens)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[metrics.Waited]:
        with tracing.span(stage, run=self.run_id), metrics.timed(stage, self.took) as waited:
            yield waited

    def _twice(
        self,
        call: Callable[[], ResultT],
        go_on: Callable[[], bool] | None = None,
        failed: Callable[[WarpsmithError], None] | None = None,
    ) -> ResultT:
        go_on = go_on or self.go_on
        if not go_on():
            raise _RunStoppedError
        try:
            return deadlines.asked(
                call,
                go_on=go_on,
                pause_seconds=self.retry_pause_seconds,
                away_seconds=self.gone_seconds,
                failed=failed or self._failed,
            )
        except (ModelFault, LeaseLost):
            raise
        except Infrastructure:
            if not go_on():
                raise _RunStoppedError from None
            raise


def _said(reply: ResultT, is_there: bool, method: str) -> ResultT:
    """An answer that says something. One that does not is the service's fault, or of what lies between, and charges no
    candidate: in protobuf a message of which all was lost is whole.
    """
    if not is_there:
        raise ServiceFault(f"{method}: the answer is empty")
    return reply


def failed(kind: verdict_pb2.FailureKind.ValueType, detail: str) -> verdict_pb2.Verdict:
    """A verdict against a candidate."""
    return verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_FAIL, kind=kind, detail=detail)


def _infrastructure(detail: str) -> verdict_pb2.Verdict:
    return verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_INFRA, detail=detail)


def impossible(timing: timing_pb2.Timing) -> str:
    """Why no kernel can be that fast; empty for a time that may be true."""
    if timing_pb2.FLAG_FLOOR_REJECT not in timing.raised:
        return ""
    median = next(arm.median_ns for arm in timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE)
    return f"{median / 1e3:.1f} us: faster than this machine can move the task's data or compute its products"


def passed(trial: trial_pb2.Trial) -> bool:
    """Whether a trial came through: right, and timed."""
    return trial.verdict.state == verdict_pb2.VERDICT_STATE_PASS and trial.HasField("timing")


def without_bulk(trial: trial_pb2.Trial, *, keep_sources: bool = False, keep_samples: bool = False) -> trial_pb2.Trial:
    """A copy for history, events and archive: no binary, no comparisons, no raw samples.

    `keep_sources`: the program stays, so that it can be shown and exported. `keep_samples`: and what was measured,
    for the record of a result.
    """
    light = trial_pb2.Trial()
    light.CopyFrom(trial)
    if light.HasField("artifact"):
        light.artifact.content = b""
        del light.artifact.further[:]
    if light.HasField("candidate") and not keep_sources:
        digest = light.candidate.program.digest
        light.candidate.program.CopyFrom(candidate_pb2.Program(digest=digest))
    if light.HasField("verdict"):
        del light.verdict.comparisons[:]
    for arm in light.timing.arms if light.HasField("timing") and not keep_samples else ():
        del arm.samples_ns[:]
    return light
