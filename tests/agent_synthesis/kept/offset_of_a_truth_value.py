"""A lookup at an offset made from a truth value: g++ 12 vectorises the plain load wrongly."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, a):
        places = (a > 0).long()
        return torch.take_along_dim(a.exp(), places, -1).abs(), torch.take_along_dim(a, places + (a > 1).long(), -1)


def get_inputs():
    return [torch.randn((7, 129))]


def get_init_inputs():
    return []
