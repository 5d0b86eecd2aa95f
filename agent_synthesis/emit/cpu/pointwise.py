"""CPU schedule of nests without reductions: blocks of the innermost axis, spread over threads.

Each block is one vectorised loop. With streaming stores it writes to a small buffer that stays in the first-level
cache, and whole lines then go to memory without being read first. Where loads run along another axis than stores, tiles
of the two keep the lines of both in the cache until they have been used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cpu import cpu_function
from agent_synthesis.emit.cpu.cpu_settings import Loop, PointwiseSettings
from agent_synthesis.emit.expression import Function, Scope
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.ir import Axis, Nest
from agent_synthesis.nests.transposition import Turn, turn
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Stores
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

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
        simple, across = _looped(nest, settings.loop)
        function = Function(CPP, simple)
        entry = function_text.name_everything(function)
        lines = function_text.header(nest, self.name, settings) + cpu_function.prologue(function, entry)
        lines += _body(function, settings, across)
        return Emission("\n".join([*lines, "}", ""]), cpu_function.HEADERS, (cpu_function.launch(nest),))

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


def _looped(nest: Nest, loop: Loop) -> tuple[Nest, Axis | None]:
    """The nest with its axes in the order of the loops, and the axis before the last if these two are tiled."""
    if loop is Loop.TILED:
        found = turn(nest, _LINE_BYTES)
        if found is None:
            raise IllegalMove(f"{nest.name}: all accesses run along one axis")
        axes = (*found.others, found.across, found.along)
        return iteration_space.reindexed(found.nest, lambda index: index, axes, ()), found.across
    simple = iteration_space.simplified(nest)
    return iteration_space.flattened(simple) if loop is Loop.FLAT and simple.row_count > 1 else simple, None


def _body(function: Function, settings: PointwiseSettings, across: Axis | None) -> list[str]:
    nest = function.nest
    axes = nest.parallel + nest.reduced
    root = Scope(function, None)
    root.expect(store.value for store in nest.stores)
    if not axes:
        for store in nest.stores:
            root.store(store)
        return root.lines
    inner, outer = axes[-1], axes[: -2 if across else -1]
    threads, block = settings.threads, min(settings.block, inner.extent)
    streamed = list(dict.fromkeys(
        store.buffer
        for store in nest.stores
        if settings.stores is Stores.STREAMING and store.index.coefficient(inner.name) == 1
    ))  # fmt: skip
    j = function.axes[inner.name]
    begin, end = function.names.take(f"{j}_begin"), function.names.take(f"{j}_end")
    extent = function.names.take(f"k{inner.name.capitalize()}Extent")
    loops = [cpu_function.loop_over(function, axis) for axis in outer]
    rows = function.names.take(f"{across.name}_begin") if across else ""
    if across:
        loops.append(f"for (long {rows} = 0; {rows} < {across.extent}; {rows} += kRows)")
    loops.append(f"for (long {begin} = 0; {begin} < {extent}; {begin} += kBlock)")
    region = threads != 1 and bool(streamed)

    body = Scope(function, root, [axis.name for axis in outer], 1 + region + len(loops))
    body.line(f"const long {end} = {_end(begin, 'kBlock', extent, even=inner.extent % block == 0)};")
    blocks = {buffer: function.names.take(f"{function.buffers[buffer]}_block") for buffer in streamed}
    line = body.child([across.name]) if across else body
    _line(line, inner, begin, end, blocks)
    if across:
        row, rows_end = function.axes[across.name], function.names.take(f"{across.name}_end")
        bound = _end(rows, "kRows", str(across.extent), even=across.extent % _TILE_ROWS == 0)
        body.line(f"const long {rows_end} = {bound};")
        body.enclose([f"for (long {row} = {rows}; {row} < {rows_end}; ++{row})"], line)

    root.line(f"constexpr long {extent} = {inner.extent};")
    if across:
        root.line(f"constexpr long kRows = {_TILE_ROWS};")
    root.line(f"constexpr long kBlock = {block};")
    root.line("")
    around = root.child(deeper=int(region))
    for buffer, held in blocks.items():
        around.line(f"alignas(64) {CPP.storage[nest.buffer(buffer).type]} {held}[kBlock];")
    collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
    if threads != 1:
        share = f"for schedule(static){collapse}"
        around.line(f"#pragma omp {share}" if region else cpu_function.parallel_pragma(threads, share))
    around.enclose(loops, body)
    if streamed:
        around.line("ws::stream_fence();")
    if region:
        root.line(cpu_function.parallel_pragma(threads))
        root.line("{")
        root.absorb(around)
        root.line("}")
    else:
        root.absorb(around)
    return root.lines


def _end(begin: str, step: str, extent: str, *, even: bool) -> str:
    """Where a block ends."""
    last = f"{begin} + {step}"
    return last if even else f"{last} < {extent} ? {last} : {extent}"


def _line(line: Scope, inner: Axis, begin: str, end: str, blocks: Mapping[str, str]) -> None:
    """One block of the innermost axis, of which some buffers' elements are streamed to memory afterwards."""
    function, stores = line.function, line.function.nest.stores
    j = function.axes[inner.name]
    element = line.child([inner.name])
    element.expect(store.value for store in stores)
    for store in stores:
        held = blocks.get(store.buffer)
        element.store(store, held and f"{held}[{j} - {begin}]")
    line.line("#pragma omp simd")
    line.enclose([f"for (long {j} = {begin}; {j} < {end}; ++{j})"], element)
    for buffer, held in blocks.items():
        index = next(store.index for store in stores if store.buffer == buffer)
        start = function.index(index, {inner.name: begin})
        line.line(f"ws::stream({function.buffers[buffer]} + {start}, {held}, {end} - {begin});")
