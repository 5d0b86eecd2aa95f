"""Cross-entropy over a vocabulary of 128,256 words, in bf16."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, words)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(8192, 128256, dtype=torch.bfloat16), torch.randint(0, 128256, (8192,))]
