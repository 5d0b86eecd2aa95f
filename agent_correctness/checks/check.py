"""What a check is: values to compare on, and a judgement of what came out.

The one idea: a check is two pure functions around one comparison, which the benchmark runs, so checks add up (their
cases are run once, together) and a plugin can be written and tested without a device. Checks run nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from warpsmith.contract import words
from warpsmith.v1 import benchmark_service_pb2, task_pb2, timing_pb2, verdict_pb2

Case = tuple[verdict_pb2.ValueFamily.ValueType, int]
"""Family and seed."""


@dataclass(frozen=True)
class Finding:
    """Why a candidate fails."""

    kind: verdict_pb2.FailureKind.ValueType
    detail: str
    """One sentence: where, how far off, which values."""


@dataclass(frozen=True)
class Passed:
    """Nothing found."""


Judgement = Finding | Passed


class Check(Protocol):
    """One way for a candidate to be wrong. Plugins fill the entry-point group `warpsmith.check`."""

    name: str

    def cases(self, task: task_pb2.Task, tier: timing_pb2.Tier.ValueType, draw: random.Random) -> Sequence[Case]:
        """Values to compare on, beside those of other checks. Seeds come from `draw`, seeded at judging time."""
        ...

    def judge(self, comparisons: Sequence[verdict_pb2.Comparison]) -> Judgement:
        """Looks at all comparisons that were made, those for other checks included.

        A comparison without outputs means that the reference refuses these values: it says nothing.
        """
        ...


class Comparer(Protocol):
    """The benchmark service, as far as this agent needs it."""

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        """Runs a program on cases. Raises Infrastructure when the service fails, BadInput for a bad reference."""
        ...


FAMILIES = tuple(
    family
    for family in verdict_pb2.ValueFamily.values()
    if family not in (verdict_pb2.VALUE_FAMILY_UNSPECIFIED, verdict_pb2.VALUE_FAMILY_PROPOSED)
)
"""Every family of values that is drawn for all kernels alike."""


def seed_from(draw: random.Random) -> int:
    """A fresh seed for a case: of 63 bits, too many to try out."""
    return draw.randrange(1, 2**63)


def family_name(comparison: verdict_pb2.Comparison) -> str:
    """As people write it: "constant_rows"."""
    return words.value_family(comparison.family)


def where(comparison: verdict_pb2.Comparison) -> str:
    """The values of a comparison, for a sentence: "family normal, seed 7"."""
    alone = f"group {comparison.group} judged alone, " if comparison.group else ""
    precision = ", convolutions without TF32" if comparison.without_tf32 else ""
    return f"{alone}family {family_name(comparison)}, seed {comparison.seed}{precision}"


def number(value: float) -> str:
    """A number as people read it."""
    return f"{value:.3g}" if abs(value) < 1e5 else f"{value:.2e}"
