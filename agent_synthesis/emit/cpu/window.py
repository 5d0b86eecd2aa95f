"""CPU schedule of sliding windows: columns of the data first, then along the row; or each output's window by itself.

The one idea: a row of outputs needs a few rows of data. Joined column by column they are one row that stays in the
first-level cache, already with the padding around it, and every output joins a few neighbours there: both loops
vectorise. Where indices do not allow that (positions of a maximum), each output walks its window.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cpu import cpu_function, window_text
from agent_synthesis.emit.cpu.convolution import CpuConvolution
from agent_synthesis.emit.cpu.cpu_settings import WindowSettings
from agent_synthesis.emit.window_loops import Reuse
from agent_synthesis.nests import iteration_space, sliding_window
from agent_synthesis.nests.analysis import convolution
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.sliding_window import Tiling
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Stores
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

_LONGEST_JOIN = 64
"""Elements of a window along the row that are joined in one expression."""
_WALKED = 256
"""Outputs of a row that a thread makes one after the other where each walks its window."""
_ROW_BUFFER_BYTES = 256 << 10
"""What the rows that a thread keeps may take: a part of its second-level cache."""


class CpuWindow:
    """Windows joined by columns, or each by itself."""

    name = "cpu_window"
    settings = WindowSettings
    target = task_pb2.TARGET_CPU

    def accepts(self, nest: Nest) -> bool:
        """Reductions over sliding windows, stored for each output; convolutions that `cpu_convolution` leaves."""
        if convolution.convolves(nest) and not convolution.is_one_left(nest, CpuConvolution().accepts):
            return False
        return sliding_window.is_window(iteration_space.simplified(nest))

    def defaults(self, nest: Nest) -> WindowSettings:
        """Columns where the indices allow it, a whole row at once where its buffer stays in the cache."""
        tiling = _tiling(nest)
        block = min(4096, _longest_block(tiling)) if tiling else 1
        return WindowSettings(Reuse.COLUMNS if tiling else Reuse.NONE, block, cpu_function.default_threads(nest))

    def alternatives(self, nest: Nest, current: WindowSettings) -> Sequence[WindowSettings]:
        """One change away."""
        tiling = _tiling(nest)
        longest = _longest_block(tiling) if tiling else 1
        blocks = [block for block in (512, 1024, 2048, 4096, 8192) if block <= longest]
        return current.one_change_away(
            reuse=... if tiling else (Reuse.NONE,), block=blocks if current.reuse is Reuse.COLUMNS else ()
        )

    def footprint(self, nest: Nest, settings: WindowSettings) -> Footprint:
        """Plain stores read each line of an output before they write it."""
        return Footprint(
            cpu_function.fill_bytes(nest, Stores.PLAIN), cpu_function.thread_count(nest, settings.threads), 1
        )

    def emit(self, nest: Nest, settings: WindowSettings) -> Emission:
        """One function."""
        tiling, block, threads = _tiling(nest), settings.block, settings.threads
        header = function_text.header(nest, self.name, settings)
        if settings.reuse is Reuse.NONE:
            simple = iteration_space.simplified(nest)
            return window_text.by_outputs(nest, simple, header, block=_WALKED, threads=threads)
        if tiling is None:
            raise IllegalMove(f"{nest.name}: its windows cannot be joined by columns")
        if not 1 <= block <= _longest_block(tiling):
            raise IllegalMove(f"{nest.name}: block = {block}, of {_longest_block(tiling)} outputs that fit")
        return window_text.by_columns(nest, tiling, header, block=block, threads=threads)


def _tiling(nest: Nest) -> Tiling | None:
    tiling = sliding_window.tiling(iteration_space.simplified(nest))
    return tiling if tiling and tiling.row.size <= _LONGEST_JOIN else None


def _longest_block(tiling: Tiling) -> int:
    """Outputs whose rows fit the buffer; at least one."""
    bytes_each = sum(r.type.compute.size_bytes for r in tiling.nest.reductions)
    longest = (_ROW_BUFFER_BYTES // bytes_each - tiling.row.reach - 1) // tiling.row.stride + 1
    return max(1, min(longest, tiling.row.outputs))
