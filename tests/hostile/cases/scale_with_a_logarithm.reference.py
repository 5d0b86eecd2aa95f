"""A parameter that has to be above zero."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.rate = nn.Parameter(torch.full((256,), 0.5))

    def forward(self, x):
        return x * self.scale.log() + self.rate.sqrt()


def get_inputs():
    return [torch.randn(512, 256)]


def get_init_inputs():
    return []
