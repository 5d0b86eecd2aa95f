"""PyTorch's own product of fp8 (e4m3), with a scale for each token and each output, and a SiLU, for 512 tokens."""

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS = 512, 4096, 14336


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn))
        self.scale = nn.Buffer(torch.rand(1, OUTPUTS) / 64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(torch._scaled_mm(x, self.weight.t(), scale, self.scale, out_dtype=torch.bfloat16))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, INPUTS).to(torch.float8_e4m3fn), torch.rand(TOKENS, 1)]


def get_init_inputs() -> list[object]:
    return []
