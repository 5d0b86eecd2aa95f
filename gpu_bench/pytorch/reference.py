"""The user's module by itself: how fast it is, and whether beating it would mean anything.

One idea: a reference is timed before a search, because a needlessly slow one makes every later number worthless (what
its results depend on is the judge's to find, in `dependence`). Judges no candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gpu_bench import device
from gpu_bench.pytorch.baselines import preserved_state
from gpu_bench.timing import arms as known_arms
from gpu_bench.timing import floor
from gpu_bench.timing.clocks import Arm
from gpu_bench.timing.interleaving import Samples, measure, plan_for
from gpu_bench.timing.measurement import Bench, arm_messages, fastest_baseline
from warpsmith.contract import words
from warpsmith.v1 import task_pb2, timing_pb2

CREDIBLE_ABOVE = 0.9
"""A floor that PyTorch itself is faster than by more than this is none: the data lay in a cache.

On a processor, whose rates change with its neighbors, any baseline that is faster says so.
"""


KEPT_WITHIN = 1.1
"""How far eager may be from what an earlier run found for the times of that run to hold here."""
KEPT_ABOVE = 1.25
"""How far the fastest has to be above the floor: nearer to it a search may end by that time, so it is taken anew."""


def measure_reference(bench: Bench, known: timing_pb2.ReferenceReport | None = None) -> timing_pb2.ReferenceReport:
    """Times the baselines that need no second compilation, and remembers their medians for screening.

    `known`: what an earlier run found of the task on such a device. Where eager takes as long as then, it alone is
    timed, and stands for what has become of the others since; finals time all of them whatever is known.
    """
    before = device.environment(bench.target, jail_rung=bench.jail_rung, seed=bench.seed)
    report, is_warm = _kept(bench, known) or _measured(bench)
    fastest_ns = _fastest_ns(report)
    if fastest_ns < floor.floor_ns(bench.work, bench.ceilings, parameters_warm=is_warm):
        # Ceilings taken while others kept the machine busy would say that nothing can be won: ask the machine again.
        bench.ceilings = device.measured_again(bench.ceilings)
    lowest = floor.floor_ns(bench.work, bench.ceilings, parameters_warm=is_warm)
    credible_above = CREDIBLE_ABOVE if bench.target == task_pb2.TARGET_CUDA else 1.0
    is_floor = fastest_ns > credible_above * lowest and not floor.may_lie_in_cache(bench.work, bench.ceilings)
    report.floor_ns = lowest if is_floor else 0.0
    report.raised.extend(floor.reference_flags(bench.work, bench.ceilings))
    report.environment.CopyFrom(device.finished(before, bench.target))
    report.graph_digest = bench.graph_digest
    return report


def _fastest_ns(report: timing_pb2.ReferenceReport) -> float:
    return min((arm.median_ns for arm in report.arms if arm.median_ns > 0), default=math.inf)


def _measured(bench: Bench) -> tuple[timing_pb2.ReferenceReport, bool]:
    """The arms, and whether calls were read in groups, which find parameters in the cache."""
    prepared = bench.baselines.prepare_reference()
    samples = _read(bench, [item.arm for item in prepared if item.arm is not None])
    for name, arm in samples.arms.items():
        if not arm.failure:
            bench.baselines.medians_ns[name] = arm.median_ns
    fastest = known_arms.kind(fastest_baseline(samples.arms))
    report = timing_pb2.ReferenceReport(arms=arm_messages(samples.arms, prepared), fastest_arm=fastest)
    return report, samples.group_length > 1


def _kept(bench: Bench, known: timing_pb2.ReferenceReport | None) -> tuple[timing_pb2.ReferenceReport, bool] | None:
    """The same from what is known and eager alone; None where that does not hold here."""
    if known is None or known.graph_digest != bench.graph_digest:
        return None
    found = {words.arm(arm.kind): arm.median_ns for arm in known.arms if arm.median_ns > 0}
    then = found.pop(known_arms.EAGER, 0.0)
    # One that failed may have lacked time or memory; one that is not there was added since.
    if not then or {known_arms.EAGER, *found} != {*bench.baselines.reference_names()}:
        return None
    samples = _read(bench, [bench.baselines.eager()])
    eager = samples.arms[known_arms.EAGER]
    if eager.failure or not 1.0 / KEPT_WITHIN <= eager.median_ns / then <= KEPT_WITHIN:
        return None
    report = timing_pb2.ReferenceReport(arms=arm_messages(samples.arms), fastest_arm=known.fastest_arm, is_kept=True)
    for arm in known.arms:
        if arm.kind != timing_pb2.ARM_KIND_EAGER:
            report.arms.append(_scaled(arm, eager.median_ns / then))
    is_warm = samples.group_length > 1
    if _fastest_ns(report) < KEPT_ABOVE * floor.floor_ns(bench.work, bench.ceilings, parameters_warm=is_warm):
        return None
    bench.baselines.medians_ns[known_arms.EAGER] = eager.median_ns
    bench.baselines.kept_shares = {name: median / then for name, median in found.items()}
    return report, is_warm


def _read(bench: Bench, arms: Sequence[Arm]) -> Samples:
    plan = plan_for(timing_pb2.TIER_FINAL, bench.target, bench.set_count, bench.seed)
    short = replace(plan, budget_s=plan.budget_s / 4, least_blocks=6, warmup_s=plan.warmup_s / 2, extra_count=3)
    with preserved_state(bench.baselines.module):
        return measure(arms, bench.clock, short)


def _scaled(arm: timing_pb2.Arm, factor: float) -> timing_pb2.Arm:
    return timing_pb2.Arm(
        kind=arm.kind,
        failure=arm.failure,
        median_ns=arm.median_ns * factor,
        warm_median_ns=arm.warm_median_ns * factor,
        call_median_ns=arm.call_median_ns * factor,
        samples_ns=[sample * factor for sample in arm.samples_ns],
    )
