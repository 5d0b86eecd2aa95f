"""What is written through a view later may not be computed again for who reads it after."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, a):
        v = torch.minimum(a, a * 0.5)
        w = v.narrow(-1, 0, 1).exp_()
        return w, v.abs().sum()


def get_inputs():
    return [torch.randn(64)]


def get_init_inputs():
    return []
