"""Elements that any rounding decides otherwise: of two scores of 1e8, either may win a softmax.

The one idea: where the float64 truth itself changes with its sources' last bits, in a few elements of many, no result
is wrong, eager's least of all; and which of these elements eager gets right is luck. The sources move row by row, by
up to 16 roundings there and back, about what an fp32 sum of a thousand products is off by. An element is excused where
a candidate is no farther from the truth than twice what these moves did to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

PAIRS = 4
"""Moves there and back."""
REACH = 16.0
"""Roundings of a source's row that a move changes it by at most."""
LEAST = 1e-3
"""Of the truth's mean magnitude: what moves by less is decided."""
MOST_SHARE = 1e-3
"""Of an output's elements; where more are undecided, the yardsticks of all others already are as long."""


def moves(seed: int) -> Iterator[tuple[int, float]]:
    """(seed, reach) of each move, for `conditioning.Moved`."""
    for number in range(PAIRS):
        yield from ((seed + 1000 * (number + 1), sign * REACH) for sign in (1.0, -1.0))


def excused(candidate: torch.Tensor, truth: torch.Tensor, after: Iterator[torch.Tensor]) -> torch.Tensor:
    """The candidate's values, and the truth's where nothing decides between them; of the candidate's type.

    `truth` and what the moves make of it, `after`, are float64; all have one shape and one device.
    """
    span = torch.zeros_like(truth)
    for moved in after:
        torch.maximum(span, (moved - truth).abs_().nan_to_num_(0.0, 0.0, 0.0), out=span)
    size = float(truth.abs().nan_to_num_(0.0, 0.0, 0.0).mean())
    is_open = span > LEAST * size
    if int(is_open.sum()) > MOST_SHARE * truth.numel():
        return candidate
    is_open &= (candidate - truth).abs() <= 2.0 * span
    return torch.where(is_open, truth.to(candidate.dtype), candidate)
