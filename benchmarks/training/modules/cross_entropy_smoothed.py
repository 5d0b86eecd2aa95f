"""The same with labels that are smoothed."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, words, label_smoothing=0.1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(8192, 128256, dtype=torch.bfloat16), torch.randint(0, 128256, (8192,))]
