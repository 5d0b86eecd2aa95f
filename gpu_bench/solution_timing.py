"""A solution timed against the baselines from outside, and the look behind its time.

The one idea: what is gained must be gained on values that nobody had seen before as well. The headline comes from
batches of plain calls, timed here, around the processes. Then both sides make calls on fresh values, with sums over
every output: an answer that was remembered, begun early, put off or computed on the side costs its time there, and
one that was left out has other sums. Where the solution is slower there than its surroundings explain, that is its
time. Processor time while the solution is not called is counted too.
"""

from __future__ import annotations

import enum
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from gpu_bench import device, floor
from gpu_bench.baselines import AA_COPY, CANDIDATE, EAGER, Prepared
from gpu_bench.clocks import Arm, Reading, Sample
from gpu_bench.contest import SURROUNDINGS
from gpu_bench.measurement import NOT_BASELINES, compose_timing
from gpu_bench.solution_session import SolutionFault
from gpu_bench.statistics import threshold
from gpu_bench.timing import measure, plan_for
from warpsmith.v1 import benchmark_service_pb2, judging_pb2, task_pb2, timing_pb2, verdict_pb2

CallArm = Callable[[judging_pb2.CallsRequest], judging_pb2.Calls]

TIMED_AS_CALLED = "TIMED_AS_CALLED"
"""Times are of whole calls from outside the process: host time is part of them, for every arm."""
UNCLEAR_ON_FRESH_VALUES = "UNCLEAR_ON_FRESH_VALUES"
"""Whether the gain is there on values that the solution has not seen could not be told: it has not passed."""
TIMED_ON_FRESH_VALUES = "TIMED_ON_FRESH_VALUES"
"""The solution is slower on values that it has not seen: its time, and every speedup, is the one on those."""

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
ROUND_GROUPS = 3
"""Load only ever adds time: of each third of the rounds the least times count, and all thirds have to agree."""
LOOK_SECONDS = 6.0
"""Spent at most where a gain has to be looked behind and the first rounds do not tell."""
FRESH_SHARE = 0.25
"""Of the gain on known values that has to be there on fresh ones: with less, it is accused."""
SLOWER_SHARE = 0.5
"""Of its time on known values that a solution may take longer on fresh ones: caches that are warm or cold."""
SURROUNDINGS_SHARE = 0.25
"""The same of what surrounds a fresh call (drawing values, sums), which costs two processes not quite the same."""
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
    plan = plan_for(tier, task_pb2.TARGET_CPU, contest.set_count)
    plan = replace(plan, warmup_s=0.05 * len(arms), followers=NOT_BASELINES)
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
    gains = timing.speedup_eager.median > FRESH_ABOVE
    told = next(arm.median_ns for arm in timing.arms if arm.name == CANDIDATE) * 1e-9
    look, speedups = look_behind(clock, told, seconds=LOOK_SECONDS if gains else 0.0)
    if look is Look.GONE and timing.speedup_eager.low > 1.0:
        raise _cheat(
            f"{timing.speedup_eager.median:.2f}x eager on values that it has seen, and less than a quarter of that "
            "gain on others: it remembers, or works while the clock stands"
        )
    if gains:
        if look is not Look.THERE:
            timing.faster = False
            timing.flags.append(UNCLEAR_ON_FRESH_VALUES)
        if speedups:
            take_fresh(timing, speedups)
    return timing


def take_fresh(timing: timing_pb2.Timing, speedups: Sequence[float]) -> None:
    """Puts the time on fresh values, from its speedups over eager, in the place of the one on known values."""
    arms = {arm.name: arm for arm in timing.arms}
    candidate, eager_ns = arms[CANDIDATE], arms[EAGER].median_ns
    fastest = timing.speedup_fastest.median / timing.speedup_eager.median
    for known, share in ((timing.speedup_fastest, fastest), (timing.speedup_eager, 1.0)):
        known.median = min(known.median, share * statistics.median(speedups))
        known.low = min(known.low, share * min(speedups))
        known.high = min(known.high, share * max(speedups))
    candidate.samples_ns[:] = [eager_ns / speedup for speedup in speedups]
    timing.floor_percent *= candidate.median_ns / statistics.median(candidate.samples_ns)
    candidate.median_ns = statistics.median(candidate.samples_ns)
    candidate.warm_median_ns = candidate.call_median_ns = 0.0
    timing.faster = timing.faster and timing.speedup_fastest.low > threshold(timing.noise_floor)
    timing.flags.append(TIMED_ON_FRESH_VALUES)


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


