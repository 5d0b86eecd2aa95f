"""The stopwatch tests itself: equals must not differ, and a planted difference must be found.

One idea: a simulated clock with the noise of real ones (jitter, slow drift, spikes, clock steps that the sentinel
sees) runs through the very code that times candidates. `python -m gpu_bench.timing.timing_selftest` prints the counts;
with `--real` a planted slowdown is timed on this processor too, which takes a minute.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gpu_bench import device
from gpu_bench.timing.arms import AA_COPY, CANDIDATE, EAGER
from gpu_bench.timing.clocks import Arm, HostClock, Reading, Sample
from gpu_bench.timing.floor import Work
from gpu_bench.timing.interleaving import Plan, Samples, measure, plan_for
from gpu_bench.timing.measurement import compose_timing
from warpsmith.v1 import task_pb2, timing_pb2


@dataclass(frozen=True)
class Noise:
    """How unquiet a simulated machine is; all relative to the time itself."""

    jitter: float = 0.01
    """Standard deviation of each reading."""
    drift: float = 0.002
    """Standard deviation of the step of a random walk, one step a reading: temperature, clocks."""
    spike_chance: float = 0.02
    """Chance that a reading is interrupted and takes 1.2 to 4 times as long."""
    step_chance: float = 0.002
    """Chance at a reading that the clock changes by up to 10 % for the next 20 readings."""


class SimulatedClock:
    """A clock over arms of known time. Deterministic for a seed; time passes only by readings."""

    def __init__(self, true_ns: Mapping[str, float], noise: Noise, seed: int) -> None:
        self._true_ns = true_ns
        self._noise = noise
        self._random = np.random.default_rng(seed)
        self._elapsed_ns = 0.0
        self._walk = 0.0
        self._step = 1.0
        self._step_left = 0
        self._stamps = 0

    def take(self, arm: Arm, sets: Sequence[int], reading: Reading) -> Sample:
        """A reading of the arm's true time, with noise; the arm is really called."""
        outputs = [arm.call(index) for index in sets]
        factor = {Reading.COLD: 1.0, Reading.WARM: 0.8, Reading.CALL: 1.2}[reading]
        return Sample(self._noisy(factor * self._true_ns[arm.name]), outputs)

    def laps_ns(self, call: Callable[[], Any]) -> list[float]:
        """One microsecond for every stamp."""
        self._stamps = 0
        call()
        return [1000.0] * self._stamps

    def stamp(self) -> None:
        """Counts a step."""
        self._stamps += 1

    def sentinel_ns(self) -> float:
        """100 µs, moved by what moves the whole machine, and little else."""
        return 1e5 * math.exp(self._walk) * self._step * (1.0 + 0.002 * self._random.standard_normal())

    def now_s(self) -> float:
        """Simulated seconds."""
        return self._elapsed_ns * 1e-9

    def begin(self, names: Iterable[str]) -> None:
        """Nothing is kept between measurements."""

    def _noisy(self, true_ns: float) -> float:
        self._walk = 0.98 * self._walk + self._noise.drift * self._random.standard_normal()
        if self._step_left == 0 and self._random.random() < self._noise.step_chance:
            self._step, self._step_left = 1.0 + 0.1 * self._random.random(), 20
        self._step_left = max(self._step_left - 1, 0)
        self._step = self._step if self._step_left else 1.0
        spike = 1.2 + 2.8 * self._random.random() if self._random.random() < self._noise.spike_chance else 1.0
        jitter = math.exp(self._noise.jitter * self._random.standard_normal())
        value = true_ns * math.exp(self._walk) * self._step * spike * jitter
        self._elapsed_ns += value + 1e5
        return value


NOTHING = Work(0, 0, 0, 0, 0, 0, 0)
"""A task without work: its floor is zero, so only the clock speaks."""

_CEILINGS = device.Ceilings(timing_pb2.Device(), 0.0, 1.0, 0.0, 0.0)


