"""Products of floats of 8 bits with scales, in float64, which the library multiplies in 8 bits alone."""

from __future__ import annotations

from typing import Final

import torch

TARGET: Final = "aten._scaled_mm.default"


def scaled_product(
    left: torch.Tensor,
    right: torch.Tensor,
    scale_left: torch.Tensor,
    scale_right: torch.Tensor,
    bias: torch.Tensor | None = None,
    *_: object,
    **__: object,
) -> torch.Tensor:
    """`torch._scaled_mm` of (m, k) and (k, n) in float64, scaled by one number, by rows and columns or by blocks."""
    made = _scaled(left, scale_left) @ _scaled(right, scale_right)
    return made if bias is None else made + bias


def _scaled(factor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each element times the scale of the part that it lies in, parts of equal size along both dimensions."""
    for dim, size in enumerate(factor.shape if scale.dim() == 2 else ()):
        scale = scale.repeat_interleave(-(-size // scale.shape[dim]), dim).narrow(dim, 0, size)
    return factor * scale
