"""CPU schedule of scans: cumulative sums and products, from either end, with or without the element itself.

The one idea: a block of values is made in the first-level cache, scanned there in double or 64-bit integers as
PyTorch's own kernels do, and stored from there; down columns, a tile of running values stays there instead while the
rows stream past. Few long rows are split into parts that all threads share.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cpu import cpu_function, scan_text
from agent_synthesis.emit.cpu.cpu_settings import ScanSettings, Shared
from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Stores
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

_PIECES = 32
"""Parts of a split row: fixed, so that the bits do not depend on the number of threads."""
_SMALLEST_EXTENT = 8
"""Least extent of an axis for a tile to lie along it."""
_SPLIT_ROWS = 8
"""Fewer rows than this are shared by all threads when they are long."""
_SPLIT_COLUMNS = 1 << 17


class CpuScan:
    """Blocks of rows, or tiles of columns."""

    name = "cpu_scan"
    settings = ScanSettings
    target = task_pb2.TARGET_CPU

    def accepts(self, nest: Nest) -> bool:
        """Nests that reduce nothing but scans along one axis, in one direction, and store every element."""
        return passes.is_scan(nest) and len(iteration_space.simplified(nest).reduced) == 1

    def defaults(self, nest: Nest) -> ScanSettings:
        """Columns where data lies across the scanned axis; split for few long rows."""
        simple = iteration_space.simplified(nest)
        axis, threads = passes.axis_across(simple, _SMALLEST_EXTENT), cpu_function.default_threads(nest)
        tile = 1024
        if axis is not None:
            while tile > 32 and (tile // 2 >= axis.extent or simple.row_count // tile < 8):
                tile //= 2
        few = simple.row_count < _SPLIT_ROWS and simple.column_count >= _SPLIT_COLUMNS
        scan = Shared.SPLIT if few and len(simple.scans) == 1 and threads != 1 else Shared.ROWS
        scan = Shared.COLUMNS if axis is not None else scan
        streams = scan is not Shared.COLUMNS and simple.column_count >= 256
        return ScanSettings(
            scan, cpu_function.default_stores(nest) if streams else Stores.PLAIN, tile=tile, threads=threads
        )

    def alternatives(self, nest: Nest, current: ScanSettings) -> Sequence[ScanSettings]:
        """One change away."""
        columns = current.scan is Shared.COLUMNS
        changes = current.one_change_away(block=() if columns else ..., tile=... if columns else ())
        return [change for change in changes if not self._objection(nest, change)]

    def footprint(self, nest: Nest, settings: ScanSettings) -> Footprint:
        """Split rows are read twice."""
        simple, scan = iteration_space.simplified(nest), settings.scan
        read = sum(b.element_count * b.type.size_bytes for b in nest.buffers if not b.written)
        again = read if scan is Shared.SPLIT and read > cpu_function.LAST_LEVEL_BYTES else 0
        axis = passes.axis_across(simple, _SMALLEST_EXTENT)
        units = simple.row_count
        if scan is Shared.COLUMNS and axis is not None:
            units = simple.row_count // axis.extent * -(-axis.extent // settings.tile)
        busy = cpu_function.thread_count(nest, settings.threads)
        parallel = busy if scan is Shared.SPLIT else min(busy, units)
        return Footprint(again + cpu_function.fill_bytes(nest, settings.stores), parallel, 1)

    def emit(self, nest: Nest, settings: ScanSettings) -> Emission:
        """One function."""
        if objection := self._objection(nest, settings):
            raise IllegalMove(f"{nest.name}: {objection}")
        simple, header = iteration_space.simplified(nest), function_text.header(nest, self.name, settings)
        axis, scan = passes.axis_across(simple, _SMALLEST_EXTENT), settings.scan
        if scan is Shared.COLUMNS and axis is not None:
            return scan_text.scan_columns(nest, simple, axis, header, tile=settings.tile, threads=settings.threads)
        return scan_text.scan_rows(
            nest, simple, header, block=settings.block, parts=_PIECES if scan is Shared.SPLIT else 1,
            streaming=settings.stores is Stores.STREAMING, threads=settings.threads,
        )  # fmt: skip

    def _objection(self, nest: Nest, settings: ScanSettings) -> str:
        """Why the settings cannot run this nest; empty when they can."""
        simple, scan = iteration_space.simplified(nest), settings.scan
        if not 16 <= settings.block <= 4096 or not 16 <= settings.tile <= 4096:
            return "a block or tile has from 16 to 4096 elements, so that it stays in the first-level cache"
        if scan is Shared.COLUMNS and passes.axis_across(simple, _SMALLEST_EXTENT) is None:
            return "no other axis has enough neighbours to lie across the scan"
        if scan is Shared.COLUMNS and settings.stores is Stores.STREAMING:
            return "rows of a tile are too short to stream"
        if scan is Shared.SPLIT and len(simple.scans) > 1:
            return "one scan is split at a time"
        if scan is Shared.SPLIT and simple.column_count < _PIECES * settings.block:
            return f"a row is too short for {_PIECES} parts"
        return ""
