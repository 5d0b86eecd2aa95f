"""Times kernels of ours with and without what brings data on chip before it is used, on a GPU with cold caches.

    python -m benchmarks.products.staging [--only transpose] [--rounds 9] [--out docs/results/staging_h200.md]

"With" is what a search begins with; "without" the fastest of the settings one move away (of another schedule, its
first) whose loads go straight to registers when they are used. Both read the same values, and their results are
compared. Prints a table, of medians over rounds in which every arm runs once, or writes a page of it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import fusion
from agent_synthesis.plans.plan import Plan, schedule_named
from agent_synthesis.testing import Applied
from benchmarks.plans import one_kernel
from benchmarks.products.attention import FLUSHED_BYTES, times
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.errors import IllegalMove
from warpsmith.v1 import candidate_pb2

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
COPIED_BYTES = 4 << 30
"""Read and written by the copy that shares are of, in all."""
HEAD = ("nest", "what brings data on chip", "without, µs", "share", "with, µs", "share", "gain",
        "eager, µs", "compiled, µs")  # fmt: skip
REGISTERS = ("warp", "block", "cluster", "grid", "two_kernels")
"""Strategies of row reductions that load to registers."""


@dataclass(frozen=True)
class Case:
    """What is computed, what brings its data on chip, and what the arm without has otherwise.

    `without`: a schedule, or a setting and its values. `compares`: whether PyTorch is timed as well.
    """

    name: str
    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    staging: str
    without: str | tuple[str, tuple[str, ...]]
    dtype: torch.dtype = F32
    compares: bool = False


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 1)


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def turned_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x.t()).contiguous()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


def weighted_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias)


COPIES, TILES = "asynchronous copies to shared memory, strategy", "tiles in shared memory"
ROWS = (4096, 393216)
CASES = (
    Case("softmax 4096 x 393216", lambda x: torch.softmax(x, 1), (ROWS,), COPIES, ("reduce", REGISTERS)),
    Case("layer norm 4096 x 393216", weighted_norm, (ROWS, ROWS[1:], ROWS[1:]), COPIES, ("reduce", REGISTERS)),
    Case("norm of 64 rows of 16 MB", normed, ((64, 64, 65536),), COPIES, ("reduce", REGISTERS)),
    Case("cumsum 20000 x 50000", lambda x: torch.cumsum(x, 1), ((20000, 50000),), "next part of the row: registers",
         ("prefetch", ("no",))),
    Case("max pool 3, stride 1, 16 x 64 x 512 x 512", lambda x: F.max_pool2d(x, 3, 1, 1), ((16, 64, 512, 512),),
         "rows of the window: registers", ("reuse", ("none",))),
    Case("transpose, GELU 8192 x 8192", turned_gelu, ((8192, 8192),), TILES, "cuda_pointwise", compares=True),
    Case("transpose, sum 4096 x 4096 bf16", lambda x, y: x + y.t(), ((4096, 4096),) * 2, TILES, "cuda_pointwise",
         BF16, compares=True),
    Case("channels last 32 x 256 x 56 x 56", channels_last, ((32, 256, 56, 56),), TILES, "cuda_pointwise",
         compares=True),
    Case("three channels last 64 x 3 x 512 x 512", channels_last, ((64, 3, 512, 512),), TILES, "cuda_pointwise",
         compares=True),
    Case("axes reversed 64 x 64 x 64 x 64", lambda x: x.permute(3, 2, 1, 0).contiguous(), ((64,) * 4,), TILES,
         "cuda_pointwise", compares=True),
    Case("transpose 8191 x 8191", turned, ((8191, 8191),), TILES, "cuda_pointwise", compares=True),
    Case("transpose 16384 x 16384 u8", turned, ((16384, 16384),), TILES, "cuda_pointwise", U8, compares=True),
)  # fmt: skip


def plan_of(case: Case) -> Plan:
    """The case as one kernel with the settings that a search begins with."""
    with FakeTensorMode():
        args = tuple(torch.empty(shape, dtype=case.dtype) for shape in case.shapes)
    return one_kernel(Applied(case.function), args)


def without(case: Case, plan: Plan) -> Iterator[Plan]:
    """The plans without staging."""
    (group,) = plan.groups
    nest = plan.nest(group)
    assert isinstance(nest, Nest)
    if isinstance(case.without, str):
        other = schedule_named(plan.target, case.without)
        made = replace(group, schedule=other.name, settings=other.defaults(nest))
        yield plan.exchanged(made)
        return
    key, values = case.without
    if (first := group.settings.words()[key]) in values:
        raise SystemExit(f"{case.name}: the default, {key} = {first}, is not staged")
    for settings in plan.schedule(group).alternatives(nest, group.settings):
        if settings.words()[key] in values:
            yield fusion.with_settings(plan, group.name, settings)


def programs(case: Case, plan: Plan) -> list[candidate_pb2.Program]:
    """With staging, then all without."""
    made = [generator.generate(plan)]
    for other in without(case, plan):
        try:
            made.append(generator.generate(other))
        except IllegalMove:
            continue
    if len(made) < 2:
        raise SystemExit(f"{case.name}: no setting one move away is without")
    return made


def staging(case: Case, plan: Plan) -> str:
    """What brings data on chip, with the strategy's name where it has one."""
    chosen = plan.groups[0].settings.words().get("reduce", "") if case.staging == COPIES else ""
    return f"{case.staging} {chosen}".strip()


