"""Results of timed calls: whether they are off eager's beyond any rounding, or less precise than when they are judged.

The one idea: eager's own error against the truth is the unit, found out once. What seems too far off is judged by the
truth of its own values, as a judged call is, for a yardstick of others may be short by luck. It draws no value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

import torch

from gpu_bench.judging import comparison
from gpu_bench.judging.magnitudes import Magnitudes
from warpsmith.v1 import verdict_pb2

RMS_WITHIN, WORST_WITHIN = 16.0, 64.0
"""How far a timed call may be off eager without a second look, in units of how far eager is off the truth: all
elements, and the worst one. A cut of precision is beyond it as well."""
SUSPECT = 3.0
"""How far a timed call may be off eager as rms without a second look, in yardsticks of judged calls; two right results
are 1.4 apart. Without a truth to look again it is `UNJUDGED_WITHIN`."""
UNJUDGED_WITHIN = 5.0
SMALL_UNJUDGED_WITHIN = 64.0
"""The same of what is small beside the rest, which is asked by magnitude."""
JUDGED_WITHIN = {"rms_ratio": RMS_WITHIN / 4, "max_ratio": 8.0, "block_ratio": 16.0, "small_ratio": 8.0}
"""How far a result may be off the truth of its own values: what judged calls are held to."""
PLAINLY_WRONG = 100.0
"""How many times as far off the truth as eager a single call's result is not by luck."""
_NO_PARTS = comparison.Forgiveness(worst_block_for_all=True)
"""For what is asked of an output as a whole and of its worst element."""
FAILURES, FAILING = 2, 0.25
"""So many second looks, and such a share of them, have to fail as rms before it is held against a solution: one may
fail by luck."""


@dataclass(frozen=True)
class Yardstick:
    """How far eager is off the truth in one region, on the task's own values."""

    rms: float
    worst: float
    judged: float
    """rms as well, by the least that judged calls count, which is shorter in 16 bits."""
    small: Magnitudes | None = None
    """Of what is small beside the rest."""


class Looks:
    """What is seen of the results of timed calls with the same parameters."""

    def __init__(self) -> None:
        self._judged_count = self._failures = 0

    def wrong(
        self,
        names: Sequence[str],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        yards: Sequence[Yardstick],
        judged: Callable[[], Sequence[verdict_pb2.OutputError]],
    ) -> str:
        """What is wrong with a call, empty where nothing is.

        `pairs`: of each region what was given, where it lies, and eager's. `judged`: what the judge says of each region
        as in a judged call; nothing where there is no truth. It is asked only where something seems wrong, and once.
        """
        paces = [pace(*pair, yard) for pair, yard in zip(pairs, yards, strict=True)]
        seems = [far(*pair, yard) for pair, yard in zip(pairs, yards, strict=True)]
        smalls = [small(*pair, yard) for pair, yard in zip(pairs, yards, strict=True)]
        suspect = [place for place, each in enumerate(paces) if each > SUSPECT]
        if (
            max(smalls, default=0.0) <= SUSPECT
            and not suspect
            and not any(seems)
            and not any(starmap(differing, pairs))
        ):
            return ""
        errors = judged()
        if [pace(*pair, yard) for pair, yard in zip(pairs, yards, strict=True)] != paces:
            return f"a result changed after the timed call: then it {next(filter(None, seems), 'was less precise')}"
        for place, (name, told, pair) in enumerate(zip(names, seems, pairs, strict=True)):
            if told and not (errors and _is_exact(errors[place])):
                return f"{name} of a timed call {told}"
            if errors and differing(*pair) and (count := errors[place].unequal_count):
                return f"{name} of a timed call differs from eager's in {count} elements"
            if smalls[place] > SUSPECT and (found := _small_is_wrong(smalls[place], errors[place] if errors else None)):
                return f"what is small beside the rest of {name} of a timed call {found}"
        return self._less_precise(names, {place: paces[place] for place in suspect}, errors)

    def _less_precise(
        self, names: Sequence[str], suspect: Mapping[int, float], errors: Sequence[verdict_pb2.OutputError]
    ) -> str:
        if not suspect:
            return ""
        ratios = {place: errors[place].rms_ratio for place in suspect} if errors else suspect
        place = max(ratios, key=lambda each: ratios[each])
        self._judged_count += 1
        self._failures += ratios[place] > (JUDGED_WITHIN["rms_ratio"] if errors else UNJUDGED_WITHIN)
        if self._failures < max(FAILURES, FAILING * self._judged_count):
            return ""
        off = "the truth as eager" if errors else "eager's as eager is off the truth"
        times = f"{ratios[place]:.3g} times as far off {off}"
        return f"{names[place]} of timed calls is {times}: less precise than in judged calls"


