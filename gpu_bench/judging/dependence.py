"""What a reference's results depend on: found by trying, one source at a time.

The one idea: an output has moved when the judge would not take the old one for the new. Where nothing moves, a stored
answer is right, and nothing that is gained over computing it again is a kernel's. It judges no candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gpu_bench.judging import comparison, guard
from gpu_bench.timing.headline import INPUT_UNUSED, OUTPUT_CONSTANT, OUTPUT_ZERO
from gpu_bench.values.keys import Key
from warpsmith.v1 import timing_pb2, verdict_pb2

INPUT_SECONDS, MEMBER_SECONDS = 2.0, 1.0
"""After which no further input is tried, and no parameter or state, which may be hundreds."""
_YARDSTICKS = 8.0
"""By which an output has to move somewhere: what moves by less would pass for right."""
_LOOKED_AT = 1 << 26
"""Elements of an output that are compared, spread over all of it."""
COARSE = 2.0**-18
"""Of a tensor's size, as root mean squares: fp32 rounds to 2**-24 of it, TF32 to 2**-11."""
DRAWS, _MOST_DRAWS = 4, 24
"""Of the task's own values, on all of which a result has to be the same to be called constant for the task: floats, and
as many as there is time for of what else there is, for an index of two is the same in half of all draws."""
_TRIED = (verdict_pb2.VALUE_FAMILY_FRESH, verdict_pb2.VALUE_FAMILY_NORMAL, verdict_pb2.VALUE_FAMILY_MIXED)

Outputs = Sequence[torch.Tensor]
Draw = Callable[[verdict_pb2.ValueFamily.ValueType, int], Sequence[torch.Tensor]]
"""All tensor inputs on new values of a family, others for each number."""
Run = Callable[[Sequence[torch.Tensor]], Outputs | None]
"""Eager's results on these inputs; None where the reference refuses them."""


@dataclass(frozen=True)
class Base:
    """Results on the task's own values, with what they are compared by: each of all outputs and written sources."""

    eager: Outputs
    truth: Outputs
    floors: Sequence[float]
    output_count: int = 1
    """The first so many of them are outputs."""
    spares: Callable[[set[int]], bool] = bool
    """Whether a program has less to do that leaves out those at these positions."""

    def is_moved(self, outputs: Outputs) -> bool:
        """Whether any of them is another result."""
        return any(map(_differs, outputs, self.eager, self.truth, self.floors))

    def is_coarse(self, position: int) -> bool:
        """Whether eager's result is as far from the truth as only products in TF32 or 16 bits leave it."""
        eager, truth = self.eager[position], self.truth[position]
        if not eager.is_floating_point() or eager.dtype is not torch.float32:
            return False
        error, size = ((tensor.double().square().mean().sqrt()) for tensor in (eager.double() - truth, truth))
        return bool(error > COARSE * size)

    def still(self, outputs: Outputs) -> set[int]:
        """Positions of those that are the same result."""
        moved = map(_differs, outputs, self.eager, self.truth, self.floors)
        return {position for position, is_moved in enumerate(moved) if not is_moved}


@dataclass
class Dependence:
    """What was found."""

    flags: list[timing_pb2.Flag.ValueType] = field(default_factory=list)
    unused: list[Key] = field(default_factory=list)
    """Sources without influence."""


def find(
    base: Base,
    leaves: Sequence[torch.Tensor],
    draw: Draw,
    run: Run,
    members: Sequence[tuple[Key, Callable[[], Outputs | None]]] = (),
    now_s: Callable[[], float] = time.perf_counter,
) -> Dependence:
    """Tries every input, then parameters and state, each by what runs the reference with that one changed."""
    begin = now_s()
    found = Dependence()
    drawn = {_TRIED[0]: draw(_TRIED[0], 0)}
    fresh = run(drawn[_TRIED[0]]) if _are_other(drawn[_TRIED[0]], leaves) else None
    if fresh is not None and _has_constant(base, fresh, draw, run, lambda: now_s() - begin > INPUT_SECONDS):
        if all(not bool(each.any()) for each in (*base.eager, *fresh)):
            found.flags.append(OUTPUT_ZERO)
        found.flags.append(OUTPUT_CONSTANT)
    for position, leaf in enumerate(leaves):
        if now_s() - begin > INPUT_SECONDS:
            return found
        moved = []  # by each value that is another and that the reference takes
        for family in _TRIED:
            drawn[family] = drawn.get(family) or draw(family, 0)
            other = drawn[family][position]
            outputs = run([*leaves[:position], other, *leaves[position + 1 :]]) if _are_other([other], [leaf]) else None
            if outputs is not None:
                moved.append(base.is_moved(outputs))
            if any(moved):
                break
        if moved and not any(moved):
            found.unused.append(Key.input(position))
    if found.unused:
        found.flags.append(INPUT_UNUSED)
    for key, changed in members:
        if now_s() - begin > MEMBER_SECONDS:
            break
        outputs = changed()
        if outputs is not None and not base.is_moved(outputs):
            found.unused.append(key)
    return found


def _has_constant(base: Base, fresh: Outputs, draw: Draw, run: Run, is_over: Callable[[], bool]) -> bool:
    """Whether every result is the same, or one of several is for whatever the task draws, and another for other values:
    a sigmoid of what is always large. Left out, it is right in every timed call, and that may spare work.

    What is written does not count where PyTorch's own is coarse: in a network of convolutions in TF32 its running means
    are as far from the truth as those of two draws are from each other.
    """
    still = base.still(fresh)
    certain = {position for position in still if base.eager[position].is_floating_point()}  # no two are alike by chance
    for number in range(1, _MOST_DRAWS):
        is_settled = still <= certain and (len(still) == len(base.eager) or number >= DRAWS)
        if not still or is_settled or (number >= DRAWS and is_over()):
            break
        if (again := run(draw(_TRIED[0], number))) is None:
            return False
        still &= base.still(again)
    if len(still) == len(base.eager):
        return True
    still = {each for each in still if each < base.output_count or not base.is_coarse(each)}
    others = (run(draw(family, 0)) for family in _TRIED[1:])
    moved = (still - base.still(outputs) for outputs in others if outputs is not None)
    return bool(still) and any(map(base.spares, moved))


def _are_other(drawn: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> bool:
    return any(not guard.same_bits(one, other) for one, other in zip(drawn, leaves, strict=True))


def _differs(new: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, floor: float) -> bool:
    if new.shape != eager.shape:
        return True
    step = max(1, new.numel() // _LOOKED_AT)
    parts = (tensor.reshape(-1)[::step] if step > 1 else tensor for tensor in (new, eager, truth))
    error = comparison.compare(*parts, terms_floor=floor)
    ratios = (error.rms_ratio, error.max_ratio, error.block_ratio, error.small_ratio)
    return bool(error.unequal_count or error.non_finite_mismatch_count) or not max(ratios) <= _YARDSTICKS
