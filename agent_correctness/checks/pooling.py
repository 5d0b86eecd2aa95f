"""Outputs of few elements are judged over many seeds: on one draw of one element any kernel may be lucky.

The one idea: a pool is what was seen of one output on one family of values. One that is small and complete is held to
the limits as a whole, every other comparison by itself. Which seeds there are is the judge's business.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from agent_correctness.checks.limits import outputs
from warpsmith.v1 import verdict_pb2

SMALL_OUTPUT = 1024
"""Outputs with fewer elements are pooled."""
SEEDS = 32
"""Seeds of a complete pool."""
FAMILIES = (verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_NORMAL)
"""Families that pools are made of; the unusual ones have one seed each."""


@dataclass(frozen=True)
class Pool:
    """All comparisons of one output on one family."""

    members: Sequence[tuple[verdict_pb2.Comparison, verdict_pb2.OutputError]]

    @property
    def errors(self) -> list[verdict_pb2.OutputError]:
        """How far off each was."""
        return [error for _, error in self.members]

    @property
    def decides(self) -> bool:
        """Whether the pool stands for its members."""
        return len(self.members) >= SEEDS and is_small(self.errors[0])

    @property
    def rms_ratio(self) -> float:
        """rms of the errors over rms of the yardsticks; a yardstick is an error over its ratio."""
        pairs = [(error.rms_error, error.rms_error / error.rms_ratio) for error in self.errors if error.rms_ratio > 0]
        # Squares of 1e300 would overflow.
        return _ratio(math.hypot(*(off for off, _ in pairs)), math.hypot(*(yardstick for _, yardstick in pairs)))

    @property
    def max_ratio(self) -> float:
        """Largest of the errors over the largest yardstick."""
        pairs = [(error.max_error, error.max_error / error.max_ratio) for error in self.errors if error.max_ratio > 0]
        return _ratio(max((off for off, _ in pairs), default=0.0), max((yard for _, yard in pairs), default=0.0))


def _ratio(off: float, yardstick: float) -> float:
    if yardstick > 0:
        return off / yardstick
    return math.inf if off > 0 else 0.0


def pools(comparisons: Sequence[verdict_pb2.Comparison]) -> list[Pool]:
    """Every output with its comparisons, by family and, of groups judged alone, by group."""
    found: dict[tuple[str, int, int], list[tuple[verdict_pb2.Comparison, verdict_pb2.OutputError]]] = defaultdict(list)
    for comparison, error in outputs(comparisons):
        found[comparison.group, comparison.family, error.output].append((comparison, error))
    return [Pool(members) for members in found.values()]


def missing(comparisons: Sequence[verdict_pb2.Comparison]) -> dict[verdict_pb2.ValueFamily.ValueType, int]:
    """Family → seeds that its pools lack; empty where no output is small."""
    whole = [comparison for comparison in comparisons if comparison.outputs and not comparison.group]
    if not any(is_small(error) for _, error in outputs(whole)):
        return {}
    seen = Counter(comparison.family for comparison in whole)
    return {family: SEEDS - seen[family] for family in FAMILIES if 0 < seen[family] < SEEDS}


def is_small(error: verdict_pb2.OutputError) -> bool:
    """Whether an output is a float of few elements."""
    return 0 < error.element_count < SMALL_OUTPUT
