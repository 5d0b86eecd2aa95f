"""What stands behind the layers of a small Llama: the last norm, the head and the loss of the next token."""

import torch
from torch import nn

BATCH, TOKENS, WIDTH, VOCABULARY = 8, 32, 64, 96


class Model(nn.Module):
    """[batch, tokens, width] and the tokens that come next, [batch, tokens], to one loss."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, TOKENS, WIDTH), torch.randint(VOCABULARY, (BATCH, TOKENS))]


def get_init_inputs() -> list[int]:
    return [WIDTH, VOCABULARY]
