"""Whether results in 16 bits show that all of an input was read.

The one idea: where one half of an input can stand for the other on the task's own values, and no output shows it
beyond what a solution may be off, whoever reads half is right there. It is found by trying, and judges no candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from gpu_bench.judging import looks
from gpu_bench.judging.dependence import DRAWS, Base, Draw, Outputs, Run
from warpsmith.v1 import verdict_pb2

SECONDS, LEAST = 2.0, 4
"""After which no further half is tried, once so many of the longest dimensions are."""
SHOWN = 3.0
"""Times what a judged call may be off that a half has to move an output by. An eighth that is left out moves it by 0.38
of that: more than is let in."""
_COARSE = (torch.float16, torch.bfloat16)
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
    """Whether half of an input may be left unread, on values as the task draws them, and nothing would show it.

    Tried are the halves of every input along each dimension, as blocks and as every second place. An output that does
    not change with a half on values of other families either does not depend on it, and needs not read it.
    """
    positions = [n for n, each in enumerate(base.eager[: base.output_count]) if each.dtype in _COARSE]
    yards = {n: looks.yardstick(base.eager[n], base.truth[n], base.floors[n]) for n in positions}
    begin, plain = now_s(), dict[int, tuple[Sequence[torch.Tensor], Outputs | None]]()

    def still(before: Outputs, after: Outputs) -> set[int]:
        return {n for n in positions if not _shows(after[n], before[n], yards[n])}

    def drawn(number: int) -> tuple[Sequence[torch.Tensor], Outputs | None]:
        if number not in plain:
            own = leaves if number == 0 else draw(_TASKS_OWN, number)
            plain[number] = own, base.eager if number == 0 else run(own)
        return plain[number]

    for count, (position, half, stands_in) in enumerate(_halves(leaves) if positions else ()):
        if count >= LEAST and now_s() - begin > SECONDS:
            break
        hidden = set(positions)
        for number in range(DRAWS):
            own, before = drawn(number)
            after = run(_with(own, position, half, own[position][stands_in]))
            hidden &= still(before, after) if before is not None and after is not None else set()
            if not hidden:
                break
        for family in _OTHERS if hidden else ():
            after = run(_with(leaves, position, half, draw(family, 0)[position][half]))
            if after is not None and hidden - still(base.eager, after):
                return True
    return False


def _shows(result: torch.Tensor, other: torch.Tensor, yard: looks.Yardstick) -> bool:
    """Whether two results of equal shape are farther apart than any that are let in."""
    if result.shape != other.shape:
        return True
    apart = (result.double() - other.double()).abs()
    if not bool(apart.isfinite().all()):
        return True
    largest = float(apart.max()) if apart.numel() else 0.0
    is_far = looks.pace(result, other, yard) > SHOWN * looks.JUDGED_WITHIN["rms_ratio"]
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
