"""Which functions of clocks, streams and comparisons a piece of host code has replaced, and what it keeps of the L2.

The one idea: they are looked at before the code is imported and again after it ran; another object under the same
name was put there. It catches what is done openly; the numbers themselves come from other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WATCHED: Mapping[str, tuple[str, ...]] = {
    "time": ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"),
    "timeit": ("default_timer",),
    "torch": ("allclose", "equal", "isclose", "eq", "no_grad", "empty", "empty_like", "empty_strided"),
    "torch.testing": ("assert_close",),
    "torch.cuda": ("Event", "synchronize", "Stream", "stream", "current_stream", "default_stream", "set_stream"),
    "torch.cuda.Event": ("record", "elapsed_time", "synchronize", "query", "wait"),
    "torch.nn.Module": ("__call__", "_call_impl", "to", "named_parameters", "named_buffers"),
    "torch.Tensor": (
        "clone", "copy_", "cpu", "to", "equal", "allclose", "sum", "detach", "data_ptr", "__eq__", "item", "stride",
        "shape", "size", "dtype", "layout", "untyped_storage", "storage_offset", "resolve_conj", "resolve_neg",
    ),
    "numpy": ("allclose", "array_equal", "isclose"),
}  # fmt: skip
_OURS = ("gpu_bench", "warpsmith")


@dataclass(frozen=True)
class Snapshot:
    """The watched functions as they were."""

    functions: Mapping[str, object]
    """By full name."""

    @staticmethod
    def taken() -> Snapshot:
        """As they are now."""
        return Snapshot(dict(_functions()))

    def replaced(self) -> list[str]:
        """Full names of those that are something else now."""
        now = _functions()
        return [name for name, kept in self.functions.items() if now.get(name, kept) is not kept]


_PERSISTING_L2 = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of the driver API."""


def set_aside_bytes() -> int:
    """Bytes of the GPU's L2 that this process keeps for itself between calls; 0 where it uses no GPU."""
    held, driver = ctypes.c_size_t(), _driver()
    if driver is None or driver.cuCtxGetLimit(ctypes.byref(held), _PERSISTING_L2):
        return 0
    return held.value


@functools.cache
def _driver() -> ctypes.CDLL | None:
    with contextlib.suppress(OSError):
        return ctypes.CDLL("libcuda.so.1")
    return None


def _functions() -> dict[str, object]:
    found: dict[str, object] = {}
    for path, names in _WATCHED.items():
        place = _place(path)
        if isinstance(place, type):  # asked for what stands in it or above it, not for a fresh bound method
            found |= {f"{path}.{name}": _inherited(place, name) for name in names}
        elif place is not None:
            found |= {f"{path}.{name}": vars(place).get(name) for name in names}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in _OURS and module is not None:
            own = {name: value for name, value in vars(module).items() if callable(value)}
            found |= {f"{module_name}.{name}": value for name, value in own.items() if not name.startswith("__")}
    return found


def _place(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        owner, _, name = path.rpartition(".")
        return getattr(importlib.import_module(owner), name, None)


def _inherited(kind: type, name: str) -> object:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
