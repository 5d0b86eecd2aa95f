"""What the driver tells of a GPU: clocks, throttle reasons, use, errors of its memory, and Xids.

One idea: the library that comes with the driver is called directly, so nothing is started and nothing installed, and
no CUDA context is made: a service's own process may ask. Reads only; changes no setting.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from dataclasses import dataclass

_SM_CLOCK = 1
_REASONS = {
    0x004: "software_power_cap",
    0x008: "hardware_slowdown",
    0x020: "software_thermal_slowdown",
    0x040: "hardware_thermal_slowdown",
    0x080: "hardware_power_brake",
}
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons that make timings doubtful; idle and set clocks do not."""
THROTTLE_REASONS = tuple(_REASONS.values())

_UNCORRECTED, _SINCE_THE_DRIVER_STARTED = 1, 0
_XID_EVENTS = ctypes.c_ulonglong(0x8)
_A_PROGRAMS_OWN = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that a faulty program causes on a sound GPU: exceptions, page faults, its channel's end, a video decoder's."""


@dataclass(frozen=True)
class GpuState:
    """The GPU at one moment; zeros and empty where the driver does not tell."""

    driver: str = ""
    sm_clock_mhz: int = 0
    throttle_reasons: tuple[str, ...] = ()


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Gpu:
    """One GPU, asked through NVML. From any thread."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle
        self._lock = threading.Lock()
        self._events: ctypes.c_void_p | None = None
        self._errors_before = self._uncorrected_errors()

    @staticmethod
    def visible() -> Gpu | None:
        """The one that CUDA would choose here; None without a driver, without a GPU, or for a slice of one."""
        library = _library()
        if library is None:
            return None
        handle = ctypes.c_void_p()
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if wanted.isdigit():
            status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(wanted)), ctypes.byref(handle))
        else:
            status = library.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(wanted.encode()), ctypes.byref(handle))
        return Gpu(library, handle) if status == 0 else None

    def state(self) -> GpuState:
        """Clocks and what holds them down."""
        clock, bits = ctypes.c_uint(0), ctypes.c_ulonglong(0)
        if self._library.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK, ctypes.byref(clock)) != 0:
            clock = ctypes.c_uint(0)
        if self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle, ctypes.byref(bits)) != 0:
            bits = ctypes.c_ulonglong(0)
        version = ctypes.create_string_buffer(96)
        self._library.nvmlSystemGetDriverVersion(version, len(version))
        reasons = tuple(name for bit, name in _REASONS.items() if bits.value & bit)
        return GpuState(version.value.decode(), int(clock.value), reasons)

    def busy_share(self) -> float | None:
        """Share of the driver's last sampling period in which a kernel ran; None where it does not tell."""
        rates = (ctypes.c_uint * 2)()
        status = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates))
        return None if status != 0 else float(rates[0]) / 100

    def memory_fault(self) -> str:
        """Why its memory cannot be trusted; empty where nothing is known against it."""
        if new := self._uncorrected_errors() - self._errors_before:
            return f"{new} uncorrected memory errors since this service has used it"
        _, _, is_pending, failed = rows = [ctypes.c_uint(0) for _ in range(4)]
        if self._library.nvmlDeviceGetRemappedRows(self._handle, *map(ctypes.byref, rows)) == 0:
            if failed.value:
                return "a row of memory could not be remapped"
            if is_pending.value:
                return "a row of memory waits to be remapped, which needs a reset"
        return ""

    def _uncorrected_errors(self) -> int:
        """Since the driver was loaded; 0 where it does not tell. Old ones were contained, or a row is pending."""
        count = ctypes.c_ulonglong(0)
        status = self._library.nvmlDeviceGetTotalEccErrors(
            self._handle, _UNCORRECTED, _SINCE_THE_DRIVER_STARTED, ctypes.byref(count)
        )
        return int(count.value) if status == 0 else 0

    def xid(self) -> int:
        """An Xid since the last question (first: since now) that no program is to blame for; 0 for none."""
        with self._lock:
            if self._events is None:
                self._events = ctypes.c_void_p()
                if self._library.nvmlEventSetCreate(ctypes.byref(self._events)) == 0:
                    self._library.nvmlDeviceRegisterEvents(self._handle, _XID_EVENTS, self._events)
            if not self._events:
                return 0
            event = _Event()
            while self._library.nvmlEventSetWait_v2(self._events, ctypes.byref(event), ctypes.c_uint(0)) == 0:
                if event.data not in _A_PROGRAMS_OWN:
                    return int(event.data)
            return 0


def gpu_state() -> GpuState:
    """State of torch's current device. For processes that may use CUDA."""
    gpu = _torch_gpu()
    return gpu.state() if gpu is not None else GpuState()


@functools.cache
def _torch_gpu() -> Gpu | None:
    import torch

    library, handle = _library(), ctypes.c_void_p()
    if library is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    status = library.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(uuid), ctypes.byref(handle))
    return Gpu(library, handle) if status == 0 else None


def _library() -> ctypes.CDLL | None:
    """NVML; None where there is none or it does not answer."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
