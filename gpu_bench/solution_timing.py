"""A solution timed against the baselines from outside, and the look behind its time.

The one idea: what is gained must be gained on values that nobody had seen before as well. The headline comes from
batches of plain calls, timed here, around the processes. Then both sides make calls on fresh values, with sums over
every output: an answer that was remembered, begun early, put off or computed on the side costs its time there, and
one that was left out has other sums. Processor time while the solution is not called is counted too.
"""

from __future__ import annotations

import enum
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_bench import device, floor
from gpu_bench.baselines import AA_COPY, CANDIDATE, EAGER, Prepared
from gpu_bench.clocks import Arm, Reading, Sample
from gpu_bench.measurement import compose_timing
from gpu_bench.solution_session import SolutionFault
from gpu_bench.timing import measure, plan_for
from warpsmith.v1 import benchmark_service_pb2, judging_pb2, task_pb2, timing_pb2, verdict_pb2

CallArm = Callable[[judging_pb2.CallsRequest], judging_pb2.Calls]

TIMED_AS_CALLED = "TIMED_AS_CALLED"
"""Times are of whole calls from outside the process: host time is part of them, for every arm."""
UNCLEAR_ON_FRESH_VALUES = "UNCLEAR_ON_FRESH_VALUES"
"""Whether the gain is there on values that the solution has not seen could not be told: nothing is called faster."""

BATCH_SECONDS = 0.02
"""Of calls between two looks at the clock: what the way to the process and back costs, 0.1 ms, is then below 1 %."""
MOST_CALLS = 20_000
IDLE_SECONDS = 0.4
"""How long the solution's process is watched while nobody calls it."""
IDLE_WATCHES = 3
"""In a row, that all have to see it work."""
IDLE_SHARE = 0.05
"""Of one processor: a process with nothing to do stays far below, and one that works above, also on a busy machine."""
SETTLE_SECONDS = 0.1
"""For threads that spin a while after their work, as OpenMP's do."""
FRESH_ROUNDS = 9
FRESH_SHARE = 0.25
"""Of the gain on known values that has to be there on fresh ones: caches that are warm or cold explain the rest."""
FRESH_ABOVE = 1.1
"""Gains up to this are believed without a look."""
SUMS_WITHIN = 1e-2
"""Relative difference of sums between the solution and eager: shows work left out; precision is judged elsewhere."""


class OutsideClock:
    """Times batches of calls in other processes. A reading is one batch, long enough to outweigh the way there."""

    def __init__(self, call: CallArm) -> None:
        self._call = call
        self.counts: dict[str, int] = {}
        """Calls of a batch, by arm."""
        self._fixed = np.linspace(0.0, 1.0, 1 << 14)

    def take(self, arm: Arm, sets: Sequence[int], reading: Reading) -> Sample:
        """One batch, from the first of `sets` on; the next is longer where this one was too short."""
        del reading
        count = self.counts.setdefault(arm.name, 1)
        seconds, _ = self.asked(arm.name, count, first=sets[0])
        if seconds < 0.7 * BATCH_SECONDS:
            larger = math.ceil(count * min(16.0, BATCH_SECONDS / seconds))
            self.counts[arm.name] = min(MOST_CALLS, larger)
        return Sample(seconds * 1e9 / count, None)

    def asked(self, name: str, count: int, *, first: int = 0, fresh_seed: int = 0) -> tuple[float, judging_pb2.Calls]:
        """Seconds from asking for the calls until the answer is here, and the answer."""
        request = judging_pb2.CallsRequest(arm=name, first=first, count=count, fresh_seed=fresh_seed)
        begin = time.perf_counter()
        answer = self._call(request)
        return time.perf_counter() - begin, answer

    def laps_ns(self, call: Callable[[], Any]) -> list[float]:
        """Nothing: a solution has no steps."""
        del call
        return []

    def stamp(self) -> None:
        """Nothing."""

    def sentinel_ns(self) -> float:
        """About 0.1 ms of arithmetic; the least of three."""
        return min(self._fixed_work_ns() for _ in range(3))

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.perf_counter()

    def begin(self, names: Iterable[str]) -> None:
        """Nothing is kept between measurements."""

    def _fixed_work_ns(self) -> float:
        begin = time.perf_counter_ns()
        for _ in range(4):
            np.sin(self._fixed)
        return float(time.perf_counter_ns() - begin)


