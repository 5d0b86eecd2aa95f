"""The synthesis service over gRPC: translates requests to the synthesizer and its answers back, nothing
else."""

from __future__ import annotations

from agent_synthesis.synthesizer import Synthesizer
from warpsmith import plugins
from warpsmith.models.model_turn import counting
from warpsmith.settings import Settings
from warpsmith.v1 import synthesis_service_pb2 as pb
from warpsmith.v1 import synthesis_service_pb2_grpc

DEFAULT = "builtin"


class SynthesisServicer(synthesis_service_pb2_grpc.SynthesisServiceServicer):
    """Serves one synthesizer; exceptions of `warpsmith.errors` become status codes in the kit."""

    def __init__(self, synthesizer: Synthesizer) -> None:
        self._synthesizer = synthesizer

    def AnalyzePlan(self, request: pb.AnalyzePlanRequest, context: object) -> pb.AnalyzePlanResponse:
        """See the contract."""
        del context
        return pb.AnalyzePlanResponse(analysis=self._synthesizer.analyze(request.task, request.moves))

    def SynthesizeCandidate(
        self, request: pb.SynthesizeCandidateRequest, context: object
    ) -> pb.SynthesizeCandidateResponse:
        """See the contract."""
        del context
        told = [request.parent] if request.HasField("parent") else []  # to those alone who write kernels
        with counting() as spent:
            candidate = self._synthesizer.synthesize(request.task, request.hypothesis, *told)
        return pb.SynthesizeCandidateResponse(candidate=candidate, model_tokens=spent.tokens)

    def RepairCandidate(self, request: pb.RepairCandidateRequest, context: object) -> pb.RepairCandidateResponse:
        """See the contract."""
        del context
        with counting() as spent:
            hypothesis, candidate = self._synthesizer.repair(request.task, request.failed, request.diagnostics)
        return pb.RepairCandidateResponse(hypothesis=hypothesis, candidate=candidate, model_tokens=spent.tokens)


def make_servicer(settings: Settings) -> SynthesisServicer:
    """The servicer of a process, with the synthesizer that the settings name.

    Raises:
        UnknownPlugin: none of that name is installed.
    """
    return SynthesisServicer(plugins.load("synthesizer", settings.plugins.get("synthesizer", DEFAULT)))
