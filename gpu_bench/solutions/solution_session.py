"""The workers of a solution: an untrusted `ModelNew` against the reference that it claims to equal.

The one idea: three processes that cannot reach each other, of which one at a time runs. The judge's holds reference,
truth and the values' origin; the baselines' holds the reference to be timed; the solution's holds the solution and gets
values only. How they are made is `called_processes`', and how they are called `contest`'s; the clock is here, outside
all of them. It imports no torch before something is timed.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_bench import faults
from gpu_bench.limits import Limits
from gpu_bench.machine import Machine
from gpu_bench.pytorch.compiler_cache import CompilerCache
from gpu_bench.session import Session
from gpu_bench.solutions.called_solution import SolutionFault
from gpu_bench.solutions.caller import Answer, Called
from gpu_bench.solutions.contest import VARIED, Contest, PlacedValues
from gpu_bench.timing.arms import AA_COPY, CANDIDATE, EAGER
from gpu_bench.workers import shared_file
from gpu_bench.workers.called_processes import CalledProcesses
from gpu_bench.workers.pair import on_failure
from gpu_bench.workers.reserve import Lot
from warpsmith.contract import words
from warpsmith.errors import BadInput, WorkerRaised
from warpsmith.sandbox import jail
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    judging_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

WITNESS = "gpu_bench.solutions.witness:METHODS"
SOLUTION = "gpu_bench.solutions.solution_worker:METHODS"
BASELINES = "gpu_bench.pytorch.baseline_worker:METHODS"
HANDSHAKE_NAME = "handshake"  # as in `solution_timing`, which needs torch
HANDSHAKE = 255
"""Number of the arm that does nothing (`solution_worker`, which needs torch)."""
OTHERS = "others"
_TASK = verdict_pb2.VALUE_FAMILY_TASK
_PATH = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/cuda/bin", "/usr/local/bin", "/usr/bin", "/bin"])
"""Where a solution that compiles its own extension finds ninja, nvcc and g++."""
_MOST_SWEPT_BYTES = 256 << 20
"""Shared caches of large servers are larger than a job's share."""


@dataclass(frozen=True)
class Arms:
    """What a solution is timed against."""

    tier: timing_pb2.Tier.ValueType
    yardstick: judging_pb2.Yardstick
    offered: Sequence[timing_pb2.Arm]
    """Baselines but eager, by their numbers; those that could not be prepared with the reason."""
    processes: Mapping[str, Called]
    """By name: eager's, its copy's, and that of all others."""

    def process_of(self, name: str) -> tuple[Called, int]:
        """The process of an arm, and the arm's number in it."""
        if name == HANDSHAKE_NAME:
            return self.processes[EAGER], HANDSHAKE
        if name in self.processes:
            return self.processes[name], 0
        return self.processes[OTHERS], [words.arm(arm.kind) for arm in self.offered].index(name)

    @property
    def alive(self) -> bool:
        """Whether all can be called."""
        return all(process.alive for process in self.processes.values())

    def close(self) -> None:
        """Ends them."""
        for process in self.processes.values():
            process.close()


