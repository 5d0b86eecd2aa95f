"""Interleaved timing of several arms.

One idea: every block times every arm twice, in a random order and then in its reverse (ABBA), so that whatever
drifts does so for all of them; blocks in which a fixed piece of work changed its time are thrown away. Decides
nothing about who is faster: see statistics.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_bench.timing.clocks import Arm, Clock, Reading
from gpu_bench.timing.statistics import Blocks, median
from warpsmith.v1 import task_pb2, timing_pb2

SHORT_CALL_NS = 20_000.0
"""Calls below this are timed in groups: an empty event pair alone reads 1,200 ns."""
GROUP_NS = 100_000.0
SLOW_ARM = 4.0
"""A baseline this many times slower than the fastest one leaves after the least number of blocks."""
INSPECT_CHANCE = 0.1
"""Chance that an output of a reading is inspected; of a block's first readings in the first block, one always is."""
FEWEST_BLOCKS = 10
"""Blocks that do where filling the buffer sets ahead of readings takes long."""
CACHES = 4
"""So many last-level caches hold nothing of their first bytes once the last were written."""

Inspect = Callable[[str, int, Any], None]
"""Called outside the timed region with arm name, buffer set and the outputs of a call that was just timed."""


@dataclass(frozen=True)
class Plan:
    """How long to measure, and how finely."""

    budget_s: float
    """Seconds for the blocks; no block begins after it, once there are `least_blocks`."""
    ceiling_s: float
    """Seconds after which no block begins, whatever `least_blocks` says, once there is one, nor a second round of
    extra readings."""
    least_blocks: int
    most_blocks: int
    set_count: int
    """Buffer sets that calls may use, numbered from 0."""
    warmup_s: float
    """Seconds of unmeasured calls, shared by all arms."""
    drift_limit: float
    """Relative change of the sentinel that discards a block; at most half of the blocks go."""
    extra_readings: tuple[Reading, ...] = ()
    """Readings taken apart from the headline: WARM, CALL."""
    extra_count: int = 7
    seed: int = 0
    enough_within: float = 0.0
    """Relative standard error of every arm's median at which blocks may end before the budget does; 0 for never."""
    followers: frozenset[str] = frozenset()
    """Names of arms that are no baselines: however fast, they drive no other out."""
    short_call_ns: float = SHORT_CALL_NS
    """Calls below this are timed in groups of at least `reading_ns`."""
    reading_ns: float = GROUP_NS
    inspect_chance: float = INSPECT_CHANCE
    looks: int = 1
    """Calls of a reading that are inspected, where one is: with two, no single one is worth doing right."""
    preparing_s: float = math.inf
    """Seconds of work ahead of readings after which `FEWEST_BLOCKS` do."""

    def __post_init__(self) -> None:
        if not 1 <= self.least_blocks <= self.most_blocks or self.set_count < 1:
            raise ValueError("a plan needs at least one block and one buffer set")


def plan_for(tier: timing_pb2.Tier.ValueType, target: task_pb2.Target.ValueType, set_count: int, seed: int = 0) -> Plan:
    """The plan of a tier: screening takes about 0.15 s on a GPU and 0.8 s on a CPU, a final a few seconds.

    A task whose calls take seconds gets fewer blocks, down to one at the ceiling: then nothing is called faster.
    Screening of what repeats within half a percent, as most kernels on a GPU do, ends as soon as that shows, on a GPU
    after three blocks, six visits to each arm; a final on a GPU once every median is known within 0.05 %, whichever
    arm is ahead.
    """
    cuda = target == task_pb2.TARGET_CUDA
    drift, looks = (0.04, 1) if cuda else (0.3, 2)
    if tier == timing_pb2.TIER_FINAL:
        extra = (Reading.WARM, Reading.CALL) if cuda else (Reading.WARM,)
        seconds, least, enough = (2.0, 16, 5e-4) if cuda else (5.0, 24, 0.0)
        chance, ahead = (INSPECT_CHANCE, math.inf) if cuda else (1 / 3, 4.0)
        return Plan(
            seconds, 90.0, least, 400, set_count, 0.3, drift, extra, seed=seed, enough_within=enough,
            inspect_chance=chance, looks=looks, preparing_s=ahead,
        )  # fmt: skip
    budget, warmup, least = (0.12, 0.01, 3) if cuda else (0.7, 0.1, 6)
    return Plan(budget, 15.0, least, 60, set_count, warmup, drift, seed=seed, enough_within=0.004, looks=looks)


