"""Times the engines of an fp32 product `a bᵀ` beside PyTorch's, with and without TF32, on a GPU, and how far each errs.

    python -m benchmarks.products.product_engines [--rounds 11]

Prints a table: medians of CUDA events over rounds in which every engine runs once on a cold cache, and root mean
squares of the errors over that of the result, of values of two kinds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import fusion, moves
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.testing import Applied
from benchmarks.products.attention import FLUSHED_BYTES, times
from benchmarks.products.product_errors import LAYOUTS, VALUES, distances
from gpu_bench.running.executor import Call, Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

LAYOUT = "a bᵀ"
ENGINES = ("fp16x3", "tf32x3", "tf32")
SIZES = ((1024, 8192, 8192), (4096, 4096, 4096), (8192, 8192, 8192))
"""Rows, depth and columns."""
KINDS = ("normal", "uniform")


def program(engine: str, m: int, k: int, n: int) -> candidate_pb2.Program:
    """The product by an engine, with the settings that it begins with."""
    with FakeTensorMode():
        args = (torch.empty(m, k), torch.empty(n, k))
    index = GraphIndex(capture(Applied(LAYOUTS[LAYOUT]), args), allows_tf32=engine == "tf32")
    plan = moves.apply(
        plan_zero(index, task_pb2.TARGET_CUDA),
        analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=index.graph.nodes[-1].name),
    )
    (group,) = plan.groups
    around = (group.settings, *plan.alternatives(group))
    wanted = next(each for each in around if each.words()["engine"] == engine)
    return generator.generate(fusion.with_settings(plan, group.name, wanted))


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """PyTorch's products with or without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def arms(m: int, k: int, n: int, a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """By name what multiplies the two."""

    def eager(allowed: bool) -> torch.Tensor:
        with tf32(allowed):
            return LAYOUTS[LAYOUT](a, b)

    found: dict[str, Callable[[], torch.Tensor]]
    found = {"PyTorch": lambda: eager(False), "PyTorch, TF32 allowed": lambda: eager(True)}
    for engine in ENGINES:
        made = program(engine, m, k, n)
        call = CudaExecutor().load(made, cubin_of(made), a.device).bind(Sources([a, b], {}, {}))
        found[engine] = functools.partial(_first, call)
    return found


def _first(call: Call) -> torch.Tensor:
    return call()[0]


def main() -> int:
    """Measures every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    torch.set_grad_enabled(False)
    device = torch.device("cuda", 0)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    torch.manual_seed(3)
    heads = ["product", "engine", "µs", "against PyTorch", *(f"error, {kind}" for kind in KINDS)]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for m, k, n in SIZES:
        a, b = torch.empty(m, k, device=device), torch.empty(n, k, device=device)
        made = arms(m, k, n, a, b)
        errors: dict[str, list[float]] = {name: [] for name in made}
        for kind in KINDS:
            VALUES[kind](a), VALUES[kind](b)
            for name, arm in made.items():
                errors[name].append(distances(arm(), LAYOUT, a, b)[0])
        taken = times(made, rounds, flushed)
        for name, ns in taken.items():
            allowed = "PyTorch, TF32 allowed" if name == "tf32" else "PyTorch"
            cells = [f"{m} x {k} x {n}", name, f"{1e-3 * ns:.0f}", f"{taken[allowed] / ns:.2f}x"]
            print(f"| {' | '.join([*cells, *(f'{error:.2e}' for error in errors[name])])} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
