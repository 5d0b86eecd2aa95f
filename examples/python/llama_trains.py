"""A Llama of transformers trains with kernels in it: `python examples/python/llama_trains.py`.

Needs `pip install 'warpsmith[models]'`. One call swaps parts of the model for modules with kernels of their forward and
backward; equal parts share one search. The weights are random, and the model learns a chain in which each token is
followed by one of four.
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import warpsmith

VOCABULARY, TOKENS = 96, 32


def batches(steps: int, device: str) -> torch.Tensor:
    """Tokens, [steps, 8, TOKENS]."""
    draw = torch.Generator().manual_seed(1)
    follows = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=draw)
    made = [torch.randint(VOCABULARY, (steps, 8), generator=draw)]
    for _ in range(TOKENS - 1):
        made.append(follows[made[-1], torch.randint(4, (steps, 8), generator=draw)])
    return torch.stack(made, dim=-1).to(device)


def trained(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[list[float], float]:
    """The loss of each step, and ms a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, begin = [], time.perf_counter()
    for batch in tokens:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.perf_counter() - begin) / len(tokens) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="LlamaRMSNorm", help="class that is swapped; on a GPU LlamaDecoderLayer too")
    parser.add_argument("--budget", default="20s", help="of search for parts that are alike")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--runs", default="runs", help="where results are kept")
    given = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = batches(given.steps, device)

    fast = warpsmith.optimize_submodules(
        model,
        (tokens[0],),
        {"use_cache": False},
        match=given.match,
        gradients=True,
        budget=given.budget,
        runs=given.runs,
    )
    for name, outcome in fast.warpsmith.items():
        print(f"{name}: {outcome.verdict}: {outcome.message}")
    for name, each in (("the model", model), ("with the kernels", fast)):
        each.load_state_dict(start)
        losses, ms = trained(each, tokens)
        print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps of {ms:.1f} ms")


if __name__ == "__main__":
    main()
