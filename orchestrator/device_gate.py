"""Keeps a machine quiet while something is timed on it, and each device busy with one measurement.

The one idea: callers of two kinds. Work (synthesis, compiling, checking) shares the machine with itself; timing
shares it with nothing that could disturb it. On the CPU target all work would; on a GPU only checking would, and
only where one benchmark service does both. Timing goes first when both wait. Nothing here knows what is timed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from orchestrator.agents import Benchmark
from warpsmith.v1 import task_pb2


class DeviceGate:
    """The gate to the devices of one set of benchmark services; shared by all runs that use them."""

    def __init__(self, benchmarks: Sequence[Benchmark]) -> None:
        self._free = list(benchmarks)
        self._device_count = len(self._free)
        self._changed = threading.Condition()
        self._working = 0
        self._timing = 0
        self._waiting_to_time = 0

    def working(self, target: task_pb2.Target.ValueType) -> AbstractContextManager[None]:
        """Held while a service computes on the host: synthesis, compiling."""
        return self._sharing() if target == task_pb2.TARGET_CPU else nullcontext()

    def checking(self, target: task_pb2.Target.ValueType) -> AbstractContextManager[None]:
        """Held while candidates run to be judged."""
        alone = target == task_pb2.TARGET_CPU or self._device_count == 1
        return self._sharing() if alone else nullcontext()

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._timing and not self._waiting_to_time)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    @contextmanager
    def timing(self) -> Iterator[Benchmark]:
        """Held while something is timed; gives the benchmark service whose turn it is."""
        with self._changed:
            self._waiting_to_time += 1
            try:
                self._changed.wait_for(lambda: not self._working and bool(self._free))
            finally:
                self._waiting_to_time -= 1
            benchmark = self._free.pop(0)
            self._timing += 1
        try:
            yield benchmark
        finally:
            with self._changed:
                self._free.append(benchmark)
                self._timing -= 1
                self._changed.notify_all()
