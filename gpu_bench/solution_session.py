"""The workers of a solution: somebody else's `ModelNew` against the reference that it claims to equal.

The one idea: three processes that cannot reach each other. The judge's holds reference, truth and the values' origin;
the baselines' holds the reference to be timed; the solution's holds the solution and gets values only. The clock is
here, outside all of them. It imports no torch before something is timed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from google.protobuf.message import Message

from gpu_bench.compiler_cache import CompilerCache
from gpu_bench.machine import worker_environment, worker_policy
from gpu_bench.session import Reply, Session
from warpsmith.errors import BadInput, WorkerRaised
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    judging_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)
from warpsmith.worker import Worker

SOLUTION = "gpu_bench.solution_worker:METHODS"
BASELINES = "gpu_bench.baseline_worker:METHODS"
CANDIDATE, EAGER, AA_COPY = "candidate", "eager", "aa_copy"  # as in `baselines`, which needs torch
_FIRST_SEED = 42
"""Seed of the first buffer set, as where programs are timed."""
_PATH = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/cuda/bin", "/usr/local/bin", "/usr/bin", "/bin"])
"""Where a solution that compiles its own extension finds ninja, nvcc and g++."""


class SolutionFault(Exception):
    """The solution failed while it was timed; `fault` says how."""

    def __init__(self, fault: benchmark_service_pb2.ExecutionFault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


class SolutionSession(Session):
    """A task's judge, and the processes of one solution and of the baselines. One call at a time."""

    _has_outbox = False
    _digest = ""
    """Of the solution in the process."""
    _fixed_parameters = False
    """Whether the solution lacks the reference's parameters by name, so that they stay as the constructor drew them."""
    _baselines: Worker | None = None
    _twin: Worker | None = None
    """The baselines' process once more, for the A/A copy of a final."""
    _contest: judging_pb2.Contest | None = None
    _tier: timing_pb2.Tier.ValueType = timing_pb2.TIER_UNSPECIFIED
    """Of the contest."""

    def close(self) -> None:
        """As `Session.close`."""
        with self._lock:
            self._close_baselines()
        super().close()

    def expect_final(self) -> None:
        """Nothing: baselines have a process of their own."""

    def measure(
        self, request: benchmark_service_pb2.MeasureArtifactRequest
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """Times the solution against the baselines, each called from here in a process of its own."""
        from gpu_bench import solution_timing  # torch, which nothing else here needs

        with self._lock:
            if request.tier == timing_pb2.TIER_FINAL:
                self._drop_bench()
            fault = self._load(request.program, request.artifact)
            if fault is None:
                contest = self._open_contest(request.tier)
                self._keep_sets(contest.set_count)
                try:
                    timing = solution_timing.contend(
                        contest, self.task.precision, request.tier, self._call_arm, self._cpu_seconds
                    )
                except SolutionFault as failed:
                    self._drop_bench()
                    fault = failed.fault
                else:
                    timing.environment.jail_rung = self.jail_rung
                    timing.environment.toolkit = request.artifact.toolchain
                    return benchmark_service_pb2.MeasureArtifactResponse(timing=timing)
            return benchmark_service_pb2.MeasureArtifactResponse(fault=fault)

    # ---- the solution's process ----------------------------------------------------------------------------

    def _load(
        self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact
    ) -> benchmark_service_pb2.ExecutionFault | None:
        prepared = self._preparation()
        if not prepared.signature.tree:
            raise BadInput(
                f"{self.task.entry_path}: get_inputs or get_init_inputs gives what cannot be written down, so that "
                "no solution can be made in a process without the reference"
            )
        if self._bench is None or not self._bench.alive or self._digest != program.digest:
            self._drop_bench()
            self._bench = Worker(
                SOLUTION,
                worker_policy(self.task.target),
                rung=self._rung,
                env=worker_environment(self._descriptor) | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PATH": _PATH},
                shared_fds=(self._descriptor,),
            )
            self._digest, self._saw_damage, self._fixed_parameters = program.digest, False, False
            request = judging_pb2.OpenSolutionRequest(
                task=self._without_sources(),
                artifact=artifact,
                signature=prepared.signature,
                sources=self._draw(verdict_pb2.VALUE_FAMILY_TASK, _FIRST_SEED, prepared),
            )
            opened = self._call_candidate("open", request, judging_pb2.OpenedSolution, self._limits.open_seconds)
            if isinstance(opened, benchmark_service_pb2.ExecutionFault):
                return opened
            if opened.fault:
                self._drop_bench()
                return benchmark_service_pb2.ExecutionFault(kind=opened.fault, detail=opened.detail)
            if not opened.has_members:
                self._fixed_parameters = True
                self._draw(verdict_pb2.VALUE_FAMILY_TASK, _FIRST_SEED, prepared)
        self._company = self._bench.processes
        return None

    def _bench_worker(self) -> Worker:
        if self._bench is None:
            raise BadInput("no solution is loaded")
        return self._bench

    def _execution_of(
        self, case: benchmark_service_pb2.ComparisonCase, prepared: judging_pb2.Preparation
    ) -> judging_pb2.ExecuteRequest:
        request = super()._execution_of(case, prepared)
        request.sources.extend(self._draw(case.family, case.seed, prepared))
        return request

    def _shared_bytes(self, prepared: judging_pb2.Preparation) -> int:
        return prepared.total_bytes_with_sources

    def _draw(
        self, family: verdict_pb2.ValueFamily.ValueType, seed: int, prepared: judging_pb2.Preparation
    ) -> Sequence[judging_pb2.Region]:
        """Lets the judge put the sources of a case into the shared memory; says where they lie."""
        request = judging_pb2.DrawRequest(family=family, seed=seed, fixed_parameters=self._fixed_parameters)
        self._judge_worker().call("draw", request, judging_pb2.Drawn, deadline_s=self._limits.judge_seconds)
        return prepared.sources

    def _without_sources(self) -> task_pb2.Task:
        bare = task_pb2.Task(target=self.task.target, precision=self.task.precision)
        bare.inputs.extend(self.task.inputs)
        return bare

    def _call_candidate(
        self, method: str, request: Message, response: type[Reply], deadline_s: float
    ) -> Reply | benchmark_service_pb2.ExecutionFault:
        """As `Session._call_candidate`; in this process every exception is the solution's doing."""
        try:
            return super()._call_candidate(method, request, response, deadline_s)
        except (WorkerRaised, BadInput) as error:
            self._drop_bench()
            return benchmark_service_pb2.ExecutionFault(kind=verdict_pb2.FAILURE_KIND_CRASH, detail=str(error)[:300])

    # ---- the contest ---------------------------------------------------------------------------------------

    def _open_contest(self, tier: timing_pb2.Tier.ValueType) -> judging_pb2.Contest:
        """The baselines' process with its arms; made once for a tier and kept."""
        if self._contest is None or self._tier != tier or self._baselines is None or not self._baselines.alive:
            self._close_baselines()
            self._tier = tier
            if self._cache is not None:
                self._cache.close()
            self._cache = CompilerCache(self._machine.compiled(self.task.target)) if self._machine else CompilerCache()
            self._cache.renew()
            self._baselines = Worker(
                BASELINES,
                replace(worker_policy(self.task.target), writable=(self._cache.directory,)),
                rung=self._rung,
                env=worker_environment(-1) | self._cache.environment() | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
            )
            ceilings = self._machine.known_ceilings(self.task.target) if self._machine else None
            self._contest = self._baselines.call(
                "open",
                judging_pb2.PrepareRequest(task=self.task, ceilings=ceilings, tier=tier),
                judging_pb2.Contest,
                deadline_s=self._limits.prepare_seconds + self._limits.measure_seconds,
            )
            if tier == timing_pb2.TIER_FINAL:
                self._twin = Worker(
                    BASELINES,
                    worker_policy(self.task.target),
                    rung=self._rung,
                    env=worker_environment(-1),
                )
                request = judging_pb2.PrepareRequest(
                    task=self.task, ceilings=self._contest.ceilings, tier=timing_pb2.TIER_SCREENING
                )
                self._twin.call("open", request, judging_pb2.Contest, deadline_s=self._limits.prepare_seconds)
        return self._contest

    def _close_baselines(self) -> None:
        for worker in filter(None, (self._baselines, self._twin)):
            worker.close()
        self._baselines = self._twin = self._contest = None

    def _keep_sets(self, count: int) -> None:
        prepared = self._preparation()
        for index in range(count):
            sources = self._draw(verdict_pb2.VALUE_FAMILY_TASK, _FIRST_SEED + index, prepared)
            request = judging_pb2.KeepRequest(index=index, sources=sources)
            self._bench_worker().call("keep", request, judging_pb2.Drawn, deadline_s=self._limits.judge_seconds)

    def _call_arm(self, request: judging_pb2.CallsRequest) -> judging_pb2.Calls:
        """Lets an arm make its calls. Raises SolutionFault, or Infrastructure for a baseline."""
        deadline = max(60.0, self._limits.patience(self.task.target, 0.0))
        if request.arm == AA_COPY:
            assert self._twin is not None
            again = judging_pb2.CallsRequest(arm=EAGER, first=request.first, count=request.count)
            return self._twin.call("calls", again, judging_pb2.Calls, deadline_s=deadline)
        if request.arm != CANDIDATE:
            assert self._baselines is not None
            return self._baselines.call("calls", request, judging_pb2.Calls, deadline_s=deadline)
        made = self._call_candidate("calls", request, judging_pb2.Calls, deadline)
        if isinstance(made, benchmark_service_pb2.ExecutionFault):
            raise SolutionFault(made)
        if made.fault:
            raise SolutionFault(benchmark_service_pb2.ExecutionFault(kind=made.fault, detail=made.detail))
        return made

    def _cpu_seconds(self) -> float:
        """Processor time of every process of the solution's jail so far, seen from outside."""
        return sum(map(_seconds_of, self._bench_worker().processes))


def _seconds_of(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has just ended
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
