"""Clocks: how long one call takes on the host's processor, and on a CUDA device.

One idea: what is timed is the work and nothing else. The cache is emptied before the timed region, host time is
hidden behind a spin on the device, results are held until the region has ended. Decides neither order nor number.
"""

from __future__ import annotations

import enum
import functools
import importlib
import itertools
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpu_bench.running.elsewhere import Elsewhere


@dataclass(frozen=True)
class Arm:
    """Something that is timed under a name."""

    name: str
    """One of the contract's arm names, such as "eager"."""
    call: Callable[[int], Any]
    """Makes one call on the buffer set of that number and returns its outputs."""
    required: bool = False
    """Whether an exception of its call ends the measurement; otherwise the arm is recorded as failed."""
    before: Callable[[Sequence[int]], object] | None = None
    """Called with the buffer sets of a group ahead of each reading of it, outside the timed region."""
    watch: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around its calls, not around what is done ahead of them: ends what takes too long."""
    elsewhere: Elsewhere | None = None
    """The process that makes its calls, where it is not this one."""


class Reading(enum.Enum):
    """What of a call is timed."""

    COLD = "cold"
    """Work with a cold last-level cache: the headline."""
    WARM = "warm"
    """Work on buffers that were just used."""
    CALL = "call"
    """From the host's call until the results are there."""


@dataclass(frozen=True)
class Sample:
    """One reading."""

    ns: float
    """Nanoseconds of one call: the group's time over its length."""
    outputs: Sequence[Any]
    """What each call of the group returned."""


def _prepare(arm: Arm, sets: Sequence[int]) -> None:
    if arm.before is not None:
        arm.before(sets)


class Clock(Protocol):
    """Times calls. A reading takes a group of calls on the named buffer sets, one after the other."""

    def take(self, arm: Arm, sets: Sequence[int], reading: Reading) -> Sample:
        """Times one group of calls; exceptions of the arm pass through."""
        ...

    def laps_ns(self, call: Callable[[], Any]) -> list[float]:
        """Times from a cold cache between the stamps that `call` makes, the start being the first."""
        ...

    def stamp(self) -> None:
        """Marks the end of a step inside a call that `laps_ns` makes."""
        ...

    def sentinel_ns(self) -> float:
        """Time of a fixed piece of work: moves only when the machine does."""
        ...

    def now_s(self) -> float:
        """Seconds, for budgets."""
        ...

    def begin(self, names: Iterable[str]) -> None:
        """A measurement of arms of these names begins; others of the same names may have been timed before."""
        ...


RETAKE_COUNT = 4
RETAKE_BELOW_NS = 200e6
"""Longer readings are never free of interruptions on a busy machine."""
SWEEP_LIMIT_BYTES = 256 << 20
"""Most that is swept to empty a processor's cache: shared caches of large servers are larger than a job's share."""


