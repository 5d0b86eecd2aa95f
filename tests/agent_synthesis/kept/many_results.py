"""A call with more results than Python unpacks at once."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, a):
        v = (a * 2).cumsum(0).unbind(0)[-1]
        return v.exp() + 1


def get_inputs():
    return [torch.rand(300, 3) * 0.01]


def get_init_inputs():
    return []
