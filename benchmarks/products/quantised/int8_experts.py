"""Eight experts whose weights are kept in int8, with a scale for each output, for 8 tokens each in bf16."""

import torch
from torch import nn

EXPERTS, TOKENS, INPUTS, OUTPUTS = 8, 8, 4096, 4096


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randint(-127, 128, (EXPERTS, OUTPUTS, INPUTS), dtype=torch.int8))
        self.scale = nn.Buffer(torch.rand(EXPERTS, OUTPUTS, 1).to(torch.bfloat16) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, (self.weight.to(torch.bfloat16) * self.scale).transpose(1, 2))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(EXPERTS, TOKENS, INPUTS).to(torch.bfloat16)]


def get_init_inputs() -> list[object]:
    return []
