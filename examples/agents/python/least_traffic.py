"""A reasoner in twenty lines: the legal move that saves the most memory traffic comes first."""

from warpsmith.errors import BadInput
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2


class LeastTraffic:
    """Proposes each legal move alone, ordered by the bytes that it saves."""

    def propose(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        """Ranks what to try next on the plan of the request."""
        analysis = request.analysis
        if not analysis.groups:
            raise BadInput("the request has no analysis with groups")
        response = reasoning_service_pb2.ProposeHypothesesResponse()
        for legal in sorted(analysis.legal_moves, key=saved_bytes, reverse=True)[: request.limit or 8]:
            hypothesis = response.hypotheses.add(moves=[*analysis.moves, legal.move], new_move_count=1)
            hypothesis.predicted_speedup = (traffic(legal.before) + 1) / (traffic(legal.after) + 1)
            hypothesis.rationale = f"saves {saved_bytes(legal):,} bytes: {legal.effect}"
            hypothesis.source = "least_traffic"
        return response


def saved_bytes(legal: analysis_pb2.LegalMove) -> int:
    """What the move saves."""
    return traffic(legal.before) - traffic(legal.after)


def traffic(cost: analysis_pb2.Cost) -> int:
    """Bytes that a group moves."""
    return cost.read_bytes + cost.write_bytes + cost.extra_bytes
