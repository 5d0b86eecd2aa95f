"""Rotary embeddings of 32 heads of queries and 8 of keys, strided as projections leave them, in bf16."""

import torch
from torch import nn


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Model(nn.Module):
    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
        self.register_buffer("cosine", angle.cos().bfloat16())
        self.register_buffer("sine", angle.sin().bfloat16())

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rotated(queries, self.cosine, self.sine), rotated(keys, self.cosine, self.sine)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(4, 4096, heads, 128, dtype=torch.bfloat16).transpose(1, 2) for heads in (32, 8)]


def get_init_inputs() -> list[object]:
    return [4096, 128]