def judged(samples: Samples, tier: timing_pb2.Tier.ValueType, seed: int) -> timing_pb2.Timing:
    """The record that the product would make of these samples."""
    aa_of = EAGER if AA_COPY in samples.arms else ""
    return compose_timing(samples, [], tier=tier, work=NOTHING, ceilings=_CEILINGS, aa_of=aa_of, seed=seed)


def simulated(gain: float, tier: timing_pb2.Tier.ValueType, seed: int, noise: Noise | None = None) -> timing_pb2.Timing:
    """Times a candidate whose true time is eager's over `gain` on a simulated machine."""
    true_ns = {EAGER: 2e5, CANDIDATE: 2e5 / gain, AA_COPY: 2e5}
    names = [CANDIDATE, EAGER] + ([AA_COPY] if tier == timing_pb2.TIER_FINAL else [])
    arms = [Arm(name, lambda index: index, required=name == CANDIDATE) for name in names]
    plan = replace(plan_for(tier, task_pb2.TARGET_CUDA, 4, seed), most_blocks=48)
    clock = SimulatedClock(true_ns, noise or Noise(), seed)
    return judged(measure(arms, clock, plan), tier, seed)


def count_faster(gain: float, tier: timing_pb2.Tier.ValueType, runs: int = 100, first_seed: int = 0) -> int:
    """How many of `runs` simulated measurements call a candidate of that true gain faster."""
    return sum(simulated(gain, tier, first_seed + run).faster for run in range(runs))


def real(slowdown: float, runs: int, seconds: float = 2.0) -> tuple[int, int]:
    """On this processor: (A/A pairs called faster, planted slowdowns found), of `runs` each."""
    values = torch.linspace(0.0, 1.0, 1 << 12)
    length = 200

    def work(repeats: int) -> Callable[[int], Any]:
        def call(_index: int) -> torch.Tensor:
            result = values
            for _ in range(repeats):
                result = torch.sin(values)
            return result

        return call

    clock = HostClock(1 << 20)
    equal = found = 0
    for run in range(runs):
        for baseline_repeats in (length, round(length * (1.0 + slowdown))):
            arms = [
                Arm(CANDIDATE, work(length), required=True),
                Arm(EAGER, work(baseline_repeats)),
                Arm(AA_COPY, work(baseline_repeats)),
            ]
            plan = Plan(seconds, 60.0, 24, 400, 1, 0.1, 0.3, seed=run)
            timing = judged(measure(arms, clock, plan), timing_pb2.TIER_FINAL, run)
            if baseline_repeats == length:
                equal += timing.faster
            else:
                found += timing.faster
    return equal, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the counts; exit status 1 when a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--real", action="store_true", help="also a planted 10 %% slowdown on this processor")
    parser.add_argument("--real-runs", type=int, default=20)
    options = parser.parse_args(arguments)
    held = True

    def show(what: str, count: int, runs: int, holds: bool) -> None:
        nonlocal held
        held = held and holds
        print(f"{what}: {count} of {runs}{'' if holds else '  BROKEN'}")

    runs = options.runs
    for tier, name in ((timing_pb2.TIER_FINAL, "final"), (timing_pb2.TIER_SCREENING, "screening")):
        count = count_faster(1.0, tier, runs)
        show(f"simulated A/A called faster, {name}", count, runs, count <= runs // 100)
    count = count_faster(1.03, timing_pb2.TIER_FINAL, runs, first_seed=1000)
    show("simulated 3 % difference found, final", count, runs, count >= math.ceil(0.95 * runs))
    if options.real:
        equal, found = real(0.10, options.real_runs)
        show("A/A called faster on this processor", equal, options.real_runs, equal <= options.real_runs // 100)
        least = math.ceil(0.95 * options.real_runs)
        show("10 % slowdown found on this processor", found, options.real_runs, found >= least)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
