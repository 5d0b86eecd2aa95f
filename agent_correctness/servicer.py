"""Translates between the correctness service's messages and `judge.Judge`, and calls the benchmark service."""

from __future__ import annotations

from agent_correctness.adversary import Adversary
from agent_correctness.checks.check import Check
from agent_correctness.judge import FIRST, Judge, built_in
from warpsmith import plugins, service
from warpsmith.settings import Settings
from warpsmith.transport import Tls
from warpsmith.v1 import (
    benchmark_service_pb2,
    benchmark_service_pb2_grpc,
    correctness_service_pb2,
    correctness_service_pb2_grpc,
)


class RemoteComparer:
    """The benchmark service at an address."""

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self._stub = service.dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, address, tls=tls, role="benchmark")

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        """As `Comparer.compare`; it ends with the verification for which it is asked."""
        return self._stub.CompareOutputs.future(request).result()


class CorrectnessServicer(correctness_service_pb2_grpc.CorrectnessServiceServicer):
    """Serves VerifyArtifact."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    @staticmethod
    def of(settings: Settings) -> CorrectnessServicer:
        """With the benchmark service of the settings and the built-in and chosen checks.

        Raises:
            BadInput: no address of the benchmark service is set. UnknownPlugin: no check of a chosen name is installed.
        """
        comparer = RemoteComparer(settings.address("benchmark"), settings.tls)
        return CorrectnessServicer(Judge(comparer, checks(), adversary=Adversary.of(settings)))

    def VerifyArtifact(
        self, request: correctness_service_pb2.VerifyArtifactRequest, context: object
    ) -> correctness_service_pb2.VerifyArtifactResponse:
        """Judges the artifact of the request."""
        del context
        return correctness_service_pb2.VerifyArtifactResponse(verdict=self._judge.verify(request))


def checks() -> list[Check]:
    """The built-in checks in their order, which cannot be left out, then those that are chosen."""
    others = [name for name in plugins.chosen("check") if name not in FIRST]
    return [*built_in(), *(plugins.load("check", name) for name in others)]
