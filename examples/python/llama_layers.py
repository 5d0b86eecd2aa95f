"""The layers of a Llama are swapped in place: `python examples/python/llama_layers.py`.

Equal layers share one search; the model keeps its weights, its class and its state_dict. The weights here are random.
"""

import argparse

import torch
from torch import nn
from torch.utils.benchmark import Timer

import warpsmith

VOCABULARY = 1000


class LlamaLayer(nn.Module):
    """Attention with rotary positions, then SwiGLU, each after an RMSNorm; [batch, tokens, width]."""

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
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens of [batch, tokens] to logits of [batch, tokens, vocabulary]."""

    def __init__(self, layers: int, width: int = 256, heads: int = 4, hidden: int = 688, tokens: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(*(LlamaLayer(width, heads, hidden, tokens) for _ in range(layers)))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens))))


def milliseconds(model: nn.Module, tokens: torch.Tensor) -> float:
    """The median time of a call."""
    timer = Timer("model(tokens)", globals={"model": model, "tokens": tokens}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=1.0).median * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="20s", help="of search for the layer that all are like")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", default="runs", help="where results are kept")
    given = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Llama(given.layers).to(device).eval()
    tokens = torch.randint(VOCABULARY, (2, 128), device=device)
    fast = warpsmith.optimize_submodules(model, (tokens,), match=LlamaLayer, budget=given.budget, runs=given.runs)
    for name, outcome in fast.warpsmith.items():
        print(f"{name}: {outcome.verdict}: {outcome.message}")
    with torch.no_grad():
        torch.testing.assert_close(fast(tokens), model(tokens), rtol=1e-3, atol=1e-3)
        print(f"the model {milliseconds(model, tokens):.2f} ms, with the kernels {milliseconds(fast, tokens):.2f} ms")


if __name__ == "__main__":
    main()
