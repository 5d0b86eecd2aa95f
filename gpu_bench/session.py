"""The calls of a task: its candidates compared, timed, looked at, one after the other.

The one idea: a session says in which order judge and candidate are asked, and holds one call at a time. Their processes
are `workers.pair`'s, whom a fault belongs to is `running.candidate`'s, and what has a truth `truths`'. It
imports no torch: judging and running happen in the workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from gpu_bench import faults
from gpu_bench.limits import Limits
from gpu_bench.machine import JUDGE, Machine
from gpu_bench.running.candidate import Candidate
from gpu_bench.sanitizing import sanitizer
from gpu_bench.timing import headline
from gpu_bench.truths import AHEAD_BYTES, Truths
from gpu_bench.workers import room
from gpu_bench.workers.pair import Pair
from gpu_bench.workers.reserve import Lot
from warpsmith.contract import structures, words
from warpsmith.errors import BadInput
from warpsmith.sandbox import jail
from warpsmith.service import tracing
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    judging_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

_CANDIDATE = timing_pb2.ARM_KIND_CANDIDATE
_RUNS = 12
"""Guarded runs of one case at most: three, six more where something differs, three to find the step."""


class Session:
    """A task with its judge's and its candidate's process; spawned at first use. One call at a time."""

    _judge_entry = JUDGE
    _with_outbox = True
    _says_structure = True
    """Whether a program says in which structure its outputs stand; a solution returns them in it."""

    def __init__(
        self,
        task: task_pb2.Task,
        *,
        rung: jail.Rung | None = None,
        limits: Limits | None = None,
        machine: Machine | None = None,
        lot: Lot | None = None,
    ) -> None:
        self.task = task
        self._limits = limits or Limits()
        self._machine = machine
        self._tools = sanitizer.Ahead(task, rung)
        self._workers = Pair(
            task,
            self._judge_entry,
            prepare_seconds=self._limits.prepare_seconds,
            rung=rung,
            machine=machine,
            lot=lot,
            with_outbox=self._with_outbox,
        )
        self._truths = Truths(task, self._workers, self._limits.judge_seconds)
        self._candidate = Candidate(task.target, self._workers)
        self._left_seconds = 0.0
        """What the program may still take for the cases of a comparison."""
        self._lock = threading.Lock()

    @property
    def jail_rung(self) -> str:
        """How the workers are confined; empty before the first is made."""
        return self._workers.jail_rung

    def close(self) -> None:
        """Ends both workers, in the middle of a call too, and gives the shared memory back."""
        self.abandon()
        with self._lock:
            self._workers.drop_bench()
            self._workers.drop_judge()
            self._tools.close()
            self._workers.close()

    def abandon(self) -> None:
        """Ends what is under way, from another thread; the next call has new processes."""
        self._workers.hurry()

    # ---- comparing -----------------------------------------------------------------------------------------

    def compare(
        self,
        program: candidate_pb2.Program,
        artifact: artifact_pb2.Artifact,
        cases: Sequence[benchmark_service_pb2.ComparisonCase],
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        """Runs the program on each case and compares; stops at the first fault.

        A case that the reference itself refuses gives a comparison without outputs. Raises BadInput for a module
        that does not work as a reference, Infrastructure for what no program is to blame for.
        """
        response = benchmark_service_pb2.CompareOutputsResponse()
        with self._lock:
            prepared = self._workers.preparation()
            self._workers.share_outbox()
            fault = _other_structure(program, prepared) if self._says_structure else None
            fault = fault or self._load(program, artifact)
            defined = self._ahead(cases, prepared)
            self._left_seconds = self._patience(prepared) * max(3.0, self._limits.phase_share * len(cases))
            try:
                for case in cases:
                    if fault is not None:
                        break
                    if (unjudged := next(defined)) is not None:
                        response.comparisons.add(family=case.family, seed=case.seed, unjudged=unjudged)
                        continue
                    fault = self._compare_case(case, program, prepared, response)
            finally:
                self._workers.drop_damaged()
                if any(case.group for case in cases):
                    self._workers.let_go(prepared)
            if fault is not None:
                response.fault.CopyFrom(fault)
            response.jail_rung = self.jail_rung
        return response

    def _ahead(
        self, cases: Sequence[benchmark_service_pb2.ComparisonCase], prepared: judging_pb2.Preparation
    ) -> Iterator[str | None]:
        return self._truths.ahead(cases, prepared)

    def _compare_case(
        self,
        case: benchmark_service_pb2.ComparisonCase,
        program: candidate_pb2.Program,
        prepared: judging_pb2.Preparation,
        response: benchmark_service_pb2.CompareOutputsResponse,
    ) -> benchmark_service_pb2.ExecutionFault | None:
        once = judging_pb2.ExecuteRequest(family=case.family, seed=case.seed, regions=prepared.regions, once=case.once)
        request = self._boundary_of(case, program) if case.group else once
        if isinstance(request, verdict_pb2.Comparison):
            response.comparisons.append(request)
            return None
        request.learned.CopyFrom(self._truths.learned(case))
        begin = time.monotonic()
        method = "execute_group" if case.group else "execute"
        executed = self._candidate.run(method, request, min(self._patience(prepared), self._left_seconds))
        self._left_seconds -= time.monotonic() - begin
        if isinstance(executed, benchmark_service_pb2.ExecutionFault):
            return executed
        if self._left_seconds <= 0:
            return faults.fault(verdict_pb2.FAILURE_KIND_TIMEOUT, "every case ended in time, all together did not")
        if (fault := self._candidate.left()) is not None:
            return fault
        observed = executed.observed
        if (observed.family, observed.seed, observed.group) != (case.family, case.seed, case.group):
            self._workers.drop_bench()
            return faults.fault(verdict_pb2.FAILURE_KIND_CHEAT, "the candidate's process answered for another case")
        if observed.unjudged and case.group:
            response.comparisons.add(family=case.family, seed=case.seed, group=case.group, unjudged=observed.unjudged)
            return None
        asked = judging_pb2.JudgeRequest(observed=observed, learned=request.learned)
        judge, other = self._workers.judge(), self._workers.current_bench
        judged = room.call(judge, other, "judge", asked, judging_pb2.Judgement, self._limits.judge_seconds)
        response.comparisons.append(judged.comparison)
        if observed.broken_canaries or observed.mutated_sources or observed.unrepeatable_outputs:
            self._workers.note_damage()
        return None

    def _boundary_of(
        self, case: benchmark_service_pb2.ComparisonCase, program: candidate_pb2.Program
    ) -> judging_pb2.ExecuteGroupRequest | verdict_pb2.Comparison:
        """What to ask for so that a group can be judged alone, or why it cannot."""
        bare = candidate_pb2.Program(buffers=program.buffers, steps=program.steps, outputs=program.outputs)
        found = self._workers.judge().call(
            "boundary",
            judging_pb2.BoundaryRequest(program=bare, group=case.group),
            judging_pb2.Boundary,
            deadline_s=self._limits.judge_seconds,
        )
        if found.unjudged:
            return verdict_pb2.Comparison(family=case.family, seed=case.seed, group=case.group, unjudged=found.unjudged)
        self._workers.hold(found.total_bytes)
        asked = judging_pb2.ExecuteGroupRequest(family=case.family, seed=case.seed, group=case.group)
        asked.regions.extend(found.regions)
        return asked

    def _patience(self, prepared: judging_pb2.Preparation) -> float:
        return self._limits.patience(self.task.target, _RUNS * prepared.eager_seconds)

    def expect_final(self) -> None:
        """Has the process of a final measurement made while a finalist is verified.

        Not for outputs so large that memory may not do for both, and not where one waits already. Raises what `compare`
        raises.
        """
        with self._lock:
            if self._workers.has_spare:
                return
            if self._machine is not None and self._machine.known_ceilings(self.task.target) is None:
                return  # they would be measured beside other work
            if self._workers.preparation().total_bytes <= AHEAD_BYTES:
                self._workers.begin_spare()

    def settle(self) -> None:
        """Returns when what `expect_final` began is done: then the machine is quiet."""
        self._workers.settle()

    def inspecting(self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact) -> sanitizer.Inspecting:
        """What asks compute-sanitizer about the program's kernels, in processes of their own that begin to load."""
        return self._tools.begin(program, artifact)

    def make_room(self) -> None:
        """Has both workers give back memory of the GPU: others are about to need some."""
        if self.task.target == task_pb2.TARGET_CUDA:
            self._workers.give_back()

    # ---- measuring -----------------------------------------------------------------------------------------

    def measure(
        self, request: benchmark_service_pb2.MeasureArtifactRequest
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """Times the program; a final measurement gets a process that has seen no other program.

        Raises BadInput and Infrastructure as `compare` does.
        """
        with self._lock:
            if request.tier == timing_pb2.TIER_FINAL:
                self._workers.drop_bench()
                self._workers.use_spare()
            fault = self._load(request.program, request.artifact)
            if fault is None:
                with tracing.span("time kernel", tier=words.tier(request.tier)) as span:
                    answer = self._candidate.call(
                        "measure", request, benchmark_service_pb2.MeasureArtifactResponse, self._limits.measure_seconds
                    )
                    _tell(span, answer)
                if request.tier == timing_pb2.TIER_SCREENING:
                    self._tools.load()  # there may be a finalist soon
                if isinstance(answer, benchmark_service_pb2.MeasureArtifactResponse):
                    if answer.WhichOneof("outcome") == "fault":
                        self._workers.drop_bench()
                        self._candidate.require_own(answer.fault.detail, "measure")
                    else:
                        self._conclude(answer.timing)
                    return answer
                fault = answer
            return benchmark_service_pb2.MeasureArtifactResponse(fault=fault)

    def _conclude(self, timing: timing_pb2.Timing) -> None:
        """Adds what is known of reference and jail: a reference that computes nothing is never beaten."""
        headline.settle(timing, self._workers.preparation().flags)
        timing.environment.jail_rung = self.jail_rung

    def open(self) -> None:
        """Starts both workers and loads what timing the module needs. Raises BadInput for what is no reference."""
        with self._lock:
            self._workers.open()

    def run_reference(self, known: timing_pb2.ReferenceReport | None = None) -> timing_pb2.ReferenceReport:
        """Times the module by itself in the candidate's process, where its baselines stay for later measurements.

        `known`: what an earlier run found of the task on such a device.
        """
        with self._lock:
            worker = self._workers.open()
            response = worker.call(
                "reference",
                benchmark_service_pb2.RunReferenceRequest(task=self.task, known=known),
                benchmark_service_pb2.RunReferenceResponse,
                deadline_s=self._limits.measure_seconds,
            )
            self._workers.keep_compiled()
            response.report.raised.extend(self._workers.preparation().flags)
            response.report.environment.jail_rung = self.jail_rung
            return response.report

    def _load(
        self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact
    ) -> benchmark_service_pb2.ExecutionFault | None:
        seconds = max(30.0, self._limits.patience(self.task.target, 0.0))
        return self._candidate.load(program, artifact, seconds)


def _other_structure(
    program: candidate_pb2.Program, prepared: judging_pb2.Preparation
) -> benchmark_service_pb2.ExecutionFault | None:
    """Why the structure in which a program's outputs stand is not the module's."""
    try:
        given = structures.require(program.output_tree, program.output_leaves, len(program.outputs))
        wanted = structures.read(prepared.output_tree)
    except BadInput as error:
        return faults.fault(verdict_pb2.FAILURE_KIND_POLICY_REJECT, str(error))
    if given == wanted and [*program.output_leaves] == [*prepared.output_leaves]:
        return None
    detail = (
        "the program's outputs have another structure than the module's, or other values in it; where it names none, "
        "that is one tensor, or a tuple"
    )
    return faults.fault(verdict_pb2.FAILURE_KIND_WRONG_SHAPE, detail)


def _tell(span: object, answer: object) -> None:
    """What a trace says of a measurement."""
    if not isinstance(answer, benchmark_service_pb2.MeasureArtifactResponse):
        tracing.note(span, fault=type(answer).__name__)
    elif answer.HasField("fault"):
        tracing.note(span, fault=words.failure_kind(answer.fault.kind))
    else:
        median = next((arm.median_ns for arm in answer.timing.arms if arm.kind == _CANDIDATE), 0.0)
        tracing.note(span, median_ns=median, device_seconds=answer.timing.device_seconds)
