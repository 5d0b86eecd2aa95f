"""Times every setting of the kernels of six matrix products, and says how soon a search holds a good one.

    python -m benchmarks.products.product_landscapes --out product_landscapes.jsonl [--only bf16] [--rounds 7]
    python -m benchmarks.products.product_landscapes --table product_landscapes.jsonl [--trials 8]

The first needs a GPU. It makes the product and what follows it one kernel, walks all settings that moves lead to,
compiles them and times them beside eager with cold caches, in rounds in which every kernel runs once; results far from
eager's are told. The second needs none: the real search looks for its first few plans among them, as in `skill.py`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import analysis, moves
from agent_synthesis.plans.plan import Plan as Groups
from agent_synthesis.plans.plan import plan_zero
from benchmarks.plans import into_one
from benchmarks.products.attention import FLUSHED_BYTES, times
from benchmarks.products.product_compiles import PRODUCTS, Product
from benchmarks.search.landscape_file import Landscape, Plan, append, digits, plan_line, read, task_line
from benchmarks.search.skill import DEFAULT_REASONER, replays
from gpu_bench import device
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.digest import digest
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, task_pb2, timing_pb2

TRIALS, GAP_BAR = 8, 0.10
"""Trials after which a search should be as near to the fastest setting as this."""
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Most that a result's rms distance from eager's may be, of its rms."""


@dataclass(frozen=True)
class Setting:
    """A plan with one kernel and the move that leads to it."""

    parent: str
    move: Sequence[analysis_pb2.Move]
    path: Sequence[analysis_pb2.Move]
    groups: Groups
    program: candidate_pb2.Program


def graph_of(name: str) -> graph_pb2.Graph:
    """The product, captured without its operands."""
    gelu, dtype, *shapes = PRODUCTS[name]
    with FakeTensorMode():
        args = tuple(torch.empty(shape, dtype=dtype) for shape in shapes)
        return capture(Product(gelu=gelu), args)


def plan_digest(groups: Groups) -> str:
    """What a landscape knows a plan by."""
    return digits(analysis.describe(groups, with_legal_moves=False).plan_digest)


def settings(zero: Groups) -> dict[str, Setting]:
    """Every setting of the one kernel, by the plan's digest, each after the one that it was reached from."""
    first = into_one(zero)
    found: dict[str, Setting] = {}
    waiting = [(plan_digest(zero), [first], [first], moves.apply(zero, first))]
    while waiting:
        parent, move, path, groups = waiting.pop(0)
        name = plan_digest(groups)
        if name in found:
            continue
        found[name] = Setting(parent, move, path, groups, generator.generate(groups))
        for legal in moves.legal(groups):
            if legal.move.kind == analysis_pb2.MOVE_KIND_SET:
                further = moves.apply(groups, legal.move)
                waiting.append((name, [legal.move], [*path, legal.move], further))
    return found


def record(name: str, file: Path, rounds: int, pool: ProcessPoolExecutor) -> str:
    """Writes the product's landscape and says what is in it."""
    began = time.monotonic()
    gelu, dtype, *shapes = PRODUCTS[name]
    graph = graph_of(name)
    zero = plan_zero(GraphIndex(graph), task_pb2.TARGET_CUDA)
    every = settings(zero)
    different = {setting.program.digest: setting for setting in every.values()}
    artifacts = dict(zip(different, pool.map(cubin_of, [each.program for each in different.values()]), strict=True))
    compiled_at = time.monotonic()
    gpu = torch.device("cuda", 0)
    module = Product(gelu=gelu)
    args = [torch.randn(*shape, dtype=dtype, device=gpu) for shape in shapes]
    wanted, wrong = module(*args), list[str]()
    arms: dict[str, Callable[[], object]] = {"": lambda: module(*args)}
    for key, setting in different.items():
        call = CudaExecutor().load(setting.program, artifacts[key], gpu).bind(Sources(args, {}, {}))
        distance = (call()[0].float() - wanted.float()).square().mean().sqrt() / wanted.float().square().mean().sqrt()
        if not float(distance) <= CLOSE[dtype]:
            wrong.append(key)
            continue
        arms[key] = call
    measured = times(arms, rounds, torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=gpu))
    eager = measured.pop("")
    keep(file, name, graph, device.describe(task_pb2.TARGET_CUDA).device, eager, measured)
    default = next(iter(every.values())).program.digest
    best = min(measured.values())
    return (
        f"{name}: {len(different)} kernels, {compiled_at - began:.0f} s to make and compile them, "
        f"{time.monotonic() - compiled_at:.0f} s to run; eager {eager / 1e3:.1f} µs, fastest {best / 1e3:.1f} µs, "
        f"default {measured.get(default, 0.0) / best - 1:.1%} slower; far from eager's result: {len(wrong)}"
    )


