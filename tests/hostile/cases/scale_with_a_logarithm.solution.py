"""The same in another order."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.rate = nn.Parameter(torch.full((256,), 0.5))

    def forward(self, x):
        return torch.addcmul(self.rate.sqrt(), x, self.scale.log())
