"""Rows whose last number is above 1.5 take a long way, all others are doubled."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        y = x
        for _ in range(20):
            y = y + 0.02 * torch.sin(y * 3)
        return torch.where(x[:, -1:] > 1.5, y, x * 2.0)


def get_inputs():
    return [torch.rand(1024, 512)]


def get_init_inputs():
    return []
