"""CUDA schedule of sliding windows: columns of the data first, in registers; then along the row, in shared memory.

The one idea: a team of threads makes a few neighbouring rows of outputs. Each thread reads vectors of every row of data
that they need, once, and joins them column by column; the joined rows meet in shared memory, where each output joins
its few neighbours. Where indices do not allow that (positions of a maximum), a thread walks the window of each output.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.windows.convolution import CudaConvolution
from agent_synthesis.emit.cuda.windows.window_text import Layout, WindowSettings, by_columns, by_outputs
from agent_synthesis.emit.window_loops import Reuse
from agent_synthesis.nests import iteration_space, sliding_window
from agent_synthesis.nests.analysis import convolution
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.sliding_window import Tiling
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.hardware import STATIC_SHARED_BYTES

_HEADERS = (*geometry.HEADERS, "ws_axes.cuh", "ws_window.cuh")
_HELD_REGISTERS = 16
"""Accumulators of a thread by default."""
_SHARED_VECTOR_BYTES = 8
"""Bytes that a thread reads at once where rows of outputs share data: half as wide and twice as tall a tile as 16 bytes
would allow. An H200 took 1.067 against 1.102 ms for a 4x4 maximum of 32x64x512x512, 1.187 against 1.194 for a 3x3x3 one
of 16x32x128x128x128."""
_LOADS_AT_ONCE = 8
"""Vectors that a thread should have on the way."""


class CudaWindow(CudaSchedule):
    """Windows joined by columns, or each by itself."""

    name = "cuda_window"
    settings = WindowSettings

    def accepts(self, nest: Nest) -> bool:
        """Reductions over sliding windows, stored for each output; convolutions that `cuda_convolution` leaves."""
        if convolution.convolves(nest) and not convolution.is_one_left(nest, CudaConvolution(self.hardware).accepts):
            return False
        return sliding_window.is_window(iteration_space.simplified(nest))

    def defaults(self, nest: Nest) -> WindowSettings:
        """Columns where the indices allow it; as many rows as registers hold, if they share data."""
        simple = iteration_space.simplified(nest)
        tiling = sliding_window.tiling(simple)
        guesses = _guesses(tiling, pdl=self.pdl[0]) if tiling else []
        least = WindowSettings(dependent_launch=self.pdl[0])
        return geometry.first_legal(guesses, lambda settings: self._require(simple, settings), least)

    def alternatives(self, nest: Nest, current: WindowSettings) -> Sequence[WindowSettings]:
        """One change away."""
        simple = iteration_space.simplified(nest)
        changes = current.one_change_away(dependent_launch=self.pdl)
        if current.reuse is Reuse.NONE:
            changes = current.changes(reuse=..., dependent_launch=self.pdl, threads=..., min_blocks=...)
        return geometry.legal(changes, lambda settings: self._require(simple, settings))

    def footprint(self, nest: Nest, settings: WindowSettings) -> Footprint:
        """Nothing beyond the nest's own bytes: rows that tiles share come from the second-level cache."""
        simple = iteration_space.simplified(nest)
        return Footprint(0, self._grid(simple, settings), 1)

    def emit(self, nest: Nest, settings: WindowSettings) -> Emission:
        """One kernel."""
        simple = iteration_space.simplified(nest)
        self._require(simple, settings)
        lines = function_text.header(nest, self.name, settings)
        tiling = sliding_window.tiling(simple)
        if settings.reuse is Reuse.COLUMNS and tiling:
            lines += by_columns(Layout(tiling, settings), nest.windows[0])
        else:
            lines += by_outputs(simple, settings)
        grid, pdl = self._grid(simple, settings), settings.dependent_launch
        return geometry.one_kernel(nest, lines, _HEADERS, grid=grid, threads=settings.threads, dependent=pdl)

    def _grid(self, simple: Nest, settings: WindowSettings) -> int:
        tiling = sliding_window.tiling(simple)
        if settings.reuse is Reuse.COLUMNS and tiling:
            layout = Layout(tiling, settings)
            return -(-layout.tiles // layout.teams)
        return -(-simple.row_count // settings.threads)

    def _require(self, simple: Nest, settings: WindowSettings) -> None:
        threads, min_blocks = settings.threads, settings.min_blocks
        if settings.reuse is Reuse.NONE:
            geometry.require_block(self.hardware, simple, threads=threads, min_blocks=min_blocks)
            return
        tiling = sliding_window.tiling(simple)
        if tiling is None:
            raise IllegalMove(f"{simple.name}: its windows cannot be joined by columns")
        layout = Layout(tiling, settings)
        layout.require(simple.name)
        if layout.shared_bytes > STATIC_SHARED_BYTES:
            raise IllegalMove(f"{simple.name}: {layout.shared_bytes} bytes of shared memory")
        words = sum(reduction.type.compute.size_bytes // 4 for reduction in tiling.nest.reductions)
        geometry.require_block(
            self.hardware, simple, threads=threads, min_blocks=min_blocks, shared_bytes=layout.shared_bytes,
            held_registers=settings.rows * settings.vector_width * words,
        )  # fmt: skip


def _guesses(tiling: Tiling, *, pdl: bool) -> list[WindowSettings]:
    """Settings from the best guess to the safest."""
    widest = Layout.widest_vector(tiling)
    down = tiling.outer[-1] if tiling.outer else None
    shared = down is not None and down.reach >= down.stride
    if shared:
        narrowest = min(b.type.size_bytes for b in tiling.nest.buffers if not b.written)
        widest = min(widest, max(2, _SHARED_VECTOR_BYTES // narrowest))
    found = []
    for threads, width, held in ((256, widest, _HELD_REGISTERS), (128, widest, _HELD_REGISTERS // 2), (128, 1, 8)):
        rows, most = 1, held // width if shared else _LOADS_AT_ONCE // down.span(1) if down else 1
        while down and rows * 2 <= min(most, down.outputs):
            rows *= 2
        min_blocks = 2 if down and not shared else 4
        layouts = [
            Layout(tiling, WindowSettings(Reuse.COLUMNS, pdl, threads, width, rows, vectors, min_blocks))
            for vectors in ((1, 2, 4) if down else (2, 4))
        ]
        layouts = [layout for layout in layouts if layout.outputs > 0]
        if layouts:
            found.append(max(layouts, key=lambda each: (round(each.busy, 1), -each.settings.vectors)).settings)
    return found
