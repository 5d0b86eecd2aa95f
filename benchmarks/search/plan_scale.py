"""How the time of planning grows with a network: capture, analysis with legal moves, hypotheses, emission.

    python -m benchmarks.search.plan_scale [--blocks 10 20 40 80] [--target cuda|cpu] [--profile]

A network of equal residual blocks (norm, convolution or product, activation, gate) is captured without being computed,
analysed, reasoned about, and the first chain of moves is made into a program. Needs no GPU. The last column is the
exponent of the growth since the row before: 1 is linear.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis import generator
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import analysis, moves
from agent_synthesis.plans.plan import plan_zero
from warpsmith.graphs import capture
from warpsmith.hardware import H200_MEASURED
from warpsmith.v1 import reasoning_service_pb2, task_pb2


class Block(nn.Module):
    """Ten operations: a norm, two products with an activation between, a gate, a residual."""

    def __init__(self, width: int) -> None:
        """Its layers."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, width] to the same."""
        y = self.norm(x)
        y = nn.functional.gelu(self.up(y)) * torch.sigmoid(self.gate(y))
        return x + torch.tanh(self.down(y)) * self.scale


def network(block_count: int) -> nn.Module:
    """Blocks in a row."""
    return nn.Sequential(*(Block(64) for _ in range(block_count)))


class Stages:
    """Seconds of the stages of one network."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Takes the time of a stage."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


def measured(block_count: int, target: task_pb2.Target.ValueType) -> tuple[int, int, int, dict[str, float]]:
    """(operations, legal moves, moves of the chain, seconds by stage)."""
    stages = Stages()
    module = network(block_count).eval()
    with stages.timed("capture"):
        graph = capture.capture(module, (torch.zeros(128, 64),))
    plan = plan_zero(GraphIndex(graph), target)
    with stages.timed("analyze"):
        described = analysis.describe(plan, with_legal_moves=True)
    request = reasoning_service_pb2.ProposeHypothesesRequest(
        task=task_pb2.Task(target=target), analysis=described, device=H200_MEASURED, limit=8
    )
    with stages.timed("propose"):
        proposed = RooflineReasoner().propose(request).hypotheses
    longest = max(proposed, key=lambda each: len(each.moves))
    with stages.timed("plan"):
        made = moves.apply_all(plan, longest.moves)
    with stages.timed("describe"):
        analysis.describe(made, with_legal_moves=True)
    with stages.timed("emit"):
        generator.generate(made)
    return len(graph.nodes), len(described.legal_moves), len(longest.moves), stages.seconds


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 20, 40, 80])
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", action="store_true", help="prints where the time of the last row went")
    options = parser.parse_args()
    target = {"cuda": task_pb2.TARGET_CUDA, "cpu": task_pb2.TARGET_CPU}[options.target]
    before: tuple[int, float] | None = None
    for place, count in enumerate(options.blocks):
        profile = cProfile.Profile()
        is_profiled = options.profile and place == len(options.blocks) - 1
        if is_profiled:
            profile.enable()
        nodes, legal, chained, seconds = measured(count, target)
        if is_profiled:
            profile.disable()
        total = sum(seconds.values())
        if before is None:
            print(f"| operations | legal moves | moves | {' | '.join(seconds)} | s | grows as |")
            print("| ---: " * (len(seconds) + 5) + "|")
        grows = f"n^{math.log(total / before[1]) / math.log(nodes / before[0]):.2f}" if before else ""
        cells = " | ".join(f"{each:.2f}" for each in seconds.values())
        print(f"| {nodes} | {legal} | {chained} | {cells} | {total:.2f} | {grows} |", flush=True)
        before = nodes, total
        if is_profiled:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
