"""A double, and a number for each row as Python has them."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        y = x
        for _ in range(16):
            y = y + 0.02 * torch.sin(y * 3)
        return x[:, 0] * 2.0, y.mean(dim=1).tolist()


def get_inputs():
    return [torch.rand(10000, 32)]


def get_init_inputs():
    return []
