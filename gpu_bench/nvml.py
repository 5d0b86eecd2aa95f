"""Clocks, driver and throttle reasons of the current GPU, read through NVML.

One idea: the library that comes with the driver is called directly, so nothing is started and nothing installed.
Reads only; changes no setting.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

_SM_CLOCK = 1
_REASONS = {
    0x004: "software_power_cap",
    0x008: "hardware_slowdown",
    0x020: "software_thermal_slowdown",
    0x040: "hardware_thermal_slowdown",
    0x080: "hardware_power_brake",
}
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons that make timings doubtful; idle and set clocks do not."""


@dataclass(frozen=True)
class GpuState:
    """The GPU at one moment; zeros and empty where the driver does not tell."""

    driver: str = ""
    sm_clock_mhz: int = 0
    throttle_reasons: tuple[str, ...] = ()


def gpu_state() -> GpuState:
    """State of torch's current device."""
    library, handle = _open()
    if library is None:
        return GpuState()
    clock = ctypes.c_uint(0)
    if library.nvmlDeviceGetClockInfo(handle, _SM_CLOCK, ctypes.byref(clock)) != 0:
        clock = ctypes.c_uint(0)
    bits = ctypes.c_ulonglong(0)
    if library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(bits)) != 0:
        bits = ctypes.c_ulonglong(0)
    version = ctypes.create_string_buffer(96)
    library.nvmlSystemGetDriverVersion(version, len(version))
    reasons = tuple(name for bit, name in _REASONS.items() if bits.value & bit)
    return GpuState(version.value.decode(), int(clock.value), reasons)


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, ctypes.c_void_p]:
    """The library and the device's handle; no library where there is none or it does not answer."""
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, handle
    if library.nvmlInit_v2() != 0:
        return None, handle
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    if library.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(uuid), ctypes.byref(handle)) != 0:
        return None, handle
    return library, handle
