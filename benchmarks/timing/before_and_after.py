"""Whether a change to the emitters leaves kernels as fast as they were: those of two trees, timed in turns.

    python -m benchmarks.timing.before_and_after --make FILE [--modules MODULE …]  this tree's, compiled; needs no GPU
    python -m benchmarks.timing.before_and_after --compare OLD NEW                 the table, on a GPU

Kernels are what a search begins with for each case, and of each strategy that is one move away the first; with
`--modules`, the first plan of each module instead. Both trees' read the same values in turn with cold caches; results
are compared.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import fusion
from agent_synthesis.plans.plan import Plan
from agent_synthesis.synthesizer import BuiltInSynthesizer
from agent_synthesis.testing import Applied
from benchmarks.kernelbench.level2_plans import first_plan
from benchmarks.plans import one_kernel
from benchmarks.products.attention import FLUSHED_BYTES, times
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from orchestrator.tasks import intake
from warpsmith.contract import earlier
from warpsmith.errors import IllegalMove
from warpsmith.v1 import artifact_pb2, candidate_pb2, task_pb2, verdict_pb2

BAR_MEAN, BAR_WORST = 1.01, 1.03
"""Of the first kernels: the geometric mean, and the slowest of them."""
FIRST = "first"
STRATEGIES = ("reduce", "reuse", "prefetch", "scan", "order")
"""Choices by which a schedule writes another kernel."""


@dataclass(frozen=True)
class Case:
    """What is computed, of inputs of these shapes."""

    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32

    @property
    def plan(self) -> Plan:
        """As one kernel with the settings that a search begins with."""
        with FakeTensorMode():
            args = tuple(torch.empty(shape, dtype=self.dtype) for shape in self.shapes)
        return one_kernel(Applied(self.function), args)


def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


_LONG, _IMAGES = ((4096, 16384),), ((16, 64, 256, 256),)
CASES = {
    "softmax 4096 x 16384": Case(lambda x: torch.softmax(x, 1), _LONG),
    "softmax 4096 x 16384 bf16": Case(lambda x: torch.softmax(x, 1), _LONG, torch.bfloat16),
    "softmax 4095 x 16381": Case(lambda x: torch.softmax(x, 1), ((4095, 16381),)),
    "log softmax 512 x 393216": Case(lambda x: torch.log_softmax(x, 1), ((512, 393216),)),
    "layer norm 4096 x 16384": Case(normed, ((4096, 16384), (16384,), (16384,))),
    "layer norm 16 x 64 x 256 x 256": Case(lambda x: F.layer_norm(x, x.shape[1:]), _IMAGES),
    "rms norm 32 x 64 x 128 x 128": Case(
        lambda x: x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt(), ((32, 64, 128, 128),)),
    "group norm 16 x 64 x 256 x 256": Case(lambda x: F.group_norm(x, 8), _IMAGES),
    "instance norm 16 x 64 x 256 x 256": Case(F.instance_norm, _IMAGES),
    "L1 norm 8192 x 16384": Case(lambda x: x / x.abs().mean(1, keepdim=True), ((8192, 16384),)),
    "sum of rows 8192 x 16384": Case(lambda x: x.sum(1), ((8192, 16384),)),
    "sum of columns 128 x 4096 x 512": Case(lambda x: x.sum(1, keepdim=True), ((128, 4096, 512),)),
    "largest of columns 128 x 4096 x 511": Case(lambda x: x.amax(1), ((128, 4096, 511),)),
    "softmax of columns 64 x 1024 x 512": Case(lambda x: torch.softmax(x, 1), ((64, 1024, 512),)),
    "argmax of columns 128 x 4096 x 512": Case(lambda x: torch.argmax(x, 1), ((128, 4096, 512),)),
    "sum of all 64 M": Case(lambda x, y: (x - y).square().mean(), ((8192, 8192),) * 2),
    "GELU 8192 x 16384": Case(F.gelu, ((8192, 16384),)),
    "cumsum 4096 x 16384": Case(lambda x: torch.cumsum(x, 1), _LONG),
    "cumprod 2048 x 32768": Case(lambda x: torch.cumprod(x, 1), ((2048, 32768),)),
    "cumsum of columns 128 x 1024 x 512": Case(lambda x: torch.cumsum(x, 1), ((128, 1024, 512),)),
    "max pool 3, stride 1": Case(lambda x: F.max_pool2d(x, 3, 1, 1), _IMAGES),
    "average pool 2": Case(lambda x: F.avg_pool2d(x, 2), _IMAGES),
    "max pool of lines 8, stride 1": Case(lambda x: F.max_pool1d(x, 8, 1, 4), ((64, 128, 16384),)),
    "max pool of volumes 3, stride 2": Case(lambda x: F.max_pool3d(x, 3, 2, 1), ((8, 32, 64, 64, 64),)),
    "transpose, GELU 8192 x 8192": Case(lambda x: F.gelu(x.t()).contiguous(), ((8192, 8192),)),
    "transpose, sum 4096 x 4096 bf16": Case(lambda x, y: x + y.t(), ((4096, 4096),) * 2, torch.bfloat16),
    "channels last 32 x 256 x 56 x 56": Case(channels_last, ((32, 256, 56, 56),)),
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A program, of a case or of a module's task, and its machine code."""

    name: str
    """The case or module, a slash, the strategy."""
    program: candidate_pb2.Program
    task: task_pb2.Task = field(default_factory=task_pb2.Task)
    """Empty for a case."""
    artifact: artifact_pb2.Artifact = field(default_factory=artifact_pb2.Artifact)

    def sources(self, device: torch.device) -> Sources:
        """Values to read: normal ones for a case, a module's own."""
        if self.task.ByteSize():
            loaded = LoadedTask.load(self.task)
            return loaded.sources(loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 3))
        case = CASES[self.name.partition("/")[0]]
        drawn = torch.Generator(device=device).manual_seed(3)
        return Sources([torch.randn(shape, device=device, generator=drawn).to(case.dtype) for shape in case.shapes])


