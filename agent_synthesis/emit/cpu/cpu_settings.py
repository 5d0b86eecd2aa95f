"""What can be set of the schedules for a processor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent_synthesis.emit.window_loops import Reuse
from agent_synthesis.settings import Settings, Stores, setting

_STORES = "whether results pass the caches"
_THREADS = "threads that share the work; 0: all"


Loop = StrEnum("Loop", "NESTED FLAT TILED")
"""How the loops of a pointwise nest go."""
Sweeps = StrEnum("Sweeps", "CACHED RECOMPUTE ONLINE")
"""What becomes of a row between its visits."""
Shared = StrEnum("Shared", "ROWS SPLIT COLUMNS")
"""What each thread has: rows, columns, or a part of each."""


@dataclass(frozen=True)
class PointwiseSettings(Settings):
    """Of `cpu_pointwise`."""

    stores: Stores = setting(Stores.PLAIN, _STORES)
    loop: Loop = setting(Loop.NESTED, "loops over axes, over all elements, or over tiles of two axes")
    block: int = setting(4096, "elements of a loop", (512, 1024, 2048, 4096))
    threads: int = setting(0, _THREADS, (0, 1))


@dataclass(frozen=True)
class RowSettings(Settings):
    """Of `cpu_row_reduction`."""

    reduce: Shared = setting(Shared.ROWS, "a row to a thread, or rows split among all", (Shared.ROWS, Shared.SPLIT))
    sweeps: Sweeps = setting(Sweeps.RECOMPUTE, "whether exponentials are kept, made again, or summed online")
    stores: Stores = setting(Stores.PLAIN, _STORES)
    lanes: int = setting(64, "partial results of a block, a power of two", (16, 32, 64, 128))
    block: int = setting(4096, "elements of a block", (1024, 2048, 4096))
    threads: int = setting(0, _THREADS, (0, 1))


@dataclass(frozen=True)
class ColumnSettings(Settings):
    """Of `cpu_column_reduction`."""

    reduce: Shared = setting(
        Shared.COLUMNS, "tiles of columns to a thread, or rows split among all", (Shared.COLUMNS, Shared.SPLIT)
    )
    stores: Stores = setting(Stores.PLAIN, _STORES)
    tile: int = setting(2048, "columns of a tile", (128, 256, 512, 1024, 2048))
    threads: int = setting(0, _THREADS, (0, 1))


@dataclass(frozen=True)
class ScanSettings(Settings):
    """Of `cpu_scan`."""

    scan: Shared = setting(Shared.ROWS, "a row to a thread, parts of a row to different ones, or columns")
    stores: Stores = setting(Stores.PLAIN, _STORES)
    block: int = setting(1024, "elements of a row at a time", (256, 512, 1024, 2048))
    tile: int = setting(1024, "columns at a time", (32, 128, 256, 512, 1024))
    threads: int = setting(0, _THREADS, (0, 1))


@dataclass(frozen=True)
class WindowSettings(Settings):
    """Of `cpu_window`."""

    reuse: Reuse = setting(Reuse.NONE, "what windows share: joined columns, or nothing")
    block: int = setting(1, "outputs of a row at once", (512, 1024, 2048, 4096, 8192))
    threads: int = setting(0, _THREADS, (0, 1))


@dataclass(frozen=True)
class ConvolutionSettings(Settings):
    """Of `cpu_convolution`."""

    made: int = setting(1, "outputs at once that see the same by other weights", (1, 2, 4, 8, 16, 32))
    rows: int = setting(4, "rows of outputs at once", (1, 2, 4, 8, 16, 32, 64))
    block: int = setting(4096, "outputs of a row at once", (64, 128, 256, 512, 1024, 4096))
    threads: int = setting(0, _THREADS, (0, 1))
