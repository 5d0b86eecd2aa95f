"""Takes a GPU that cannot be trusted out of service, and says why.

The one idea: a measurement is worth what its device is worth, so a device that fails a test of itself is not used again
in this process: its service stays alive, is not ready, and refuses calls. Who was being measured when it failed is not
to blame: that call ends as `DeviceQuarantined` and never as a verdict. A processor is not tested: it is the machine's.
It heals nothing: the pod is deleted, the node's operator looks at the GPU (docs/kubernetes.md).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from gpu_bench import metrics
from gpu_bench.nvml import Gpu
from warpsmith.errors import DeviceQuarantined, WarpsmithError, WorkerCrashed, WorkerTimeout
from warpsmith.v1 import task_pb2, timing_pb2

log = logging.getLogger("warpsmith.benchmark")

Probe = Callable[[], timing_pb2.Device]
"""Measures the GPU's rates in a new process, or raises where it does not answer in time."""


class Reason(StrEnum):
    """Why a device is out of service; also the label of the metric."""

    MEMORY = "memory"
    """Uncorrected errors, or a row that is not remapped."""
    XID = "xid"
    """The driver reported an error that no program causes."""
    HANG = "hang"
    """A new process gets no answer: a kernel was not freed, or the GPU is gone."""
    SLOW = "slow"
    """Rates far below what the device had before, or below its data sheet."""
    NOISE = "noise"
    """Equal programs keep differing in time."""


@dataclass(frozen=True)
class Bounds:
    """What a device may do and still be trusted. Far from all that sound ones do."""

    noise_floor: float = 0.2
    """Relative difference of equal programs; below 0.02 is usual."""
    noisy_in_a_row: int = 5
    """Measurements above it that are one too many."""
    least_share: float = 0.5
    """Of the best rates known, and of the bandwidth by data sheet."""


_RATES = ("copy_bytes_per_second", "read_bytes_per_second", "tensor_flops")


class Quarantine:
    """Whether the GPU of this process may be measured on. From any thread.

    `gpu` None: there is no driver to ask, and what programs and the probe show is all that is known.
    """

    def __init__(self, probe: Probe, gpu: Gpu | None = None, bounds: Bounds = Bounds()) -> None:
        self._probe, self._gpu, self._bounds = probe, gpu, bounds
        self._lock = threading.Lock()
        self._told: Callable[[], None] = lambda: None
        self._noisy = 0
        self._best: dict[str, float] = {}
        self.reason: Reason | None = None
        self.detail = ""

    def when_unfit(self, tell: Callable[[], None]) -> None:
        """Has `tell` called once, when the device goes out of service; at once where it has."""
        with self._lock:
            self._told = tell
            if self.reason is None:
                return
        tell()

    def look(self) -> None:
        """Asks the driver."""
        if self._gpu is None or self.reason is not None:
            return
        if fault := self._gpu.memory_fault():
            self._end(Reason.MEMORY, fault)
        elif xid := self._gpu.xid():
            self._end(Reason.XID, f"the driver reported Xid {xid}")

    @contextlib.contextmanager
    def guarding(self, target: task_pb2.Target.ValueType) -> Iterator[None]:
        """Around a call that uses the device.

        Raises:
            DeviceQuarantined: before the block or, instead of what the block says, after it.
        """
        if target == task_pb2.TARGET_CPU:
            yield
            return
        self._require()
        try:
            yield
        except (WorkerTimeout, WorkerCrashed):
            self.suspect()
            self._require()
            raise
        self._require()

    def suspect(self) -> None:
        """After a program hung or took its process with it: is the device still there, and as fast as it was?"""
        for is_last in (False, True):
            if self.reason is not None:
                return
            try:
                device = self._probe()
            except WarpsmithError as error:
                if is_last:
                    self._end(Reason.HANG, f"it does not answer a new process: {error}")
            else:
                lack = self._lack(device)
                if not lack:
                    return
                if is_last:
                    self._end(Reason.SLOW, lack)

    def saw_device(self, device: timing_pb2.Device) -> None:
        """Learns what the device could do when it was first described."""
        if device.target != task_pb2.TARGET_CPU:
            if self._lack(device):
                self.suspect()
            self._require()

    def saw_timing(self, target: task_pb2.Target.ValueType, timing: timing_pb2.Timing) -> None:
        """Learns how quiet the device was."""
        if target == task_pb2.TARGET_CPU:
            return
        with self._lock:
            self._noisy = self._noisy + 1 if timing.noise_floor > self._bounds.noise_floor else 0
            noisy = self._noisy
        if noisy >= self._bounds.noisy_in_a_row:
            self._end(Reason.NOISE, f"equal programs differed by over {self._bounds.noise_floor:.0%} {noisy} times")

    def _lack(self, device: timing_pb2.Device) -> str:
        """What the device should do and does not, in one sentence; else its rates are remembered."""
        found = {rate: getattr(device, rate) for rate in _RATES}
        sheet = dict.fromkeys(_RATES[:2], device.physical_bytes_per_second)
        with self._lock:
            for rate, value in found.items():
                wanted = self._bounds.least_share * max(self._best.get(rate, 0.0), sheet.get(rate, 0.0))
                if value < wanted:
                    return f"{rate} is {value:.3g}, less than {wanted:.3g}"
            self._best = {rate: max(value, self._best.get(rate, 0.0)) for rate, value in found.items()}
        return ""

    def _require(self) -> None:
        self.look()
        if self.reason is not None:
            raise DeviceQuarantined(f"the GPU is out of service ({self.reason}): {self.detail}")

    def _end(self, reason: Reason, detail: str) -> None:
        with self._lock:
            if self.reason is not None:
                return
            self.detail, self.reason = detail, reason
            tell = self._told
        metrics.QUARANTINED.labels(reason.value).set(1)
        log.error("the GPU is out of service (%s): %s; see docs/kubernetes.md", reason.value, detail)
        tell()


class Watch:
    """Asks the driver, and how busy the device is, every few seconds, until closed."""

    def __init__(self, quarantine: Quarantine, gpu: Gpu | None, every_seconds: float = 5.0) -> None:
        self._quarantine, self._gpu, self._every = quarantine, gpu, every_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Asks no more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        busy = metrics.HostBusy()
        while True:
            self._quarantine.look()
            share = self._gpu.busy_share() if self._gpu is not None else busy.share()
            if share is not None:
                metrics.BUSY.set(share)
            if self._closed.wait(self._every):
                return
