"""A time in seconds in the first column, and what a gate lets through in all others."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        y = x
        for _ in range(20):
            y = y + 0.02 * torch.sin(y * 3)
        return torch.cat([1e6 * x[:, :1] + 1.7e9, torch.sigmoid(y)], dim=1)


def get_inputs():
    return [torch.rand(1024, 512)]


def get_init_inputs():
    return []
