"""The last layer of a language model and its loss: 8192 rows of 4096 columns, 128,256 words, in bf16."""

import torch
from torch import nn

ROWS, COLUMNS, WORDS = 8192, 4096, 128256


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(WORDS, COLUMNS, dtype=torch.bfloat16) * COLUMNS**-0.5)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(x, self.words), words)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16), torch.randint(0, WORDS, (ROWS,))]
