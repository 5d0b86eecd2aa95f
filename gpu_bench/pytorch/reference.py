"""The user's module by itself: how fast it is, and whether beating it would mean anything.

One idea: a reference is timed before a search, because a needlessly slow one makes every later number worthless (what
its results depend on is the judge's to find, in `dependence`). Judges no candidate.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gpu_bench import device
from gpu_bench.pytorch.baselines import preserved_state
from gpu_bench.timing import arms as known_arms
from gpu_bench.timing import floor
from gpu_bench.timing.interleaving import measure, plan_for
from gpu_bench.timing.measurement import Bench, arm_messages, fastest_baseline
from warpsmith.v1 import task_pb2, timing_pb2

CREDIBLE_ABOVE = 0.9
"""A floor that PyTorch itself is faster than by more than this is none: the data lay in a cache.

On a processor, whose rates change with its neighbors, any baseline that is faster says so.
"""


def measure_reference(bench: Bench) -> timing_pb2.ReferenceReport:
    """Times every baseline but the autotuned one, and remembers their medians for screening."""
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
    credible_above = CREDIBLE_ABOVE if bench.target == task_pb2.TARGET_CUDA else 1.0
    is_floor = fastest_ns > credible_above * lowest and not floor.may_lie_in_cache(bench.work, bench.ceilings)
    return timing_pb2.ReferenceReport(
        arms=arm_messages(samples.arms, prepared),
        fastest_arm=known_arms.kind(fastest),
        floor_ns=lowest if is_floor else 0.0,
        raised=floor.reference_flags(bench.work, bench.ceilings),
        environment=device.finished(before, bench.target),
    )
