"""A solution timed against the baselines from outside.

The one idea: every reading is one call on new values, in a process that was stopped until then; `contest` makes it.
What surrounds it, a wake-up and an answer, is part of every arm's time and is measured by a call that does nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_bench import device
from gpu_bench.pytorch.baselines import Prepared
from gpu_bench.solutions.caller import Answer
from gpu_bench.timing import floor
from gpu_bench.timing.arms import AA_COPY, CANDIDATE, EAGER
from gpu_bench.timing.clocks import RETAKE_BELOW_NS, RETAKE_COUNT, Arm, Reading, Sample
from gpu_bench.timing.interleaving import measure, plan_for
from gpu_bench.timing.measurement import NOT_BASELINES, compose_timing
from warpsmith.contract import words
from warpsmith.v1 import judging_pb2, task_pb2, timing_pb2

Call = Callable[[str], Answer]
"""Arm's name → what came of one call, on values that its process has not seen."""

TIMED_AS_CALLED = timing_pb2.FLAG_TIMED_AS_CALLED
"""Times are of whole calls from outside the process: host time is part of them, for every arm."""
HANDSHAKE = "handshake"
"""Arm that does nothing."""
HANDSHAKES = 15
WAITED_SHARE = 0.05
"""Of a reading that threads may have waited for a processor."""


class OutsideClock:
    """Times calls in other processes, one a reading."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._fixed = np.linspace(0.0, 1.0, 1 << 14)

    def take(self, arm: Arm, sets: Sequence[int], reading: Reading) -> Sample:
        """One call; there are no buffer sets, for every call has values of its own.

        One that had to wait for a processor says little about the arm and is made again.
        """
        del sets, reading
        for _ in range(RETAKE_COUNT):
            answer = self._call(arm.name)
            if answer.waited_seconds <= WAITED_SHARE * answer.seconds or answer.seconds * 1e9 > RETAKE_BELOW_NS:
                break
        return Sample(answer.seconds * 1e9, ())

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
    yardstick: judging_pb2.Yardstick,
    offered: Sequence[timing_pb2.Arm],
    precision: task_pb2.Precision.ValueType,
    tier: timing_pb2.Tier.ValueType,
    call: Call,
) -> timing_pb2.Timing:
    """Times the solution against eager and what else is `offered`. What `call` raises passes through."""
    running = [EAGER, *(words.arm(arm.kind) for arm in offered if not arm.failure)]
    names, aa_of = ([*running, AA_COPY], EAGER) if tier == timing_pb2.TIER_FINAL else (running, "")
    arms = [Arm(CANDIDATE, lambda index: index, required=True), *(Arm(name, lambda index: index) for name in names)]
    handshake = statistics.median(call(HANDSHAKE).seconds for _ in range(HANDSHAKES))
    plan = plan_for(tier, task_pb2.TARGET_CPU, 1)  # the host's whatever the device, for it is the host's clock
    plan = replace(plan, warmup_s=0.05 * len(arms), followers=NOT_BASELINES, extra_readings=())
    samples = measure(arms, OutsideClock(call), plan)
    timing = compose_timing(
        samples,
        [Prepared(words.arm(arm.kind), None, arm.failure) for arm in offered if arm.failure],
        tier=tier,
        work=floor.work_of(yardstick.graph, precision),
        ceilings=device.Ceilings.of(yardstick.ceilings),
        aa_of=aa_of,
    )
    timing.raised.extend([*yardstick.flags, TIMED_AS_CALLED])
    timing.environment.CopyFrom(yardstick.environment)
    timing.handshake_ns = handshake * 1e9
    return timing
