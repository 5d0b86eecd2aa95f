"""What a reasoner is: the seam between what is known of a task and what is tried next."""

from __future__ import annotations

from typing import Protocol

from warpsmith.v1 import reasoning_service_pb2


class Reasoner(Protocol):
    """Ranks hypotheses on one parent plan; stateless, all it may use is in the request."""

    def propose(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        """At most `request.limit` hypotheses, best first; none when nothing is worth trying.

        Each begins with the moves of `request.analysis`. A hypothesis may turn out to be illegal; the search goes on
        with the next.

        Raises:
            BadInput: the analysis is missing or names no group.
            Infrastructure: a model server that it needs does not answer.
        """
        ...
