"""The two workers of a task, and who is to blame when one of them ends.

The one idea: what happens in the candidate's process while its program is loaded or runs is the candidate's fault
and an answer; everything else is ours and an error. The first fault of a candidate replaces its process, so that the
next one finds a clean one. It imports no torch: judging and running happen in the workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from google.protobuf.message import Message

from gpu_bench import faults
from gpu_bench.limits import Limits
from gpu_bench.machine import BENCH, JUDGE, Machine
from gpu_bench.pytorch.compiler_cache import CompilerCache
from gpu_bench.sanitizing import sanitizer
from gpu_bench.timing import headline
from gpu_bench.workers import room, shared_file
from gpu_bench.workers.outbox import Passage
from gpu_bench.workers.parcels import Parcels
from gpu_bench.workers.reserve import Lot, started
from gpu_bench.workers.spare import Spare
from warpsmith.errors import BadInput, WorkerCrashed, WorkerFault, WorkerTimeout
from warpsmith.sandbox import jail
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    judging_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

Reply = TypeVar(
    "Reply",
    judging_pb2.Execution,
    judging_pb2.OpenedSolution,
    benchmark_service_pb2.MeasureArtifactResponse,
)

_AHEAD_BYTES = 512 << 20
"""Outputs up to which two truths are held at once."""
_RUNS = 6
"""Guarded runs of one case at most."""


class Session:
    """A task's judge and candidate workers; spawned at first use. One call at a time."""

    _judge_entry = JUDGE

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
        self._rung = rung
        self._machine = machine
        self._lot = lot
        self._tools = sanitizer.Ahead(task, rung)
        self._descriptor = lot.descriptor if lot else shared_file.made()
        self._judge: Worker | None = None
        self._bench: Worker | None = None
        self._prepared: judging_pb2.Preparation | None = None
        self._learned: dict[tuple[int, int], judging_pb2.Learned] = {}
        """By family and seed, what the judge knew of the inputs' values when it drew the case; of (0, 0), what now."""
        self._known: dict[int, str | None] = {}
        """Families that had a truth (None), or have none: why, where the reason is the machine's."""
        self._passage = lot.passage if lot else Passage()
        self._parcels = Parcels(self._passage, self._limits.prepare_seconds)
        self._cache: CompilerCache | None = lot.cache if lot else None
        self._spare: Spare | None = None
        self._saw_candidate = False
        self._company: frozenset[int] = frozenset()
        """Processes of the candidate's jail before its program ran."""
        self._saw_damage = False
        self._left_seconds = 0.0
        """What the program may still take for the cases of a comparison."""
        self._lock = threading.Lock()

    @property
    def jail_rung(self) -> str:
        """How the workers are confined; empty before the first is made."""
        worker = self._bench or self._judge
        return worker.rung.value if worker else ""

    def close(self) -> None:
        """Ends both workers, in the middle of a call too, and gives the shared memory back."""
        with ThreadPoolExecutor(2) as closing:  # giving gigabytes back takes a process half a second
            for worker in (self._judge, self._bench):
                if worker is not None:
                    closing.submit(worker.close)
        with self._lock:
            self._drop_bench()
            self._drop_judge()
            self._tools.close()
            if self._spare is not None:
                self._spare.close()
                self._spare = None
            self._parcels.give_up()
            if self._lot is not None:
                self._lot.close()
            else:
                self._passage.close()
            if self._lot is None and self._descriptor >= 0:
                os.close(self._descriptor)
            self._lot, self._descriptor = None, -1
            if self._cache is not None:
                self._cache.close()

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
            prepared = self._preparation()
            self._share_outbox()
            fault = self._load(program, artifact)
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
                if any(case.group for case in cases):
                    self._begin_outbox(prepared)  # which groups do without
                if self._saw_damage:
                    self._drop_bench()  # who writes where it may not may have written anywhere
            if fault is not None:
                response.fault.CopyFrom(fault)
            response.jail_rung = self.jail_rung
        return response

    def _ahead(
        self, cases: Sequence[benchmark_service_pb2.ComparisonCase], prepared: judging_pb2.Preparation
    ) -> Iterator[str | None]:
        """As `_without_truth`, of each case. On a GPU the next truth is made while a candidate runs, but for the first
        of a family: where the reference ends the judge's process, the candidate's case would go with it."""
        if self.task.target != task_pb2.TARGET_CUDA or prepared.total_bytes > _AHEAD_BYTES:
            yield from map(self._without_truth, cases)
            return
        with ThreadPoolExecutor(1) as judging:
            coming: Future[str | None] | None = None
            for position, case in enumerate(cases):
                unjudged = coming.result() if coming else self._without_truth(case)
                following = [case for case in cases[position + 1 : position + 2] if case.family in self._known]
                coming = judging.submit(self._without_truth, following[0]) if following else None
                yield unjudged

    def _compare_case(
        self,
        case: benchmark_service_pb2.ComparisonCase,
        program: candidate_pb2.Program,
        prepared: judging_pb2.Preparation,
        response: benchmark_service_pb2.CompareOutputsResponse,
    ) -> benchmark_service_pb2.ExecutionFault | None:
        request = self._execution_of(case, prepared) if not case.group else self._boundary_of(case, program)
        if isinstance(request, verdict_pb2.Comparison):
            response.comparisons.append(request)
            return None
        request.learned.CopyFrom(self._learned.get((case.family, case.seed), self._learned[0, 0]))
        begin = time.monotonic()
        executed = self._run_candidate("execute", request, min(self._patience(prepared), self._left_seconds))
        self._left_seconds -= time.monotonic() - begin
        if isinstance(executed, benchmark_service_pb2.ExecutionFault):
            return executed
        if self._left_seconds <= 0:
            return faults.fault(verdict_pb2.FAILURE_KIND_TIMEOUT, "every case ended in time, all together did not")
        # Only programs for a processor have code on the host; beside others, PyTorch's compilers may come and go.
        worker = self._bench
        if worker is None or not worker.alive:
            return self._ended()
        if self.task.target == task_pb2.TARGET_CPU and worker.processes - self._company:
            self._drop_bench()
            return faults.fault(verdict_pb2.FAILURE_KIND_CHEAT, "the program started a process that lives on")
        observed = executed.observed
        if (observed.family, observed.seed, observed.group) != (case.family, case.seed, case.group):
            self._drop_bench()
            return faults.fault(verdict_pb2.FAILURE_KIND_CHEAT, "the candidate's process answered for another case")
        if observed.unjudged and case.group:
            response.comparisons.add(family=case.family, seed=case.seed, group=case.group, unjudged=observed.unjudged)
            return None
        observed.unjudged = ""  # of whole cases, the judge says it
        asked, seconds = judging_pb2.JudgeRequest(observed=observed), self._limits.judge_seconds
        judged = room.call(self._judge_worker(), self._bench, "judge", asked, judging_pb2.Judgement, seconds)
        response.comparisons.append(judged.comparison)
        self._saw_damage |= bool(observed.broken_canaries or observed.mutated_sources or observed.unrepeatable_outputs)
        return None

    def _execution_of(
        self, case: benchmark_service_pb2.ComparisonCase, prepared: judging_pb2.Preparation
    ) -> judging_pb2.ExecuteRequest:
        return judging_pb2.ExecuteRequest(family=case.family, seed=case.seed, regions=prepared.regions, once=case.once)

    def _boundary_of(
        self, case: benchmark_service_pb2.ComparisonCase, program: candidate_pb2.Program
    ) -> judging_pb2.ExecuteRequest | verdict_pb2.Comparison:
        """What to ask for so that a group can be judged alone, or why it cannot."""
        bare = candidate_pb2.Program(buffers=program.buffers, steps=program.steps, outputs=program.outputs)
        found = self._judge_worker().call(
            "boundary",
            judging_pb2.BoundaryRequest(program=bare, group=case.group),
            judging_pb2.Boundary,
            deadline_s=self._limits.judge_seconds,
        )
        if found.unjudged:
            return verdict_pb2.Comparison(family=case.family, seed=case.seed, group=case.group, unjudged=found.unjudged)
        self._parcels.give_up()
        if os.fstat(self._descriptor).st_size < found.total_bytes:
            shared_file.grow(self._descriptor, found.total_bytes)
        return judging_pb2.ExecuteRequest(family=case.family, seed=case.seed, regions=found.regions, group=case.group)

    def _without_truth(self, case: benchmark_service_pb2.ComparisonCase) -> str | None:
        """None where a case has a truth; else why it is not judged on, empty where the reference is not defined."""
        if (known := self._known.get(case.family)) is not None:
            return known
        if case.group:
            return None  # its truth is that of what it is given
        request = judging_pb2.TruthRequest(family=case.family, seed=case.seed, once=case.once)
        try:
            worker = self._judge_worker()
            truth = room.call(worker, self._bench, "truth", request, judging_pb2.Truth, self._limits.judge_seconds)
        except WorkerCrashed as crash:
            self._drop_judge()
            if case.family == verdict_pb2.VALUE_FAMILY_TASK or crash.signal_number == signal.SIGKILL:
                raise  # the latter: killed for want of memory
            # An assertion on the device ends the process: the reference refuses these values the hard way.
            self._known[case.family] = ""
            return ""
        self._learned[case.family, case.seed] = self._learned[0, 0] = truth.learned
        self._known[case.family] = truth.unjudged if truth.undefined or truth.unjudged else None
        return self._known[case.family]

    def _patience(self, prepared: judging_pb2.Preparation) -> float:
        return self._limits.patience(self.task.target, _RUNS * prepared.eager_seconds)

    def expect_final(self) -> None:
        """Has the process of a final measurement made while a finalist is verified.

        Not on a GPU, where compiling means timing, and not for outputs so large that memory may not do for both.
        Raises what `compare` raises.
        """
        with self._lock:
            if self.task.target != task_pb2.TARGET_CPU or self._spare is not None:
                return
            if self._machine is not None and self._machine.known_ceilings(self.task.target) is None:
                return  # they would be measured beside other work
            if self._preparation().total_bytes > _AHEAD_BYTES:
                return
            self._spare = Spare(self._start_spare, self._call_on_task, self._cache)

    def settle(self) -> None:
        """Returns when what `expect_final` began is done: then the machine is quiet."""
        if self._spare is not None:
            self._spare.worker()

    def _start_spare(self, cache: CompilerCache) -> Worker:
        return started(BENCH, self.task.target, self._rung, self._descriptor, cache, self._passage)

    def inspecting(self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact) -> sanitizer.Inspecting:
        """What asks compute-sanitizer about the program's kernels, in processes of their own that begin to load."""
        return self._tools.begin(program, artifact)

    def make_room(self) -> None:
        """Has both workers give back memory of the GPU: others are about to need some."""
        if self.task.target == task_pb2.TARGET_CUDA:
            room.give_back(self._judge, self._bench)

    # ---- measuring -----------------------------------------------------------------------------------------

    def measure(
        self, request: benchmark_service_pb2.MeasureArtifactRequest
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """Times the program; a final measurement gets a process that has seen no other program.

        Raises BadInput and Infrastructure as `compare` does.
        """
        with self._lock:
            if request.tier == timing_pb2.TIER_FINAL:
                self._drop_bench()
                self._use_spare()
            fault = self._load(request.program, request.artifact)
            if fault is None:
                answer = self._call_candidate(
                    "measure", request, benchmark_service_pb2.MeasureArtifactResponse, self._limits.measure_seconds
                )
                if request.tier == timing_pb2.TIER_SCREENING:
                    self._tools.load()  # there may be a finalist soon
                if isinstance(answer, benchmark_service_pb2.MeasureArtifactResponse):
                    if answer.WhichOneof("outcome") == "fault":
                        self._drop_bench()
                    else:
                        self._conclude(answer.timing)
                    return answer
                fault = answer
            return benchmark_service_pb2.MeasureArtifactResponse(fault=fault)

    def _conclude(self, timing: timing_pb2.Timing) -> None:
        """Adds what is known of reference and jail: a reference that computes nothing is never beaten."""
        headline.settle(timing, self._preparation().flags)
        timing.environment.jail_rung = self.jail_rung

    def _use_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is None:
            return
        self._bench = spare.worker()
        if self._cache is not None:
            self._cache.close()
        self._cache, self._saw_candidate = spare.cache, False

    def open(self) -> None:
        """Starts both workers and loads what timing the module needs. Raises BadInput for what is no reference."""
        with self._lock:
            self._open()

    def _open(self) -> Worker:
        """The candidate's process, ready to time the module; nothing is under way any more when this ends."""
        with ThreadPoolExecutor(2) as beside:
            judge = beside.submit(self._preparation)
            compiled = None
            if self._cache is None and self._machine is not None:
                compiled = beside.submit(self._machine.compiled, self.task.target)
            try:
                worker = self._bench_worker()
                self._call_on_task(worker, "warm_up")
                if compiled is not None and self._cache is not None:
                    self._cache.begin_with(compiled.result())
            finally:
                judge.result()  # refuses a module that is no reference
            return worker

    def run_reference(self) -> timing_pb2.ReferenceReport:
        """Times the module by itself in the candidate's process, where its baselines stay for later measurements."""
        with self._lock:
            worker = self._open()
            response = worker.call(
                "reference",
                benchmark_service_pb2.RunReferenceRequest(task=self.task),
                benchmark_service_pb2.RunReferenceResponse,
                deadline_s=self._limits.measure_seconds,
            )
            if self._cache is not None and not self._saw_candidate:
                self._cache.keep()
            response.report.flags.extend(self._preparation().flags)
            response.report.environment.jail_rung = self.jail_rung
            return response.report

    # ---- the candidate's process ---------------------------------------------------------------------------

    def _load(
        self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact
    ) -> benchmark_service_pb2.ExecutionFault | None:
        worker, self._saw_candidate = self._bench_worker(), True
        learned = self._preparation().learned
        request = judging_pb2.LoadRequest(program=program, artifact=artifact, learned=learned)
        loaded = self._run_candidate("load", request, max(30.0, self._limits.patience(self.task.target, 0.0)))
        self._company = worker.processes  # none of the program's: loading it runs nothing of it
        return loaded if isinstance(loaded, benchmark_service_pb2.ExecutionFault) else None

    def _run_candidate(
        self, method: str, request: judging_pb2.LoadRequest | judging_pb2.ExecuteRequest, deadline_s: float
    ) -> judging_pb2.Execution | benchmark_service_pb2.ExecutionFault:
        answer = self._call_candidate(method, request, judging_pb2.Execution, deadline_s)
        if isinstance(answer, judging_pb2.Execution) and answer.fault:
            self._drop_bench()
            return faults.fault(answer.fault, answer.detail)
        return answer

    def _call_candidate(
        self, method: str, request: Message, response: type[Reply], deadline_s: float
    ) -> Reply | benchmark_service_pb2.ExecutionFault:
        """Calls the candidate's process; its end is the candidate's fault, because the program was in it."""
        worker = self._bench
        if worker is None or not worker.alive:
            return self._ended()
        try:
            return room.call(worker, self._judge, method, request, response, deadline_s)
        except WorkerTimeout:
            self._drop_bench()
            return faults.fault(verdict_pb2.FAILURE_KIND_TIMEOUT, f"no end within {deadline_s:.3g} s")
        except WorkerCrashed as crash:
            self._drop_bench()
            return faults.crash(crash)
        except WorkerFault:
            self._drop_bench()
            raise

    def _ended(self) -> benchmark_service_pb2.ExecutionFault:
        """What is said of a program whose process ends while nobody asks it for anything, as a thread of its may do."""
        self._drop_bench()
        return faults.fault(verdict_pb2.FAILURE_KIND_CRASH, "the program's process ended between two calls")

    # ---- workers -------------------------------------------------------------------------------------------

    def _preparation(self) -> judging_pb2.Preparation:
        self._judge_worker()
        assert self._prepared is not None
        return self._prepared

    def _judge_worker(self) -> Worker:
        if self._judge is None or not self._judge.alive:
            self._drop_judge()
            self._judge = self._spawn(self._judge_entry)
            request, seconds = judging_pb2.PrepareRequest(task=self.task), self._limits.prepare_seconds
            with self._on_failure(self._drop_judge):
                self._prepared = self._judge.call("prepare", request, judging_pb2.Preparation, deadline_s=seconds)
            self._learned = {(0, 0): self._prepared.learned}  # goes with a judge: the next one is asked again
            self._known = {family: why for family, why in self._known.items() if why is not None}
            shared_file.grow(self._descriptor, self._prepared.total_bytes)
            self._begin_outbox(self._prepared)
            if self._parcels.is_there:
                self._share_outbox()
        return self._judge

    def _begin_outbox(self, prepared: judging_pb2.Preparation) -> None:
        if self.task.target == task_pb2.TARGET_CUDA:
            self._parcels.begin(prepared.total_bytes)

    def _share_outbox(self) -> None:
        self._parcels.share(lambda: (self._judge_worker(), self._bench_worker()))

    def _bench_worker(self) -> Worker:
        if self._bench is None or not self._bench.alive:
            self._drop_bench()
            self._bench = self._spawn(BENCH)
            with self._on_failure(self._drop_bench):
                self._call_on_task(self._bench, "open")
            self._saw_damage = False
        return self._bench

    def _call_on_task(self, worker: Worker, method: str) -> None:
        ceilings = self._machine.known_ceilings(self.task.target) if self._machine is not None else None
        request = judging_pb2.PrepareRequest(task=self.task, ceilings=ceilings)
        worker.call(method, request, judging_pb2.Preparation, deadline_s=self._limits.prepare_seconds)

    @contextlib.contextmanager
    def _on_failure(self, drop: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except (WorkerFault, BadInput):
            drop()
            raise

    def _spawn(self, entry: str) -> Worker:
        if entry == BENCH:
            self._cache = self._cache or CompilerCache()
            self._cache.renew()
            self._saw_candidate = False
        waiting = self._lot.take(entry) if self._lot is not None else None
        return waiting or started(entry, self.task.target, self._rung, self._descriptor, self._cache, self._passage)

    def _drop_bench(self) -> None:
        if self._bench is not None:
            self._forget(self._bench)
            self._bench = None

    def _drop_judge(self) -> None:
        if self._judge is not None:
            self._forget(self._judge)
            self._judge = None

    def _forget(self, worker: Worker) -> None:
        worker.close()
        self._parcels.forget(worker)
