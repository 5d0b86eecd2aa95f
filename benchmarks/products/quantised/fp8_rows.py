"""A linear layer of fp8 (e4m3) tokens and weights, with a scale for each token and each output, for 512 tokens."""

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS = 512, 4096, 14336


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn))
        self.scale = nn.Buffer(torch.rand(OUTPUTS, 1).to(torch.bfloat16) / 64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.bfloat16) * scale) @ (self.weight.to(torch.bfloat16) * self.scale).T


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, INPUTS).to(torch.float8_e4m3fn), torch.rand(TOKENS, 1).to(torch.bfloat16)]


def get_init_inputs() -> list[object]:
    return []