def plainly_wrong(names: Sequence[str], errors: Sequence[verdict_pb2.OutputError]) -> str:
    """Which region of a judged call is wrong beyond any luck, and how; empty where none is, or there is no truth."""
    for name, error in zip(names, errors, strict=bool(errors)):
        ratios = (error.rms_ratio, error.max_ratio)
        if count := error.non_finite_mismatch_count or error.unequal_count:
            return f"{name} differs in {count} elements in a call"
        if not all(each <= PLAINLY_WRONG for each in ratios):
            return f"{name} is {max(ratios):.3g} times as far off the truth as eager in a call"
    return ""


def _is_exact(error: verdict_pb2.OutputError) -> bool:
    """Whether a judged call would be let in with it."""
    unlike = error.non_finite_mismatch_count or error.unequal_count
    return not unlike and all(getattr(error, ratio) <= most for ratio, most in JUDGED_WITHIN.items())


def _small_is_wrong(ratio: float, error: verdict_pb2.OutputError | None) -> str:
    """How what is small is off, if it is: the truth where `error` tells of it, and eager's by `ratio` otherwise."""
    if error is None:
        return f"is {ratio:.3g} times as far off eager's as eager is off the truth" * (ratio > SMALL_UNJUDGED_WITHIN)
    is_off = error.small_ratio > JUDGED_WITHIN["small_ratio"]
    return f"is {error.small_ratio:.3g} times as far off the truth as eager or the third digit" * is_off


def yardstick(eager: torch.Tensor, truth: torch.Tensor, floor: float) -> Yardstick:
    """How far eager is off the truth, and no less than a rounding of the result."""
    eager, truth = comparison.parts_of(eager), comparison.parts_of(truth)
    if not eager.is_floating_point() or not eager.numel():
        return Yardstick(0.0, 0.0, 0.0)
    own = comparison.compare(eager, eager, truth, terms_floor=floor, forgiveness=_NO_PARTS)
    size = truth.nan_to_num(0.0, 0.0, 0.0).abs()
    rms, largest = float(size.square().mean().sqrt()), float(size.max())
    least = comparison.least_yardstick(eager.dtype)
    step = comparison.ulp(rms, eager.dtype)
    rounding = comparison.rounding_floor(rms, eager.dtype, eager.numel())
    return Yardstick(
        max(own.rms_error, 2.0 * step, floor, least),
        max(own.max_error, comparison.ulp(largest, eager.dtype), floor, least),
        max(own.rms_error, rounding, floor, least),
        _by_magnitude(eager, eager, truth),
    )


def far(result: torch.Tensor, eager: torch.Tensor, yard: Yardstick) -> str:
    """How a result is farther off eager's than any rounding; empty where it is not."""
    result, eager = comparison.parts_of(result), comparison.parts_of(eager)
    if not eager.is_floating_point():
        count = differing(result, eager)
        return f"differs from eager's in {count} elements" if count > eager.numel() // 100 else ""
    error = comparison.compare(result, eager, eager.double(), terms_floor=0.0, forgiveness=_NO_PARTS)
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
    """How far a result is off eager's, in yardsticks of judged calls; 0 for integers."""
    result, eager = comparison.parts_of(result), comparison.parts_of(eager)
    if not eager.is_floating_point() or not eager.numel():
        return 0.0
    return float((result - eager).double().nan_to_num_(0.0, 0.0, 0.0).square().mean().sqrt()) / yard.judged


def small(result: torch.Tensor, eager: torch.Tensor, yard: Yardstick) -> float:
    """How far what is small beside the rest is off eager's, by magnitude: in what eager is off the truth there, or in
    the third digit; 0 for integers."""
    result, eager = comparison.parts_of(result), comparison.parts_of(eager)
    if not eager.is_floating_point() or not eager.numel():
        return 0.0
    least = comparison.least_yardstick(eager.dtype)
    return _by_magnitude(result, eager, eager).ratio(yard.judged, 1.0, least, yard.small)


def _by_magnitude(result: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> Magnitudes:
    seen = Magnitudes(eager.numel(), comparison.BLOCK, eager.shape, eager.dtype)
    seen.add(result.reshape(-1), eager.reshape(-1), truth.reshape(-1))
    return seen
