"""Rows of a table of 128,256 words of 4096 columns, looked up by 16,384 words of which few are many, in bf16."""

import torch
from torch import nn

WORDS, COLUMNS = 128256, 4096


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WORDS, COLUMNS, dtype=torch.bfloat16))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(words, self.table)


def get_inputs() -> list[torch.Tensor]:
    return [(torch.rand(4, 4096) ** 4 * WORDS).long()]
