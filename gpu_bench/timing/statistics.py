"""Medians, intervals and the rule for "faster".

One idea: two arms are compared by the ratio of their medians over all visits, each in units of its *block*, in which
every arm was visited close together; so drift that a block shares cancels. Blocks are resampled. An arm with two
speeds of its own gains nothing by them: the lower bound holds for the plain medians too. Knows no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.float64]
"""Nanoseconds [blocks, visits]: NaN rows where a block was discarded or the arm sat out."""

RESAMPLE_COUNT = 1000
FEW_BLOCKS = 10
"""Below this many blocks a bootstrap of medians is too narrow; the range of the block ratios is taken instead."""
LEAST_BLOCKS = 3
"""Below this many blocks nothing is ever called faster."""
LEAST_GAIN = 1.01


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its 95 % interval."""

    median: float
    """Ratio of the two medians over the blocks that both arms have."""
    low: float
    """Lower bound; 0 when there is no common block."""
    high: float
    """Upper bound; infinite when there is no common block."""
    block_count: int
    """Blocks that both arms have."""

    def times(self, factor: float) -> Ratio:
        """The ratio for an arm that takes `factor` times as long as the first."""
        return Ratio(factor * self.median, factor * self.low, factor * self.high, self.block_count)


UNKNOWN = Ratio(math.nan, 0.0, math.inf, 0)


def median(blocks: Blocks) -> float:
    """Median in ns over all visits of complete blocks; NaN for none.

    Over visits, not over block means: one interrupted visit would spoil its block's mean, and a shared processor
    interrupts often. For quiet noise both are equally precise.
    """
    kept = blocks[_complete(blocks)]
    return float(np.median(kept)) if kept.size else math.nan


def ratio(numerator: Blocks, denominator: Blocks, seed: int = 0) -> Ratio:
    """Median of `numerator` over median of `denominator` ([blocks, visits] ns each), paired by block.

    The lower bound is the least of three: that of `_in_block_units`, the same in units of the numerator alone, and
    the ratio of the plain medians. An arm that is fast in some visits and slow in others shrinks the unit of both in
    the first: eager 2, a candidate 1 in 40 % of visits and else 3 gave 1.15 where the medians say 0.67. (The plain
    medians' own bootstrap would be as sound, and 2 % lower under drift that both arms share.)
    """
    above, below = _common(numerator, denominator)
    if not len(above):
        return UNKNOWN
    result = _in_block_units(above, below, seed)
    in_numerators = _bootstrapped(above, below, np.exp(np.log(above).mean(axis=1, keepdims=True)), seed)
    plain = float(np.median(above) / np.median(below))
    return replace(result, low=min(result.low, in_numerators.low, plain))


def _in_block_units(above: Blocks, below: Blocks, seed: int) -> Ratio:
    """Ratio of the medians of common blocks, one at least.

    Visits are taken in units of the block, the geometric mean of the two arms' shortest visits to it: a machine that
    runs at two speeds for seconds at a time would otherwise have two medians. (The median of all the block's visits
    as the unit would be biased by 0.2 %; their mean is spoilt by one interruption.)
    """
    return _bootstrapped(
        above, below, np.sqrt(above.min(axis=1, keepdims=True) * below.min(axis=1, keepdims=True)), seed
    )


def _bootstrapped(above: Blocks, below: Blocks, units: Blocks, seed: int) -> Ratio:
    """Ratio of the medians in units of [blocks, 1] ns.

    The interval is the percentile bootstrap over blocks (Efron and Tibshirani, An Introduction to the Bootstrap,
    chapter 13), widened to the range of the block ratios when there are fewer than `FEW_BLOCKS`.
    """
    count = len(above)
    above, below = above / units, below / units
    centre = float(np.median(above) / np.median(below))
    picks = np.random.default_rng(seed).integers(0, count, (RESAMPLE_COUNT, count))
    resampled = np.median(above[picks], axis=(1, 2)) / np.median(below[picks], axis=(1, 2))
    low, high = (float(bound) for bound in np.percentile(resampled, (2.5, 97.5)))
    if count < FEW_BLOCKS:
        each = above.mean(axis=1) / below.mean(axis=1)
        low, high = min(low, float(each.min())), max(high, float(each.max()))
    return Ratio(centre, low, high, count)


def noise_floor(first: Blocks, second: Blocks, seed: int = 0) -> float:
    """How far two arms that are the same thing seem to differ: the farther bound of their interval from 1.

    Not half its width: an interval of [1.02, 1.03] between equals says that 3 % means nothing here.
    """
    above, below = _common(first, second)
    if not len(above):
        return math.inf
    result = _in_block_units(above, below, seed)
    return max(result.high - 1.0, 1.0 / result.low - 1.0 if result.low > 0 else math.inf)


def split_noise_floor(blocks: Blocks, seed: int = 0) -> float:
    """Noise floor from one arm alone: its visits dealt alternately into two halves ([blocks, 2] ns).

    First visits of even blocks with second visits of odd blocks against the rest, so that a drift inside a block
    does not count as a difference. A little larger than an A/A arm's, which has twice the visits.
    """
    swapped = blocks.copy()
    swapped[1::2] = swapped[1::2, ::-1]
    return noise_floor(swapped[:, :1], swapped[:, 1:2], seed)


def threshold(noise: float) -> float:
    """What the lower bound of a speedup must exceed before anything is called faster."""
    return max(LEAST_GAIN, 1.0 + 3.0 * noise)


def faster(speedup: Ratio, noise: float) -> bool:
    """Whether a speedup is beyond doubt: its lower bound clears `threshold`, on at least `LEAST_BLOCKS` blocks."""
    return speedup.block_count >= LEAST_BLOCKS and speedup.low > threshold(noise)


def _common(numerator: Blocks, denominator: Blocks) -> tuple[Blocks, Blocks]:
    """The blocks that both arms have."""
    length = min(len(numerator), len(denominator))
    above, below = numerator[:length], denominator[:length]
    common = _complete(above) & _complete(below)
    return above[common], below[common]


def _complete(blocks: Blocks) -> NDArray[np.bool_]:
    """Which blocks have all their visits."""
    return np.asarray(np.isfinite(blocks).all(axis=1), dtype=np.bool_)
