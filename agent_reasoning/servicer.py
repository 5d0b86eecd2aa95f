"""Translates between the reasoning service's messages and a reasoner."""

from __future__ import annotations

from agent_reasoning.reasoner import Reasoner
from warpsmith import plugins
from warpsmith.models.model_turn import counting
from warpsmith.settings import Settings
from warpsmith.v1 import reasoning_service_pb2, reasoning_service_pb2_grpc

DEFAULT = "roofline"


class ReasoningServicer(reasoning_service_pb2_grpc.ReasoningServiceServicer):
    """Serves ProposeHypotheses with one reasoner."""

    def __init__(self, reasoner: Reasoner) -> None:
        self._reasoner = reasoner

    def ProposeHypotheses(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest, context: object
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        """Ranks what to try next, and says what a model took for it."""
        del context
        with counting() as spent:
            response = self._reasoner.propose(request)
        response.model_tokens = max(response.model_tokens, spent.tokens)
        return response


def make_servicer(settings: Settings) -> ReasoningServicer:
    """The servicer of a process, with the reasoner that the settings name.

    Raises:
        UnknownPlugin: none of that name is installed.
    """
    return ReasoningServicer(plugins.load("reasoner", settings.plugins.get("reasoner", DEFAULT)))
