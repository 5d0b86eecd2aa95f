"""Measures how long the compile service's toolchain takes for candidates of matrix products; needs no GPU.

    python -m benchmarks.products.product_compiles [--each 4]

compiles the default tiling of six products and tilings one change away (as many as wanted of each product, or all), one
after the other in a warm worker with no cache, and prints the median, the 90th percentile and the slowest, in ms.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator

import torch

from agent_compile.compiler import Compiler
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_synthesis import generator
from agent_synthesis.plans import moves
from benchmarks.plans import one_kernel
from warpsmith.v1 import analysis_pb2, artifact_pb2, candidate_pb2

BAR_MS = 800.0
"""Most that the median candidate may take."""

F32, BF16 = torch.float32, torch.bfloat16


class Product(torch.nn.Module):
    """A product of two matrices, perhaps with a GELU."""

    def __init__(self, *, gelu: bool = False) -> None:
        super().__init__()
        self._gelu = gelu

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a @ b
        return torch.nn.functional.gelu(product) if self._gelu else product


PRODUCTS = {
    "f32 4096 x 4096 x 4096": (False, F32, (4096, 4096), (4096, 4096)),
    "f32 4096 x 4096 x 4096, GELU": (True, F32, (4096, 4096), (4096, 4096)),
    "f32 8205 x 2949 x 5921": (False, F32, (8205, 2949), (2949, 5921)),
    "f32 256 x 65536 x 256": (False, F32, (256, 65536), (65536, 256)),
    "bf16 8192 x 8192 x 8192": (False, BF16, (8192, 8192), (8192, 8192)),
    "bf16 8192 x 8192 x 8192, GELU": (True, BF16, (8192, 8192), (8192, 8192)),
}
"""Name → whether a GELU follows, type, shapes."""


def candidates(name: str) -> Iterator[candidate_pb2.Program]:
    """The default and all that is one change away."""
    gelu, dtype, left, right = PRODUCTS[name]
    args = (torch.empty(left, dtype=dtype), torch.empty(right, dtype=dtype))
    plan = one_kernel(Product(gelu=gelu), args)
    yield generator.generate(plan)
    for legal in moves.legal(plan):
        if legal.move.kind == analysis_pb2.MOVE_KIND_SET:
            yield generator.generate(moves.apply(plan, legal.move))


def main() -> int:
    """Compiles and prints; the exit code says whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=1000, help="most candidates of a product")
    each = parser.parse_args().each
    compiler = Compiler([Nvrtc()], None)
    every: list[float] = []
    try:
        compiler.compile(next(candidates("f32 4096 x 4096 x 4096")))  # starts the worker
        print("| product | candidates | median ms | 90 % ms | slowest ms |\n| --- | --- | --- | --- | --- |")
        for name in PRODUCTS:
            found = []
            for program in itertools.islice(candidates(name), each):
                artifact = compiler.compile(program).outcome
                assert isinstance(artifact, artifact_pb2.Artifact), artifact
                found.append(1e3 * artifact.compile_seconds)
            print(f"| {name} | {len(found)} | {' | '.join(f'{value:.0f}' for value in spread(found))} |")
            every += found
    finally:
        compiler.close()
    middle, high, slowest = spread(every)
    print(f"| all | {len(every)} | {middle:.0f} | {high:.0f} | {slowest:.0f} |\n\nbar: median at most {BAR_MS:.0f} ms")
    return int(middle > BAR_MS)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, 90th percentile and greatest."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1]


if __name__ == "__main__":
    sys.exit(main())
