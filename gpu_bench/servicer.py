"""Translates between the benchmark service's messages and sessions, and nothing else."""

from __future__ import annotations

import grpc

from gpu_bench import metrics
from gpu_bench.sessions import Sessions
from warpsmith.v1 import benchmark_service_pb2, benchmark_service_pb2_grpc


class BenchmarkServicer(benchmark_service_pb2_grpc.BenchmarkServiceServicer):
    """Serves all four methods; one call at a time for each task."""

    def __init__(self, sessions: Sessions | None = None) -> None:
        self._sessions = sessions or Sessions()

    def CompareOutputs(
        self, request: benchmark_service_pb2.CompareOutputsRequest, context: grpc.ServicerContext
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        """Runs the program on the cases of the request."""
        del context
        with self._sessions.using(request.task, request.artifact.format) as session:
            return session.compare(request.program, request.artifact, request.cases)

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, context: grpc.ServicerContext
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """Times the program of the request."""
        del context
        with self._sessions.using(request.task, request.artifact.format) as session:
            response = session.measure(request)
        if response.WhichOneof("outcome") == "timing":
            metrics.record_timing(response.timing)
        else:
            metrics.record_fault(request.tier, response.fault.kind)
        return response

    def RunReference(
        self, request: benchmark_service_pb2.RunReferenceRequest, context: grpc.ServicerContext
    ) -> benchmark_service_pb2.RunReferenceResponse:
        """Times the task's module by itself."""
        del context
        with self._sessions.using(request.task) as session:
            report = session.run_reference()
        metrics.record_reference(report)
        return benchmark_service_pb2.RunReferenceResponse(report=report)

    def DescribeDevice(
        self, request: benchmark_service_pb2.DescribeDeviceRequest, context: grpc.ServicerContext
    ) -> benchmark_service_pb2.DescribeDeviceResponse:
        """Describes the device of a target."""
        del context
        return self._sessions.describe(request)

    def close(self) -> None:
        """Ends every worker."""
        self._sessions.close()