def buffer_set_count(set_bytes: int, cache_bytes: int, limit_bytes: int) -> int:
    """Buffer sets to rotate over: four times the last-level cache in all, 2 to 64, within `limit_bytes`.

    `set_bytes` are the bytes of one set's inputs and outputs. One set when memory allows no second.
    """
    wanted = min(max(math.ceil(CACHES * cache_bytes / max(set_bytes, 1)), 2), 64)
    return max(min(wanted, limit_bytes // max(set_bytes, 1)), 1)


@dataclass(frozen=True)
class ArmSamples:
    """What was measured of one arm."""

    name: str
    blocks: Blocks
    """Cold nanoseconds of one call [blocks, 2]; NaN where the arm sat out or the block was discarded."""
    failure: str = ""
    """Why it could not run; empty when it ran."""
    warm_ns: float = 0.0
    """Median of the warm readings; 0 when not taken."""
    call_ns: float = 0.0
    """Median of the whole call; 0 when not taken."""

    @property
    def median_ns(self) -> float:
        """Median over blocks; NaN when there is none."""
        return median(self.blocks) if len(self.blocks) else math.nan

    @property
    def samples_ns(self) -> list[float]:
        """Kept cold readings in the order they were taken."""
        return [float(value) for value in self.blocks.ravel() if math.isfinite(value)]


@dataclass(frozen=True)
class Samples:
    """A whole measurement."""

    arms: Mapping[str, ArmSamples]
    """Every arm that was asked for, in that order."""
    group_length: int
    """Calls of one reading: more than one for short calls."""
    block_count: int
    """Blocks kept."""
    discarded_count: int
    """Blocks thrown away because the sentinel drifted."""
    unsteady: bool
    """Whether more than half of the blocks drifted, so that the steadier half was kept."""
    seconds: float
    """Seconds that it all took."""


def measure(arms: Sequence[Arm], clock: Clock, plan: Plan, inspect: Inspect | None = None) -> Samples:
    """Times the arms against each other.

    Names must differ. Raises whatever a `required` arm raises; any other arm's exception becomes its `failure`.
    """
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names) or not arms:
        raise ValueError(f"arms need names of their own, got {names}")
    begin = clock.now_s()
    clock.begin(names)
    session = _Session(list(arms), clock, plan, inspect)
    with _no_garbage_collection():
        session.warm_up()
        session.run_blocks()
        extra = session.extra_readings()
    kept, unsteady = _steady(np.array(session.sentinels), plan.drift_limit)
    results = {}
    for arm in arms:
        blocks = np.array(session.rows[arm.name], dtype=np.float64).reshape(-1, 2)
        blocks[~kept[: len(blocks)]] = np.nan
        readings = extra.get(arm.name, {})
        results[arm.name] = ArmSamples(
            name=arm.name,
            blocks=blocks,
            failure=session.failures.get(arm.name, ""),
            warm_ns=readings.get(Reading.WARM, 0.0),
            call_ns=readings.get(Reading.CALL, 0.0),
        )
    total = len(kept)
    count = int(kept.sum())
    return Samples(results, session.group_length, count, total - count, unsteady, clock.now_s() - begin)


def measure_steps(
    call: Callable[[], Any],
    clock: Clock,
    repeats: int = 9,
    watch: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[float]:
    """Median ns of each step of a program, in its order, so that later steps find what earlier ones left in cache.

    `call` makes `clock.stamp()` after every step; `watch` is around each call.
    """

    def lap() -> list[float]:
        with watch():
            return clock.laps_ns(call)

    lap()
    with _no_garbage_collection():
        laps = np.array([lap() for _ in range(repeats)], dtype=np.float64)
    return [float(value) for value in np.median(laps, axis=0)]


@dataclass
class _Session:
    """A measurement under way."""

    active: list[Arm]
    clock: Clock
    plan: Plan
    inspect: Inspect | None
    failures: dict[str, str] = field(default_factory=dict)
    rows: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    sentinels: list[tuple[float, float]] = field(default_factory=list)
    group_length: int = 1
    _next_set: int = 0
    _begin: float = 0.0
    """When the blocks began, in the clock's seconds."""
    _preparing_s: list[float] = field(default_factory=list)
    """What each thing done ahead of a reading since then took."""

    def __post_init__(self) -> None:
        self.rows = {arm.name: [] for arm in self.active}
        self.active = [self._watched(arm) for arm in self.active]
        self._random = random.Random(self.plan.seed)
        self._secret = random.SystemRandom()  # no candidate can work out which blocks are inspected

    def warm_up(self) -> None:
        """Runs every arm until its share of the time is spent, and chooses the length of a group."""
        share = self.plan.warmup_s / len(self.active)
        pilots = []
        for arm in list(self.active):
            begin = self.clock.now_s()
            readings: list[float] = []
            while not readings or self.clock.now_s() - begin < share:
                reading = self._take(arm, Reading.COLD, inspected=False)
                if reading is None:
                    break
                readings.append(reading)
                if len(readings) == 50:
                    break
            if readings:
                pilots.append(float(np.median(readings)))
        fastest = min(pilots, default=math.inf)
        # One length for all arms: a group warms parameters that a single call finds cold.
        if fastest < self.plan.short_call_ns:
            self.group_length = min(math.ceil(self.plan.reading_ns / max(fastest, 1.0)), self.plan.set_count)

    def run_blocks(self) -> None:
        """Blocks until the budget is spent."""
        self._begin = self.clock.now_s()
        self._preparing_s.clear()
        for number in range(self.plan.most_blocks):
            spent = self.clock.now_s() - self._begin
            enough = self.plan.least_blocks if spent < self.plan.ceiling_s else 1
            if sum(self._preparing_s) > self.plan.preparing_s:
                enough = min(enough, FEWEST_BLOCKS)
            if not self.active or (number >= enough and (spent >= self.plan.budget_s or self._is_precise())):
                return
            self._run_block(is_first=number == 0)
            if number + 1 == self.plan.least_blocks:
                self._retire_slow_arms()

    def _is_precise(self) -> bool:
        """Whether every arm's median is known as well as the plan wants."""
        if not self.plan.enough_within:
            return False
        for arm in self.active:
            readings = np.array(self.rows[arm.name], dtype=np.float64)
            readings = readings[np.isfinite(readings)]
            # The median of a normal sample has 1.25 times the standard error of its mean.
            error = 1.25 * readings.std() / math.sqrt(max(len(readings), 1))
            if not len(readings) or error > self.plan.enough_within * np.median(readings):
                return False
        return True

    def extra_readings(self) -> dict[str, dict[Reading, float]]:
        """Median of each extra reading of each arm that runs, a round at least; slow arms that retired have none."""
        taken: dict[str, dict[Reading, list[float]]] = {}
        for number in range(self.plan.extra_count if self.plan.extra_readings else 0):
            if number and self.clock.now_s() - self._begin >= self.plan.ceiling_s:
                break
            for arm in list(self.active):
                for kind in self.plan.extra_readings:
                    reading = self._take(arm, kind, inspected=False)
                    if reading is not None:
                        taken.setdefault(arm.name, {}).setdefault(kind, []).append(reading)
        return {
            name: {kind: float(np.median(values)) for kind, values in kinds.items()} for name, kinds in taken.items()
        }

    def _watched(self, arm: Arm) -> Arm:
        """The arm, with what it does ahead of readings counted."""
        if (ahead := arm.before) is None:
            return arm
        clock, spent = self.clock, self._preparing_s  # not `self`, which has the arm: a cycle keeps all that it holds

        def before(sets: Sequence[int]) -> None:
            begin = clock.now_s()
            ahead(sets)
            spent.append(clock.now_s() - begin)

        return replace(arm, before=before)

    def _run_block(self, *, is_first: bool) -> None:
        order = list(self.active)
        self._random.shuffle(order)
        visits: dict[str, list[float]] = {arm.name: [] for arm in order}
        before = self.clock.sentinel_ns()
        for place, arm in enumerate(order + order[::-1]):
            if arm.name not in self.failures:
                is_due = (is_first and place < len(order)) or self._secret.random() < self.plan.inspect_chance
                reading = self._take(arm, Reading.COLD, inspected=is_due)
                if reading is not None:
                    visits[arm.name].append(reading)
        self.sentinels.append((before, self.clock.sentinel_ns()))
        for name, row in self.rows.items():
            first_and_second = visits.get(name, [])
            row.append((first_and_second[0], first_and_second[1]) if len(first_and_second) == 2 else _ABSENT)

    def _take(self, arm: Arm, reading: Reading, *, inspected: bool) -> float | None:
        """Nanoseconds of one call, or None when the arm failed and leaves."""
        if reading is Reading.WARM:
            sets = [self._next_set % self.plan.set_count] * self.group_length
        else:
            sets = [(self._next_set + step) % self.plan.set_count for step in range(self.group_length)]
        self._next_set = (self._next_set + self.group_length) % self.plan.set_count
        try:
            sample = self.clock.take(arm, sets, reading)
        except Exception as error:
            if arm.required:
                raise
            self.failures[arm.name] = failure_text(error)
            self.active = [other for other in self.active if other.name != arm.name]
            return None
        if inspected and self.inspect is not None:
            for place in self._secret.sample(range(len(sets)), min(self.plan.looks, len(sets))):
                self.inspect(arm.name, sets[place], sample.outputs[place])
        return sample.ns

    def _retire_slow_arms(self) -> None:
        """Leaves the time to the arms that matter. A required arm neither leaves nor drives others out."""
        optional = [arm.name for arm in self.active if not arm.required]
        medians = {name: median(np.array(self.rows[name], dtype=np.float64)) for name in optional}
        baselines = [ns for name, ns in medians.items() if name not in self.plan.followers]
        limit = SLOW_ARM * min(baselines, default=math.inf)
        self.active = [arm for arm in self.active if not medians.get(arm.name, 0.0) > limit]


_ABSENT = (math.nan, math.nan)


def failure_text(error: BaseException) -> str:
    """An exception as one line of at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _steady(sentinels: NDArray[np.float64], limit: float) -> tuple[NDArray[np.bool_], bool]:
    """Which blocks to keep ([blocks, 2] sentinel ns), and whether the limit had to be given up."""
    if len(sentinels) == 0:
        return np.zeros(0, dtype=np.bool_), False
    drift = np.abs(sentinels / np.median(sentinels) - 1.0).max(axis=1)
    kept = drift <= limit
    if kept.sum() * 2 >= len(kept):
        return kept, False
    return drift <= np.median(drift), True


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection would add to the time of a sample."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
