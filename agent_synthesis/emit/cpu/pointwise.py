"""CPU schedule of nests without reductions: blocks of the innermost axis, spread over threads.

Each block is one vectorised loop. With streaming stores it writes to a small buffer that stays in the first-level
cache, and whole lines then go to memory without being read first. Where loads run along another axis than stores, tiles
of the two keep the lines of both in the cache until they have been used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cpu import cpu_function
from agent_synthesis.emit.cpu.cpu_settings import Loop, PointwiseSettings
from agent_synthesis.emit.cpu.cpu_struct import CpuStruct
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.transposition import Turn, turn
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Stores
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

_SKELETON = ("compute_pointwise", "ws_pointwise.hpp")
BLOCK_BUFFER_BYTES = 16 << 10
"""What all buffers of a block may take: half of a first-level cache."""
_SMALLEST_VECTOR_EXTENT = 16
_LINE_BYTES = 64
_TILE_ROWS = 32
"""Rows of a tile: two lines of floats, each."""
_TILE_COLUMNS = 64
"""Elements of a tile's row, by default."""


class CpuPointwise:
    """Blocks of the innermost axis, or tiles of two."""

    name = "cpu_pointwise"
    settings = PointwiseSettings
    target = task_pb2.TARGET_CPU

    def accepts(self, nest: Nest) -> bool:
        """Any nest that reduces nothing and reads what it overwrites only in place."""
        return not nest.reductions and iteration_space.is_safe_in_place(nest)

    def defaults(self, nest: Nest) -> PointwiseSettings:
        """Streams outputs that no cache could keep; one thread for tiny nests; flat when the inner axis is short; tiled
        when what it reads lies along another axis and is no longer in a core's cache for the next row.
        """
        simple = iteration_space.simplified(nest)
        axes = simple.parallel + simple.reduced
        short = len(axes) > 1 and axes[-1].extent < _SMALLEST_VECTOR_EXTENT
        inner = simple.row_count * simple.column_count if short else (axes[-1].extent if axes else 1)
        stores = cpu_function.default_stores(nest) if inner >= 256 else Stores.PLAIN
        threads = cpu_function.default_threads(nest)
        if not short and _gains_by_tiles(nest):
            return PointwiseSettings(loop=Loop.TILED, block=_TILE_COLUMNS, threads=threads)
        loop = Loop.FLAT if short else Loop.NESTED
        return PointwiseSettings(stores, loop, self._largest_block(nest), threads)

    def alternatives(self, nest: Nest, current: PointwiseSettings) -> Sequence[PointwiseSettings]:
        """One change away."""
        tiled, most = current.loop is Loop.TILED, self._largest_block(nest)
        blocks = (32, 64, 128) if tiled else (512, 1024, 2048, 4096)
        found = current.one_change_away(
            stores=(Stores.PLAIN,) if tiled else ...,
            loop=(Loop.FLAT,) if current.loop is Loop.NESTED else (Loop.NESTED,),
            block=[size for size in blocks if size <= most],
        )
        if tiled:  # blocks of tiles are too short for other loops, and theirs too long for tiles
            return [each if each.loop is Loop.TILED else replace(each, block=most) for each in found]
        if turn(nest, _LINE_BYTES) is not None:
            found.append(replace(current, stores=Stores.PLAIN, loop=Loop.TILED, block=_TILE_COLUMNS))
        return found

    def footprint(self, nest: Nest, settings: PointwiseSettings) -> Footprint:
        """Plain stores read each line of an output before they write it."""
        return Footprint(
            cpu_function.fill_bytes(nest, settings.stores), cpu_function.thread_count(nest, settings.threads), 1
        )

    def emit(self, nest: Nest, settings: PointwiseSettings) -> Emission:
        """One function."""
        block = settings.block
        if not 1 <= block <= self._largest_block(nest):
            raise IllegalMove(f"block = {block}: from 1 to {self._largest_block(nest)} elements fit for {nest.name}")
        if settings.stores is Stores.STREAMING and settings.loop is Loop.TILED:
            raise IllegalMove(f"{nest.name}: rows of tiles are too short to stream")
        simple, tiled = _looped(nest, settings.loop), settings.loop is Loop.TILED
        *outer, inner = simple.parallel
        struct = CpuStruct(simple, "elements", outer)
        struct.constant("ws::PointwiseTiling", {
            "rows": outer[-1].extent if outer else 1, "columns": inner.extent,
            "tile_rows": _TILE_ROWS if tiled else 1, "block": min(block, inner.extent),
            "threads": settings.threads,
        })  # fmt: skip
        struct.space("Outer", outer[:-1])
        streamed = min(block, inner.extent) if settings.stores is Stores.STREAMING else 0
        struct.stores(struct.located, (), simple.stores, inner, streamed)
        return struct.emission(nest, function_text.header(nest, self.name, settings), *_SKELETON)

    def _largest_block(self, nest: Nest) -> int:
        bytes_each = sum(nest.buffer(store.buffer).type.size_bytes for store in nest.stores)
        return max(64, min(4096, 1 << int(math.log2(BLOCK_BUFFER_BYTES / bytes_each))))


def _gains_by_tiles(nest: Nest) -> bool:
    """Whether rows of tiles save lines, of data that exceeds a core's cache."""
    found = turn(nest, _LINE_BYTES)
    size = sum(buffer.element_count * buffer.type.size_bytes for buffer in nest.buffers)
    return found is not None and found.pays and _is_tile(found) and size > cpu_function.PRIVATE_CACHE_BYTES


def _is_tile(found: Turn) -> bool:
    return min(found.along.extent, found.across.extent) >= _SMALLEST_VECTOR_EXTENT


def _looped(nest: Nest, loop: Loop) -> Nest:
    """The nest with all axes parallel, one at least, in the order of the loops."""
    if loop is Loop.TILED:
        found = turn(nest, _LINE_BYTES)
        if found is None:
            raise IllegalMove(f"{nest.name}: all accesses run along one axis")
        return iteration_space.all_parallel(found.nest, (*found.others, found.across, found.along))
    looped = iteration_space.simplified(nest)
    if loop is Loop.FLAT and looped.row_count > 1:
        looped = iteration_space.flattened(looped)
    return iteration_space.all_parallel(looped)
