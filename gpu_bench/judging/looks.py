"""Results of timed calls: whether they are off eager's beyond any rounding, or less precise over many calls.

The one idea: eager's own error against the truth is the unit, found out once. What seems too far off is judged by the
truth of its own values, as a judged call is, for a yardstick of others may be short by luck. It draws no value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_bench.judging import comparison
from warpsmith.v1 import verdict_pb2

RMS_WITHIN, WORST_WITHIN = 16.0, 64.0
"""How far a timed call may be off eager without a second look, in units of how far eager is off the truth: all
elements, and the worst one. A cut of precision is beyond it as well."""
JUDGED_RMS, JUDGED_WORST = 4.0, 8.0
"""The same off the truth of its own values, where it is looked at again: what judged calls are held to."""
POOLED, LEAST_POOLED, POOLED_WITHIN = 8, 4, 3.0
"""So many last looks, or those that there are when there are a few, are suspect where they are together farther off
eager's than so many yardsticks of judged calls; two right results are 1.4 apart."""
FAILURES = 2
"""Suspect results that are too far off the truth before it is held against a solution: one may be so by luck."""
UNJUDGED_WITHIN = 5.0
"""As `POOLED_WITHIN`, where there is no truth to look again."""


@dataclass(frozen=True)
class Yardstick:
    """How far eager is off the truth in one region, on the task's own values."""

    rms: float
    worst: float
    pooled: float
    """rms as well, by the least that judged calls count, which is shorter in 16 bits: for many looks together."""


class Looks:
    """What is seen of the results of timed calls with the same parameters."""

    def __init__(self) -> None:
        self._squares: list[list[float]] = []
        """Of the last looks: how far each region was off eager's, in pooled yardsticks, squared."""
        self._failures = 0

    def wrong(
        self,
        names: Sequence[str],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        yards: Sequence[Yardstick],
        judged: Callable[[], Sequence[verdict_pb2.OutputError]],
    ) -> str:
        """What is wrong with a call, empty where nothing is.

        `pairs`: of each region what was given, and eager's. `judged`: what the judge says of each region as in a judged
        call; nothing where there is no truth. It is asked only where something seems wrong, and once.
        """
        judged = functools.cache(judged)
        for place, (name, pair, yard) in enumerate(zip(names, pairs, yards, strict=True)):
            told = far(*pair, yard)
            if told and not (judged() and _is_exact(judged()[place])):
                return f"{name} of a timed call {told}"
            if differing(*pair) and judged() and (count := judged()[place].unequal_count):
                return f"{name} of a timed call differs from eager's in {count} elements"
        return self._less_precise(names, [pace(*pair, yard) for pair, yard in zip(pairs, yards, strict=True)], judged)

    def _less_precise(
        self, names: Sequence[str], paces: Sequence[float], judged: Callable[[], Sequence[verdict_pb2.OutputError]]
    ) -> str:
        self._squares.append([each**2 for each in paces])
        del self._squares[:-POOLED]  # honest looks of the beginning would hide what comes later
        if len(self._squares) < LEAST_POOLED:
            return ""
        ratios = [math.sqrt(sum(squares) / len(self._squares)) for squares in zip(*self._squares, strict=True)]
        suspect = {place: ratio for place, ratio in enumerate(ratios) if ratio > POOLED_WITHIN}
        if not suspect:
            return ""
        if not (errors := judged()):
            place, ratio = max(suspect.items(), key=lambda item: item[1])
            off = f"{ratio:.3g} times as far off eager's as eager is off the truth" if ratio > UNJUDGED_WITHIN else ""
        else:
            place = max(suspect, key=lambda each: errors[each].rms_ratio)
            ratio = errors[place].rms_ratio
            if ratio <= JUDGED_RMS:
                self._squares.clear()  # else it would be asked at every look
                return ""
            self._failures += 1
            off = f"{ratio:.3g} times as far off the truth as eager" if self._failures >= FAILURES else ""
        return f"{names[place]} of timed calls is {off}: less precise than in judged calls" if off else ""


def _is_exact(error: verdict_pb2.OutputError) -> bool:
    """Whether a judged call would be let in with it."""
    unlike = error.non_finite_mismatch_count or error.unequal_count
    return not unlike and error.rms_ratio <= JUDGED_RMS and error.max_ratio <= JUDGED_WORST


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
