"""Translates between the reasoning service's messages and a reasoner."""

from __future__ import annotations

import grpc

from agent_reasoning.reasoner import Reasoner
from warpsmith import plugins
from warpsmith.v1 import reasoning_service_pb2, reasoning_service_pb2_grpc

DEFAULT = "roofline"


class ReasoningServicer(reasoning_service_pb2_grpc.ReasoningServiceServicer):
    """Serves ProposeHypotheses with one reasoner."""

    def __init__(self, reasoner: Reasoner | None = None) -> None:
        self._reasoner: Reasoner = reasoner or plugins.load("reasoner", DEFAULT)

    def ProposeHypotheses(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest, context: grpc.ServicerContext
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        """Ranks what to try next."""
        del context
        return self._reasoner.propose(request)
