"""The latest of each row's times."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return x.amax(dim=-1)


def get_inputs():
    return [(1e6 * torch.rand(2048, 2048)).sort(dim=-1).values]


def get_init_inputs():
    return []
