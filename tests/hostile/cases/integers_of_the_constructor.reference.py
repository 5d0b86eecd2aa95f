"""A product with weights that are integers, as after quantization."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.randint(-128, 128, (256, 256), dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(256, 1) / 1000)

    def forward(self, x):
        return x @ (self.q.float() * self.scale).t()


def get_inputs():
    return [torch.rand(64, 256)]


def get_init_inputs():
    return []
