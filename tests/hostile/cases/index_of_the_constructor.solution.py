"""Computes the index instead of reading it."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(127, 8))
        places = torch.arange(64)
        self.register_buffer("index", places.view(-1, 1) - places + 63)

    def forward(self, scores):
        places = torch.arange(64)
        return (scores + self.table.t()[:, places.view(-1, 1) - places + 63]).softmax(-1)
