"""CPU schedule of reductions along contiguous rows, such as softmax and the norms.

The one idea: a row is taken in blocks, a block in interleaved lanes, and the blocks' results are joined in order, in
double for f32 sums. So the bits do not depend on the vector width, on the number of threads, or on whether a
thread has a row of its own (`rows`) or all threads share one (`split`).
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cpu import cpu_function
from agent_synthesis.emit.cpu.cpu_settings import RowSettings, Shared, Sweeps
from agent_synthesis.emit.cpu.row_text import RowWriter
from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Stores
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

KEPT_ROW_BYTES = 256 << 10
"""What kept values of a row may take of a thread's stack and of its core's second-level cache."""
_SPLIT_ROWS = 8
"""Fewer rows than this are shared by all threads when they are long."""
_SPLIT_COLUMNS = 1 << 16
_MOST_PIECES = 4096
"""Blocks of a split row: their results lie on the stack and are joined by one thread."""


class CpuRowReduction:
    """Rows in blocks of lanes."""

    name = "cpu_row_reduction"
    settings = RowSettings
    target = task_pb2.TARGET_CPU

    def accepts(self, nest: Nest) -> bool:
        """Any nest with reductions that reads what it overwrites only in place."""
        return passes.is_reduction(nest)

    def defaults(self, nest: Nest) -> RowSettings:
        """Keeps exponentials where a row of them fits the cache, goes online where even the input does not."""
        simple = iteration_space.simplified(nest)
        inner = simple.reduced[-1].extent
        long_rows = simple.row_count < _SPLIT_ROWS and simple.column_count >= _SPLIT_COLUMNS
        split = long_rows and self._pieces(simple, 4096) <= _MOST_PIECES
        keeps = passes.kept_bytes(simple)
        if 0 < keeps <= KEPT_ROW_BYTES:
            visits = Sweeps.CACHED
        elif passes.online_pair(simple) and simple.column_count * 4 > cpu_function.PRIVATE_CACHE_BYTES // 2:
            visits = Sweeps.ONLINE
        else:
            visits = Sweeps.RECOMPUTE
        lanes = 64 if inner >= 256 else 16
        while lanes > 1 and lanes // 2 >= inner:
            lanes //= 2
        in_output = visits is Sweeps.CACHED and passes.output_that_keeps(simple) is not None
        streamable = inner >= 256 and bool(passes.element_stores(simple)) and not in_output
        streams = cpu_function.default_stores(simple) if streamable else Stores.PLAIN
        sharing = Shared.SPLIT if split else Shared.ROWS
        return RowSettings(sharing, visits, streams, lanes, threads=cpu_function.default_threads(nest))

    def alternatives(self, nest: Nest, current: RowSettings) -> Sequence[RowSettings]:
        """One change away."""
        return [change for change in current.one_change_away() if not self._objection(nest, change)]

    def footprint(self, nest: Nest, settings: RowSettings) -> Footprint:
        """Sweeps after the first leave the core's own cache only when a row is longer than that."""
        simple = iteration_space.simplified(nest)
        visits = len(passes.levels(simple)) + bool(passes.element_stores(simple))
        visits -= settings.sweeps is Sweeps.ONLINE
        row_bytes = sum(b.element_count * b.type.size_bytes for b in nest.buffers if not b.written) // max(
            1, nest.row_count
        )
        again = (visits - 1) * row_bytes * nest.row_count if row_bytes > cpu_function.PRIVATE_CACHE_BYTES else 0
        split = settings.reduce is Shared.SPLIT
        busy = cpu_function.thread_count(nest, settings.threads)
        return Footprint(
            again + cpu_function.fill_bytes(nest, settings.stores), busy if split else min(busy, nest.row_count), 1
        )

    def emit(self, nest: Nest, settings: RowSettings) -> Emission:
        """One function; a split row's kept values are a workspace."""
        if objection := self._objection(nest, settings):
            raise IllegalMove(f"{nest.name}: {objection}")
        writer = RowWriter(
            passes.with_reciprocal(iteration_space.simplified(nest)),
            split=settings.reduce is Shared.SPLIT, visits=settings.sweeps, lanes=settings.lanes, block=settings.block,
            streaming=settings.stores is Stores.STREAMING, threads=settings.threads,
        )  # fmt: skip
        return writer.write(nest, function_text.header(nest, self.name, settings))

    def _objection(self, nest: Nest, settings: RowSettings) -> str:
        """Why the settings cannot run this nest; empty when they can."""
        simple = iteration_space.simplified(nest)
        lanes, block = settings.lanes, settings.block
        if lanes < 1 or lanes & (lanes - 1) or lanes > 256:
            return f"lanes = {lanes} is not a power of two up to 256"
        if not lanes <= block <= 4096 or block % lanes:
            return f"block = {block} is not a multiple of {lanes} lanes up to 4096"
        visits, keeps = settings.sweeps, passes.kept_bytes(simple)
        if visits is Sweeps.ONLINE and passes.online_pair(simple) is None:
            return "online sweeps need a maximum and the sum of exponentials less that maximum"
        if visits is Sweeps.CACHED and not 0 < keeps <= KEPT_ROW_BYTES:
            return f"cached sweeps would keep {keeps} bytes a row, of {KEPT_ROW_BYTES} that fit"
        if settings.reduce is Shared.SPLIT and self._pieces(simple, block) > _MOST_PIECES:
            return f"a split row has more than {_MOST_PIECES} blocks"
        if settings.stores is Stores.STREAMING and not passes.element_stores(simple):
            return "nothing to stream: every store is made once a row"
        return ""

    @staticmethod
    def _pieces(nest: Nest, block: int) -> int:
        inner = nest.reduced[-1].extent
        return nest.column_count // inner * -(-inner // block)
