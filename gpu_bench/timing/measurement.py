"""A candidate timed beside its baselines, and the record of it.

One idea: the headline is the fastest thing that the user could have had without us, over the candidate, and it is
believed only when its interval clears the noise and its time clears the floor. Loads no candidate: it gets calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from gpu_bench import device
from gpu_bench.pytorch.baselines import (
    Baselines,
    Prepared,
    aa_copy,
    preserved_state,
)
from gpu_bench.running.elsewhere import Elsewhere
from gpu_bench.timing import arms as known_arms
from gpu_bench.timing import floor, headline
from gpu_bench.timing.arms import AA_COPY, CANDIDATE, EAGER, REWRITTEN
from gpu_bench.timing.clocks import Arm, Clock, CudaClock, HostClock, Reading
from gpu_bench.timing.interleaving import (
    GROUP_NS,
    SHORT_CALL_NS,
    ArmSamples,
    Inspect,
    Plan,
    Samples,
    measure,
    measure_steps,
    plan_for,
)
from gpu_bench.timing.statistics import (
    FEW_BLOCKS,
    Blocks,
    Ratio,
    faster,
    noise_floor,
    ratio,
    split_noise_floor,
)
from warpsmith.program_steps import buffers_of
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2, timing_pb2

FASTEST_UNPROVEN = timing_pb2.FLAG_FASTEST_UNPROVEN
"""A baseline could not run, so the fastest that did may not be the fastest there is."""
UNSTEADY = timing_pb2.FLAG_UNSTEADY_MACHINE
"""More than half of the blocks drifted."""
FEW = timing_pb2.FLAG_FEW_BLOCKS
"""Too few blocks for a bootstrap: the interval is the range of the block ratios."""
PERSISTING_LINES_STAY = timing_pb2.FLAG_PERSISTING_LINES_STAY
"""cuda-bindings is not installed: lines that a kernel asked the L2 to keep outlive the flush before a cold reading."""
FLOOR_AUDITED = timing_pb2.FLAG_FLOOR_AUDITED
"""Faster than any sweep of this machine, and no doubt is left: on values drawn anew the output of every buffer set was
looked at, and the time was the same."""
AUDIT_WITHIN = 0.05
"""Relative difference of two times of one candidate that are the same, where the noise floor does not say more."""
FRESH_LOOKS, FRESH_READINGS, FRESH_SHARE = 3, 5, 0.8
"""Looks, readings of each, and how much of the speedup has to be there between the least of one look."""
SLOWED = 1.5
"""How much longer than before a baseline may take in such a look: with several threads it suffers most under load."""
HANDSHAKES = 20
"""How many times longer than having calls made elsewhere a group of short calls takes."""
NOT_BASELINES = frozenset({AA_COPY, CANDIDATE, REWRITTEN})
"""Arms that no user has without us: neither the fastest baseline nor the measure of a slow one."""
HOST_BOUND = timing_pb2.FLAG_HOST_BOUND
"""Host time could not be hidden behind the device: the module synchronises, or makes thousands of launches."""


@dataclass
class Bench:
    """What a worker keeps for one task. Build it once; measure with it many times."""

    target: task_pb2.Target.ValueType
    baselines: Baselines
    work: floor.Work
    """Least work of the task: `floor.work_of` of the worker's own capture."""
    clock: Clock
    ceilings: device.Ceilings
    seed: int = 0
    """Seed of the inputs and of the order of arms."""
    jail_rung: str = ""
    graph_digest: str = ""
    """Of that capture."""

    @staticmethod
    def of(
        target: task_pb2.Target.ValueType,
        baselines: Baselines,
        work: floor.Work,
        ceilings: device.Ceilings,
        *,
        seed: int = 0,
        jail_rung: str = "",
    ) -> Bench:
        """A bench with the target's clock."""
        cache_bytes = ceilings.device.cache_bytes
        cuda = target == task_pb2.TARGET_CUDA
        clock: Clock = CudaClock(cache_bytes) if cuda else HostClock(cache_bytes)
        return Bench(target, baselines, work, clock, ceilings, seed, jail_rung)

    @property
    def set_count(self) -> int:
        """Buffer sets that calls rotate over."""
        return len(self.baselines.inputs)


