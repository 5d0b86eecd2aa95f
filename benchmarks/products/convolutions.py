"""Times convolutions of ours beside the library's, on a GPU with cold caches: KernelBench's, and those of networks.

    python -m benchmarks.products.convolutions [--only conv3d] [--rounds 5] [--steps 2] [--out FILE]

The library's: as a module calls it, and the fastest of cuDNN's benchmark mode with tensors as they are and with
channels-last weights, to which the data is converted in each call.
Ours begin with what a search begins with; in each of `--steps` the best so far is changed in one setting at a time.
Errors are the worst against fp64 over PyTorch's own, on the first image and a few channels. Prints a table: medians of
CUDA events over rounds in which every arm runs once; the floor is what inputs and outputs take at a copy's rate.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.emit.cuda.products.convolutions.convolution_product import CudaConvolutionProduct
from agent_synthesis.emit.cuda.windows.convolution import CudaConvolution
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans.plan import Plan
from agent_synthesis.settings import Settings
from agent_synthesis.testing import Applied
from benchmarks.plans import one_kernel
from benchmarks.products.attention import FLUSHED_BYTES, times
from benchmarks.products.staging import copy_rate
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.errors import IllegalMove
from warpsmith.hardware import H200

F32, BF16 = torch.float32, torch.bfloat16
COMPARED_CHANNELS = 8
"""Of the first group, in the first image, whose errors are compared."""
HEAD = (
    "convolution", "schedule", "floor, µs", "eager", "library's best", "ours at first", "ours", "gain", "TFLOP/s",
    "error", "settings",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A convolution without a bias; `options` are those of `torch.nn.functional`."""

    name: str
    data: tuple[int, ...]
    weight: tuple[int, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    transposed: bool = False
    dtype: torch.dtype = F32

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """The call."""
        name = f"conv{'_transpose' if self.transposed else ''}{len(self.data) - 2}d"
        return lambda x, weight: getattr(F, name)(x, weight, **self.options)

    def multiply_adds(self, result: torch.Tensor) -> int:
        """Of one call."""
        each = self.data if self.transposed else result.shape  # that meets a whole weight
        return math.prod(each) * math.prod(self.weight[1:])


CASES = (
    Case("1/82 depthwise 3x3, 64 channels", (16, 64, 512, 512), (64, 1, 3, 3), {"groups": 64}),
    Case("1/83 depthwise 3x1, 8 channels", (64, 8, 512, 512), (8, 1, 3, 1), {"groups": 8}),
    Case("1/84 depthwise 3x3, 128 channels", (64, 128, 256, 512), (128, 1, 3, 3), {"groups": 128}),
    Case("1/85 depthwise 3x7, 128 channels", (32, 128, 128, 256), (128, 1, 3, 7), {"groups": 128}),
    Case("7x7 depthwise, 96 channels", (64, 96, 56, 56), (96, 1, 7, 7), {"groups": 96, "padding": 3}),
    Case("7x7 depthwise, 96 channels, bf16", (64, 96, 56, 56), (96, 1, 7, 7), {"groups": 96, "padding": 3}, dtype=BF16),
    Case("causal, 4 taps, 2048 channels", (8, 2048, 2048), (2048, 1, 4), {"groups": 2048, "padding": 3}),
    Case("1/50 11x11, stride 4, 3 to 96", (256, 3, 224, 224), (96, 3, 11, 11), {"stride": 4, "padding": 2}),
    Case("1/55 3x3, 64 to 128", (8, 64, 512, 1024), (128, 64, 3, 3)),
    Case("1/56 5x7, 64 to 128", (8, 64, 512, 256), (128, 64, 5, 7)),
    Case("1/57 transposed 3x3, 64 to 64", (8, 64, 1024, 1024), (64, 64, 3, 3), transposed=True),
    Case("1/58 transposed 3x5x7, 32 to 16", (16, 32, 16, 32, 64), (32, 16, 3, 5, 7), transposed=True),
    Case("1/54 3x3x3, 3 to 64", (16, 3, 64, 64, 64), (64, 3, 3, 3, 3)),
    Case("1/61 transposed 3x3x3, 48 to 48", (8, 48, 64, 64, 64), (48, 48, 3, 3, 3), transposed=True),
    Case("1/62 5x9, 32 to 64", (8, 32, 512, 512), (64, 32, 5, 9)),
    Case("1/63 3x3, 16 to 128", (16, 16, 1024, 1024), (128, 16, 3, 3)),
    Case("1/67 3, 64 to 128", (32, 64, 131072), (128, 64, 3)),
    Case("1/68 transposed 3x5x5, 32 to 64", (16, 32, 64, 64, 64), (32, 64, 3, 5, 5), transposed=True),
    Case("1/76 3, stride 3, dilation 4", (64, 64, 524280), (128, 64, 3), {"stride": 3, "dilation": 4}),
    Case("1/80 5x9, padding, dilation", (8, 32, 512, 512), (64, 32, 5, 9), {"padding": (2, 4), "dilation": (2, 3)}),
    Case("3x3, 64 at 56x56", (64, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
    Case("3x3, 256 at 14x14", (64, 256, 14, 14), (256, 256, 3, 3), {"padding": 1}),
    Case("3x3, 512 at 7x7", (64, 512, 7, 7), (512, 512, 3, 3), {"padding": 1}),
    Case("3x3, 256 at 56x56, bf16", (32, 256, 56, 56), (256, 256, 3, 3), {"padding": 1}, dtype=BF16),
    Case("3x3, 512 at 28x28, bf16", (32, 512, 28, 28), (512, 512, 3, 3), {"padding": 1}, dtype=BF16),
    Case("3x3, 128, stride 2, bf16", (64, 128, 56, 56), (128, 128, 3, 3), {"padding": 1, "stride": 2}, dtype=BF16),
)  # fmt: skip


class Ours:
    """What ours take, step by step; programs are compiled side by side."""

    def __init__(self, case: Case, args: Sequence[torch.Tensor], rounds: int, flushed: torch.Tensor) -> None:
        self._args, self._rounds, self._flushed = list(args), rounds, flushed
        with FakeTensorMode():
            fake = [torch.empty(shape, dtype=case.dtype) for shape in (case.data, case.weight)]
        self._plan = one_kernel(Applied(case.function), fake)
        (self._group,) = self._plan.groups
        nest = self._plan.nest(self._group)
        assert isinstance(nest, Nest)
        self._nest = nest

    def all(self, steps: int) -> list[tuple[str, float, float, str, torch.Tensor]]:
        """(schedule, first µs, best µs, its settings, its result) of each schedule that takes it."""
        found = []
        schedules: list[Any] = [CudaConvolution(H200), CudaConvolutionProduct(H200)]
        for schedule in schedules:
            if not schedule.accepts(self._nest):
                continue
            best = schedule.defaults(self._nest)
            first, result = self._measure([self._plan_of(schedule.name, best)])
            taken, tried = first[0], {best}
            for _ in range(steps):
                around = [each for each in schedule.alternatives(self._nest, best) if each not in tried]
                tried |= set(around)
                measured, _ = self._measure([self._plan_of(schedule.name, each) for each in around])
                if not measured or min(measured) >= taken:
                    break
                taken = min(measured)
                best = around[measured.index(taken)]
            words = ", ".join(f"{name} {value}" for name, value in best.words().items())
            found.append((schedule.name, first[0], taken, words, result))
        return found

    def _plan_of(self, schedule: str, settings: Settings) -> Plan:
        return self._plan.exchanged(replace(self._group, schedule=schedule, settings=settings))

    def _measure(self, plans: Sequence[Plan]) -> tuple[list[float], torch.Tensor]:
        programs = [generator.generate(plan) for plan in plans]
        with ThreadPoolExecutor(16) as pool:
            artifacts = list(pool.map(cubin_of, programs))
        taken, result = [], torch.empty(0)
        for program, artifact in zip(programs, artifacts, strict=True):  # one after the other: workspaces are large
            call = CudaExecutor().load(program, artifact, torch.device("cuda", 0)).bind(Sources(self._args, {}, {}))
            taken.append(1e-3 * times({"ours": call}, self._rounds, self._flushed)["ours"])
            result = call()[0].clone()
            del call
            torch.cuda.empty_cache()
        return taken, result


def library(case: Case, args: Sequence[torch.Tensor], rounds: int, flushed: torch.Tensor) -> tuple[float, float]:
    """(as it is called, the best) of the library in µs."""
    taken = {"eager": lambda: case.function(*args)}
    eager = 1e-3 * times(taken, rounds, flushed)["eager"]
    torch.backends.cudnn.benchmark = True
    ways: list[Callable[[], object]] = [lambda: case.function(*args)]
    if len(case.data) > 3:
        layout = torch.channels_last if len(case.data) == 4 else torch.channels_last_3d
        weight = args[1].contiguous(memory_format=layout)
        ways.append(lambda: case.function(args[0].contiguous(memory_format=layout), weight))
    best = min(1e-3 * times({"way": way}, rounds, flushed)["way"] for way in ways)
    torch.backends.cudnn.benchmark = False
    return eager, min(best, eager)


def errors(case: Case, args: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> list[float]:
    """The worst of each result in units of the library's worst, in the first image and some of the first channels."""
    groups = int(str(case.options.get("groups", 1)))
    x, weight = args[0][:1].double(), args[1].double()
    made = (case.weight[1] if case.transposed else case.weight[0]) // (1 if case.transposed else groups)
    count = min(COMPARED_CHANNELS, made)
    per = x.shape[1] // groups
    x, weight = x[:, :per], weight[:per, :count] if case.transposed else weight[:count]
    options = {**case.options, "groups": 1}
    truth = replace(case, options=options).function(x, weight)
    worst = [(each[:1, :count].double() - truth).abs().max().item() for each in (case.function(*args), *found)]
    return [each / worst[0] if worst[0] else math.inf for each in worst[1:]]


def measure(case: Case, rounds: int, steps: int, rate: float) -> list[str]:
    """The case's lines of the table."""
    device = torch.device("cuda", 0)
    drawn = torch.Generator(device=device).manual_seed(3)
    args = [torch.randn(shape, device=device, generator=drawn).to(case.dtype) for shape in (case.data, case.weight)]
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    eager, best = library(case, args, rounds, flushed)
    result = case.function(*args)
    moved = sum(each.numel() for each in (*args, result)) * case.dtype.itemsize
    flops, floor = 2 * case.multiply_adds(result), moved / rate * 1e6
    del result
    try:
        ours = Ours(case, args, rounds, flushed).all(steps)
    except IllegalMove as error:
        return [f"| {case.name} | {error} |"]
    worst = errors(case, args, [each[-1] for each in ours])
    lines = []
    for (schedule, first, taken, settings, _), ratio in zip(ours, worst, strict=True):
        cells = [case.name, schedule, f"{floor:.0f}", f"{eager:.0f}", f"{best:.0f}", f"{first:.0f}", f"{taken:.0f}",
                 f"{best / taken:.2f}x", f"{flops / taken / 1e6:.0f}", f"{ratio:.2f}", settings]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Measures every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of changing one setting of the best so far")
    parser.add_argument("--only", default="", help="cases whose name contains one of these words, by commas")
    parser.add_argument("--out", type=Path, help="file to write the table to")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    rate = copy_rate(options.rounds)
    lines = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    print("\n".join(lines), flush=True)
    for case in CASES:
        if any(word in case.name for word in options.only.split(",")):
            found = measure(case, options.rounds, options.steps, rate)
            print("\n".join(found), flush=True)
            lines += found
            torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
