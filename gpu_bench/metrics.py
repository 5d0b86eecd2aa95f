"""Prometheus metrics of measuring: what was timed, how long it took, how quiet the machine is.

One idea: base units and bounded labels, so that every series is known in advance. Counts in the service's process;
workers report through the messages that they return.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram, Metric

from gpu_bench.nvml import THROTTLE_REASONS
from warpsmith.contract import words
from warpsmith.v1 import timing_pb2, verdict_pb2

_OF_THE_FLOOR = (timing_pb2.FLAG_FLOOR_REJECT, timing_pb2.FLAG_FLOOR_SUSPECT)
_TIERS = {timing_pb2.TIER_SCREENING: "screening", timing_pb2.TIER_FINAL: "final"}


class _HeldSeconds(Counter):
    """A counter whose holders count up to now before each scrape: no rate is above what one can hold in a second."""

    def collect(self) -> Iterable[Metric]:
        """The series, as of now."""
        for holder in list(_holders):
            holder.count()
        return super().collect()


MEASUREMENTS = Counter("warpsmith_bench_measurements", "Candidates measured, by tier and outcome.", ["tier", "outcome"])
HELD_SECONDS = _HeldSeconds(
    "warpsmith_bench_held_seconds",
    "Time for which calls held the device, however they ended; those at the same time share it.",
    ["call"],
)
DEVICE_SECONDS = Histogram(
    "warpsmith_bench_device_seconds",
    "Time that one measurement held the device.",
    ["tier"],
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120),
)
NOISE_FLOOR = Gauge("warpsmith_bench_noise_floor_ratio", "Noise floor of the last measurement; 0.01 is 1 %.")
CLOCK = Gauge("warpsmith_bench_clock_hertz", "SM or processor clock after the last measurement; 0 when unknown.")
FLAGGED = Counter("warpsmith_bench_flagged_timings", "Timings with a flag of the floor guard.", ["flag"])
FAULTS = Counter("warpsmith_bench_faults", "Candidates that faulted while timed, by kind.", ["kind"])
THROTTLED = Gauge(
    "warpsmith_bench_throttled", "1 when this throttle reason was in force in the last measurement.", ["reason"]
)
QUARANTINED = Gauge("warpsmith_bench_quarantined", "1 when the GPU is out of service for this reason.", ["reason"])
WAITING = Gauge("warpsmith_bench_calls_waiting", "Calls that wait for their turn with the device.")
LEASES_LOST = Counter(
    "warpsmith_bench_leases_lost",
    "Work for the device that was ended or refused, by why: its caller left, its run was taken up, it was asked again.",
    ["loss"],
)
BUSY = Gauge(
    "warpsmith_bench_device_busy_ratio", "Share of time in which the GPU, or the machine's processors, worked."
)

# Every series starts at 0, so that a rate sees the first event too.
for _tier in _TIERS.values():
    DEVICE_SECONDS.labels(_tier)
    for _outcome in ("faster", "not_faster", "fault"):
        MEASUREMENTS.labels(_tier, _outcome)
for _flag in _OF_THE_FLOOR:
    FLAGGED.labels(words.flag(_flag))
for _kind in ("crash", "launch_error", "resource", "timeout"):
    FAULTS.labels(_kind)
for _reason in THROTTLE_REASONS:
    THROTTLED.labels(_reason)
for _reason in ("memory", "xid", "hang", "slow", "noise"):
    QUARANTINED.labels(_reason)
for _loss in ("caller_left", "taken_up", "asked_again"):
    LEASES_LOST.labels(_loss)
for _call in ("compare", "describe", "measure", "open", "reference"):
    HELD_SECONDS.labels(_call)


class Holding:
    """Who holds the device, from any thread: time at which several calls do is divided among them, so that all of it
    together never exceeds the time that has passed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: Tally[str] = Tally()
        self._last = 0.0
        _holders.add(self)

    @contextlib.contextmanager
    def by(self, call: str) -> Iterator[None]:
        """Counts the time of the block."""
        self._change(call, 1)
        try:
            yield
        finally:
            self._change(call, -1)

    def count(self) -> None:
        """Counts what was held until now."""
        with self._lock:
            self._count()

    def _change(self, call: str, difference: int) -> None:
        with self._lock:
            self._count()
            self._calls[call] += difference

    def _count(self) -> None:
        now = self._clock()
        share = (now - self._last) / max(1, self._calls.total())
        for name, count in self._calls.items():
            HELD_SECONDS.labels(name).inc(share * count)
        self._last = now


_holders: weakref.WeakSet[Holding] = weakref.WeakSet()


def record_timing(timing: timing_pb2.Timing) -> None:
    """Counts one finished measurement."""
    tier = _TIERS.get(timing.tier, "other")
    MEASUREMENTS.labels(tier, "faster" if timing.faster else "not_faster").inc()
    DEVICE_SECONDS.labels(tier).observe(timing.device_seconds)
    NOISE_FLOOR.set(timing.noise_floor)
    for flag in timing.raised:
        if flag in _OF_THE_FLOOR:
            FLAGGED.labels(words.flag(flag)).inc()
    _record_environment(timing.environment)


def record_fault(tier: timing_pb2.Tier.ValueType, kind: verdict_pb2.FailureKind.ValueType) -> None:
    """Counts a candidate that faulted while it was timed."""
    MEASUREMENTS.labels(_TIERS.get(tier, "other"), "fault").inc()
    FAULTS.labels(words.failure_kind(kind).lower()).inc()


def record_reference(report: timing_pb2.ReferenceReport) -> None:
    """Notes the machine's state after a reference was timed."""
    _record_environment(report.environment)


def _record_environment(environment: timing_pb2.Environment) -> None:
    if environment.clock_mhz:
        CLOCK.set(environment.clock_mhz[-1] * 1e6)
    for reason in THROTTLE_REASONS:
        THROTTLED.labels(reason).set(reason in environment.throttle_reasons)


class HostBusy:
    """How busy all processors were since the last question, by the kernel's count; None where it does not tell."""

    def __init__(self, file: Path = Path("/proc/stat")) -> None:
        self._file = file
        self._last = self._ticks()

    def share(self) -> float | None:
        """From 0 to 1; 0 for no time at all."""
        before, self._last = self._last, self._ticks()
        if before is None or self._last is None:
            return None
        idle, total = (after - earlier for earlier, after in zip(before, self._last, strict=True))
        return 1.0 - idle / total if total > 0 else 0.0

    def _ticks(self) -> tuple[int, int] | None:
        if not self._file.exists():
            return None
        counts = [int(each) for each in self._file.read_text().split("\n", 1)[0].split()[1:9]]
        return counts[3] + counts[4], sum(counts)  # idle and waiting for a disk; all