@dataclass(frozen=True)
class StepInfo:
    """A step of the candidate, for its line in the profile."""

    group: str
    engine: analysis_pb2.Engine.ValueType
    name: str
    """Kernel entry or library operation."""
    byte_count: int
    """Bytes of the buffers that it touches, each once."""


@dataclass(frozen=True)
class Candidate:
    """A loaded program as calls."""

    call: Callable[[int], Any]
    """One forward on the buffer set of that number."""
    before: Callable[[Sequence[int]], object] | None = None
    """Called ahead of each timed forward, outside the timed region."""
    watch: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around each reading of it: ends what takes too long."""
    renew: Callable[[Sequence[int]], bool] = lambda _: False
    """Fills buffer sets with values drawn anew; False where that cannot be done."""
    elsewhere: Elsewhere | None = None
    """The process that makes its calls, where it is not this one. What it keeps from call to call cannot be seen: in a
    final each reading is on values that it sees for the first time."""
    rewritten: Callable[[int], Any] | None = None
    """The same algebra as library calls only, when the candidate used a rewrite."""
    work: floor.Work | None = None
    """Least work by its algebra; None where that is the module's own."""
    stepwise: Callable[[], Any] | None = None
    """One forward that makes `clock.stamp()` after every step; None when steps are not timed."""
    steps: Sequence[StepInfo] = ()
    toolkit: str = ""
    """Compiler with version, for the record."""

    @property
    def handshake_ns(self) -> float:
        """What having calls made elsewhere takes; 0 where they are made here."""
        return self.elsewhere.handshake_ns if self.elsewhere is not None else 0.0

    def arm(self, *, is_fresh: bool = False) -> Arm:
        """What is timed; `is_fresh`: each time on values that it has never seen."""

        def renewed(sets: Sequence[int]) -> None:  # ahead of a reading that is taken again, too
            self.renew(sets)
            if self.before is not None:
                self.before(sets)

        before = renewed if is_fresh else self.before
        return Arm(CANDIDATE, self.call, required=True, before=before, watch=self.watch, elsewhere=self.elsewhere)


def step_infos(program: candidate_pb2.Program) -> list[StepInfo]:
    """What there is to say of each step of a program but its time; prepared ones are in no call."""
    sizes = {buffer.name: floor.spec_bytes(buffer.spec) for buffer in program.buffers}
    infos = []
    for step in program.steps:
        if step.prepared:
            continue
        kind = step.WhichOneof("kind")
        name = {"launch": step.launch.entry, "library": step.library.target}.get(kind or "", "memset")
        engine = analysis_pb2.ENGINE_LIBRARY if kind == "library" else analysis_pb2.ENGINE_AUTHORED
        infos.append(StepInfo(step.group, engine, name, sum(sizes[b] for b in set(buffers_of(step)))))
    return infos


