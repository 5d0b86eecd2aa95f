"""Which step of a program is the first whose results differ between two runs on equal inputs.

The one idea: of ninety steps one has the race, and the outputs do not say which. Results are told apart by a hash of
their bits, so that looking at all of them takes no memory. It judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from warpsmith.program_steps import made_by
from warpsmith.v1 import candidate_pb2

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
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return int(torch.hash_tensor(plain.resolve_neg()).view(torch.int64)) if plain.numel() else 0