class SolutionSession(Session):
    """A task's judge, and the processes of one solution and of the baselines. One call at a time."""

    _judge_entry = WITNESS
    _says_structure = False
    _with_outbox = False  # all is shared from the beginning, once it is known what lies there

    def __init__(
        self,
        task: task_pb2.Task,
        *,
        rung: jail.Rung | None = None,
        limits: Limits | None = None,
        machine: Machine | None = None,
        lot: Lot | None = None,
    ) -> None:
        super().__init__(task, rung=rung, limits=limits, machine=machine, lot=lot)
        self._processes = CalledProcesses(
            task.target, self._workers, rung=rung, prepare_seconds=self._limits.prepare_seconds
        )
        self._digest = ""
        """Of the solution in the process."""
        self._artifact = artifact_pb2.Artifact()
        """The solution."""
        self._contest: Contest | None = None
        self._arms: Arms | None = None
        self._cache: CompilerCache | None = None
        """What the baselines' process compiles."""

    def close(self) -> None:
        """As `Session.close`."""
        with self._lock:
            self._close_arms()
        super().close()
        with self._lock:
            if self._cache is not None:
                self._cache.close()
        self._processes.close()

    def expect_final(self) -> None:
        """Nothing: baselines have a process of their own."""

    # ---- comparing -----------------------------------------------------------------------------------------

    def _ahead(
        self, cases: Sequence[benchmark_service_pb2.ComparisonCase], prepared: judging_pb2.Preparation
    ) -> Iterator[str | None]:
        """As `Session._ahead`; the judge does one thing at a time, for it places the values of calls."""
        del prepared
        return map(self._truths.of, cases)

    def _compare_case(
        self,
        case: benchmark_service_pb2.ComparisonCase,
        program: candidate_pb2.Program,
        prepared: judging_pb2.Preparation,
        response: benchmark_service_pb2.CompareOutputsResponse,
    ) -> benchmark_service_pb2.ExecutionFault | None:
        del prepared
        there = self._workers.current_bench
        if there is None or not there.alive:
            return self._candidate.ended()
        # A judge that values of another case have ended is a new one, which knows no solution yet.
        if self._opened().solution is not there and (fault := self._load(program, self._artifact)) is not None:
            return fault
        try:
            response.comparisons.append(self._opened().judged(case.family, case.seed))
        except SolutionFault as failed:
            self._workers.drop_bench()
            return failed.fault
        return None

    # ---- measuring -----------------------------------------------------------------------------------------

    def measure(
        self, request: benchmark_service_pb2.MeasureArtifactRequest
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """Times the solution against the baselines, each called from here in a process of its own."""
        from gpu_bench.solutions import solution_timing

        with self._lock:
            if request.tier == timing_pb2.TIER_FINAL:
                self._workers.drop_bench()
            fault = self._load(request.program, request.artifact)
            if fault is not None:
                return benchmark_service_pb2.MeasureArtifactResponse(fault=fault)
            arms, contest = self._opened_arms(request.tier), self._opened()
            contest.values.place_members(_TASK, 0)
            for family in (verdict_pb2.VALUE_FAMILY_RARE, *VARIED):  # as trained, or else as the reference takes them
                if self._truths.may_have(family):
                    contest.values.place_timed_members(family)
                    break
            swept = min(max(2 * arms.yardstick.ceilings.device.cache_bytes, 8 << 20), _MOST_SWEPT_BYTES)

            def call(name: str) -> Answer:
                if name == CANDIDATE:
                    return contest.time_solution(name, swept)
                return contest.time_arm(name, *arms.process_of(name), swept)

            try:
                timing = solution_timing.contend(arms.yardstick, arms.offered, self.task.precision, request.tier, call)
            except SolutionFault as failed:
                self._workers.drop_bench()
                return benchmark_service_pb2.MeasureArtifactResponse(fault=failed.fault)
            finally:
                if contest.judge.alive:
                    contest.values.place_members(_TASK, 0)
            self._conclude(timing)
            timing.environment.toolkit = request.artifact.toolchain
            return benchmark_service_pb2.MeasureArtifactResponse(timing=timing)

    def _opened_arms(self, tier: timing_pb2.Tier.ValueType) -> Arms:
        """The baselines' processes; made once for a tier and kept."""
        if self._arms is not None and (self._arms.tier != tier or not self._arms.alive):
            self._close_arms()
        if self._arms is None:
            contest, is_final = self._opened(), tier == timing_pb2.TIER_FINAL
            ceilings = self._machine.known_ceilings(self.task.target) if self._machine else None
            asked = judging_pb2.YardstickRequest(ceilings=ceilings)
            yardstick = contest.values.ask("yardstick", asked, judging_pb2.Yardstick)
            processes = {name: self._eager() for name in ((EAGER, AA_COPY) if is_final else (EAGER,))}
            offered: Sequence[timing_pb2.Arm] = ()
            if is_final:
                processes[OTHERS], offered = self._others()
            self._arms = Arms(tier, yardstick, offered, processes)
        return self._arms

    def _eager(self) -> Called:
        """A process like a solution's, with the reference in it."""
        process = self._processes.start(SOLUTION, self._shared_bytes)
        with on_failure(process.close):
            seconds = self._limits.prepare_seconds
            opened = process.call("open", self._opening(self.task), judging_pb2.OpenedSolution, deadline_s=seconds)
            if opened.fault:
                raise BadInput(opened.detail)
        return process

    def _others(self) -> tuple[Called, Sequence[timing_pb2.Arm]]:
        if self._cache is not None:
            self._cache.close()
        self._cache = CompilerCache(self._machine.compiled(self.task.target)) if self._machine else CompilerCache()
        self._cache.renew()
        process = self._processes.start(BASELINES, self._shared_bytes, self._cache)
        with on_failure(process.close):
            request = judging_pb2.BaselinesRequest(
                task=self.task,
                introduction=self._opened().introduction,
            )
            seconds = self._limits.prepare_seconds + self._limits.measure_seconds
            return process, process.call("open", request, judging_pb2.Baselines, deadline_s=seconds).arms

    def _close_arms(self) -> None:
        if self._arms is not None:
            self._arms.close()
            self._arms = None

    # ---- processes -----------------------------------------------------------------------------------------

    def _opened(self) -> Contest:
        """The judge, and what solutions are told of the reference.

        Raises BadInput where that cannot be written down.
        """
        judge = self._workers.judge()
        if self._contest is None or self._contest.judge is not judge:
            told = judge.call(
                "introduce",
                judging_pb2.IntroduceRequest(),
                judging_pb2.Introduction,
                deadline_s=self._limits.judge_seconds,
            )
            if not told.signature.tree:
                raise BadInput(
                    f"{self.task.entry_path}: get_inputs or get_init_inputs gives what cannot be written down, so that "
                    "no solution can be made in a process without the reference"
                )
            shared_file.grow(self._workers.descriptor, told.total_bytes)
            prepared = self._workers.preparation()
            values = PlacedValues(judge, self._limits.judge_seconds)
            contest = Contest(
                self.task.target, self._limits, values, told, prepared.eager_seconds, prepared.regions,
                self._processes.mapped(told.total_bytes),
            )  # fmt: skip
            self._processes.share(judge, told.total_bytes)
            contest.values.place_members(_TASK, 0)
            self._contest = contest  # last: a session that was refused the memory asks for it again
        return self._contest

    def _shared_bytes(self) -> int:
        return self._opened().introduction.total_bytes

    def _load(
        self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact
    ) -> benchmark_service_pb2.ExecutionFault | None:
        contest = self._opened()
        there = self._workers.current_bench
        if there is not None and there.alive and there is contest.solution and self._digest == program.digest:
            return None
        self._workers.drop_bench()
        solution = self._processes.start(SOLUTION, self._shared_bytes, environment={"PATH": _PATH})
        self._workers.take_for_bench(solution)
        self._digest, self._artifact = program.digest, artifact
        own = task_pb2.Task(
            entry_path="solution.py",
            class_name="ModelNew",
            target=self.task.target,
            precision=self.task.precision,
            sources=[task_pb2.SourceFile(path="solution.py", content=artifact.content)],
        )
        request, seconds = self._opening(own), self._limits.open_seconds
        try:
            opened = self._candidate.call("open", request, judging_pb2.OpenedSolution, seconds)
        except (WorkerRaised, BadInput) as error:  # in this process every exception is the solution's doing
            self._workers.drop_bench()
            return faults.fault(verdict_pb2.FAILURE_KIND_CRASH, str(error)[:300])
        if isinstance(opened, benchmark_service_pb2.ExecutionFault):
            return opened
        if opened.fault:
            self._workers.drop_bench()
            return faults.fault(opened.fault, opened.detail)
        contest.admit(solution)
        return None

    def _opening(self, task: task_pb2.Task) -> judging_pb2.OpenSolutionRequest:
        """The request to load a task's module; values of a case lie in the shared memory for its first call."""
        contest = self._opened()
        contest.values.place_members(_TASK, 0)
        contest.values.place(_TASK, secrets.randbits(63))
        return judging_pb2.OpenSolutionRequest(
            task=task, introduction=contest.introduction, regions=self._workers.preparation().regions
        )
