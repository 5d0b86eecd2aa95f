"""A residual and the RMSNorm of the sum, both of which are given on, in bf16."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + residual
        return nn.functional.rms_norm(total, self.weight.shape, self.weight, 1e-6), total


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(16384, 4096, dtype=torch.bfloat16) for _ in range(2)]


def get_init_inputs() -> list[object]:
    return [4096]
