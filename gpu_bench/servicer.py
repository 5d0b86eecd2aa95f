"""Translates between the benchmark service's messages and sessions, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpu_bench import metrics
from gpu_bench.nvml import Gpu
from gpu_bench.quarantine import Quarantine, Watch
from gpu_bench.sanitizing import sanitizer
from gpu_bench.session import Session
from gpu_bench.sessions import Sessions
from gpu_bench.workers import room
from warpsmith.errors import WorkerRaised
from warpsmith.v1 import benchmark_service_pb2, benchmark_service_pb2_grpc, task_pb2, verdict_pb2

Answer = TypeVar("Answer", benchmark_service_pb2.CompareOutputsResponse, benchmark_service_pb2.MeasureArtifactResponse)


class BenchmarkServicer(benchmark_service_pb2_grpc.BenchmarkServiceServicer):
    """Serves all five methods, one call at a time for each task, for as long as the GPU can be trusted."""

    def __init__(self, sessions: Sessions | None = None, quarantine: Quarantine | None = None) -> None:
        self._sessions = sessions or Sessions()
        gpu = Gpu.visible()
        self._quarantine = quarantine or Quarantine(self._sessions.probe, gpu)
        self._watch = Watch(self._quarantine, gpu)
        self._holding = metrics.Holding()

    def CompareOutputs(
        self, request: benchmark_service_pb2.CompareOutputsRequest, context: object
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        """Runs the program on the cases of the request."""
        del context
        with self._quarantine.guarding(request.task.target):
            with self._holding.by("compare"), self._sessions.using(request.task, request.artifact.format) as session:
                try:
                    compare = _inspected if request.inspect else _compared
                    response = self._with_room(lambda: compare(session, request))
                finally:
                    session.settle()
            self._suspect_after(request.task, response.fault)
            return response

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, context: object
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """Times the program of the request."""
        del context
        with self._quarantine.guarding(request.task.target):
            with self._holding.by("measure"), self._sessions.using(request.task, request.artifact.format) as session:
                response = self._with_room(lambda: session.measure(request))
            if response.WhichOneof("outcome") == "timing":
                metrics.record_timing(response.timing)
                self._quarantine.saw_timing(request.task.target, response.timing)
            else:
                metrics.record_fault(request.tier, response.fault.kind)
                self._suspect_after(request.task, response.fault)
            return response

    def OpenTask(
        self, request: benchmark_service_pb2.OpenTaskRequest, context: object
    ) -> benchmark_service_pb2.OpenTaskResponse:
        """Opens the task's session."""
        del context
        with self._quarantine.guarding(request.task.target):
            with self._holding.by("open"), self._sessions.using(request.task) as session:
                session.open()
            return benchmark_service_pb2.OpenTaskResponse()

    def RunReference(
        self, request: benchmark_service_pb2.RunReferenceRequest, context: object
    ) -> benchmark_service_pb2.RunReferenceResponse:
        """Times the task's module by itself."""
        del context
        with self._quarantine.guarding(request.task.target):
            with self._holding.by("reference"), self._sessions.using(request.task) as session:
                report = session.run_reference(request.known if request.HasField("known") else None)
            metrics.record_reference(report)
            return benchmark_service_pb2.RunReferenceResponse(report=report)

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

    def _suspect_after(self, task: task_pb2.Task, fault: benchmark_service_pb2.ExecutionFault) -> None:
        """A kernel that hung was killed: whether the GPU is free of it, only a new process can tell."""
        if task.target == task_pb2.TARGET_CUDA and fault.kind == verdict_pb2.FAILURE_KIND_TIMEOUT:
            self._quarantine.suspect()


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
