"""Overfitting: right on the values that come with the task, wrong on others of the same kind.

The one idea: the difference between the task's own draw and ordinary values of another distribution. A constant
answer, a remembered seed, a kernel that needs positive inputs or ignores a weight of ones shows here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_correctness.checks.check import Case, Finding, Judgement, Passed, seed_from
from agent_correctness.checks.limits import Size, outputs, size_of, worst_ratio
from agent_correctness.checks.values import far_sentence
from warpsmith.v1 import task_pb2, timing_pb2, verdict_pb2

ORDINARY = frozenset({
    verdict_pb2.VALUE_FAMILY_NORMAL, verdict_pb2.VALUE_FAMILY_UNIFORM, verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS,
    verdict_pb2.VALUE_FAMILY_FRESH, verdict_pb2.VALUE_FAMILY_RARE,
})  # fmt: skip
"""Families without extremes: a kernel that is right in general is right on them."""

JUMP = 100.0
"""Times worse than on the task's own values that an output must be: less is one and the same imprecision."""


class OverfitCheck:
    """Compares what passes on the task's values with what fails on ordinary ones."""

    name = "overfit"

    def cases(self, task: task_pb2.Task, tier: timing_pb2.Tier.ValueType, draw: random.Random) -> Sequence[Case]:
        """Normal values: parameters and statistics vary with them."""
        del task, tier
        return [(verdict_pb2.VALUE_FAMILY_NORMAL, seed_from(draw))]

    def judge(self, comparisons: Sequence[verdict_pb2.Comparison]) -> Judgement:
        """As `Check.judge`: needs a pass on the task's values and a plainly wrong value on ordinary ones."""
        tried = [(c, e) for c, e in outputs(comparisons) if c.family == verdict_pb2.VALUE_FAMILY_TASK]
        if not tried or any(_wrong(error) for _, error in tried):
            return Passed()
        usual = max(1.0, *(worst_ratio(error) for _, error in tried))
        for comparison, error in outputs(comparisons):
            if comparison.family not in ORDINARY or not _wrong(error) or error.non_finite_mismatch_count:
                continue
            if error.unequal_count or worst_ratio(error) > JUMP * usual:
                return Finding(
                    verdict_pb2.FAILURE_KIND_WRONG_OVERFIT,
                    f"right on the task's own values only: {far_sentence(comparison, error)}",
                )
        return Passed()


def _wrong(error: verdict_pb2.OutputError) -> bool:
    return bool(error.unequal_count or error.non_finite_mismatch_count) or size_of(error) is Size.WRONG
