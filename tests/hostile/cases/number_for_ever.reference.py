"""A tensor, and a number of Python's that depends on it."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x), int(torch.linalg.matrix_rank(x))


def get_inputs():
    return [torch.rand(64, 64)]


def get_init_inputs():
    return []
