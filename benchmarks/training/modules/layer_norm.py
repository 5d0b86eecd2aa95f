"""Layer norm of a language model's rows, in bf16."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.bfloat16)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.randn(16384, 4096, dtype=torch.bfloat16)]


def get_init_inputs():
    return [4096]
