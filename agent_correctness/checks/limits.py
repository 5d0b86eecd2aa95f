"""The limits of the error-ratio rule, and which of them an output breaks.

The one idea: limits live here and nowhere else; the benchmark service reports ratios and decides nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence

from warpsmith.v1 import verdict_pb2

RMS_LIMIT = 4.0
"""rms error of all elements over the yardstick."""
MAX_LIMIT = 8.0
"""Largest error over the yardstick's largest."""
BLOCK_LIMIT = 16.0
"""rms error of any 4,096 elements over the yardstick there."""
SMALL_LIMIT = 8.0
"""rms error of elements of about one magnitude that are small beside the rest, over the yardstick there."""
LIMITS = (RMS_LIMIT, MAX_LIMIT, BLOCK_LIMIT, SMALL_LIMIT)
GROSS = 1e5
"""Ratio from which on an error is no rounding: bf16 inside an fp32 contract stays below."""


class Size(enum.Enum):
    """How bad an output is."""

    FINE = "within every limit"
    IMPRECISE = "beyond a limit, but the size of a rounding in a lower precision"
    WRONG = "beyond any rounding"


Ratios = tuple[float, float, float, float]
"""What `LIMITS` are of: rms, largest error, worst block, worst magnitude of small elements."""


def ratios_of(error: verdict_pb2.OutputError) -> Ratios:
    """Of an output."""
    return error.rms_ratio, error.max_ratio, error.block_ratio, error.small_ratio


def size_of(error: verdict_pb2.OutputError) -> Size:
    """Where an output stands by its error ratios; masks and integers are looked at elsewhere."""
    ratios = ratios_of(error)
    if all(ratio <= limit for ratio, limit in zip(ratios, LIMITS, strict=True)):
        return Size.FINE
    # A precision cut is spread evenly over the elements; a wrong element or tile is not, however small its share.
    spread = max(error.rms_ratio, 1e-300)
    even = error.max_ratio <= 32.0 * spread and error.block_ratio <= 16.0 * spread
    small = all(math.isfinite(ratio) and ratio < GROSS for ratio in ratios)
    return Size.IMPRECISE if even and small else Size.WRONG


def worst_of(ratios: Ratios) -> float:
    """The ratio that is furthest beyond its limit, whichever it is."""
    return max((ratio / limit, ratio) for ratio, limit in zip(ratios, LIMITS, strict=True))[1]


def is_off_in_small(error: verdict_pb2.OutputError) -> bool:
    """Whether what is small beside the rest is all that is beyond its limit."""
    others = zip(ratios_of(error)[:3], LIMITS, strict=False)
    return error.small_ratio > SMALL_LIMIT and all(ratio <= limit for ratio, limit in others)


def worst_ratio(error: verdict_pb2.OutputError) -> float:
    """As `worst_of`, of an output."""
    return worst_of(ratios_of(error))


def outputs(
    comparisons: Sequence[verdict_pb2.Comparison],
) -> Iterator[tuple[verdict_pb2.Comparison, verdict_pb2.OutputError]]:
    """Every output of every comparison."""
    for comparison in comparisons:
        for error in comparison.outputs:
            yield comparison, error
