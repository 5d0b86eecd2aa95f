"""A linear layer in fp8 (e4m3) with scales of each token's 128 inputs and of blocks of 128 x 128, for 512 tokens."""

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS, BLOCK = 512, 4096, 14336, 128


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn))
        self.scale = nn.Buffer(torch.rand(OUTPUTS // BLOCK, INPUTS // BLOCK) / 64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        tokens = (x.view(TOKENS, -1, BLOCK).float() * scale.unsqueeze(-1)).view(x.shape).to(torch.bfloat16)
        blocks = self.weight.view(OUTPUTS // BLOCK, BLOCK, -1, BLOCK).float() * self.scale[:, None, :, None]
        return tokens @ blocks.view(OUTPUTS, INPUTS).to(torch.bfloat16).T


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, INPUTS).to(torch.float8_e4m3fn), torch.rand(TOKENS, INPUTS // BLOCK)]


def get_init_inputs() -> list[object]:
    return []
