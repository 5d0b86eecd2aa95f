"""Knows that the mask is causal: so it is whatever the seed, and after training."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("later", torch.ones(64, 64).triu(1).bool())

    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
