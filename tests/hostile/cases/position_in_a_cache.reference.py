"""Puts a row into a cache, and the mean of what is there out."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(64, 1024))
        self.register_buffer("position", torch.tensor(0))

    def forward(self, x):
        self.cache.index_copy_(0, self.position.view(1), x.view(1, -1))
        self.position += 1
        seen = torch.arange(64).view(-1, 1) < self.position
        return torch.where(seen, self.cache, 0.0).sum(0) / self.position


def get_inputs():
    return [torch.rand(1024)]


def get_init_inputs():
    return []
