"""How far PyTorch's own result may be from a graph's in float64 before the graph is doubted.

The one idea: rounding has a size. What is farther off is another computation, or one of which rounding leaves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

CHUNK = 1 << 26
"""Elements looked at in float64 at once."""
_SHARE = {torch.float64: 1e-6, torch.float32: 2e-2, torch.float16: 1e-1, torch.bfloat16: 3e-1}
"""Largest rms error of eager relative to the truth's rms. TF32 products in a deep network stay below it."""


def share(dtypes: Iterable[torch.dtype]) -> float:
    """Of the truth's rms that eager may be off; `dtypes` are those on the way, of which the coarsest counts."""
    return max((_SHARE.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def off_and_size(eager: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """rms of eager's error and of the truth, over the elements where both are finite."""
    squares, sizes, count = 0.0, 0.0, 0
    for own, wide in zip(torch.split(eager.reshape(-1), CHUNK), torch.split(truth.reshape(-1), CHUNK), strict=True):
        off, size = (float(torch.linalg.vector_norm(values)) for values in (own - wide, wide))
        if math.isfinite(off + size):  # nothing infinite or NaN among them, as nearly always
            squares, sizes, count = squares + off * off, sizes + size * size, count + own.numel()
            continue
        valid = torch.isfinite(own) & torch.isfinite(wide)
        squares += float(torch.where(valid, own - wide, 0.0).square().sum())
        sizes += float(torch.where(valid, wide, 0.0).square().sum())
        count += int(valid.sum())
    return math.sqrt(squares / max(count, 1)), math.sqrt(sizes / max(count, 1))
