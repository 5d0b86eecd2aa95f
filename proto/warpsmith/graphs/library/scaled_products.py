"""`torch._scaled_mm`, which the library has of floats of 8 bits alone, in any type."""

from __future__ import annotations

import torch


def scaled_product(left: torch.Tensor, right: torch.Tensor, *more: torch.Tensor | None, **_: object) -> torch.Tensor:
    """The product of both factors, each times its scale. `more`: both scales, and perhaps a bias."""
    made = _scaled(left, more[0]) @ _scaled(right, more[1])
    return made if len(more) < 3 or more[2] is None else made + more[2]


def _scaled(factor: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Times one number, or each element times that of its part, which are equal along both dimensions."""
    assert scale is not None
    for dim, size in enumerate(factor.shape if scale.dim() == 2 else ()):
        scale = scale.repeat_interleave(-(-size // scale.shape[dim]), dim).narrow(dim, 0, size)
    return factor * scale
