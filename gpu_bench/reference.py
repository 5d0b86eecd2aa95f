"""The user's module by itself: how fast it is, and whether beating it would mean anything.

One idea: a reference is audited before a search, because a needlessly slow or constant one makes every later number
worthless. Judges no candidate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gpu_bench import device, floor
from gpu_bench.baselines import preserved_state
from gpu_bench.measurement import Bench, arm_messages, fastest_baseline
from gpu_bench.timing import measure, plan_for
from warpsmith.v1 import timing_pb2

OUTPUT_CONSTANT = "OUTPUT_CONSTANT"
"""Every output is the same for all inputs."""
OUTPUT_ZERO = "OUTPUT_ZERO"
"""Every output is all zeros."""
INPUT_UNUSED = "INPUT_UNUSED"
"""Some input does not influence any output."""

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""One forward from flattened tensor inputs to flattened tensor outputs; equal inputs give equal outputs."""

AUDIT_LIMIT_S = 5.0
CREDIBLE_ABOVE = 0.9
"""A floor that PyTorch itself is faster than by more than this is none: the data lay in a cache."""
SAME_WITHIN = 1e-6
"""Relative difference below which two outputs count as the same: sums in another order differ by as much."""


def measure_reference(bench: Bench, audit_flags: Sequence[str] = ()) -> timing_pb2.ReferenceReport:
    """Times every baseline but the autotuned one, remembers their medians for screening, and adds the flags.

    `audit_flags` come from `audit`, which needs forwards of its own.
    """
    before = device.environment(bench.target, jail_rung=bench.jail_rung, seed=bench.seed)
    prepared = bench.baselines.prepare_reference()
    arms = [item.arm for item in prepared if item.arm is not None]
    plan = plan_for(timing_pb2.TIER_FINAL, bench.target, bench.set_count, bench.seed)
    short = replace(plan, budget_s=plan.budget_s / 4, least_blocks=6, warmup_s=plan.warmup_s / 2, extra_count=3)
    with preserved_state(bench.baselines.module):
        samples = measure(arms, bench.clock, short)
    for name, arm in samples.arms.items():
        if not arm.failure:
            bench.baselines.medians_ns[name] = arm.median_ns
    fastest, warm = fastest_baseline(samples.arms), samples.group_length > 1
    fastest_ns = samples.arms[fastest].median_ns if fastest else math.inf
    if fastest_ns < floor.floor_ns(bench.work, bench.ceilings, parameters_warm=warm):
        # Ceilings taken while others kept the machine busy would say that nothing can be won: ask the machine again.
        bench.ceilings = device.measured_again(bench.ceilings)
    lowest = floor.floor_ns(bench.work, bench.ceilings, parameters_warm=warm)
    return timing_pb2.ReferenceReport(
        arms=arm_messages(samples.arms, prepared),
        fastest=fastest,
        floor_ns=lowest if fastest_ns > CREDIBLE_ABOVE * lowest else 0.0,
        flags=[*audit_flags, *floor.reference_flags(bench.work, bench.ceilings)],
        environment=device.finished(before, bench.target),
    )


def audit(run: Run, draws: Sequence[Sequence[torch.Tensor]], limit_s: float = AUDIT_LIMIT_S) -> list[str]:
    """Flags of a reference whose result could be had without computing it.

    `draws` are two or three sets of inputs from different seeds. A random module must be seeded inside `run`.
    Inputs are tried one by one for influence until `limit_s` is spent; integer inputs are left alone, since
    another draw need not differ from the first.
    """
    begin = time.perf_counter()
    outputs = [run(draw) for draw in draws]
    flags = []
    if all(not bool(tensor.count_nonzero()) for each in outputs for tensor in each):
        flags.append(OUTPUT_ZERO)
    if all(_same(each, outputs[0]) for each in outputs[1:]):
        return [*flags, OUTPUT_CONSTANT]
    for position, leaf in enumerate(draws[0]):
        if time.perf_counter() - begin > limit_s:
            break
        other = draws[1][position]
        if not leaf.is_floating_point() or torch.equal(leaf, other):
            continue
        changed = [*draws[0][:position], other, *draws[0][position + 1 :]]
        if _same(run(changed), outputs[0]):
            flags.append(INPUT_UNUSED)
            break
    return flags


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether all outputs agree, NaN with NaN."""
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, SAME_WITHIN, 0.0, equal_nan=True)
        for a, b in zip(left, right, strict=True)
    )
