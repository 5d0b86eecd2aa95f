"""Which step of a program is the first whose results differ between two runs on equal inputs.

The one idea: of ninety steps one has the race, and the outputs do not say which. Results are told apart by a hash of
their numbers and places, so that looking at all of them takes no memory. It judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from gpu_bench.judging import guard
from warpsmith.program_steps import made_by
from warpsmith.v1 import candidate_pb2

_PIECE = 1 << 24
"""Elements that are looked at together."""
_ODD = 0x1E3779B97F4A7C15
"""By which places are multiplied, modulo 2^64: what is in another place counts otherwise."""

Hashes = Sequence[int]
"""Of the results of each step, in order."""


def hashing(
    program: candidate_pb2.Program, found: Callable[[str], torch.Tensor | None]
) -> tuple[Callable[[], None], list[int]]:
    """What to call after every step of a run, and once before the first; and the hashes that it fills. `found`: the
    tensor of a name, if there is one by now."""
    hashes: list[int] = []
    step = -1

    def after_step() -> None:
        nonlocal step
        step += 1
        if step:
            tensors = [found(name) for name in made_by(program.steps[step - 1])]
            hashes.append(hash(tuple(_hash(each) for each in tensors if each is not None)))

    return after_step, hashes


def first_unlike(program: candidate_pb2.Program, runs: Sequence[Hashes]) -> str:
    """The step of which runs have other hashes, in words; empty where they are all alike."""
    for number, of_step in enumerate(zip(*runs, strict=False)):
        if len({*of_step}) > 1:
            step = program.steps[number]
            what = f"kernel {step.launch.entry}" if step.HasField("launch") else step.library.target
            return f"step {number + 1} of {len(program.steps)}, {what}" + (f" of {step.group}" if step.group else "")
    return ""


def _hash(tensor: torch.Tensor) -> int:
    """One NaN is as good as another."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat, total = plain.reshape(-1), 0
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        if piece.is_floating_point() and piece.element_size() > 1:
            piece = piece.masked_fill(piece.isnan(), math.nan)
        places = torch.arange(start, start + piece.numel(), device=piece.device) * 2 + 1
        total += int((guard.bits(piece).to(torch.int64) * (places * _ODD)).sum())
    return total
