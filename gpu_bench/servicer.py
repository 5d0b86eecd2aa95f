"""Translates between the benchmark service's messages and sessions, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gpu_bench import faults, metrics
from gpu_bench.nvml import Gpu
from gpu_bench.quarantine import Quarantine, Watch
from gpu_bench.sanitizing import sanitizer
from gpu_bench.session import Session
from gpu_bench.sessions import Sessions
from gpu_bench.workers import room
from gpu_bench.workers.leases import Kind, Leases, Loss, Work
from warpsmith import digest
from warpsmith.errors import WorkerCrashed, WorkerKilled, WorkerRaised
from warpsmith.service.handlers import Call
from warpsmith.v1 import (
    benchmark_service_pb2,
    benchmark_service_pb2_grpc,
    candidate_pb2,
    lease_pb2,
    task_pb2,
    verdict_pb2,
)

Answer = TypeVar("Answer", benchmark_service_pb2.CompareOutputsResponse, benchmark_service_pb2.MeasureArtifactResponse)

_JUDGING = frozenset({"judge", "boundary"})
"""What a judge is asked about a program."""


class BenchmarkServicer(benchmark_service_pb2_grpc.BenchmarkServiceServicer):
    """Serves all five methods, in turns (`workers.leases`), for as long as the GPU can be trusted."""

    def __init__(self, sessions: Sessions | None = None, quarantine: Quarantine | None = None) -> None:
        self._sessions = sessions or Sessions()
        gpu = Gpu.visible()
        self._quarantine = quarantine or Quarantine(self._sessions.probe, gpu)
        self._watch = Watch(self._quarantine, gpu)
        self._holding = metrics.Holding()
        self._leases, self._casualties = Leases(), faults.Casualties()

    async def turn(self, method: str, request: Any, call: Call) -> Callable[[], None]:
        """Returns when it is a call's turn; what gives it back."""
        if method == "DescribeDevice":
            if self._sessions.is_described(request.target):
                return lambda: None
            work = Work(Kind.ALONE, "", lease_pb2.Lease())
        else:
            task, program = digest.of_task(request.task), getattr(request, "program", None)
            piece = f"{method} {program.digest}" if program is not None else method
            work = Work(_kind(method, request.task.target), task, request.lease, piece)
        call.turn = work
        call.when_left(lambda: self._leases.lose(work, Loss.CALLER_LEFT))
        await self._leases.begin(work)
        return lambda: self._leases.end(work)

    def CompareOutputs(
        self, request: benchmark_service_pb2.CompareOutputsRequest, context: object
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        """Runs the program on the cases of the request."""
        with self._quarantine.guarding(request.task.target):
            try:
                response = self._compared(request, context)
            except WorkerCrashed as crash:
                response = benchmark_service_pb2.CompareOutputsResponse(fault=self._set_aside(request.program, crash))
            response.waited_seconds = _waited_seconds(context)
            self._after(request.task, response.fault, "compare")
            return response

    def _compared(
        self, request: benchmark_service_pb2.CompareOutputsRequest, context: object
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        with self._holding.by("compare"), self._using(request, context, request.artifact.format) as session:
            try:
                compare = _inspected if request.inspect else _compared
                return self._with_room(lambda: compare(session, request))
            finally:
                session.settle()

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, context: object
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """Times the program of the request."""
        with self._quarantine.guarding(request.task.target):
            try:
                with self._holding.by("measure"), self._using(request, context, request.artifact.format) as session:
                    response = self._with_room(lambda: session.measure(request))
            except WorkerKilled as killed:
                response = benchmark_service_pb2.MeasureArtifactResponse(fault=self._set_aside(request.program, killed))
            response.waited_seconds = _waited_seconds(context)
            if response.WhichOneof("outcome") == "timing":
                metrics.record_timing(response.timing)
                self._quarantine.saw_timing(request.task.target, response.timing)
            else:
                metrics.record_fault(request.tier, response.fault.kind)
                self._after(request.task, response.fault, "measure")
            return response

    def _set_aside(self, program: candidate_pb2.Program, crash: WorkerCrashed) -> benchmark_service_pb2.ExecutionFault:
        """The fault of a program over which so many processes have ended; raises what has ended one before."""
        is_over_it = isinstance(crash, WorkerKilled) or crash.method in _JUDGING
        found = self._casualties.note(program.digest, crash) if is_over_it else None
        if found is None:
            raise crash
        return found

    def OpenTask(
        self, request: benchmark_service_pb2.OpenTaskRequest, context: object
    ) -> benchmark_service_pb2.OpenTaskResponse:
        """Opens the task's session."""
        with self._quarantine.guarding(request.task.target):
            with self._holding.by("open"), self._using(request, context) as session:
                session.open()
            return benchmark_service_pb2.OpenTaskResponse()

    def RunReference(
        self, request: benchmark_service_pb2.RunReferenceRequest, context: object
    ) -> benchmark_service_pb2.RunReferenceResponse:
        """Times the task's module by itself."""
        with self._quarantine.guarding(request.task.target):
            with self._holding.by("reference"), self._using(request, context) as session:
                report = session.run_reference(request.known if request.HasField("known") else None)
            metrics.record_reference(report)
            return benchmark_service_pb2.RunReferenceResponse(report=report, waited_seconds=_waited_seconds(context))

    def DescribeDevice(
        self, request: benchmark_service_pb2.DescribeDeviceRequest, context: object
    ) -> benchmark_service_pb2.DescribeDeviceResponse:
        """Describes the device of a target."""
        del context
        with self._quarantine.guarding(request.target):
            with self._holding.by("describe"):
                response = self._sessions.describe(request)
            self._quarantine.saw_device(response.device)
            return response

    @contextlib.contextmanager
    def _using(self, request: Any, context: object, *form: Any) -> Iterator[Session]:
        """The session of a request's task, whose work is ended where the call loses its lease."""
        work = _work(context)
        with contextlib.ExitStack() as held:
            session = held.enter_context(self._sessions.using(request.task, *form))
            if work is not None:
                held.enter_context(work.under_way(session.abandon))
            yield session

    def _with_room(self, act: Callable[[], Answer]) -> Answer:
        """What `act` gives; where memory is short, once more after tasks that nobody waits for have given up theirs."""
        try:
            answer = act()
        except WorkerRaised as raised:
            if raised.kind not in room.SHORT or not self._sessions.end_idle():
                raise
            return act()
        is_short = answer.fault.kind == verdict_pb2.FAILURE_KIND_RESOURCE
        return act() if is_short and self._sessions.end_idle() else answer

    def when_unfit(self, tell: Callable[[], None]) -> None:
        """Has `tell` called when the GPU goes out of service."""
        self._quarantine.when_unfit(tell)

    def close(self) -> None:
        """Ends every worker."""
        self._watch.close()
        self._sessions.close()

    def _after(self, task: task_pb2.Task, fault: benchmark_service_pb2.ExecutionFault, work: str) -> None:
        """A kernel that hung was killed: whether the GPU is free of it, only a new process can tell."""
        faults.note_end(fault, work)
        if task.target == task_pb2.TARGET_CUDA and fault.kind == verdict_pb2.FAILURE_KIND_TIMEOUT:
            self._quarantine.suspect()


def _work(context: object) -> Work | None:
    """What a call's turn is for; None where there are no turns."""
    return context.turn if isinstance(context, Call) else None


def _waited_seconds(context: object) -> float:
    return work.waited_seconds if (work := _work(context)) is not None else 0.0


def _kind(method: str, target: task_pb2.Target.ValueType) -> Kind:
    """What else may be under way beside a call."""
    if method in ("MeasureArtifact", "RunReference"):
        return Kind.ALONE
    return Kind.AHEAD if method == "OpenTask" and target == task_pb2.TARGET_CUDA else Kind.BESIDE


def _compared(
    session: Session, request: benchmark_service_pb2.CompareOutputsRequest
) -> benchmark_service_pb2.CompareOutputsResponse:
    return session.compare(request.program, request.artifact, request.cases)


def _inspected(
    session: Session, request: benchmark_service_pb2.CompareOutputsRequest
) -> benchmark_service_pb2.CompareOutputsResponse:
    """The same of a finalist: compute-sanitizer loads its kernels meanwhile, and runs them where nothing was found."""
    session.expect_final()
    with session.inspecting(request.program, request.artifact) as inspecting:
        response = _compared(session, request)
        if not response.HasField("fault"):
            session.make_room()
            response.inspections.extend(inspecting.answer())
            if (found := sanitizer.fault(response.inspections)) is not None:
                response.fault.CopyFrom(found)
    return response
