"""Two ways to compute, of which the task's own values need the cheap one."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.where(x < 1.0, x * 2, torch.lgamma(x.abs() + 1))


def get_inputs():
    return [torch.rand(256, 1024)]


def get_init_inputs():
    return []
