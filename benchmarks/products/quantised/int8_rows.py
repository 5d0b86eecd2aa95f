"""A linear layer whose weight is kept in int8, with a scale for each output, for 16 tokens in bf16."""

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS = 16, 8192, 8192


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randint(-127, 128, (OUTPUTS, INPUTS), dtype=torch.int8))
        self.scale = nn.Buffer(torch.rand(OUTPUTS, 1).to(torch.bfloat16) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(torch.bfloat16) * self.scale)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, INPUTS).to(torch.bfloat16)]


def get_init_inputs() -> list[object]:
    return []