class HostClock:
    """Times on the processor. The cache is emptied by updating a buffer of twice the last-level cache."""

    def __init__(self, cache_bytes: int) -> None:
        size = min(max(2 * cache_bytes, 8 << 20), SWEEP_LIMIT_BYTES)
        self._sweep = torch.ones(size // 8, dtype=torch.int64)
        self._fixed = torch.linspace(0.0, 1.0, 1 << 14)
        self._stamps: list[int] = []

    def take(self, arm: Arm, sets: Sequence[int], reading: Reading) -> Sample:
        """Times a group; WARM calls every set once before, CALL is read like COLD with no sweep.

        A reading in which the system took a processor away says nothing about the arm and is taken again.
        """
        if reading is Reading.WARM:
            with arm.watch():
                for index in sets:
                    arm.call(index)
        for _ in range(RETAKE_COUNT):
            sample, interrupted = self._once(arm, sets, cold=reading is Reading.COLD)
            if not interrupted or sample.ns > RETAKE_BELOW_NS:
                break
        return sample

    def laps_ns(self, call: Callable[[], Any]) -> list[float]:
        """Time of each step, from a cold cache."""
        self._evict()
        self._stamps = [timed_ns()]
        call()
        return [float(after - before) for before, after in itertools.pairwise(self._stamps)]

    def stamp(self) -> None:
        """Marks the end of a step."""
        self._stamps.append(timed_ns())

    def sentinel_ns(self) -> float:
        """About 0.1 ms of vector arithmetic in cache; the least of three, so that only lasting load shows."""
        return min(self._fixed_work_ns() for _ in range(3))

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.perf_counter()

    def begin(self, names: Iterable[str]) -> None:
        """Nothing is kept between measurements."""

    def _fixed_work_ns(self) -> float:
        begin = time.perf_counter_ns()
        for _ in range(4):
            torch.sin(self._fixed)
        return float(time.perf_counter_ns() - begin)

    def _once(self, arm: Arm, sets: Sequence[int], *, cold: bool) -> tuple[Sample, bool]:
        """A reading, and whether the system took a processor away during it."""
        call, elsewhere = arm.call, arm.elsewhere
        outputs = []
        _prepare(arm, sets)
        if cold:
            self._evict()
        batch = elsewhere.batch() if elsewhere is not None else nullcontext()
        switches = _forced_switches(elsewhere)
        with arm.watch():
            begin = timed_ns()
            with batch:
                for index in sets:
                    outputs.append(call(index))  # held: freeing would be timed, and would hand out warm memory
            elapsed = timed_ns() - begin
        return Sample(elapsed / len(sets), outputs), _forced_switches(elsewhere) != switches

    def _evict(self) -> None:
        self._sweep.add_(1)


def _forced_switches(elsewhere: Elsewhere | None) -> int:
    """How often the system took a processor away from a thread of this process, or of another that makes the calls."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    return own + (elsewhere.forced_switches() if elsewhere is not None else 0)


_aside_ns = 0


@contextmanager
def aside() -> Iterator[None]:
    """Around what only the bench has to do within a call that is timed, in this process: the host's clock stands."""
    global _aside_ns
    begin = time.perf_counter_ns()
    try:
        yield
    finally:
        _aside_ns += time.perf_counter_ns() - begin


def timed_ns() -> int:
    """Nanoseconds, less those that were spent `aside`."""
    return time.perf_counter_ns() - _aside_ns


SPIN_START_NS = 50_000.0
SPIN_LIMIT_NS = 50_000_000.0
"""A call that the host cannot enqueue within this is host-bound: its gaps are part of its time."""
SPIN_DECAY = 0.8
HOST_BOUND_AFTER = 5
"""Readings in a row that were late behind the longest spin."""
CALIBRATION_CYCLES = 2_000_000
SENTINEL_CYCLES = 20_000


def new_event() -> Any:
    """A CUDA event that can be timed."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def spin(cycles: int) -> None:
    """Keeps the current stream busy for that many cycles of the SM clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class HostLead:
    """How long the device has to spin so that the host is ahead of it when a timed region begins, by arm.

    A stall of the host makes the spin long once; it comes back to twice what the host needs, a fifth a reading. Only
    who is late behind the longest spin time and again is host-bound.
    """

    def __init__(self) -> None:
        self._spin_ns: dict[str, float] = {}
        self._late: Counter[str] = Counter()
        self.host_bound: set[str] = set()

    def forget(self, names: Iterable[str]) -> None:
        """Other arms of these names are about to be timed."""
        for name in names:
            self._spin_ns.pop(name, None)
            self._late.pop(name, None)
            self.host_bound.discard(name)

    def spin_ns(self, name: str) -> float:
        """The spin before the next reading."""
        return self._spin_ns.get(name, SPIN_START_NS)

    def was_enough(self, name: str, host_ns: float, *, was_ahead: bool) -> bool:
        """Whether a reading counts that the host took `host_ns` to enqueue; if not, it is to be taken again."""
        spin = self.spin_ns(name)
        if was_ahead or name in self.host_bound:
            self._late.pop(name, None)
            self._spin_ns[name] = max(SPIN_START_NS, SPIN_DECAY * spin, min(spin, 2.0 * host_ns))
            return True
        self._late[name] += spin >= SPIN_LIMIT_NS
        self._spin_ns[name] = min(1.5 * max(spin, host_ns), SPIN_LIMIT_NS)
        if self._late[name] == HOST_BOUND_AFTER:
            self.host_bound.add(name)
            self._spin_ns[name] = SPIN_START_NS
        return False


class CudaClock:
    """Times on the current CUDA device with events.

    Every timed region is enqueued behind a spin of the device, long enough that the host is ahead when the region
    begins. Whether it was is asked after enqueueing: if the first event is already past, the spin grows and the
    reading is taken again. The L2 cache is emptied by writing a buffer of twice its size.
    """

    def __init__(self, cache_bytes: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._flush = torch.empty(2 * cache_bytes // 4, dtype=torch.int32, device=device)
        self._lead = HostLead()
        self.host_bound = self._lead.host_bound
        """Names of arms whose host time could not be hidden."""
        self._events: list[Any] = []
        reset = persisting_reset()
        self.resets_persisting = reset is not None
        """Whether lines that a kernel asked the L2 to keep are let go before a cold reading."""
        self._reset_persisting = reset or (lambda: None)
        self._cycles_per_ns = 1.0
        self._cycles_per_ns = CALIBRATION_CYCLES / min(self._spin_time_ns(CALIBRATION_CYCLES) for _ in range(3))

    def take(self, arm: Arm, sets: Sequence[int], reading: Reading) -> Sample:
        """Times a group; COLD and WARM give device time, CALL gives the host's from call to synchronised."""
        if reading is Reading.CALL:
            return self._take_call(arm, sets)
        if reading is Reading.WARM:
            with arm.watch():
                for index in sets:
                    arm.call(index)
        calls = [_bound(arm.call, index) for index in sets]
        prepare = functools.partial(_prepare, arm, sets)
        events, outputs = self._behind_spin(arm.name, calls, prepare, cold=reading is Reading.COLD, watch=arm.watch)
        return Sample(events[0].elapsed_time(events[-1]) * 1e6 / len(sets), outputs)

    def laps_ns(self, call: Callable[[], Any]) -> list[float]:
        """Device time of each step, from a cold L2, with events between them."""
        self._lead.forget(["steps"])
        events, _ = self._behind_spin("steps", [call], lambda: None, cold=True)
        return [before.elapsed_time(after) * 1e6 for before, after in itertools.pairwise(events[:-1])]

    def stamp(self) -> None:
        """Records an event."""
        event = new_event()
        event.record()
        self._events.append(event)

    def sentinel_ns(self) -> float:
        """Time of a fixed number of cycles: the inverse of the SM clock."""
        return self._spin_time_ns(SENTINEL_CYCLES)

    def now_s(self) -> float:
        """Monotonic seconds of the host."""
        return time.perf_counter()

    def begin(self, names: Iterable[str]) -> None:
        """What the host needed for other arms of these names is forgotten."""
        self._lead.forget(names)

    def _take_call(self, arm: Arm, sets: Sequence[int]) -> Sample:
        _prepare(arm, sets)
        torch.cuda.synchronize()
        with arm.watch():
            begin = time.perf_counter_ns()
            outputs = [arm.call(index) for index in sets]
            torch.cuda.synchronize()
            elapsed = time.perf_counter_ns() - begin
        return Sample(elapsed / len(sets), outputs)

    def _behind_spin(
        self,
        name: str,
        calls: Sequence[Callable[[], Any]],
        prepare: Callable[[], object],
        *,
        cold: bool,
        watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[list[Any], list[Any]]:
        """Events from before the calls to after them, the calls' own stamps between, and what the calls returned."""
        held: list[Any] = []
        while True:
            held.clear()
            prepare()  # a reading that is taken again must not find the answers of the one before
            if cold:
                self._evict()
            with watch():
                self._spin(self._lead.spin_ns(name))
                self._events = []
                begin = time.perf_counter_ns()
                self.stamp()
                held += [call() for call in calls]  # held: freed memory would come back warm within the group
                self.stamp()
                host_ns = float(time.perf_counter_ns() - begin)
                events = self._events
                was_ahead = not events[0].query()
                events[-1].synchronize()
            if self._lead.was_enough(name, host_ns, was_ahead=was_ahead):
                return events, held

    def _evict(self) -> None:
        self._reset_persisting()
        self._flush.fill_(1)

    def _spin(self, nanoseconds: float) -> None:
        spin(int(nanoseconds * self._cycles_per_ns))

    def _spin_time_ns(self, cycles: int) -> float:
        before, after = new_event(), new_event()
        self._spin(SPIN_START_NS)
        before.record()
        spin(cycles)
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e6


def _bound(call: Callable[[int], Any], index: int) -> Callable[[], Any]:
    return lambda: call(index)


def persisting_reset() -> Callable[[], object] | None:
    """Resets lines that a kernel asked the L2 to keep; None where cuda-bindings is not installed."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    reset: Callable[[], object] = driver.cuCtxResetPersistingL2Cache
    return reset
