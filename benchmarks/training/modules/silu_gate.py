"""The gate of a Llama's feed-forward layer, in bf16."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(gate) * up


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(8192, 14336, dtype=torch.bfloat16) for _ in range(2)]
