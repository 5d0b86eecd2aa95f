"""Values: masks of NaN and infinity first, then integers, then errors beyond any rounding.

The one idea: families of values on which kernels go wrong for different reasons, drawn with seeds that no kernel can
know before. Small errors are the precision check's; memory is the memory check's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_correctness.checks.check import FAMILIES, Case, Finding, Judgement, Passed, number, seed_from, where
from agent_correctness.checks.limits import Size, is_off_in_small, outputs, size_of, worst_ratio
from warpsmith.v1 import task_pb2, timing_pb2, verdict_pb2

_ALWAYS = (verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_NORMAL)
FINAL_SEEDS = 3
"""Seeds of the task's and of normal values in a final; most other families get one each."""
ARRANGED = {verdict_pb2.VALUE_FAMILY_RARE: (*range(16),), verdict_pb2.VALUE_FAMILY_NON_FINITE: (4, 5, 6, 7, 14, 15, 3)}
"""Families of which a final has a case for each way in which their unusual elements lie: by the seed modulo 8, from 4
on a handful, in pairs (`VALUE_FAMILY_RARE`): each of two inputs has one of NaN and both infinities. Many that are not
finite come last, for on those a reference may have no truth."""


class ValueCheck:
    """Compares on the task's values, normal ones, and one (screening) or all (final) of the other families."""

    name = "values"

    def cases(self, task: task_pb2.Task, tier: timing_pb2.Tier.ValueType, draw: random.Random) -> Sequence[Case]:
        """As `Check.cases`."""
        del task
        others = [family for family in FAMILIES if family not in _ALWAYS]
        if tier == timing_pb2.TIER_FINAL:
            counts = dict.fromkeys(_ALWAYS, FINAL_SEEDS)
            plain = [family for family in FAMILIES if family not in ARRANGED for _ in range(counts.get(family, 1))]
            first = seed_from(draw) // 8 * 8
            arranged = [(family, first + number) for family, numbers in ARRANGED.items() for number in numbers]
            return [*((family, seed_from(draw)) for family in plain), *arranged]
        return [(family, seed_from(draw)) for family in (*_ALWAYS, draw.choice(others))]

    def judge(self, comparisons: Sequence[verdict_pb2.Comparison]) -> Judgement:
        """As `Check.judge`."""
        for comparison, error in outputs(comparisons):
            if error.non_finite_mismatch_count:
                return Finding(verdict_pb2.FAILURE_KIND_WRONG_NAN, _mask_sentence(comparison, error))
            if error.unequal_count:
                return Finding(verdict_pb2.FAILURE_KIND_WRONG_VALUE, _unequal_sentence(comparison, error))
            if size_of(error) is Size.WRONG:
                return Finding(verdict_pb2.FAILURE_KIND_WRONG_VALUE, far_sentence(comparison, error))
        return Passed()


def far_sentence(comparison: verdict_pb2.Comparison, error: verdict_pb2.OutputError) -> str:
    """How far off an output is, and where most."""
    if is_off_in_small(error):
        return (
            f"what is small in output {error.output} beside the rest is {number(error.small_ratio)}x farther from the "
            f"truth than PyTorch or the third digit ({where(comparison)})"
        )
    return (
        f"output {error.output} is {number(worst_ratio(error))}x farther from the truth than PyTorch at element "
        f"{error.worst_index} ({where(comparison)}): {number(error.worst_value)} instead of {number(error.worst_truth)}"
    )


def _mask_sentence(comparison: verdict_pb2.Comparison, error: verdict_pb2.OutputError) -> str:
    count = error.non_finite_mismatch_count
    elements = "element differs" if count == 1 else "elements differ"
    return (
        f"output {error.output}: {count} {elements} in being NaN or infinite, first element {error.worst_index} "
        f"({where(comparison)}): {number(error.worst_value)} instead of {number(error.worst_truth)}"
    )


def _unequal_sentence(comparison: verdict_pb2.Comparison, error: verdict_pb2.OutputError) -> str:
    elements = "element differs" if error.unequal_count == 1 else "elements differ"
    return (
        f"output {error.output}: {error.unequal_count} {elements}, first element {error.worst_index} "
        f"({where(comparison)}): {error.worst_value:.0f} instead of {error.worst_truth:.0f}"
    )
