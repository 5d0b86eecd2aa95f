"""Rotary position embedding of queries and keys: halves of each head are turned by an angle of their position."""

import torch
from torch import nn

BATCH = 2
HEADS = 16
TOKENS = 512
HEAD_WIDTH = 64
BASE = 10000.0


class Model(nn.Module):
    def __init__(self, tokens: int = TOKENS, head_width: int = HEAD_WIDTH) -> None:
        super().__init__()
        frequencies = BASE ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._turned(query), self._turned(key)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, HEADS, TOKENS, HEAD_WIDTH) for _ in range(2)]


def get_init_inputs() -> list[object]:
    return []
