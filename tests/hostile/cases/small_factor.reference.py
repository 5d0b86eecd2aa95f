"""A block behind a factor that training begins with at almost nothing."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(128, 512)
        self.narrow = nn.Linear(512, 128)
        self.scale = nn.Parameter(torch.full((128,), 1e-8))

    def forward(self, x):
        return x + self.scale * self.narrow(nn.functional.gelu(self.wide(x)))


def get_inputs():
    return [torch.rand(256, 128)]


def get_init_inputs():
    return []
