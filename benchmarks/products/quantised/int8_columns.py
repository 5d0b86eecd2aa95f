"""A product with a weight kept in int8 as [inputs, outputs], with a scale for each output, for 16 tokens in bf16."""

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS = 16, 4096, 14336


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randint(-127, 128, (INPUTS, OUTPUTS), dtype=torch.int8))
        self.scale = nn.Buffer(torch.rand(OUTPUTS).to(torch.bfloat16) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(torch.bfloat16) * self.scale)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, INPUTS).to(torch.bfloat16)]


def get_init_inputs() -> list[object]:
    return []
