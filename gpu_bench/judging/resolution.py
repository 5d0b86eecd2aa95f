"""Whether results that 16 bits make coarse show that all of an input was read.

The one idea: where one half of an input can stand for the other on the task's own values, and no output shows it
beyond what a solution may be off, whoever reads half is right there. It is found by trying, and judges no candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from gpu_bench.judging import guard, looks
from gpu_bench.judging.dependence import COARSE, DRAWS, Base, Draw, Outputs, Run
from warpsmith.v1 import verdict_pb2

SECONDS, LEAST = 2.0, 4
"""After which no further half is tried, once so many are: those of the longest dimensions."""
SHOWN = 3.0
"""Times what a judged call may be off that a half has to move an output by. Of an even sum an eighth that is left out
moves it by 0.38 of that: more than is let in."""
_LOOKED_AT = 1 << 26
"""Elements of an output that are compared, spread over all of it."""
_TASKS_OWN = verdict_pb2.VALUE_FAMILY_FRESH
_OTHERS = (verdict_pb2.VALUE_FAMILY_NORMAL, verdict_pb2.VALUE_FAMILY_MIXED)

Place = tuple[slice, ...]
"""Where a half of a tensor lies."""


def is_unresolved(
    base: Base,
    leaves: Sequence[torch.Tensor],
    draw: Draw,
    run: Run,
    now_s: Callable[[], float] = time.perf_counter,
) -> bool:
    """Whether a good part of an input may be left unread, on values as the task draws them, and nothing would show it.

    Tried are the halves of every input along each dimension, as blocks and as every second place, for outputs that
    16 bits or TF32 make coarse. An output that does not change with a half on values of other families either does not
    depend on it, and needs not read it; nor does one of which both halves are always the same.
    """
    yards = {n: yard for n in range(base.output_count) if (yard := _coarse_yardstick(base, n)) is not None}
    begin = now_s()

    def still(before: Outputs, after: Outputs) -> set[int]:
        return {n for n, yard in yards.items() if not _shows(after[n], before[n], yard)}

    def is_hidden(position: int, half: Place, stands_in: Place) -> bool:
        hidden, is_tried = set(yards), False
        for number in range(DRAWS):
            own = leaves if number == 0 else draw(_TASKS_OWN, number)
            if guard.same_bits(own[position][half], own[position][stands_in]):
                continue
            before = base.eager if number == 0 else run(own)
            after = run(_with(own, position, half, own[position][stands_in]))
            hidden &= still(before, after) if before is not None and after is not None else set()
            if not is_tried and hidden:
                hidden &= depending(position, half)
            if not hidden:
                return False
            is_tried = True
        return is_tried

    def depending(position: int, half: Place) -> set[int]:
        results = (run(_with(leaves, position, half, draw(family, 0)[position][half])) for family in _OTHERS)
        return set[int]().union(*({*yards} - still(base.eager, each) for each in results if each is not None))

    for count, half in enumerate(_halves(leaves) if yards else ()):
        if count >= LEAST and now_s() - begin > SECONDS:
            break
        if is_hidden(*half):
            return True
    return False


def _coarse_yardstick(base: Base, position: int) -> looks.Yardstick | None:
    """How far eager is off, of a float output that is as coarse as 16 bits or TF32 make it."""
    eager, truth = base.eager[position], base.truth[position]
    if not eager.is_floating_point() or not eager.numel():
        return None
    yard = looks.yardstick(eager, truth, base.floors[position])
    size = float(truth.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
    return yard if yard.judged > COARSE * size else None


def _shows(result: torch.Tensor, other: torch.Tensor, yard: looks.Yardstick) -> bool:
    """Whether two results are farther apart than any that are let in."""
    if result.shape != other.shape:
        return True
    step = max(1, result.numel() // _LOOKED_AT)
    result, other = (each.reshape(-1)[::step] for each in (result, other))
    if not torch.equal(result.isfinite(), other.isfinite()):
        return True
    is_far = looks.pace(result, other, yard) > SHOWN * looks.JUDGED_WITHIN["rms_ratio"]
    largest = float((result - other).double().nan_to_num_(0.0, 0.0, 0.0).abs().max())
    return is_far or largest > SHOWN * looks.JUDGED_WITHIN["max_ratio"] * yard.worst


def _halves(leaves: Sequence[torch.Tensor]) -> Iterator[tuple[int, Place, Place]]:
    """(input, a half, the other half) along each dimension that has two and is not one element seen many times, the
    longest first."""
    dims = [(leaf.shape[dim], n, dim) for n, leaf in enumerate(leaves) for dim in range(leaf.ndim) if leaf.numel()]
    for extent, position, dim in sorted(dims, reverse=True):
        whole, middle = (slice(None),) * dim, extent // 2
        if middle and leaves[position].stride(dim):
            yield position, (*whole, slice(middle, 2 * middle)), (*whole, slice(0, middle))
            yield position, (*whole, slice(1, 2 * middle, 2)), (*whole, slice(0, 2 * middle, 2))


def _with(leaves: Sequence[torch.Tensor], position: int, half: Place, values: torch.Tensor) -> list[torch.Tensor]:
    """The inputs with other values in one half of one of them, wherever that one is passed."""
    changed = leaves[position].clone()
    changed[half] = values
    return [changed if each is leaves[position] else each for each in leaves]
