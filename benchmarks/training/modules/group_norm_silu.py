"""Group norm and SiLU of a diffusion model's block, in fp32."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, groups: int, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.norm(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(16, 320, 64, 64)]


def get_init_inputs() -> list[object]:
    return [32, 320]
