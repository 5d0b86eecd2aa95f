"""Group norm and SiLU over images, as in every block of a diffusion model."""

import torch
from torch import nn

BATCH = 2
CHANNELS = 320
SIZE = 64
GROUPS = 32


class Model(nn.Module):
    def __init__(self, channels: int = CHANNELS, groups: int = GROUPS) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.norm(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    return []
