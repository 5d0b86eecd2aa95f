"""Amounts: those of 1e7 and more take a long way."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.where(x < 1e7, x * 2.0, torch.lgamma(x + 1.0))


def get_inputs():
    return [1e6 * torch.rand(1024, 512)]


def get_init_inputs():
    return []
