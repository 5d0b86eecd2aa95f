"""A linear layer of weights in floats that multiplies in bf16, as under autocast, for 32 tokens."""

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS = 32, 4096, 14336


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(nn.functional.linear(x, self.weight.to(torch.bfloat16)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, INPUTS).to(torch.bfloat16)]


def get_init_inputs() -> list[object]:
    return []
