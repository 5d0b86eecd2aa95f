"""What is above 1.5 takes a long way, all else is doubled."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        y = x
        for _ in range(6):
            y = y + 0.02 * torch.sin(y * 3)
        return torch.where(x > 1.5, y, x * 2.0)


def get_inputs():
    return [torch.rand(2048, 1024)]


def get_init_inputs():
    return []
