"""A linear layer whose weight is kept in int4, with scale and zero for each 128 inputs, for 16 tokens in bf16."""

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS, GROUP = 16, 8192, 8192, 128


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        groups = OUTPUTS, INPUTS // GROUP, 1
        self.weight = nn.Buffer(torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8))
        self.scale = nn.Buffer(torch.rand(groups).to(torch.bfloat16) / 16)
        self.zero = nn.Buffer(torch.randint(0, 16, groups).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.stack([self.weight & 15, self.weight >> 4], -1).reshape(OUTPUTS, -1, GROUP)
        weight = (numbers.to(torch.bfloat16) - self.zero) * self.scale
        return nn.functional.linear(x, weight.reshape(OUTPUTS, INPUTS))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, INPUTS).to(torch.bfloat16)]


def get_init_inputs() -> list[object]:
    return []