def measure(case: Case, plan: Plan, made: Sequence[candidate_pb2.Program], rounds: int, rate: float) -> str:
    """The case's line of the table."""
    device = torch.device("cuda", 0)
    generator_ = torch.Generator(device=device).manual_seed(3)
    args = [torch.empty(each, device=device, dtype=case.dtype) for each in case.shapes]
    for tensor in args:
        tensor.normal_(generator=generator_) if tensor.is_floating_point() else tensor.random_(generator=generator_)
    with ThreadPoolExecutor(8) as pool:
        artifacts = list(pool.map(cubin_of, made))
    calls = [
        CudaExecutor().load(program, artifact, device).bind(Sources(args, {}, {}))
        for program, artifact in zip(made, artifacts, strict=True)
    ]
    arms: dict[str, Callable[[], object]] = {str(number): call for number, call in enumerate(calls)}
    result = calls[0]()[0]
    for call in calls[1:]:
        torch.testing.assert_close(call()[0], result, rtol=2e-2 if case.dtype == BF16 else 1e-4, atol=1e-3)
    if case.compares:
        arms["eager"] = lambda: case.function(*args)
        fast = torch.compile(case.function)
        arms["compiled"] = lambda: fast(*args)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    us = {name: 1e-3 * ns for name, ns in times(arms, rounds, flushed).items()}
    moved = (sum(math.prod(shape) for shape in case.shapes) + result.numel()) * case.dtype.itemsize
    staged, plain = us["0"], min(us[str(number)] for number in range(1, len(calls)))
    cells = [case.name, staging(case, plan)]
    for value in (plain, staged):
        cells += [f"{value:.1f}", f"{moved / value / rate * 1e6:.0%}".replace("%", " %")]
    cells += [f"{plain / staged:.2f}x", *(f"{us[name]:.1f}" if name in us else "-" for name in ("eager", "compiled"))]
    return f"| {' | '.join(cells)} |"


def copy_rate(rounds: int) -> float:
    """Bytes read and written a second by a large copy of PyTorch's."""
    source = torch.zeros(COPIED_BYTES // 2, dtype=torch.uint8, device="cuda")
    target, flushed = torch.empty_like(source), torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    return COPIED_BYTES / times({"copy": lambda: target.copy_(source)}, rounds, flushed)["copy"] * 1e9


def main() -> int:
    """Measures every case; 1 where staging made one slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="page to write")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    cases = [case for case in CASES if options.only in case.name]
    plans = [plan_of(case) for case in cases]
    made = [programs(case, plan) for case, plan in zip(cases, plans, strict=True)]
    rate = copy_rate(options.rounds)
    lines = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    print("\n".join(lines), flush=True)
    for case, plan, each in zip(cases, plans, made, strict=True):
        lines.append(measure(case, plan, each, options.rounds, rate))
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text(page(lines, options.rounds, rate))
    return int(any("| 0." in line for line in lines))


def page(lines: Sequence[str], rounds: int, rate: float) -> str:
    """The table with what it was measured on."""
    made_with = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"""# Staging on an {torch.cuda.get_device_name()}

Made by `python -m benchmarks.products.staging --out docs/results/staging_h200.md` ({made_with}): medians of
CUDA events over {rounds} rounds in which every arm runs once, cold L2. *With* is what a search begins with,
*without* the fastest of the settings one move away whose loads go straight to registers when they are used.
*Share* is of the rate of a copy of {COPIED_BYTES >> 30} GiB, {rate / 1e12:.2f} TB/s, each input and output
counted once.

{chr(10).join(lines)}
"""


if __name__ == "__main__":
    sys.exit(main())
