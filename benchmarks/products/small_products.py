"""Times batches of small matrix products in plain floats by tile and threads, beside the library.

    python -m benchmarks.products.small_products [--only heads states …]

A row for each: µs of the kernel from a cold cache, and the share of what a copy of its operands and result would take.
Needs a GPU; nothing is judged.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_synthesis import generator
from agent_synthesis.synthesizer import BuiltInSynthesizer
from benchmarks.timing.step_times import Steps, compiled
from gpu_bench import device
from gpu_bench.judging.loaded import LoadedTask
from orchestrator.tasks import intake
from warpsmith.errors import IllegalMove
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

SCHEDULE = "cuda_product_simt"
MODULE = """
import torch

class Model(torch.nn.Module):
    def forward(self, a, b):
        return torch.einsum("{equation}", a, b)

def get_inputs():
    return [torch.rand({left}), torch.rand({right})]

def get_init_inputs():
    return []
"""


@dataclass(frozen=True)
class Case:
    """A product: einsum's equation, extents of both, and (rows, columns, threads) of tiles."""

    equation: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    tiles: tuple[tuple[int, int, int], ...]


CASES = {
    "heads, 64 x 64 x 64": Case(
        "bhls,bshp->bhlp", (4096, 8, 64, 64), (4096, 64, 8, 64),
        ((64, 64, 256), (64, 64, 128), (64, 32, 128), (32, 64, 128)),
    ),
    "states, 64 x 16 x 64": Case(
        "blhn,blhp->bhpn", (4096, 64, 8, 16), (4096, 64, 8, 64),
        ((64, 16, 64), (64, 16, 128), (64, 16, 256), (32, 16, 64)),
    ),
    "chunks, 3 x 1024 x 3": Case(
        "bhzc,bchp->bhzp", (2048, 8, 3, 3), (2048, 3, 8, 1024), ((4, 512, 64), (4, 512, 128), (4, 512, 256)),
    ),
    "outer, 64 x 64 x 16": Case(
        "blhn,bshn->bhls", (4096, 64, 8, 16), (4096, 64, 8, 16), ((64, 64, 256), (64, 64, 128)),
    ),
    "small, 32 x 32 x 32": Case(
        "bij,bjk->bik", (65536, 32, 32), (65536, 32, 32), ((32, 32, 64), (32, 32, 128), (32, 32, 256)),
    ),
}  # fmt: skip


def programs(task: task_pb2.Task, case: Case) -> Iterator[tuple[str, candidate_pb2.Program]]:
    """The library's call, then our kernel by each of the case's tiles."""
    synthesizer = BuiltInSynthesizer()
    yield "library", generator.generate(synthesizer.plan(task, []))
    rewrite = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_REWRITE, group="einsum", choice="einsum_pairs")
    group = synthesizer.analyze(task, [rewrite]).groups[-1].name
    author = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group, choice=SCHEDULE)
    for tile in case.tiles:
        wanted = dict(zip(("rows", "columns", "threads"), tile, strict=True))
        given = [
            analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_SET, group=group, arguments={name: value})
            for name, value in wanted.items()
        ]
        # A setting that is the default already is no move, and on the way each has to be possible.
        orders = (order for count in range(4) for order in itertools.permutations(given, count))
        for moves in orders:
            try:
                plan = synthesizer.plan(task, [rewrite, author, *moves])
            except IllegalMove:
                continue
            if wanted.items() <= plan.group(group).settings.words().items():
                yield " ".join(f"{name}={value}" for name, value in wanted.items()), generator.generate(plan)
                break


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names")
    options = parser.parse_args(arguments)
    print("| product | by | µs | of a copy |\n|---|---|---|---|")
    for name, case in CASES.items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "product.py"
            file.write_text(
                MODULE.format(equation=case.equation, left=str(case.left)[1:-1], right=str(case.right)[1:-1])
            )
            task = intake.read(intake.Request(str(file), target="cuda"))
        about = device.describe(task.target).device
        for how, program in programs(task, case):
            steps = Steps(LoadedTask.load(task), about.cache_bytes)
            info, ns = max(steps.times(program, compiled(program)), key=lambda each: each[1])
            share = info.byte_count / ns * 1e9 / about.copy_bytes_per_second
            print(f"| {name} | {how} | {ns / 1e3:.1f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
