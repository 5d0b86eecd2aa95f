"""A residual block in train mode: batch norm computes its statistics and updates the running ones."""

import torch
from torch import nn

BATCH = 4
CHANNELS = 64
SIZE = 28


class Model(nn.Module):
    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu(self.first_norm(self.first(x)))
        return nn.functional.relu(x + self.second_norm(self.second(y)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    return []
