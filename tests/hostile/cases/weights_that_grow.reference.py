"""A linear layer whose rows may be no longer than 1: as nn.Embedding's max_norm, or a GAN's clipped weights."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(2048, 1024) / 32)

    def forward(self, x):
        return x @ torch.renorm(self.weight, 2, 0, 1.0).T


def get_inputs():
    return [torch.randn(8, 1024)]


def get_init_inputs():
    return []
