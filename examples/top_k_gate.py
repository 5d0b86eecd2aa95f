"""The gate of a mixture of experts: scores, the best two of each token, and their shares."""

import torch
from torch import nn

TOKENS = 4096
WIDTH = 256
EXPERTS = 64
CHOSEN = 2


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, experts: int = EXPERTS, chosen: int = CHOSEN) -> None:
        super().__init__()
        self.scores = nn.Linear(width, experts, bias=False)
        self.chosen = chosen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = torch.softmax(self.scores(x), dim=-1)
        best, experts = shares.topk(self.chosen, dim=-1)
        return best / best.sum(dim=-1, keepdim=True), experts


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, WIDTH)]


def get_init_inputs() -> list[object]:
    return []
