"""How far the result of a timed call may be off eager's: beyond any rounding, or less precise over many calls.

The one idea: eager's own error against the truth is the unit. It draws no value and asks nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_bench.judging import comparison
from gpu_bench.values.keys import Key
from warpsmith.v1 import judging_pb2

RMS_WITHIN, WORST_WITHIN = 16.0, 64.0
"""How far a timed call may be off eager, in units of how far eager is off the truth: all elements, and the worst one.
Judged calls are held to a quarter of it against the truth; a cut of precision is beyond it as well."""
POOLED, POOLED_WITHIN = 8, 5.0
"""So many last looks are together held to what judged calls are held to and eager's own error: what one is by luck,
many are not."""


@dataclass(frozen=True)
class Yardstick:
    """How far eager is off the truth in one region, on the task's own values."""

    rms: float
    worst: float
    pooled: float
    """As `rms`, with one rounding of a 16-bit result instead of two."""


class LastLooks:
    """How far the results of the last timed calls with the same parameters were off, together."""

    def __init__(self) -> None:
        self._squares: list[list[float]] = []

    def add(self, regions: Sequence[judging_pb2.Region], paces: Sequence[float]) -> str:
        """One more, each region's in yardsticks; what is wrong with the last `POOLED` of them, empty where nothing."""
        self._squares.append([each**2 for each in paces])
        del self._squares[:-POOLED]  # honest looks of the beginning would hide what comes later
        for region, squares in zip(regions, zip(*self._squares, strict=True), strict=True):
            if len(squares) == POOLED and (ratio := math.sqrt(sum(squares) / len(squares))) > POOLED_WITHIN:
                return (
                    f"{Key.of(region)} of {len(squares)} timed calls is {ratio:.3g} times as far off eager's as eager "
                    "is off the truth: less precise than in judged calls"
                )
        return ""


def yardstick(eager: torch.Tensor, truth: torch.Tensor, floor: float) -> Yardstick:
    """How far eager is off the truth, and no less than a rounding of the result."""
    eager, truth = comparison.parts_of(eager), comparison.parts_of(truth)
    if not eager.is_floating_point() or not eager.numel():
        return Yardstick(0.0, 0.0, 0.0)
    own = comparison.compare(eager, eager, truth, terms_floor=floor)
    size = truth.nan_to_num(0.0, 0.0, 0.0).abs()
    rms, largest = float(size.square().mean().sqrt()), float(size.max())
    least = comparison.least_yardstick(eager.dtype)
    step = comparison.ulp(rms, eager.dtype)
    return Yardstick(
        max(own.rms_error, 2.0 * step, floor, least),
        max(own.max_error, comparison.ulp(largest, eager.dtype), floor, least),
        max(own.rms_error, step if eager.itemsize < 4 else 2.0 * step, floor, least),
    )


def far(result: torch.Tensor, eager: torch.Tensor, yard: Yardstick) -> str:
    """How a result is farther off eager's than any rounding; empty where it is not."""
    result, eager = comparison.parts_of(result), comparison.parts_of(eager)
    if not eager.is_floating_point():
        count = differing(result, eager)
        return f"differs from eager's in {count} elements" if count > eager.numel() // 100 else ""
    error = comparison.compare(result, eager, eager.double(), terms_floor=0.0)
    if error.non_finite_mismatch_count:
        return f"differs from eager's in {error.non_finite_mismatch_count} elements in being NaN or infinite"
    if error.rms_error <= RMS_WITHIN * yard.rms and error.max_error <= WORST_WITHIN * yard.worst:
        return ""
    return (
        f"is {error.max_error:.3g} off eager's at element {error.worst_index} ({error.worst_value:.6g} instead of "
        f"{error.worst_truth:.6g}), {error.rms_error:.3g} rms: beyond any rounding"
    )


def differing(result: torch.Tensor, eager: torch.Tensor) -> int:
    """Integers and booleans that are not eager's; 0 of other numbers."""
    if eager.is_floating_point() or eager.is_complex():
        return 0
    return int((result != eager).sum())


def pace(result: torch.Tensor, eager: torch.Tensor, yard: Yardstick) -> float:
    """How far a result is off eager's, in yardsticks of many calls; 0 for integers."""
    result, eager = comparison.parts_of(result), comparison.parts_of(eager)
    if not eager.is_floating_point() or not eager.numel():
        return 0.0
    return float((result - eager).double().nan_to_num_(0.0, 0.0, 0.0).square().mean().sqrt()) / yard.pooled