@dataclass(frozen=True)
class Round:
    """Seconds of a call of both sides, on known values and on fresh ones."""

    known: float
    known_eager: float
    fresh: float
    fresh_eager: float
    surroundings: float
    """Of a fresh call's surroundings alone."""

    @property
    def gain(self) -> float:
        """Over eager, on known values."""
        return self.known_eager - self.known

    @property
    def kept(self) -> float:
        """Of the gain, on fresh values."""
        return self.fresh_eager - self.fresh

    @property
    def is_lost(self) -> bool:
        """Whether next to nothing of the gain is kept, and the surroundings do not explain it."""
        lost = self.gain - self.kept
        return self.gain > 0 and self.kept < FRESH_SHARE * self.gain and lost > SURROUNDINGS_SHARE * self.surroundings

    @property
    def is_slower(self) -> bool:
        """Whether it takes longer on fresh values than what surrounds a call explains."""
        extra = self.fresh - self.surroundings - self.known
        return extra > SLOWER_SHARE * self.known + SURROUNDINGS_SHARE * self.surroundings

    @property
    def speedup(self) -> float:
        """Over eager, on fresh values, without what surrounds a call."""
        return self.known_eager / max(self.fresh - self.surroundings, self.known)


def look_behind(
    clock: OutsideClock, told: float = math.inf, *, rounds: int = FRESH_ROUNDS, seconds: float = 0.0
) -> tuple[Look, list[float]]:
    """Compares what is gained over eager on known values with what is gained on fresh ones.

    `told` is the solution's time on known values, in seconds, as it was measured before: one that behaves from its
    first fresh values on would be as slow on known ones now.
    Goes on for `seconds`, with as many rounds again each time, where the machine is too unsteady to tell. Also gives
    the speedups over eager on fresh values, one for each group of rounds, where the solution is slower on those;
    nothing where it is not. Raises SolutionFault where the sums over outputs differ.
    """
    end = clock.now_s() + seconds
    counts = {name: clock.counts[name] for name in (CANDIDATE, EAGER)}
    clock.asked(SURROUNDINGS, 1, fresh_seed=1)  # makes what it needs
    taken: list[Round] = []
    while True:
        taken += [_round(clock, counts, told, number) for number in range(rounds)]
        groups = least_of([taken[first::ROUND_GROUPS] for first in range(ROUND_GROUPS)])
        look, speedups = conclude(groups)
        agree = look is not Look.UNCLEAR and len({each.is_slower for each in groups}) == 1
        if agree or clock.now_s() >= end:
            return look, speedups


def _round(clock: OutsideClock, counts: Mapping[str, int], told: float, number: int) -> Round:
    # As many on fresh values as the slower side makes in a batch: a slow solution is not asked for eager's many.
    fresh_count = min(counts.values())
    seed = secrets.randbelow(1 << 31) + 1
    known: dict[str, float] = {}
    fresh: dict[str, float] = {}
    sums: dict[str, Sequence[float]] = {}
    for name in (CANDIDATE, EAGER) if number % 2 else (EAGER, CANDIDATE):
        known[name] = clock.asked(name, counts[name])[0] / counts[name]
        seconds, answer = clock.asked(name, fresh_count, fresh_seed=seed)
        fresh[name], sums[name] = seconds / fresh_count, answer.sums
    _compare_sums(sums[CANDIDATE], sums[EAGER])
    alone = clock.asked(SURROUNDINGS, fresh_count, fresh_seed=seed)[0] / fresh_count
    return Round(min(known[CANDIDATE], told), known[EAGER], fresh[CANDIDATE], fresh[EAGER], alone)


def conclude(groups: Sequence[Round]) -> tuple[Look, list[float]]:
    """What the rounds show: all have to agree before anybody is accused, or acquitted."""
    is_slower = 2 * sum(each.is_slower for each in groups) > len(groups)
    speedups = [each.speedup for each in groups] if is_slower else []
    if all(each.is_lost for each in groups):
        return Look.GONE, speedups
    is_there = all(each.gain > 0 and each.kept > FRESH_SHARE * each.gain for each in groups)
    return Look.THERE if is_there else Look.UNCLEAR, speedups


def least_of(groups: Sequence[Sequence[Round]]) -> list[Round]:
    """The least times of each group; of the surroundings, those of all: load must not explain what a solution adds."""
    least = [_least(group) for group in groups]
    over_all = _least(least)
    # Eager's own outputs are not in a cache, those of the surroundings alone are: up to twice as much is believed.
    around = min(max(over_all.surroundings, over_all.fresh_eager - over_all.known_eager), 2.0 * over_all.surroundings)
    return [replace(each, surroundings=around) for each in least]


def _least(rounds: Sequence[Round]) -> Round:
    return Round(*(min(values) for values in zip(*map(astuple, rounds), strict=True)))


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
