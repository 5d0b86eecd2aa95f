"""A block of a convolutional network: convolution, bias, ReLU and pooling."""

import torch
from torch import nn

BATCH = 16
CHANNELS = 64
MADE = 128
SIZE = 56


class Model(nn.Module):
    def __init__(self, channels: int = CHANNELS, made: int = MADE) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, made, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(torch.relu(self.convolution(x)), 2)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    return []
