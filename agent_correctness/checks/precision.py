"""Precision: errors that are small, evenly spread, and still several times PyTorch's own.

The one idea: the ratio rule sees what a tolerance cannot, fp16 or TF32 inside an fp32 contract. Outputs with few
elements are pooled over many seeds of their family, because one lucky or unlucky element says little.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_correctness.checks.check import Case, Finding, Judgement, Passed, number, where
from agent_correctness.checks.limits import MAX_LIMIT, RMS_LIMIT, Size, size_of
from agent_correctness.checks.pooling import pools
from agent_correctness.checks.values import far_sentence
from warpsmith.v1 import task_pb2, timing_pb2, verdict_pb2


class PrecisionCheck:
    """Holds every output to the limits, one by one and pooled by family."""

    name = "precision"

    def cases(self, task: task_pb2.Task, tier: timing_pb2.Tier.ValueType, draw: random.Random) -> Sequence[Case]:
        """None of its own: what the other checks compare on is enough."""
        del task, tier, draw
        return []

    def judge(self, comparisons: Sequence[verdict_pb2.Comparison]) -> Judgement:
        """As `Check.judge`."""
        for pool in pools(comparisons):
            for comparison, error in pool.members:
                if not pool.decides and size_of(error) is not Size.FINE:
                    return Finding(verdict_pb2.FAILURE_KIND_WRONG_PRECISION, far_sentence(comparison, error))
            is_off = pool.rms_ratio > RMS_LIMIT or (pool.decides and pool.max_ratio > MAX_LIMIT)
            if is_off:
                ratio = max(pool.rms_ratio, pool.max_ratio)
                return Finding(
                    verdict_pb2.FAILURE_KIND_WRONG_PRECISION,
                    f"output {pool.errors[0].output} is {number(ratio)}x farther from the truth than PyTorch over "
                    f"{len(pool.members)} seeds ({where(pool.members[0][0])} and others)",
                )
        return Passed()
