"""The greatest of what a gain scales."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return (x * self.gain).amax(dim=1)


def get_inputs():
    return [torch.randn(64, 512, 64)]


def get_init_inputs():
    return []