def keep(
    file: Path, name: str, graph: graph_pb2.Graph, gpu: timing_pb2.Device, eager: float, measured: dict[str, float]
) -> None:
    """Writes a product's landscape: `measured` has nanoseconds by digest of the program, of those that are right."""
    made = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "emitters": digits(generator.emitter_digest()),
        "torch": str(torch.__version__),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
    }
    task = task_pb2.Task(name=name, target=task_pb2.TARGET_CUDA, digest=digest(name))
    zero = plan_zero(GraphIndex(graph), task_pb2.TARGET_CUDA)
    plans = [Plan(plan_digest(zero), digits(generator.generate(zero).digest), "", [], "PASS", 1.0, eager)]
    for key, setting in settings(zero).items():
        program, ns = setting.program.digest, measured.get(setting.program.digest, 0.0)
        gain = eager / ns if ns else 0.0
        plans.append(Plan(key, digits(program), setting.parent, setting.move, "PASS" if ns else "NUMERIC", gain, ns))
    append(file, task_line(Landscape(task, graph, gpu, made=made)))
    for plan in plans:
        append(file, plan_line(name, plan, eager, 0.0))


def table(landscapes: Sequence[Landscape], trials: int) -> tuple[str, int]:
    """What the search found in so many trials, as Markdown; and for how many products that is near the fastest."""
    head = [
        "product",
        "kernels",
        "fastest, µs",
        "against eager",
        "first plan",
        f"best of {trials} trials",
        "trials to 10 %",
    ]
    lines, near = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)], 0
    for landscape in landscapes:
        passed = [plan for plan in landscape.plans.values() if plan.passed]
        best = max(passed, key=lambda plan: plan.speedup)
        with tempfile.TemporaryDirectory() as cache:
            (found,) = replays(landscape, ["beam"], [DEFAULT_REASONER], trials, 1, Path(cache))
        first = next(plan for plan in passed if plan.parent)
        reached = next((n for n, share in enumerate(found.shares, 1) if share >= 1 / (1 + GAP_BAR)), 0)
        near += reached > 0
        cells = [landscape.task.name, str(len({plan.program for plan in passed}) - 1), f"{best.candidate_ns / 1e3:.1f}"]
        cells += [f"{best.speedup:.2f}x", f"{best.speedup / first.speedup - 1:.1%} slower", f"{found.gap:.1%} slower"]
        lines.append(f"| {' | '.join([*cells, str(reached or 'more')])} |")
    return "\n".join(lines), near


def main() -> int:
    """Records or prints; 1 where the search does not come near the fastest setting of most products."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the landscapes, lines of JSON; products in it are left out")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only replay searches on these")
    parser.add_argument("--only", default="", help="products whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trials", type=int, default=TRIALS)
    options = parser.parse_args()
    if options.out:
        torch.set_grad_enabled(False)
        known = {landscape.task.name for landscape in read([options.out])}
        with ProcessPoolExecutor() as pool:
            list(pool.map(abs, range(4 * (os.cpu_count() or 1))))  # its processes begin before a GPU is in use
            for name in PRODUCTS:
                if options.only in name and name not in known:
                    print(record(name, options.out, options.rounds, pool), flush=True)
    if not (file := options.out or options.table):
        parser.error("--out records, --table only replays")
    landscapes = read([file])
    says, near = table(landscapes, options.trials)
    print(f"{says}\n\nwithin {GAP_BAR:.0%} of the fastest after {options.trials} trials: {near} of {len(landscapes)}")
    return int(2 * near <= len(landscapes))


if __name__ == "__main__":
    sys.exit(main())