def measure_candidate(
    bench: Bench,
    candidate: Candidate,
    tier: timing_pb2.Tier.ValueType,
    inspect: Inspect | None = None,
) -> timing_pb2.Timing:
    """Times a candidate. What its call raises passes through: it is the candidate's fault, not a timing.

    Screening times it against eager and the fastest known baseline; a final against all, with an A/A copy of the
    fastest, and step by step. `inspect` sees outputs of calls that were just timed.
    """
    before = device.environment(bench.target, toolkit=candidate.toolkit, jail_rung=bench.jail_rung, seed=bench.seed)
    prepared = bench.baselines.prepare(tier)
    is_fresh = tier == timing_pb2.TIER_FINAL and candidate.elsewhere is not None
    arms = [candidate.arm(is_fresh=is_fresh)]
    arms += [item.arm for item in prepared if item.arm is not None]
    seconds, aa_of = 0.0, ""
    steps: list[timing_pb2.StepTime] = []
    plan = _plan(bench, candidate, tier)
    with preserved_state(bench.baselines.module):
        if candidate.rewritten is not None:
            arms.append(Arm(REWRITTEN, candidate.rewritten))
        if tier == timing_pb2.TIER_FINAL:
            copied, seconds = _fastest_arm(bench, [arm for arm in arms if arm.name not in NOT_BASELINES])
            if copied is not None:
                arms.append(aa_copy(copied))
                aa_of = copied.name
        samples = measure(arms, bench.clock, plan, inspect)
        if tier == timing_pb2.TIER_FINAL and candidate.stepwise is not None:
            steps = _step_times(candidate, bench.clock)

    def composed(*, is_audited: bool = False) -> timing_pb2.Timing:
        return compose_timing(
            samples, prepared, tier=tier, work=candidate.work or bench.work, ceilings=bench.ceilings, aa_of=aa_of,
            seed=bench.seed, is_audited=is_audited,
            kept_shares=bench.baselines.kept_shares if tier == timing_pb2.TIER_SCREENING else {},
        )  # fmt: skip

    timing = composed()
    if {floor.FLOOR_REJECT, floor.FLOOR_SUSPECT} & set(timing.raised):
        # Ceilings taken while others kept the machine busy would accuse an honest kernel: ask the machine again.
        bench.ceilings = device.measured_again(bench.ceilings)
        timing = composed()
    if floor.FLOOR_SUSPECT in timing.raised:
        with preserved_state(bench.baselines.module):
            is_cleared, audit_seconds = _audit(bench, candidate, replace(plan, extra_readings=()), timing, inspect)
        timing = composed(is_audited=is_cleared)
        seconds += audit_seconds
    if tier == timing_pb2.TIER_FINAL and timing.faster and not is_fresh:
        baseline = next(arm for arm in arms if known_arms.kind(arm.name) == timing.fastest_arm)
        _settle_on_fresh_values(bench, candidate, baseline, timing, samples.group_length)
    timing.steps.extend(steps)
    timing.handshake_ns = candidate.handshake_ns
    timing.device_seconds += seconds
    timing.environment.CopyFrom(device.finished(before, bench.target))
    timing.raised.extend(_of_the_clock(bench.clock, samples))
    return timing


def _of_the_clock(clock: Clock, samples: Samples) -> list[timing_pb2.Flag.ValueType]:
    """Flags that say what the clock could not keep out of the times."""
    if not isinstance(clock, CudaClock):
        return []
    host_bound = [HOST_BOUND] if clock.host_bound & set(samples.arms) else []
    return host_bound if clock.resets_persisting else [*host_bound, PERSISTING_LINES_STAY]


def _plan(bench: Bench, candidate: Candidate, tier: timing_pb2.Tier.ValueType) -> Plan:
    """Readings long enough for the candidate's handshakes not to show in them."""
    return replace(
        plan_for(tier, bench.target, bench.set_count, bench.seed),
        followers=NOT_BASELINES,
        short_call_ns=max(SHORT_CALL_NS, HANDSHAKES * candidate.handshake_ns),
        reading_ns=max(GROUP_NS, HANDSHAKES * candidate.handshake_ns),
    )


def _audit(
    bench: Bench, candidate: Candidate, plan: Plan, timing: timing_pb2.Timing, inspect: Inspect | None
) -> tuple[bool, float]:
    """Whether a time below the achievable floor is to be believed, and the seconds that it took to find out.

    Every buffer set gets new values; the candidate is timed on them by itself, and then one timed call on each set is
    looked at. What `inspect` raises passes through.
    """
    if inspect is None or not candidate.renew(range(bench.set_count)):
        return False, 0.0
    arm = candidate.arm(is_fresh=candidate.elsewhere is not None)
    again = measure([arm], bench.clock, plan, inspect)
    for index in range(bench.set_count):
        sample = bench.clock.take(arm, [index], Reading.COLD)
        inspect(CANDIDATE, index, sample.outputs[0])
    known = next(known.median_ns for known in timing.arms if known.kind == timing_pb2.ARM_KIND_CANDIDATE)
    within = max(AUDIT_WITHIN, 3.0 * timing.noise_floor)
    return abs(again.arms[CANDIDATE].median_ns / known - 1.0) <= within, again.seconds


def _settle_on_fresh_values(
    bench: Bench, candidate: Candidate, baseline: Arm, timing: timing_pb2.Timing, group_length: int
) -> None:
    with preserved_state(bench.baselines.module):
        is_there = _is_there_on_fresh_values(bench, candidate, baseline, timing, group_length)
    headline.settle(timing, [] if is_there else [headline.SLOWER_ON_FRESH_VALUES])


