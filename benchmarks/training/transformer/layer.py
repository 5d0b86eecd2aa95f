"""A layer of a small Llama: attention with rotary positions, then SwiGLU, each after an RMSNorm."""

import torch
from torch import nn

BATCH, TOKENS, WIDTH, HEADS, HIDDEN = 8, 32, 64, 4, 160


class Model(nn.Module):
    """[batch, tokens, width] to the same."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int, heads: int, hidden: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        return x.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        query, key, value = (self._heads(part(y)) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(
            self._turned(query), self._turned(key), value, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        y = self.norm(x)
        fed: torch.Tensor = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + fed


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, TOKENS, WIDTH)]


def get_init_inputs() -> list[int]:
    return [WIDTH, HEADS, HIDDEN, TOKENS]
