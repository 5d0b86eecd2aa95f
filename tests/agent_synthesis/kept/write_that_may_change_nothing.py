"""A write in place that changes nothing on some values: the judge may not take the input for one that is only read."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, a):
        v = a.clamp_(max=0.5)
        return v.abs() + 1


def get_inputs():
    return [torch.randn(1)]


def get_init_inputs():
    return []
