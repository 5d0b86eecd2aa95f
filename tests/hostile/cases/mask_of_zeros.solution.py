"""The attention that PyTorch has: it skips what the mask takes out, NaN with it."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, width, heads, longest):
        super().__init__()
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.register_buffer("seen", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))
        self.heads = heads

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attend(x).chunk(3, dim=2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))
