"""Whether the stopwatch tells equals apart, and whether it finds a planted difference: 100 comparisons of each.

    python -m benchmarks.timing.aa_experiment --target cpu --write docs/results/aa_experiment.md

The code that times candidates (interleaved arms, A/A copy, bootstrap, the rule for "faster") times pieces of work of
which nothing needs to be compiled: one that is its own baseline, and one whose baseline does 3 % more (10 % on a
processor, which others may share). Bars: at most 1 of 100 equals called faster, at least 95 of 100 differences found.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpu_bench.timing.arms import AA_COPY, CANDIDATE, EAGER
from gpu_bench.timing.clocks import Arm, Clock, CudaClock, HostClock
from gpu_bench.timing.interleaving import measure, plan_for
from gpu_bench.timing.timing_selftest import judged
from warpsmith.v1 import task_pb2, timing_pb2

PLANTED = {"cpu": 0.10, "cuda": 0.03}


@dataclass(frozen=True)
class Work:
    """A piece of work that can be made larger by a part of itself."""

    unit: Callable[[], Any]
    """What is repeated on a processor."""
    values: torch.Tensor
    target: str

    def of(self, size: float) -> Callable[[int], Any]:
        """A call that does `size` times the work: more repeats on a processor, more elements on a GPU."""
        if self.target == "cpu":
            count = round(REPEATS * size)

            def repeat(_index: int) -> Any:
                result = None
                for _ in range(count):
                    result = self.unit()
                return result

            return repeat
        part = self.values[: int(len(self.values) / (1 + PLANTED["cuda"]) * size)]
        return lambda _index: torch.relu(part)


REPEATS = 200


def work_of(target: str) -> Work:
    """Sines of 4,096 numbers, over and over; or relu of 256 MB, which is read and written."""
    if target == "cpu":
        values = torch.linspace(0.0, 1.0, 1 << 12)
        return Work(lambda: torch.sin(values), values, target)
    values = torch.rand(int((1 << 26) * (1 + PLANTED["cuda"])), device="cuda")
    return Work(lambda: None, values, target)


def compare(work: Work, clock: Clock, more: float, seconds: float, seed: int) -> timing_pb2.Timing:
    """One comparison of a candidate with a baseline that does `more` than it, as a part of 1."""
    target = task_pb2.TARGET_CUDA if work.target == "cuda" else task_pb2.TARGET_CPU
    baseline = work.of(1.0 + more)
    arms = [Arm(CANDIDATE, work.of(1.0), required=True), Arm(EAGER, baseline), Arm(AA_COPY, baseline)]
    plan = plan_for(timing_pb2.TIER_FINAL, target, 1, seed)
    samples = measure(arms, clock, replace(plan, budget_s=seconds, warmup_s=0.01, extra_readings=()))
    return judged(samples, timing_pb2.TIER_FINAL, seed)


def main() -> int:
    """Prints and writes the counts; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0, help="of blocks in each comparison")
    parser.add_argument("--write", type=Path, help="a Markdown table; rows of the other target are kept")
    options = parser.parse_args()
    work, clock = work_of(options.target), CudaClock(64 << 20) if options.target == "cuda" else HostClock(1 << 20)
    more, begin, load = PLANTED[options.target], time.monotonic(), os.getloadavg()[0]
    equal, planted = [], []
    for run in range(options.runs):
        equal.append(compare(work, clock, 0.0, options.seconds, run))
        planted.append(compare(work, clock, more, options.seconds, run))
        if (run + 1) % 10 == 0:
            print(f"{run + 1} of {options.runs} pairs, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    called, found = sum(each.faster for each in equal), sum(each.faster for each in planted)
    noise = statistics.median(each.noise_floor for each in equal)
    measured = statistics.median(each.speedup_eager.median for each in planted)
    device = torch.cuda.get_device_name() if options.target == "cuda" else platform.processor() or platform.machine()
    others = f"load of the machine {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
    held = called <= options.runs / 100 and found >= 0.95 * options.runs
    row = (
        f"| {options.target} | {device} | {called} of {options.runs} | {more:.0%} | {found} of {options.runs} "
        f"| {measured - 1:.2%} | {noise:.2%} | {options.seconds:g} s | {others} | {'yes' if held else 'no'} |"
    )
    print(row)
    print(f"{time.monotonic() - begin:.0f} s")
    if options.write:
        write(options.write, options.target, row)
    return 0 if held else 1


HEAD = """# A/A comparisons and planted differences

Equals that were called faster (bar: at most 1 of 100), and planted differences that were found (bar: at least 95).

| target | device | equals called faster | planted | found | median found | noise floor | blocks | others | bars held |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |
"""
FOOT = """
Where others keep a shared processor busy, as the column says, differences drown; equals are still not called faster.

Made by `python -m benchmarks.timing.aa_experiment --target TARGET --write FILE`.
"""


def write(file: Path, target: str, row: str) -> None:
    """The table with this target's row; that of the other target stays."""
    rows = {}
    if file.exists():
        lines = [line for line in file.read_text().splitlines() if line.startswith(("| cpu |", "| cuda |"))]
        rows = {line.split("|")[1].strip(): line for line in lines}
    rows[target] = row
    file.write_text(HEAD + "\n".join(rows[name] for name in sorted(rows)) + "\n" + FOOT)


if __name__ == "__main__":
    sys.exit(main())
