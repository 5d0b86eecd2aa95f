"""How far the result of a timed call may be off eager's: beyond any rounding, or less precise over many calls.

The one idea: eager's own error against the truth is the unit. It draws no value and asks nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_bench.judging import comparison
from warpsmith.v1 import verdict_pb2

RMS_WITHIN, WORST_WITHIN = 16.0, 64.0
"""How far a timed call may be off eager, in units of how far eager is off the truth: all elements, and the worst one.
Judged calls are held to a quarter of it against the truth; a cut of precision is beyond it as well."""
POOLED, POOLED_WITHIN = 8, 3.0
"""So many last looks are suspect where they are together farther off eager's than so many yardsticks of judged calls;
two right results are 1.4 apart."""


@dataclass(frozen=True)
class Yardstick:
    """How far eager is off the truth in one region, on the task's own values."""

    rms: float
    worst: float
    pooled: float
    """That of judged calls."""


class LastLooks:
    """How far the results of the last timed calls with the same parameters were off, together."""

    def __init__(self) -> None:
        self._squares: list[list[float]] = []

    def suspect(self, paces: Sequence[float]) -> dict[int, float]:
        """One more look, each region's in yardsticks: by its place, how far a region's last `POOLED` are off together,
        where that is suspect."""
        self._squares.append([each**2 for each in paces])
        del self._squares[:-POOLED]  # honest looks of the beginning would hide what comes later
        if len(self._squares) < POOLED:
            return {}
        ratios = [math.sqrt(sum(squares) / POOLED) for squares in zip(*self._squares, strict=True)]
        return {place: ratio for place, ratio in enumerate(ratios) if ratio > POOLED_WITHIN}


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
    rounding = comparison.rounding_floor(rms, eager.dtype, eager.numel())
    return Yardstick(
        max(own.rms_error, 2.0 * step, floor, least),
        max(own.max_error, comparison.ulp(largest, eager.dtype), floor, least),
        max(own.rms_error, rounding, floor, least),
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


def less_precise(names: Sequence[str], suspect: Mapping[int, float], errors: Sequence[verdict_pb2.OutputError]) -> str:
    """What is said of suspect results of which the last is less exact than judged calls have to be, else empty.

    `errors`: what the judge finds of the last results, each in its place; empty where there is no truth.
    """
    for place, ratio in suspect.items():
        if errors[place].rms_ratio > RMS_WITHIN / 4 if errors else ratio > RMS_WITHIN:
            return (
                f"{names[place]} of {POOLED} timed calls is {ratio:.3g} times as far off eager's as eager is off the "
                "truth: less precise than in judged calls"
            )
    return ""


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
