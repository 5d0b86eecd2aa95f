"""Judges the best candidates of a search again, from nothing and with all care. Only they are ever reported.

The one idea: a screening result is a reason to look, never a claim. Each finalist is compiled (from the cache),
verified and timed against every arm in a fresh process; the winner is the fastest of those that are right and whose
lower bound clears the noise. It does not search.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator import agents as deadlines
from orchestrator.pipeline import Judged, Pipeline, passed
from orchestrator.search import score
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.v1 import (
    analysis_pb2,
    candidate_pb2,
    hypothesis_pb2,
    synthesis_service_pb2,
    timing_pb2,
    trial_pb2,
)

COUNT = 3
"""Finalists of an undisturbed run."""


def select(trials: Sequence[trial_pb2.Trial], count: int = COUNT) -> list[trial_pb2.Trial]:
    """Trials worth the care, best first: passing ones that changed something, and of those not faster only the best.

    `trials` carry their programs.
    """
    changed = [trial for trial in trials if passed(trial) and trial.candidate.moves]
    ranked = sorted(changed, key=score, reverse=True)
    return [trial for place, trial in enumerate(ranked[:count]) if place == 0 or score(trial) > 1.0]


def judge(pipeline: Pipeline, finalists: Sequence[trial_pb2.Trial], *, thrifty: bool = False) -> list[trial_pb2.Trial]:
    """The finalists as judged again, in order; those that a fault kept from judgement are left out.

    `thrifty` stops at the first that is right and faster: on a CPU a final takes as long as a search.

    Raises:
        Infrastructure: there were finalists and none could be judged.
    """
    judged: list[trial_pb2.Trial] = []
    faults: list[str] = []
    for finalist in finalists:
        again = trial_pb2.Trial()
        again.CopyFrom(finalist)
        for field in ("artifact", "verdict", "timing"):
            again.ClearField(field)
        match pipeline.walk(again, timing_pb2.TIER_FINAL, rewritten_reference(pipeline, finalist.candidate)):
            case Judged(trial):
                judged.append(trial)
                if thrifty and passed(trial) and trial.timing.faster:
                    break
            case outcome:
                faults.append(getattr(outcome, "reason", "interrupted"))
    if finalists and not judged:
        raise Infrastructure(f"no finalist could be judged: {faults[0]}")
    return judged


def winner(judged: Sequence[trial_pb2.Trial]) -> trial_pb2.Trial | None:
    """The best judged finalist: a faster one before any other, then by speedup. None when none passed."""
    right = [trial for trial in judged if passed(trial)]
    return max(right, key=lambda trial: (trial.timing.faster, score(trial)), default=None)


def rewritten_reference(pipeline: Pipeline, candidate: candidate_pb2.Candidate) -> candidate_pb2.Program | None:
    """The candidate's algebra as library calls only, or None where it used none or the rules need other moves.

    It separates what the algebra gives from what the kernels give.
    """
    if not candidate.rewrites:
        return None
    moves: list[analysis_pb2.Move] = [move for move in candidate.moves if move.operation == "rewrite"]
    hypothesis = hypothesis_pb2.Hypothesis(
        moves=moves,
        new_move_count=len(moves),
        predicted_speedup=1.0,
        rationale="the same algebra in plain PyTorch",
        source="rewritten reference",
    )
    request = synthesis_service_pb2.SynthesizeCandidateRequest(task=pipeline.task, hypothesis=hypothesis)
    try:
        with pipeline.gate.working(pipeline.task.target):
            reply = pipeline.agents.synthesis.SynthesizeCandidate(request, timeout=deadlines.SYNTHESIZE_SECONDS)
    except BadInput:
        return None
    return reply.candidate.program
