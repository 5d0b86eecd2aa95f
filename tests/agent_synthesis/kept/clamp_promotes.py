"""The bounds of a clamp take part in promotion: a bool between integers, an integer above a real."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, a):
        v = (a > 2).clamp(-1, 2)
        w = a.clamp(min=0.5)
        return v - 1, (w.abs() + 0.5) ** 1.5


def get_inputs():
    return [torch.randint(-9, 10, (5, 7))]


def get_init_inputs():
    return []
