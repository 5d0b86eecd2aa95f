"""Forms in which modules attend: causal, under a mask, with heads that share keys."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention as attention


def some(*shape: int) -> torch.Tensor:
    """A mask of bools whose second row of each layer sees nothing."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(6)) < 0.7
    mask[..., 1, :] = False
    return mask


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, is_causal=True)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, mask)


def grouped_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, enable_gqa=True, is_causal=True)