def contend(
    contest: judging_pb2.Contest,
    precision: task_pb2.Precision.ValueType,
    tier: timing_pb2.Tier.ValueType,
    call: CallArm,
    cpu_seconds: Callable[[], float],
) -> timing_pb2.Timing:
    """Times the solution against every baseline, and looks behind its time. Raises SolutionFault."""
    running = [arm.name for arm in contest.arms if not arm.failure]
    if tier == timing_pb2.TIER_FINAL:
        # The copy is eager in a process of its own: two processes may differ by percents although their code is one.
        names, aa_of = [*running, AA_COPY], EAGER
    else:
        names, aa_of = [name for name in running if name in (EAGER, contest.report.fastest)], ""
    arms = [_arm(CANDIDATE, required=True), *map(_arm, names)]
    clock = OutsideClock(call)
    # The host's plan whatever the device, for it is the host's clock.
    plan = replace(plan_for(tier, task_pb2.TARGET_CPU, contest.set_count), warmup_s=0.05 * len(arms))
    samples = measure(arms, clock, plan)
    timing = compose_timing(
        samples,
        [Prepared(arm.name, None, arm.failure) for arm in contest.arms if arm.failure],
        tier=tier,
        work=floor.work_of(contest.graph, precision),
        ceilings=device.Ceilings.of(contest.ceilings),
        aa_of=aa_of,
    )
    timing.flags.extend([*contest.report.flags, TIMED_AS_CALLED])
    timing.environment.CopyFrom(contest.report.environment)
    watch_idle(cpu_seconds)
    look = look_behind(clock)
    if look is Look.GONE and timing.speedup_eager.low > 1.0:
        raise _cheat(
            f"{timing.speedup_eager.median:.2f}x eager on values that it has seen, and less than a quarter of that "
            "gain on others: it remembers, or works while the clock stands"
        )
    if look is not Look.THERE and timing.speedup_eager.median > FRESH_ABOVE:
        timing.faster = False
        timing.flags.append(UNCLEAR_ON_FRESH_VALUES)
    return timing


def _arm(name: str, *, required: bool = False) -> Arm:
    return Arm(name, lambda index: index, required=required)


def watch_idle(cpu_seconds: Callable[[], float], sleep: Callable[[float], None] = time.sleep) -> None:
    """Raises SolutionFault where the solution's process works while nobody calls it.

    Watched again before it is accused: the system counts time in hundredths of a second, and a process may have
    something to clear up.
    """
    sleep(SETTLE_SECONDS)
    shares = []
    for _ in range(IDLE_WATCHES):
        begin = cpu_seconds()
        sleep(IDLE_SECONDS)
        shares.append((cpu_seconds() - begin) / IDLE_SECONDS)
        if shares[-1] <= IDLE_SHARE:
            return
    raise _cheat(f"its process keeps {min(shares):.0%} of a processor busy while nobody calls it")


class Look(enum.Enum):
    """What a look behind a time gave."""

    THERE = "the gain is there on fresh values"
    GONE = "the gain is not there on fresh values"
    UNCLEAR = "the machine is too unsteady to tell"


def look_behind(clock: OutsideClock, *, rounds: int = FRESH_ROUNDS) -> Look:
    """Compares what is gained over eager on known values with what is gained on fresh ones, round by round.

    Load can fake a gain in one round and take it away in another: all rounds but one have to agree before anybody is
    accused, or acquitted. Raises SolutionFault where the sums over outputs differ.
    """
    counts = {name: clock.counts[name] for name in (CANDIDATE, EAGER)}
    # As many on fresh values as the slower side makes in a batch: a slow solution is not asked for eager's many.
    fresh_count = min(counts.values())
    gains: list[float] = []
    kept: list[float] = []
    for number in range(rounds):
        seed = secrets.randbelow(1 << 31) + 1
        known: dict[str, float] = {}
        fresh: dict[str, float] = {}
        sums: dict[str, Sequence[float]] = {}
        for name in (CANDIDATE, EAGER) if number % 2 else (EAGER, CANDIDATE):
            known[name] = clock.asked(name, counts[name])[0] / counts[name]
            seconds, answer = clock.asked(name, fresh_count, fresh_seed=seed)
            fresh[name], sums[name] = seconds / fresh_count, answer.sums
        _compare_sums(sums[CANDIDATE], sums[EAGER])
        gains.append(known[EAGER] - known[CANDIDATE])
        kept.append(fresh[EAGER] - fresh[CANDIDATE])
    least, most = sorted(gains)[1], sorted(gains)[-2]
    if least > 0 and sorted(kept)[-2] < FRESH_SHARE * least:
        return Look.GONE
    return Look.THERE if most > 0 and sorted(kept)[1] > FRESH_SHARE * most else Look.UNCLEAR


def _compare_sums(ours: Sequence[float], eager: Sequence[float]) -> None:
    if len(ours) != len(eager):
        raise _cheat("a timed call gave another number of outputs than eager's")
    scale = max((abs(value) for value in eager if math.isfinite(value)), default=0.0)
    for mine, theirs in zip(ours, eager, strict=True):
        if math.isnan(theirs) or math.isinf(theirs) or math.isclose(mine, theirs, rel_tol=SUMS_WITHIN):
            continue
        if abs(mine - theirs) > SUMS_WITHIN * scale:
            raise SolutionFault(
                benchmark_service_pb2.ExecutionFault(
                    kind=verdict_pb2.FAILURE_KIND_WRONG_VALUE,
                    detail=f"an output of a timed call sums to {mine:.6g} instead of {theirs:.6g}: timed calls do not "
                    "do what judged ones do",
                )
            )


def _cheat(detail: str) -> SolutionFault:
    return SolutionFault(benchmark_service_pb2.ExecutionFault(kind=verdict_pb2.FAILURE_KIND_CHEAT, detail=detail))
