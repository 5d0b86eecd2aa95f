"""Trains a small Llama with exports in place of all its layers and its loss, and as it is, from the same seeds.

    python -m benchmarks.training.small_transformer [--steps 200] [--seeds 5] [--target cuda] [--out FILE]
    python -m benchmarks.training.small_transformer --compiled

The layers and what stands behind them (`transformer/`) are exported as training steps by their whole plans, without a
search, and put into the model by their weights; the embedding is PyTorch's. Tokens come from a random chain that is
learnt: each follows one of four. Every seed gives weights and batches, the same for both. A loss is the mean over the
last ten steps. Ours are within eager's spread where, at every step, their mean over seeds lies between the least and
the greatest of eager's, and no seed's is farther from eager's of that seed than these two are apart. `--compiled`: with
exports, of the flavour package, the whole model is one graph of `torch.compile`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.timing import host_time
from orchestrator.exports import export_training
from warpsmith import plugins

PIECES = Path(__file__).parent / "transformer"
SMOOTHED = 10
"""Steps that a loss is the mean of."""
SHOWN = (10, 25, 50, 75, 100, 150, 200)


@dataclass(frozen=True)
class Shape:
    """As the pieces' files have it."""

    batch: int
    tokens: int
    width: int
    vocabulary: int


class Transformer(nn.Module):
    """Tokens and those that follow, each [batch, tokens], to a loss."""

    def __init__(self, pieces: Mapping[str, ModuleType], name: str, layers: int, shape: Shape) -> None:
        """`name`: of the class in each piece."""
        super().__init__()
        layer, loss = (pieces[piece] for piece in ("layer", "loss"))
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList([getattr(layer, name)(*layer._ws_arguments) for _ in range(layers)])
        self.loss = getattr(loss, name)(*loss._ws_arguments)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.loss(x, following)
        return loss


def exported(folder: Path, flavour: str, target: str) -> dict[str, Any]:
    """The pieces' exports, imported, by name."""
    made = {}
    for piece in ("layer", "loss"):
        run = host_time.a_step(PIECES / f"{piece}.py", target)
        found = export_training.export_all(plugins.load("exporter", flavour), flavour, [run])
        made[piece] = host_time.imported(found, folder / piece)
    return made


def shape_of(pieces: Mapping[str, Any]) -> Shape:
    """Read from the inputs of the loss."""
    x, _ = pieces["loss"]._WsReference.forward.__globals__["get_inputs"]()
    batch, tokens, width = x.shape
    return Shape(batch, tokens, width, pieces["loss"]._ws_arguments[1])


def batches(seed: int, steps: int, shape: Shape) -> torch.Tensor:
    """Tokens of [steps, batch, tokens + 1], of one chain for all seeds."""
    draw = torch.Generator().manual_seed(1)
    follows = torch.randint(shape.vocabulary, (shape.vocabulary, 4), generator=draw)
    draw.manual_seed(seed)
    made = [torch.randint(shape.vocabulary, (steps, shape.batch), generator=draw)]
    for _ in range(shape.tokens):
        choice = torch.randint(4, (steps, shape.batch), generator=draw)
        made.append(follows[made[-1], choice])
    return torch.stack(made, dim=-1)


def curve(model: nn.Module, call: Any, seed: int, steps: int, shape: Shape, target: str) -> list[float]:
    """The loss of each step of a training with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    losses = []
    for tokens in batches(seed, steps, shape).to(target):
        optimizer.zero_grad()
        loss = call(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def curves(pieces: Mapping[str, Any], options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of eager and of the exports, each [seeds, steps].

    Raises:
        UserWarning: an original answers in an export's place.
    """
    shape, found = shape_of(pieces), list[tuple[list[float], list[float]]]()
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        theirs = Transformer(pieces, "_WsReference", options.layers, shape).to(options.target)
        ours = Transformer(pieces, "ModelNew", options.layers, shape).to(options.target)
        ours.load_state_dict(theirs.state_dict())
        call = torch.compile(ours, fullgraph=True) if options.compiled else ours
        settings = (seed, options.steps, shape, options.target)
        eager = curve(theirs, theirs, *settings)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*the original forward answers")
            found.append((eager, curve(ours, call, *settings)))
    eager_losses, our_losses = zip(*found, strict=True)
    return torch.tensor(eager_losses), torch.tensor(our_losses)


def smoothed(losses: torch.Tensor) -> torch.Tensor:
    """Means over the last steps, [seeds, steps - 9]."""
    return losses.unfold(1, min(SMOOTHED, losses.shape[1]), 1).mean(-1)


def is_within(eager: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether ours are within eager's spread, at every step."""
    eager, ours = smoothed(eager), smoothed(ours)
    least, most, mean = eager.amin(0), eager.amax(0), ours.mean(0)
    apart = (ours - eager).abs().amax(0)
    return bool(((least <= mean) & (mean <= most) & (apart <= most - least)).all())


def table(eager: torch.Tensor, ours: torch.Tensor) -> list[str]:
    """Lines of what is told."""
    head = "| step | eager: mean | least | greatest | exports: mean | least | greatest | farthest of one seed |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    both = smoothed(eager), smoothed(ours)
    first = eager.shape[1] - both[0].shape[1] + 1
    for step in sorted({*(s for s in SHOWN if first <= s < eager.shape[1]), eager.shape[1]}):
        cells = [f"{step}"]
        for losses in both:
            at = losses[:, step - first]
            cells += [f"{each:.4f}" for each in (at.mean(), at.amin(), at.amax())]
        apart = (both[1] - both[0])[:, step - first].abs().amax()
        lines.append(f"| {' | '.join([*cells, f'{apart:.1e}'])} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and prints; 1 where ours are not within eager's spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--target", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compiled", action="store_true", help="compile the model with the exports in it")
    parser.add_argument("--out", type=Path, help="a file that the losses are added to, as one line of JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        pieces = exported(Path(folder), "package" if options.compiled else "module", options.target)
        eager, ours = curves(pieces, options)
    print("\n".join(table(eager, ours)))
    good = is_within(eager, ours)
    print(f"{'within' if good else 'NOT within'} eager's spread over {options.seeds} seeds at every step")
    if options.out:
        with options.out.open("a") as file:
            line = {"target": options.target, "compiled": options.compiled, "torch": torch.__version__}
            file.write(json.dumps({**line, "eager": eager.tolist(), "exports": ours.tolist()}) + "\n")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
