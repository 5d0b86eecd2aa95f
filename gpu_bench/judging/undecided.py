"""Elements that any rounding decides otherwise: of two scores of 1e8, either may win a softmax.

The one idea: where the float64 truth itself changes with its sources' last bits, in a few elements of many, no result
is wrong, eager's least of all; and which of these elements eager gets right is luck. So it is where a few elements are
so large that they are nearly all of an output's error, and share a factor: exponentials of one head's running sum.
The sources move row by row, by up to 16 roundings there and back, about what an fp32 sum of a thousand products is off
by. An element is excused where a candidate is no farther from the truth than twice what these moves did to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gpu_bench.judging.comparison import count_of_large
from gpu_bench.truth.floats_of_8_bits import before_rounding
from warpsmith.v1 import verdict_pb2

FAR = 4.0
"""Times its yardstick that an output has to be off to be looked at again."""
FAR_BY_LUCK = 256.0
"""The most that eager's error may be too small by luck: once in 300 outputs whose elements share one factor."""
PAIRS = 4
"""Moves there and back."""
REACH = 16.0
"""Roundings of a source's row that a move changes it by at most."""
LEAST = 1e-3
"""Of the truth's mean magnitude: what moves by less is decided."""
MOST_SHARE = 1e-3
"""Of an output's elements; where more are undecided, the yardsticks of all others mostly are as long."""
_CHUNK = 1 << 24
"""Elements looked at at once."""


def moves(seed: int) -> Iterator[tuple[int, float]]:
    """(seed, reach) of each move, for `conditioning.Moved`."""
    for number in range(PAIRS):
        yield from ((seed + 1000 * (number + 1), sign * REACH) for sign in (1.0, -1.0))


def is_far_by_luck(error: verdict_pb2.OutputError, candidate: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether an output of ordinary values may be far off as eager, by luck, is not: by a little, in few elements."""
    is_far = FAR < max(error.rms_ratio, error.max_ratio, error.block_ratio) < FAR_BY_LUCK
    if not is_far or error.non_finite_mismatch_count or not candidate.is_floating_point():
        return False
    return is_of_few(candidate, truth)


def is_of_few(candidate: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether the errors of at most `MOST_SHARE` of the elements make up their sum of squares, as (Σe²)²/Σe⁴ counts."""
    parts = zip(*(torch.split(each.reshape(-1), _CHUNK) for each in (candidate, truth)), strict=True)
    count = count_of_large(before_rounding(part.to(known.device), known) - known for part, known in parts)
    return 0.0 < count <= MOST_SHARE * truth.numel()


def excused(
    candidate: torch.Tensor, truth: torch.Tensor, after: Iterator[torch.Tensor], *, if_many: bool = False
) -> torch.Tensor:
    """The candidate's values, and the truth's where nothing decides between them; of the candidate's type.

    `if_many`: where more than `MOST_SHARE` are undecided, those that move most, in place of none.
    `truth` and what the moves make of it, `after`, are float64; all have one shape and one device.
    """
    span = torch.zeros_like(truth)
    for moved in after:
        torch.maximum(span, (moved - truth).abs_().nan_to_num_(0.0, 0.0, 0.0), out=span)
    size = float(truth.abs().nan_to_num_(0.0, 0.0, 0.0).mean())
    is_open = span > LEAST * size
    most = math.floor(MOST_SHARE * truth.numel())
    if int(is_open.sum()) > most:
        if not if_many:
            return candidate
        is_open &= span > span.reshape(-1).topk(most + 1, sorted=False).values.min()
    is_open &= (before_rounding(candidate, truth) - truth).abs() <= 2.0 * span
    return torch.where(is_open, truth.to(candidate.dtype), candidate)
