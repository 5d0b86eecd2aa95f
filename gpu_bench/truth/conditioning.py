"""How far the truth moves where what it is made of is off by a rounding: the yardstick where eager's error is none.

The one idea: of rows that are constant, thousands of results may be one number, of which PyTorch's error may be small
by luck, and equal terms add up exactly in some orders of summing. The conditioning of the task is no luck. Rows move
as a whole, so that what is constant stays constant. (Backward error: Higham 2002, *Accuracy and Stability of Numerical
Algorithms*, chapter 1.) Knows tensors, and nothing of modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

_CHUNK = 1 << 26
"""Elements compared at once."""


class Moved(Mapping[str, torch.Tensor]):
    """Copies of tensors, floats in float64 with each row (last dimension) a rounding up or down.

    `reach`: by up to so many roundings instead, drawn evenly; the negative of a reach moves each row the other way.
    Roundings are of fp32, in which sums of 16-bit numbers are made as well; of fp64 where all floats are fp64. A copy
    is made when it is asked for and not kept: the caller copies what it computes with, and two copies of all are too
    many.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], seed: int, reach: float = 0.0) -> None:
        self._sources, self._seed, self._reach = sources, seed, reach
        types = {tensor.dtype for tensor in sources.values() if tensor.is_floating_point()}
        self._rounding = torch.finfo(torch.float64 if types == {torch.float64} else torch.float32).eps / 2

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._sources[name]
        if not tensor.is_floating_point():
            return tensor.clone()  # of complex numbers, too
        number = list(self._sources).index(name)
        generator = torch.Generator(tensor.device).manual_seed(self._seed + number)
        rows = [*tensor.shape[:-1], 1] if tensor.dim() else []
        if self._reach:
            steps = (torch.rand(rows, generator=generator, device=tensor.device) * 2 - 1) * self._reach
        else:
            steps = torch.randint(0, 2, rows, generator=generator, device=tensor.device) * 2 - 1
        return tensor.to(torch.float64, copy=True).mul_(1.0 + self._rounding * steps.double())

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def shift(truth: torch.Tensor, after: torch.Tensor) -> float:
    """rms of how far a float64 truth moved, over what is finite; 0 for integers and for nothing."""
    if not truth.is_floating_point() or not truth.numel():
        return 0.0
    squares = 0.0
    for known, moved_to in zip(*(torch.split(each.reshape(-1), _CHUNK) for each in (truth, after)), strict=True):
        squares += float(torch.linalg.vector_norm((moved_to - known).nan_to_num_(0.0, 0.0, 0.0))) ** 2
    return math.sqrt(squares / truth.numel())
