"""A linear layer whose weight is kept in fp8 (e4m3) with a scale for each block of 128 x 128, for 16 tokens in bf16."""

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS, BLOCK = 16, 4096, 14336, 128


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn))
        self.scale = nn.Buffer(torch.rand(OUTPUTS // BLOCK, INPUTS // BLOCK) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return nn.functional.linear(x, (self.weight.float() * scale).to(torch.bfloat16))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, INPUTS).to(torch.bfloat16)]


def get_init_inputs() -> list[object]:
    return []
