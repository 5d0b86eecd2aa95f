"""How far fp32 products of ours and PyTorch's are from fp64, on a GPU: a first plan's, on values of three kinds.

    python -m benchmarks.products.product_errors [--only 8192]

Prints a table of products, at 4096 in every layout: root mean squares of the errors over that of the result, and their
ratio; the largest errors likewise. The exit code is 1 where a ratio of root mean squares is above the bar.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.testing import Applied
from benchmarks.plans import one_kernel
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.v1 import candidate_pb2

BAR = 1.0
"""Most that our error may be of PyTorch's."""
PARTS = 1024
"""Rows that are compared at once."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LAYOUTS: dict[str, Product] = {
    "a bᵀ": lambda a, b: a @ b.T, "a b": lambda a, b: a @ b,
    "aᵀ b": lambda a, b: a.T @ b, "aᵀ bᵀ": lambda a, b: a.T @ b.T,
}  # fmt: skip
CASES = (
    ("a bᵀ", 1024, 8192, 8192), ("a bᵀ", 4096, 4096, 4096), ("a b", 4096, 4096, 4096), ("aᵀ b", 4096, 4096, 4096),
    ("aᵀ bᵀ", 4096, 4096, 4096), ("a bᵀ", 8192, 8192, 8192), ("a b", 256, 524288, 256), ("a bᵀ", 128, 16384, 16384),
)  # fmt: skip
"""Layout, rows, depth and columns."""
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": torch.Tensor.normal_,
    "uniform": torch.Tensor.uniform_,
    "of many sizes": lambda tensor: tensor.normal_().mul_(torch.empty_like(tensor).uniform_(-4, 4).exp2_()),
}


def shapes(layout: str, m: int, k: int, n: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the operands as they lie in memory."""
    return (k, m) if "aᵀ" in layout else (m, k), (n, k) if "bᵀ" in layout else (k, n)


def program(layout: str, m: int, k: int, n: int) -> candidate_pb2.Program:
    """The product with the settings that a search begins with."""
    with FakeTensorMode():
        args = tuple(torch.empty(shape) for shape in shapes(layout, m, k, n))
    return generator.generate(one_kernel(Applied(LAYOUTS[layout]), args))


def distances(found: torch.Tensor, layout: str, a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """(root mean square, largest) of the errors against fp64, over the root mean square of the result."""
    squares = largest = size = 0.0
    right = b.double()
    for first in range(0, found.shape[0], PARTS):
        rows = slice(first, first + PARTS)
        truth = LAYOUTS[layout]((a[:, rows] if "aᵀ" in layout else a[rows]).double(), right)
        error = found[rows].double() - truth
        squares, size = squares + error.square().sum().item(), size + truth.square().sum().item()
        largest = max(largest, error.abs().max().item())
    return (squares / size) ** 0.5, largest / (size / found.numel()) ** 0.5


def main() -> int:
    """Measures every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sizes that contain this")
    only = parser.parse_args().only
    torch.set_grad_enabled(False)
    device, worst = torch.device("cuda", 0), 0.0
    torch.manual_seed(3)
    print("| product | values | PyTorch's error | ours | ratio | largest, PyTorch's | ours | ratio |\n|" + " --- |" * 8)
    for layout, m, k, n in CASES:
        if only not in (name := f"{m} x {k} x {n}"):
            continue
        made = program(layout, m, k, n)
        artifact = cubin_of(made)
        for kind, draw in VALUES.items():
            a, b = (draw(torch.empty(shape, device=device)) for shape in shapes(layout, m, k, n))
            (ours,) = CudaExecutor().load(made, artifact, device).bind(Sources([a, b], {}, {}))()
            theirs = distances(LAYOUTS[layout](a, b), layout, a, b)
            own = distances(ours, layout, a, b)
            worst = max(worst, own[0] / theirs[0])
            cells = [f"{layout}, {name}", kind]
            for eager, found in zip(theirs, own, strict=True):
                cells += [f"{eager:.2e}", f"{found:.2e}", f"{found / eager:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nlargest ratio of root mean squares: {worst:.2f} (bar {BAR})")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
