"""CPU schedule of reductions across rows: data is contiguous along a parallel axis, as in a sum over dimension 0.

The one idea: a tile of columns keeps one accumulator a column in the first-level cache while the rows stream past,
and every loop vectorises over columns. Short groups of rows add up in the lane's type and groups in double, so that
sums of many rows stay exact. With `split`, pieces of the rows go to different threads and are joined in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cpu import cpu_function
from agent_synthesis.emit.cpu.column_text import ColumnWriter
from agent_synthesis.emit.cpu.cpu_settings import ColumnSettings, Shared
from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.analysis.segments import segments_of
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Axis, Nest
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Stores
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

_SMALLEST_VECTOR_EXTENT = 8
_PIECES = 16
"""Pieces of the reduced axis when it is split: fixed, so that the bits do not depend on the number of threads."""


def _problem(nest: Nest) -> tuple[Nest, Axis]:
    """The simplified nest, and the axis of its columns."""
    if (parts := segments_of(nest)) is not None:
        return parts.nest, parts.axis
    simple = iteration_space.simplified(nest)
    axis, _ = passes.vector_axis(simple)
    assert axis is not None  # accepts() requires it
    return simple, axis


class CpuColumnReduction:
    """Tiles of columns."""

    name = "cpu_column_reduction"
    settings = ColumnSettings
    target = task_pb2.TARGET_CPU

    def accepts(self, nest: Nest) -> bool:
        """A nest with reductions whose data is contiguous along a parallel axis more than along a reduced one, and any
        whose columns reduce parts of the rows."""
        if nest.segments:
            return segments_of(nest) is not None
        simple = iteration_space.simplified(nest)
        return passes.is_reduction(nest) and passes.axis_across(simple, _SMALLEST_VECTOR_EXTENT) is not None

    def defaults(self, nest: Nest) -> ColumnSettings:
        """Splits the rows when there are too few tiles to occupy threads; tiles as wide as leaves a few for each."""
        simple, axis = _problem(nest)
        extent = axis.extent
        others = simple.row_count // extent
        threads = cpu_function.default_threads(nest)
        few_tiles = others * -(-extent // 2048) < _PIECES and threads == 0 and simple.column_count >= 8 * _PIECES
        split = few_tiles and not nest.segments and not self._split_objection(simple)
        tile = 2048
        while tile > 128 and (tile // 2 >= extent or (not split and others * extent // tile < 8)):
            tile //= 2
        streams = cpu_function.default_stores(simple) if passes.element_stores(simple) and tile >= 256 else Stores.PLAIN
        return ColumnSettings(Shared.SPLIT if split else Shared.COLUMNS, streams, tile, threads)

    def alternatives(self, nest: Nest, current: ColumnSettings) -> Sequence[ColumnSettings]:
        """One change away."""
        return [change for change in current.one_change_away() if not self._objection(nest, change)]

    def footprint(self, nest: Nest, settings: ColumnSettings) -> Footprint:
        """Sweeps after the first come from memory unless a tile of columns fits the core's own cache."""
        simple, _ = _problem(nest)
        visits = len(passes.levels(simple)) + bool(passes.element_stores(simple))
        read = sum(b.element_count * b.type.size_bytes for b in nest.buffers if not b.written)
        tile_bytes = settings.tile * simple.column_count * 4
        again = (visits - 1) * read if tile_bytes > cpu_function.PRIVATE_CACHE_BYTES else 0
        return Footprint(
            again + cpu_function.fill_bytes(nest, settings.stores), cpu_function.thread_count(nest, settings.threads), 1
        )

    def emit(self, nest: Nest, settings: ColumnSettings) -> Emission:
        """One function; pieces' results are workspaces."""
        if objection := self._objection(nest, settings):
            raise IllegalMove(f"{nest.name}: {objection}")
        (simple, axis), parts = _problem(nest), segments_of(nest)
        writer = ColumnWriter(
            passes.with_reciprocal(simple), axis,
            tile=settings.tile, pieces=_PIECES if settings.reduce is Shared.SPLIT else 1,
            threads=settings.threads, streaming=settings.stores is Stores.STREAMING,
            part=(parts.begin, parts.end) if parts else None,
        )  # fmt: skip
        return writer.write(nest, function_text.header(nest, self.name, settings))

    def _objection(self, nest: Nest, settings: ColumnSettings) -> str:
        """Why the settings cannot run this nest; empty when they can."""
        simple, _ = _problem(nest)
        if not 16 <= settings.tile <= 2048:
            return "a tile has from 16 to 2048 columns: its accumulators stay in the first-level cache"
        if settings.stores is Stores.STREAMING and not passes.element_stores(simple):
            return "nothing to stream: every store is made once a column"
        if settings.reduce is Shared.SPLIT and nest.segments:
            return "columns have different rows, which are not split"
        return self._split_objection(simple) if settings.reduce is Shared.SPLIT else ""

    @staticmethod
    def _split_objection(nest: Nest) -> str:
        if len(passes.levels(nest)) > 1 or passes.element_stores(nest):
            return "only one sweep can be split over pieces of the rows"
        if any(reduction.operation in ARG_REDUCTIONS for reduction in nest.reductions):
            return "positions are not joined over pieces of the rows"
        return "" if nest.reduced[0].extent >= _PIECES else f"fewer than {_PIECES} rows to split"
