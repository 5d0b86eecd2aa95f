"""Precision: errors that are small, evenly spread, and still several times PyTorch's own.

The one idea: the ratio rule sees what a tolerance cannot, fp16 or TF32 inside an fp32 contract. Outputs with few
elements are pooled over all seeds of their family, because one lucky or unlucky element says little.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence

from agent_correctness.check import Case, Finding, Judgement, Passed, number, where
from agent_correctness.limits import RMS_LIMIT, Size, outputs, size_of
from agent_correctness.values import far_sentence
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
        pools: dict[tuple[int, int], list[tuple[verdict_pb2.Comparison, verdict_pb2.OutputError]]] = defaultdict(list)
        for comparison, error in outputs(comparisons):
            if size_of(error) is not Size.FINE:
                return Finding(verdict_pb2.FAILURE_KIND_WRONG_PRECISION, far_sentence(comparison, error))
            pools[comparison.family, error.output].append((comparison, error))
        for pool in pools.values():
            ratio = _pooled_ratio([error for _, error in pool])
            if ratio > RMS_LIMIT:
                comparison, error = pool[0]
                return Finding(
                    verdict_pb2.FAILURE_KIND_WRONG_PRECISION,
                    f"output {error.output} is {number(ratio)}x farther from the truth than PyTorch over "
                    f"{len(pool)} seeds ({where(comparison)} and others)",
                )
        return Passed()


def _pooled_ratio(errors: Sequence[verdict_pb2.OutputError]) -> float:
    """rms of the errors over rms of the yardsticks; a yardstick is an error over its ratio."""
    pairs = [(error.rms_error, error.rms_error / error.rms_ratio) for error in errors if error.rms_ratio > 0]
    if not pairs:
        return 0.0
    off, yardstick = (math.hypot(*(pair[i] for pair in pairs)) for i in (0, 1))  # squares of 1e300 would overflow
    return off / yardstick if yardstick > 0 else math.inf
