"""What the hostile suite runs on where there is a GPU: the product's compiler, sessions and judge, and honest jobs.

The one idea: one session stays all the time, and its honest kernel is judged and timed after others did their worst;
what there is of processes, files and memory is looked at before and after.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import hostile_kernels as kernels
import hostile_solutions as solutions
import hostile_tasks as tasks
from hostile_traces import SETTLE_SECONDS, Footprint, Traces

from agent_compile import elf
from agent_compile.compiler import Compiler
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_compile.toolchains.toolchain import Rejected
from agent_correctness.judge import Judge
from gpu_bench.machine import Machine
from gpu_bench.session import Session
from gpu_bench.solutions.solution_session import SolutionSession
from warpsmith import digest
from warpsmith.contract import words
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

PASS, FAIL = verdict_pb2.VERDICT_STATE_PASS, verdict_pb2.VERDICT_STATE_FAIL
SCREENING, FINAL = timing_pb2.TIER_SCREENING, timing_pb2.TIER_FINAL
USUAL_WITHIN = 0.03
"""What an honest kernel's time may differ by after a hostile one."""
_MOST_QUICKER = 0.1
"""What a GPU may have become quicker by since it was first asked."""
CACHED_BYTES = 256 << 20
"""What warm workers may keep for later: a process that stayed behind would hold twice as much for its context alone."""
_PROBE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and driver.cuCtxSetCurrent(context) == 0
assert driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0
assert driver.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), ctypes.c_size_t(1 << 20)) == 0
assert driver.cuCtxSynchronize() == 0
"""
"""From a fresh process: the GPU does something for it. In a container the driver lists no processes."""


def kind_of(verdict: verdict_pb2.Verdict) -> str:
    """Without FAILURE_KIND_."""
    return verdict_pb2.FailureKind.Name(verdict.kind).removeprefix("FAILURE_KIND_")


class Times(NamedTuple):
    """Of an honest kernel: nanoseconds, and how many times as fast as eager it is."""

    candidate_ns: float
    speedup: float


@dataclass
class Bench:
    """A session that stays, in which honest jobs are timed, and one other at a time."""

    traces: Traces
    compiler: Compiler = field(default_factory=lambda: Compiler([Nvrtc()], None))
    machine: Machine = field(default_factory=Machine)
    _staying: Session | None = None
    _session: Session | None = None
    _name: str = ""
    _begun: tuple[Footprint, int] | None = None
    """What there was, and how much memory was free, before the first session."""
    _idle: Footprint | None = None
    """What there was with no other session than the one that stays."""
    _artifacts: dict[str, artifact_pb2.Artifact | Rejected] = field(default_factory=dict)
    _usual: dict[str, Times] = field(default_factory=dict)
    """By module, as they were at first."""

    def session(self, module: tasks.Module) -> Session:
        """The session of a module; the one before is closed. That of the honest job stays."""
        self._begin()
        if module.name == kernels.WIDE.name:
            self._staying = self._staying or Session(kernels.task(module), machine=self.machine)
            return self._staying
        return self._opened(module.name, lambda: Session(kernels.task(module), machine=self.machine))

    def solution_session(self, reference: str) -> SolutionSession:
        """The session of a reference for solutions."""
        task = solutions.reference_task(reference, task_pb2.TARGET_CUDA)
        made = self._opened(reference, lambda: SolutionSession(task, machine=self.machine))
        assert isinstance(made, SolutionSession)
        return made

    def _opened(self, name: str, make: Callable[[], Session]) -> Session:
        if self._session is None or self._name != name:
            self.close()
            self.settle()
            self._session, self._name = make(), name
        return self._session

    def close(self) -> None:
        """Ends the session that does not stay."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def settle(self) -> None:
        """Makes everything that stays, and remembers what there is then."""
        self._begin()
        if self._idle is None:
            self.usual(kernels.WIDE)
            self._idle = self.traces.now()

    def _begin(self) -> None:
        """Makes what stays beside sessions, and remembers what there is before the first of those."""
        if self._begun is None:
            assert not isinstance(
                self.compiler.compile(kernels.program(kernels.honest(kernels.WIDE))).outcome, Rejected
            )
            self.machine.describe(task_pb2.TARGET_CUDA)
            self.machine.compiled(task_pb2.TARGET_CUDA)
            self._begun = self.traces.now(), free_bytes()

    def assert_idle(self) -> None:
        """Ends the session that does not stay, and fails where more is left than there was before the first such."""
        self.close()
        self.settle()
        assert self._idle is not None
        self.traces.assert_same(self._idle)

    def assert_ended(self) -> None:
        """Ends every session, and fails where more is left than there was before the first."""
        self.settle()
        self.end_sessions()
        assert self._begun is not None
        self.traces.assert_same(self._begun[0])
        assert_free(self._begun[1])

    def end_sessions(self) -> None:
        """Ends the session that stays as well."""
        self.close()
        if self._staying is not None:
            self._staying.close()
            self._staying = None

    def end(self) -> None:
        """Ends everything."""
        self.end_sessions()
        self.compiler.close()
        self.machine.close()

    def usual(self, module: tasks.Module) -> Times:
        """Times of an honest kernel of the module, as they were when they were first asked for."""
        if module.name not in self._usual:
            verdict = self.control(module)
            assert verdict.state == PASS, f"the control: {kind_of(verdict)}: {verdict.detail}"
            self._usual[module.name] = self._screened(module, 3)
        return self._usual[module.name]

    def control(self, module: tasks.Module) -> verdict_pb2.Verdict:
        """The verdict on an honest kernel of the module."""
        return self.verdict(kernels.honest(module), SCREENING)

    def assert_usual(self, module: tasks.Module) -> str:
        """An honest kernel of the module passes in its usual time: by one screening, or else the median of five.

        What is a little faster than at first has to be so by as much as eager is: then the GPU is, which another may
        have slowed at first. What is much faster is what a stopped clock would tell.
        """
        verdict = self.control(module)
        assert verdict.state == PASS, f"the control: {kind_of(verdict)}: {verdict.detail}"
        usual, now = self.usual(module), self._screened(module)
        if abs(now.candidate_ns / usual.candidate_ns - 1) >= USUAL_WITHIN:
            now = self._screened(module, 5)
        off = now.candidate_ns / usual.candidate_ns - 1
        is_quicker = -_MOST_QUICKER < off <= -USUAL_WITHIN
        unlike = now.speedup / usual.speedup - 1 if is_quicker else off
        assert abs(unlike) < USUAL_WITHIN, f"the control takes {off:+.1%} longer than at first: {now}, {usual}"
        return f"control {off:+.1%}"

    def _screened(self, module: tasks.Module, count: int = 1) -> Times:
        timings = [self.timing(kernels.honest(module)) for _ in range(count)]
        times = [arm_ns(each, "candidate") for each in timings]
        return Times(statistics.median(times), statistics.median(each.speedup_eager.median for each in timings))

    @contextmanager
    def leaving_nothing(self) -> Iterator[None]:
        """Fails where what is done inside leaves processes, files, shared memory or memory of the GPU behind."""
        self._make_room()
        before, free = self.traces.now(), free_bytes()
        yield
        self.traces.assert_same(before)
        self._make_room()
        assert_free(free)

    def _make_room(self) -> None:
        """Has sessions give back what they keep for later: a judge keeps truths of gigabytes."""
        for session in (self._staying, self._session):
            if session is not None:
                session.make_room()

    @contextmanager
    def leaving_no_traces(self, session: SolutionSession, case: solutions.Solution) -> Iterator[None]:
        """The same of a solution, whose process ends; what judge and baselines keep of the GPU varies by gigabytes."""
        session._workers.judge()
        if case.timed:
            session._opened_arms(SCREENING)
        session._workers.drop_bench()
        before = self.traces.now()
        yield
        session._workers.drop_bench()
        self.traces.assert_same(before)

    def compiled(self, kernel: kernels.Kernel) -> tuple[candidate_pb2.Program, artifact_pb2.Artifact | Rejected]:
        """The kernel as a program of its module, compiled as the product does it; an edit comes after."""
        program = kernels.program(kernel)
        if program.digest not in self._artifacts:
            with keeping_variables() if kernel.bare else nullcontext():
                self._artifacts[program.digest] = self.compiler.compile(program).outcome
        made = self._artifacts[program.digest]
        if isinstance(made, Rejected):
            return program, made
        artifact = artifact_pb2.Artifact()
        artifact.CopyFrom(made)
        if kernel.edit is not None:
            kernel.edit(program)
            program.digest = artifact.program_digest = digest.of_program(program)
        return program, artifact

    def verdict(self, kernel: kernels.Kernel, tier: timing_pb2.Tier.ValueType = FINAL) -> verdict_pb2.Verdict:
        """The verdict on a kernel."""
        program, artifact = self.compiled(kernel)
        if isinstance(artifact, Rejected):
            return verdict_pb2.Verdict(state=FAIL, kind=artifact.kind, detail=artifact.diagnostics)
        return judged(self.session(kernel.module), program, artifact, tier)

    def timing(self, kernel: kernels.Kernel, tier: timing_pb2.Tier.ValueType = SCREENING) -> timing_pb2.Timing:
        """The times of a right kernel."""
        answer = self.response(kernel, tier)
        assert answer.HasField("timing"), answer.fault.detail
        return answer.timing

    def response(
        self, kernel: kernels.Kernel, tier: timing_pb2.Tier.ValueType = SCREENING
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """What comes of timing a kernel."""
        program, artifact = self.compiled(kernel)
        assert isinstance(artifact, artifact_pb2.Artifact), artifact
        session = self.session(kernel.module)
        return session.measure(
            benchmark_service_pb2.MeasureArtifactRequest(
                task=session.task, program=program, artifact=artifact, tier=tier
            )
        )

    def candidate_ns(self, kernel: kernels.Kernel) -> float:
        """Median of three screenings."""
        return statistics.median(arm_ns(self.timing(kernel), "candidate") for _ in range(3))


def judged(
    session: Session,
    program: candidate_pb2.Program,
    artifact: artifact_pb2.Artifact,
    tier: timing_pb2.Tier.ValueType,
) -> verdict_pb2.Verdict:
    """The product's judge on a session."""

    class Comparer:
        def compare(
            self, asked: benchmark_service_pb2.CompareOutputsRequest
        ) -> benchmark_service_pb2.CompareOutputsResponse:
            return session.compare(asked.program, asked.artifact, asked.cases)

    request = correctness_service_pb2.VerifyArtifactRequest(
        task=session.task, program=program, artifact=artifact, tier=tier
    )
    return Judge(Comparer()).verify(request)


def measured(
    session: Session,
    program: candidate_pb2.Program,
    artifact: artifact_pb2.Artifact,
    tier: timing_pb2.Tier.ValueType,
) -> timing_pb2.Timing:
    """The times of a program."""
    answer = session.measure(
        benchmark_service_pb2.MeasureArtifactRequest(task=session.task, program=program, artifact=artifact, tier=tier)
    )
    assert answer.HasField("timing"), answer.fault.detail
    return answer.timing


def arm_ns(timing: timing_pb2.Timing, name: str) -> float:
    """Median of an arm."""
    return next(arm.median_ns for arm in timing.arms if words.arm(arm.kind) == name)


@contextmanager
def keeping_variables() -> Iterator[None]:
    """Takes the look at what a cubin keeps between launches away."""
    with mock.patch.object(elf, "_device_variables", return_value=()):
        yield


def free_bytes() -> int:
    """Free memory of the GPU, as this process sees it."""
    import torch

    return int(torch.cuda.mem_get_info()[0])


def assert_free(before: int) -> None:
    """Fails unless as much memory is free again as there was; processes that end take a moment to give theirs back."""
    end = time.monotonic() + SETTLE_SECONDS
    while free_bytes() < before - CACHED_BYTES and time.monotonic() < end:
        time.sleep(0.05)
    lost = before - free_bytes()
    assert lost <= CACHED_BYTES, f"{lost >> 20} MiB of the GPU's memory are not free again"


def is_free(seconds: float) -> bool:
    """Whether a fresh process gets work done on the GPU within that time."""
    try:
        return subprocess.run([sys.executable, "-c", _PROBE], timeout=seconds, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
