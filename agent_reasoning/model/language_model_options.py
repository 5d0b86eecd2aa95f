"""What a language model may choose from: the legal moves of a plan, and chains that begin with one, numbered.

The one idea: numbers depend on the plan alone, not on what was tried, so that the list is the same text in every
question about the plan and a server's prefix cache holds it. What was tried is left out of the numbers that are open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_reasoning import wording
from agent_reasoning.evidence import Evidence
from agent_reasoning.roofline_reasoner import RooflineReasoner
from warpsmith import digest
from warpsmith.v1 import analysis_pb2, hypothesis_pb2, reasoning_service_pb2

MOST = 400
"""Options of one plan; the best predicted ones are kept."""


@dataclass(frozen=True)
class Option:
    """One thing to try; its number is its place in the list."""

    moves: tuple[analysis_pb2.Move, ...]
    """The new moves, at least one; the first is legal."""
    predicted_speedup: float
    """The roofline's prediction from costs alone; 0 where it expects the plan to become slower."""
    text: str
    """What it does, in words; holds names from the module."""


def of(request: reasoning_service_pb2.ProposeHypothesesRequest) -> list[Option]:
    """All options, those that the roofline ranks first in its order, then the other legal moves."""
    bare = reasoning_service_pb2.ProposeHypothesesRequest(
        task=request.task, analysis=request.analysis, device=request.device, limit=MOST
    )
    ranked: Sequence[hypothesis_pb2.Hypothesis] = RooflineReasoner().propose(bare).hypotheses
    options = [Option(_new(each), each.predicted_speedup, each.rationale) for each in ranked]
    known = {digest.of_moves(option.moves) for option in options}
    for legal in request.analysis.legal_moves:
        if digest.of_moves([legal.move]) not in known:
            is_open = legal.move.kind == analysis_pb2.MOVE_KIND_WRITE  # of a kernel to be written nothing is predicted
            guess = 1.0 if is_open else 0.0
            options.append(Option((legal.move,), guess, wording.effect(legal)))
    return options[:MOST]


def untried(options: Sequence[Option], request: reasoning_service_pb2.ProposeHypothesesRequest) -> list[int]:
    """Numbers of the options that no trial of the run has walked, in order."""
    evidence = Evidence(request.history)
    before = request.analysis.moves
    return [number for number, option in enumerate(options) if not evidence.tried([*before, *option.moves])]


def _new(hypothesis: hypothesis_pb2.Hypothesis) -> tuple[analysis_pb2.Move, ...]:
    return tuple(hypothesis.moves[len(hypothesis.moves) - hypothesis.new_move_count :])
