"""A product that begins as an identity."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(512, 512, bias=False)
        nn.init.eye_(self.mix.weight)

    def forward(self, x):
        return self.mix(x.nan_to_num(0.0, 1.0, -1.0))


def get_inputs():
    return [torch.rand(128, 512)]


def get_init_inputs():
    return []
