"""Right below 1e7, and for infinities and NaN."""

from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x * 2.0
