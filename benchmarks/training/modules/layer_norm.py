"""Layer norm of a language model's rows, in bf16."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.norm(x)
        return normalised


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(16384, 4096, dtype=torch.bfloat16)]


def get_init_inputs() -> list[object]:
    return [4096]
