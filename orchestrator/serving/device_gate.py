"""Keeps a machine quiet while something is timed on it, and each device busy with one measurement.

The one idea: callers of two kinds. Work (synthesis, compiling, checking) shares the machine with itself; timing
shares it with nothing that could disturb it. On the CPU target all work would; on a GPU only checking would, and
only where one benchmark service does both. Timing goes first when both wait. Runs take turns with the devices, in the
order in which they ask; what needs none they do before their turn. A device that says it cannot be trusted is put aside
for a while. Nothing here knows what is timed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from orchestrator import metrics
from orchestrator.agents import Benchmark
from warpsmith.errors import DeviceQuarantined
from warpsmith.v1 import task_pb2, timing_pb2

ASIDE_SECONDS = 30.0
"""After which a device out of service is asked again: its service may be another by then."""
_CHECKS_AT_ONCE = 2
"""Checks that may be under way on a GPU: were twelve to wait for one another, what is right would be timed last."""


@dataclass(frozen=True)
class Use:
    """What the devices of a gate do."""

    devices: Sequence[timing_pb2.Device]
    """As they have described themselves, one for each target that was asked for."""
    device_count: int
    timing_count: int
    aside_count: int
    waiting_count: int
    """Measurements that wait for a device."""


class DeviceGate:
    """The gate to the devices of one set of benchmark services; shared by all runs that use them."""

    def __init__(self, benchmarks: Sequence[Benchmark]) -> None:
        self._benchmarks = list(benchmarks)
        self._free = list(benchmarks)
        self._busy: list[Benchmark] = []
        """Those that time something, gone ones too."""
        self._aside: list[Benchmark] = []
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._device_freed = threading.Condition(lock)  # one waiter is woken for one device: there may be a hundred
        metrics.devices.set(len(self._benchmarks))
        self._working = 0
        self._timing = 0
        self._waiting_to_time = 0
        self._turns: deque[object] = deque()
        self.devices: dict[task_pb2.Target.ValueType, timing_pb2.Device] = {}
        """What is known of the devices, by the target that was asked for."""

    @property
    def device_count(self) -> int:
        """How many devices there are now."""
        return len(self._benchmarks)

    @property
    def only_benchmark(self) -> Benchmark | None:
        """The one service; None where there are several, and chance says which is next."""
        benchmarks = self._benchmarks
        return benchmarks[0] if len(benchmarks) == 1 else None

    def use(self) -> Use:
        """What the devices do at this moment."""
        with self._changed:
            counts = len(self._benchmarks), self._timing, len(self._aside), self._waiting_to_time
            return Use(list(self.devices.values()), *counts)

    def renew(self, benchmarks: Sequence[Benchmark]) -> None:
        """Takes other services for those of before; what is timed on one that is gone ends there, and is its last."""
        with self._changed:
            new = [each for each in benchmarks if each not in self._benchmarks and each not in self._busy]
            self._benchmarks = list(benchmarks)
            metrics.devices.set(len(self._benchmarks))
            self._free = [each for each in self._free if each in self._benchmarks] + new
            self._set_aside([each for each in self._aside if each in self._benchmarks])
            self._changed.notify_all()
            self._device_freed.notify_all()

    @property
    def is_taken(self) -> bool:
        """Whether a run that asks now has to wait for its turn."""
        with self._changed:
            return len(self._turns) >= self.device_count

    @contextmanager
    def turn(self, go_on: Callable[[], bool] = lambda: True) -> Iterator[bool]:
        """Held by a run for as long as it needs devices: as many runs hold one as there are devices.

        Gives False, without a turn, where `go_on` became false first.
        """
        ticket = object()
        with self._changed:
            self._turns.append(ticket)
        try:
            with self._changed:
                while self._turns.index(ticket) >= self.device_count and go_on():
                    self._changed.wait(0.2)
                has_turn = self._turns.index(ticket) < self.device_count
            yield has_turn
        finally:
            with self._changed:
                self._turns.remove(ticket)
                self._changed.notify_all()

    def working(self, target: task_pb2.Target.ValueType) -> AbstractContextManager[None]:
        """Held while a service computes on the host: synthesis, compiling."""
        return self._sharing() if target == task_pb2.TARGET_CPU else nullcontext()

    def checking(self, target: task_pb2.Target.ValueType) -> AbstractContextManager[None]:
        """Held while candidates run to be judged; few at once on a GPU, where a service judges them one by one."""
        if target == task_pb2.TARGET_CPU:
            return self._sharing()
        return self._sharing(most=_CHECKS_AT_ONCE) if self.device_count == 1 else nullcontext()

    @contextmanager
    def _sharing(self, most: int = 1 << 30) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._timing and not self._waiting_to_time and self._working < most,
            )
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()
                self._device_freed.notify_all()

    @contextmanager
    def timing(self) -> Iterator[Benchmark]:
        """Held while something is timed; gives the benchmark service whose turn it is."""
        with self._changed:
            self._waiting_to_time += 1
            metrics.waiting_to_time.inc()
            try:
                self._device_freed.wait_for(lambda: not self._working and bool(self._free))
            finally:
                self._waiting_to_time -= 1
                metrics.waiting_to_time.dec()
            benchmark = self._free.pop(0)
            self._busy.append(benchmark)
            self._timing += 1
            metrics.devices_timing.inc()
        is_fit = True
        try:
            yield benchmark
        except DeviceQuarantined:
            is_fit = False
            raise
        finally:
            with self._changed:
                self._timing -= 1
                self._busy.remove(benchmark)
                metrics.devices_timing.dec()
                if is_fit:
                    self._free_again(benchmark)
                else:
                    self._put_aside(benchmark)
                self._changed.notify_all()

    def _free_again(self, benchmark: Benchmark) -> None:
        if self._free.count(benchmark) + self._busy.count(benchmark) < self._benchmarks.count(benchmark):
            self._free.append(benchmark)
        self._device_freed.notify()

    def _put_aside(self, benchmark: Benchmark) -> None:
        if benchmark not in self._benchmarks:
            return  # should it come back, `renew` takes it for a new one
        self._set_aside([*self._aside, benchmark])

        def return_it() -> None:
            with self._changed:
                if benchmark in self._aside:
                    self._set_aside([each for each in self._aside if each is not benchmark])
                    self._free_again(benchmark)

        timer = threading.Timer(ASIDE_SECONDS, return_it)
        timer.daemon = True
        timer.start()

    def _set_aside(self, benchmarks: list[Benchmark]) -> None:
        self._aside = benchmarks
        metrics.devices_aside.set(len(benchmarks))


def most_ahead(processor_count: int) -> int:
    """Runs that may prepare while another has the device: a core in four, at most three runs."""
    return max(0, min(3, processor_count // 4 - 1))