def _is_there_on_fresh_values(
    bench: Bench, candidate: Candidate, baseline: Arm, timing: timing_pb2.Timing, group_length: int
) -> bool:
    """Whether most of a speedup is there in first calls on values drawn anew; so it is said where none can be drawn.

    A call may leave its answer on its stack or in shared memory, neither of which is cleared, for the next on equal
    values.
    """
    drawn: list[bool] = []
    slowest = SLOWED * next(arm.median_ns for arm in timing.arms if arm.kind == known_arms.kind(baseline.name))

    def renew(sets: Sequence[int]) -> None:  # ahead of a reading that is taken again, too
        drawn.append(candidate.renew(range(bench.set_count)))
        if candidate.before is not None:
            candidate.before(sets)

    arm = replace(candidate.arm(), before=renew)
    for _ in range(FRESH_LOOKS):
        fresh, beside = [], []
        for number in range(FRESH_READINGS):
            first = number % (bench.set_count // group_length) * group_length
            sets = range(first, first + group_length)
            fresh.append(bench.clock.take(arm, sets, Reading.COLD).ns)
            beside.append(bench.clock.take(baseline, sets, Reading.COLD).ns)
        least = min(*beside, slowest)  # load only ever adds
        if not all(drawn) or least >= FRESH_SHARE * timing.speedup_fastest.median * min(fresh):
            return True
    return False


def compose_timing(
    samples: Samples,
    prepared: Sequence[Prepared],
    *,
    tier: timing_pb2.Tier.ValueType,
    work: floor.Work,
    ceilings: device.Ceilings,
    aa_of: str = "",
    seed: int = 0,
    is_audited: bool = False,
    kept_shares: Mapping[str, float] = MappingProxyType({}),
) -> timing_pb2.Timing:
    """The record of a measurement that has an arm "candidate": everything but steps and environment.

    `kept_shares`: time over eager's, by name, of baselines that an earlier run timed and this one did not.

    `aa_of` is the baseline that the arm "aa_copy" copies; empty for none, as in screening.
    "rewritten" and "aa_copy" are never the fastest baseline. `faster` also needs a time that the floor allows;
    `is_audited`: one that the achievable floor does not, but that a deep audit has cleared.
    """
    candidate = samples.arms[CANDIDATE]
    fastest = fastest_baseline(samples.arms)
    noise = _noise(samples, fastest, aa_of, seed)
    speedup = _speedup(samples, fastest, seed)
    eager_ns = samples.arms[EAGER].median_ns if EAGER in samples.arms else math.inf
    kept = {name: share * eager_ns for name, share in kept_shares.items() if name not in samples.arms}
    if fastest and kept and min(kept.values()) < samples.arms[fastest].median_ns:
        fastest = min(kept, key=kept.__getitem__)
        speedup = _speedup(samples, EAGER, seed).times(kept_shares[fastest])
    warm = samples.group_length > 1
    lowest = floor.floor_ns(work, ceilings, parameters_warm=warm)
    flags = floor.guard(candidate.median_ns, work, ceilings, parameters_warm=warm)
    if is_audited:
        flags = [FLOOR_AUDITED if flag == floor.FLOOR_SUSPECT else flag for flag in flags]
    if samples.unsteady:
        flags.append(UNSTEADY)
    if speedup.block_count < FEW_BLOCKS and tier == timing_pb2.TIER_FINAL:
        flags.append(FEW)
    failed = [item for item in prepared if item.failure]
    broken = [arm for arm in samples.arms.values() if arm.failure and arm.name not in NOT_BASELINES]
    if failed or broken:
        flags.append(FASTEST_UNPROVEN)
    timing = timing_pb2.Timing(
        tier=tier,
        arms=[*arm_messages(samples.arms, prepared), *_unread(kept)],
        fastest_arm=known_arms.kind(fastest),
        speedup_fastest=_message(speedup),
        speedup_eager=_message(_speedup(samples, EAGER, seed)),
        noise_floor=noise if math.isfinite(noise) else 1.0,
        floor_ns=lowest,
        floor_percent=100.0 * lowest / candidate.median_ns if candidate.median_ns > 0 else 0.0,
        faster=faster(speedup, noise),
        device_seconds=samples.seconds,
    )
    headline.settle(timing, flags)
    return timing


def fastest_baseline(arms: Mapping[str, ArmSamples]) -> str:
    """Name of the fastest baseline that ran; empty when none did."""
    ran = [arm for arm in arms.values() if arm.name not in NOT_BASELINES and math.isfinite(arm.median_ns)]
    return min(ran, key=lambda arm: arm.median_ns).name if ran else ""


def arm_messages(arms: Mapping[str, ArmSamples], prepared: Sequence[Prepared] = ()) -> list[timing_pb2.Arm]:
    """All arms for the record, those that could not be prepared included."""
    seconds = {item.name: item.seconds for item in prepared}
    messages = [
        timing_pb2.Arm(
            kind=known_arms.kind(arm.name),
            failure=arm.failure,
            median_ns=arm.median_ns if math.isfinite(arm.median_ns) else 0.0,
            warm_median_ns=arm.warm_ns,
            call_median_ns=arm.call_ns,
            samples_ns=arm.samples_ns,
            prepare_seconds=seconds.get(arm.name, 0.0),
        )
        for arm in arms.values()
    ]
    return messages + [
        timing_pb2.Arm(kind=known_arms.kind(item.name), failure=item.failure, prepare_seconds=item.seconds)
        for item in prepared
        if item.failure
    ]


def _unread(medians_ns: Mapping[str, float]) -> list[timing_pb2.Arm]:
    """Arms that were not read, by their medians."""
    return [timing_pb2.Arm(kind=known_arms.kind(name), median_ns=ns) for name, ns in medians_ns.items()]


def _fastest_arm(bench: Bench, arms: Sequence[Arm]) -> tuple[Arm | None, float]:
    """The baseline to copy for the A/A pair, and the seconds that finding it took."""
    known = {name: ns for name, ns in bench.baselines.medians_ns.items() if any(a.name == name for a in arms)}
    if len(known) == len(arms) and known:
        return next(arm for arm in arms if arm.name == min(known, key=lambda name: known[name])), 0.0
    plan = plan_for(timing_pb2.TIER_SCREENING, bench.target, bench.set_count, bench.seed)
    samples = measure(arms, bench.clock, replace(plan, budget_s=0.1))
    name = fastest_baseline(samples.arms)
    return next((arm for arm in arms if arm.name == name), None), samples.seconds


def _step_times(candidate: Candidate, clock: Clock) -> list[timing_pb2.StepTime]:
    assert candidate.stepwise is not None
    medians = measure_steps(candidate.stepwise, clock, watch=candidate.watch)
    return [
        timing_pb2.StepTime(
            group=info.group,
            computed_by=info.engine,
            name=info.name,
            median_ns=ns,
            bytes_per_second=info.byte_count / ns * 1e9 if ns > 0 else 0.0,
        )
        for info, ns in zip(candidate.steps, medians, strict=True)
    ]


def _noise(samples: Samples, fastest: str, aa_of: str, seed: int) -> float:
    """From the A/A pair where there is one, else from the fastest baseline's own two visits."""
    copied = samples.arms.get(AA_COPY)
    if copied is not None and aa_of in samples.arms and not copied.failure:
        return noise_floor(samples.arms[aa_of].blocks, copied.blocks, seed)
    if not fastest:
        return math.inf
    return split_noise_floor(_complete(samples.arms[fastest].blocks), seed)


def _complete(blocks: Blocks) -> Blocks:
    """Blocks without those that have no reading."""
    result: Blocks = blocks[np.isfinite(blocks).all(axis=1)]
    return result


def _speedup(samples: Samples, name: str, seed: int) -> Ratio:
    """The named baseline over the candidate."""
    if name not in samples.arms:
        return Ratio(0.0, 0.0, 0.0, 0)
    return ratio(samples.arms[name].blocks, samples.arms[CANDIDATE].blocks, seed)


def _message(result: Ratio) -> timing_pb2.Speedup:
    if result.block_count == 0:
        return timing_pb2.Speedup()
    return timing_pb2.Speedup(median=result.median, low=result.low, high=result.high)