def kernels(case: Case) -> Iterator[tuple[str, candidate_pb2.Program]]:
    """The first, then the first of each other strategy."""
    plan = case.plan
    yield FIRST, generator.generate(plan)
    (group,) = plan.groups
    nest, seen = plan.nest(group), set()
    assert isinstance(nest, Nest)
    first = group.settings.words()
    for settings in plan.schedule(group).alternatives(nest, group.settings):
        words = settings.words()
        changed = [f"{key}={words[key]}" for key in STRATEGIES if words.get(key) != first.get(key)]
        name = " ".join(changed)
        if not changed or name in seen:
            continue
        try:
            yield name, generator.generate(fusion.with_settings(plan, group.name, settings))
        except IllegalMove:
            continue
        seen.add(name)


def of_cases() -> Iterator[Kernel]:
    """Those of all cases."""
    for name, case in CASES.items():
        for strategy, program in kernels(case):
            yield Kernel(f"{name}/{strategy}", program)


def of_modules(files: Sequence[Path]) -> Iterator[Kernel]:
    """The first plan of each module. Raises BadInput."""
    synthesizer = BuiltInSynthesizer()
    for file in files:
        plan, _ = first_plan(synthesizer, file)
        if plan is None:
            print(f"{file.stem}: no plan of ours")
            continue
        yield Kernel(
            f"{file.stem}/{FIRST}", generator.generate(plan), intake.read(intake.Request(str(file), target="cuda"))
        )


def make(file: Path, made: Iterable[Kernel]) -> None:
    """Writes kernels with their machine code."""
    count = 0
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in made:
            archive.writestr(f"{each.name}.program", each.program.SerializeToString())
            archive.writestr(f"{each.name}.artifact", cubin_of(each.program).SerializeToString())
            archive.writestr(f"{each.name}.task", each.task.SerializeToString())
            print(each.name, flush=True)
            count += 1
    print(f"{count} kernels in {file}")


def read(file: Path) -> dict[str, Kernel]:
    """What `make` wrote, by case or module and strategy."""
    with zipfile.ZipFile(file) as archive:
        names = [name.removesuffix(".program") for name in archive.namelist() if name.endswith(".program")]
        return {
            today(name): Kernel(
                today(name),
                candidate_pb2.Program.FromString(archive.read(f"{name}.program")),
                task_pb2.Task.FromString(archive.read(f"{name}.task")),
                artifact_pb2.Artifact.FromString(archive.read(f"{name}.artifact")),
            )
            for name in names
        }


def today(name: str) -> str:
    """A kernel's name, of which an earlier version may have spelled the strategy otherwise."""
    label, _, strategy = name.partition("/")
    return f"{label}/{' '.join(map(earlier.choice, strategy.split()))}"


def compare(old: Path, new: Path, rounds: int, only: str) -> int:
    """Prints the table; 1 where the first kernels are slower than the bars."""
    before, after = read(old), read(new)
    firsts: dict[str, float] = {}
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {len(before)} kernels before, {len(after)} after"
    )
    head = ("case", "kernel", "before, µs", "after, µs", "after / before", "results")
    print(f"| {' | '.join(head)} |\n| --- | --- | ---: | ---: | ---: | --- |")
    for name in (name for name in before if name in after and only in name):
        label, _, strategy = name.partition("/")
        one, two, same = measured(before[name], after[name], rounds)
        torch.cuda.empty_cache()
        if strategy == FIRST:
            firsts[label] = two / one
        print(f"| {label} | {strategy} | {one / 1e3:.1f} | {two / 1e3:.1f} | {two / one:.3f} | {same} |", flush=True)
    mean = math.exp(statistics.fmean(map(math.log, firsts.values())))
    worst = max(firsts, key=lambda name: firsts[name])
    print(f"\nfirst kernels: {len(firsts)}, geometric mean {mean:.4f}, slowest {firsts[worst]:.3f} ({worst})")
    return int(mean > BAR_MEAN or firsts[worst] > BAR_WORST)


def measured(before: Kernel, after: Kernel, rounds: int) -> tuple[float, float, str]:
    """Median nanoseconds of two kernels of one case or module, and how far apart their first results are."""
    device = torch.device("cuda", 0)
    sources = before.sources(device)
    one, two = (CudaExecutor().load(each.program, each.artifact, device).bind(sources) for each in (before, after))
    pairs = list(zip([result.clone() for result in one()], [result.clone() for result in two()], strict=True))
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    ns = times({"before": one, "after": two}, rounds, flushed)
    apart = max(float((first.double() - second.double()).abs().max()) for first, second in pairs)
    is_same = all(torch.equal(*pair) for pair in pairs)
    return ns["before"], ns["after"], "same bits" if is_same else f"{apart:.1e} apart"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--make", type=Path, metavar="FILE")
    wanted.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--modules", type=Path, nargs="+", default=[], help="files to take the first plans of")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.make:
        make(options.make, of_modules(options.modules) if options.modules else of_cases())
        return 0
    old, new = options.compare
    return compare(old, new, options.rounds, options.only)


if __name__ == "__main__":
    sys.exit(main())
