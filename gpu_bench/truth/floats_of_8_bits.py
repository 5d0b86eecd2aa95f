"""How far results in floats of 8 bits are off the truth, their last rounding left out.

The one idea: a rounding to 8 bits is off by up to a sixteenth, beside which nothing shows: of a product, one term in
sixty could be left out. But what a right kernel rounds is as exact as any, so an element stands for all numbers that
round to it. It is off by how far the truth is from the nearest of these: by nothing, in nearly all elements, or by
little beside a tie. It judges nothing.
"""

from __future__ import annotations

import functools
import math

import torch

from warpsmith.graphs import dtypes

AS_IF_OF = torch.bfloat16
"""The type whose roundings such results are held to: those of what is rounded to 8 bits mostly."""
_CODES = 256


def before_rounding(values: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """float64: of all numbers that round to an element, the one nearest to the truth; the element where that is not
    finite. Of values in other types than floats of 8 bits these. `truth` is float64 and of their shape."""
    if values.dtype not in dtypes.FLOATS_OF_8_BITS:
        return values
    lowest, highest = (bound.to(values.device) for bound in _bounds(values.dtype))
    codes = values.contiguous().view(torch.uint8).long()
    nearest = torch.clamp(truth, lowest[codes], highest[codes])
    return torch.where(truth.isfinite(), nearest, dtypes.computable(values).double())


@functools.cache
def _bounds(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [256] twice: by its code, the least and the largest number that rounds to each; NaN of NaN."""
    numbers = torch.arange(_CODES, dtype=torch.uint8).view(dtype).double()
    magnitudes = numbers[: _CODES // 2]
    count = int((magnitudes.isfinite()).sum())
    finite = magnitudes[:count]
    most = 2.0 * finite[-1] - finite[-2]  # the next one, if there were any
    beyond = (finite[-1] + most) / 2.0
    ties = torch.cat([(finite[1:] + finite[:-1]) / 2.0, beyond.reshape(1)])
    largest, least = magnitudes.clone(), magnitudes.clone()
    largest[:count], least[1:count] = ties, ties[:-1]
    least[0] = -ties[0]
    least[magnitudes.isinf()] = beyond
    if bool(torch.tensor(math.inf, dtype=torch.float64).to(dtype).double().isfinite()):
        largest[count - 1] = math.inf  # what is too large is the largest
    return torch.cat([least, -largest]), torch.cat([largest, -least])
