"""CUDA schedule of nests without reductions that turn: tiles over two axes, exchanged in shared memory.

The one idea: values are computed in vectors along one axis; whatever lies along the other passes through a tile, so
that every access is of neighbours. A permutation of more axes has a tile in two of them, and the others count tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.block_work import BlockWork
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.transposes.transpose_text import TransposeSettings, TransposeText
from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.analysis.transposition import SECTOR_BYTES, Turn, turn
from agent_synthesis.nests.ir import Load, Nest
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.hardware import STATIC_SHARED_BYTES, Hardware

HEADERS = (*geometry.HEADERS, "ws_axes.cuh", "ws_vectors.cuh", "ws_transpose.cuh")
_AREAS = (4096, 2048, 1024)
"""Elements of a tile, the best first."""
_BYTE_AREA = 16384
"""The same of single bytes, so that a row has four sectors."""
_UNALIGNED_AREA = 8192
"""The same where accesses begin anywhere: longer rows have less of what two tiles share."""
_LARGE_BYTES = 1 << 20
"""Data of a nest from which on its time is more than a launch's."""
_HELD_REGISTERS = 64
"""Most registers of operands that are read before the exchange by default."""


def saved_bytes(nest: Nest) -> int:
    """What tiles save of the traffic of a schedule whose accesses all run along one axis, in bytes."""
    found = turn(nest, SECTOR_BYTES) if not nest.reductions else None
    return found.straight_bytes - found.bytes if found is not None and found.pays else 0


def dominates(hardware: Hardware, nest: Nest) -> bool:
    """Whether this schedule takes a nest, large enough to be bound by memory, that costs others twice as much."""
    if nest.reductions or sum(b.element_count * b.type.size_bytes for b in nest.buffers) < _LARGE_BYTES:
        return False
    found = turn(nest, SECTOR_BYTES)
    return found is not None and found.straight_bytes >= 2 * found.bytes and CudaTranspose(hardware).accepts(nest)


class CudaTranspose(CudaSchedule):
    """Tiles of two axes."""

    name = "cuda_transpose"
    settings = TransposeSettings

    def accepts(self, nest: Nest) -> bool:
        """Nests that reduce nothing, read what they overwrite only in place, and have accesses that cross others."""
        return bool(self._legal_defaults(nest))

    def defaults(self, nest: Nest) -> TransposeSettings:
        """The largest tile of which there are several for each SM."""
        legal = self._legal_defaults(nest)
        found = _turn(nest)
        return next((p for p in legal if _tiles(found, p) >= 4 * self.hardware.sm_count), legal[-1])

    def alternatives(self, nest: Nest, current: TransposeSettings) -> Sequence[TransposeSettings]:
        """One change away; a tile may change in both directions at once."""
        found = _turn(nest)
        widest = memory_access.widest_vector(found.nest, found.along)
        widths = [width for width in (1, 2, 4, 8) if width <= widest]
        changes = current.one_change_away(dependent_launch=self.pdl, vector_width=widths)
        for side in (32, 64, 128):
            if side not in (current.along, current.across):
                changes.append(replace(current, along=side, across=side))
        return geometry.legal(changes, lambda settings: _require(self.hardware, found, settings))

    def footprint(self, nest: Nest, settings: TransposeSettings) -> Footprint:
        """Nothing beyond the nest's own bytes."""
        found = _turn(nest)
        return Footprint(0, _tiles(found, settings), 1)

    def emit(self, nest: Nest, settings: TransposeSettings) -> Emission:
        """One kernel."""
        work = self.work(nest, settings)
        beside = geometry.blocks_beside(self.hardware, settings.threads, work.held_registers)
        lines = function_text.header(nest, self.name, settings) + work.kernel(beside)
        return geometry.one_kernel(
            nest, lines, HEADERS, grid=work.blocks, threads=settings.threads, dependent=settings.dependent_launch
        )

    def work(self, nest: Nest, settings: TransposeSettings) -> BlockWork:
        """What a block does, in a kernel of this nest or of several.

        Raises:
            IllegalMove: the settings cannot run this nest.
        """
        found = _turn(nest)
        _require(self.hardware, found, settings)
        text = TransposeText(found, settings)
        return BlockWork(
            text.name, text.struct(), text.text, "transpose", _tiles(found, settings), settings.threads, HEADERS,
            _held_registers(found, settings), settings.dependent_launch, {"tiles": "ws::TransposeTiles<%>"},
        )  # fmt: skip

    def _legal_defaults(self, nest: Nest) -> list[TransposeSettings]:
        """What could be the default, larger tiles first."""
        if nest.reductions or not iteration_space.is_safe_in_place(nest):
            return []
        found = turn(nest, SECTOR_BYTES)
        if found is None or not found.pays:
            return []
        candidates = _candidates(found, pdl=self.pdl[0])
        return geometry.legal(candidates, lambda settings: _require(self.hardware, found, settings))


def _turn(nest: Nest) -> Turn:
    """The axes of a nest's tiles. Raises IllegalMove where it has none."""
    found = turn(nest, SECTOR_BYTES)
    if found is None:
        raise IllegalMove(f"{nest.name}: no access runs across another")
    return found


def _candidates(found: Turn, *, pdl: bool) -> Iterator[TransposeSettings]:
    """A tile of each area, as square as the axes allow, without and with less in registers."""
    widest = memory_access.widest_vector(found.nest, found.along)
    longest = geometry.power_of_two_at_least(found.along.extent)
    deepest = geometry.power_of_two_at_least(found.across.extent)
    widths = [widest, *(found.width_across(access) for access in found.crossing)]
    areas = [_BYTE_AREA] if all(buffer.type.size_bytes == 1 for buffer in found.nest.buffers) else []
    areas += [_UNALIGNED_AREA] if min(widths) == 1 and min(longest, deepest) >= 128 else []
    for area in (*areas, *_AREAS):
        side = 1 << area.bit_length() // 2
        along = max(min(side, longest), area // deepest)
        if along > longest:  # both axes are short
            continue
        threads = min(512 if area == _BYTE_AREA else 256, area // max(widths))
        made = TransposeSettings(
            dependent_launch=pdl, threads=threads, along=along, across=area // along, vector_width=min(widest, along)
        )
        yield made if _held_registers(found, made) <= _HELD_REGISTERS else replace(made, preload=False)


def _held_registers(found: Turn, settings: TransposeSettings) -> int:
    """Registers of operands that a thread holds before the exchange."""
    area = settings.along * settings.across
    each = area // settings.threads
    held = [load for load in found.crossing if isinstance(load, Load)]
    if settings.preload:
        width = settings.vector_width
        direct = (load for load in memory_access.loads(found.nest) if found.is_of_a_tile(load.index))
        held += [load for load in direct if memory_access.access(load.index, found.along.name, width) == "vector"]
    return sum(max(1, each * found.nest.buffer(load.buffer).type.size_bytes // 4) for load in held)


def _require(hardware: Hardware, found: Turn, settings: TransposeSettings) -> None:
    """Checks a tile against its axes, its threads and an SM.

    Raises:
        IllegalMove: names what does not fit.
    """
    name = found.nest.name
    threads, along, across, width = settings.threads, settings.along, settings.across, settings.vector_width
    if any(size < 1 or size & (size - 1) for size in (threads, along, across, width)):
        raise IllegalMove(f"{name}: {threads}, {along}, {across} and {width} are not all powers of two")
    if memory_access.widest_vector(found.nest, found.along) % width or width > along:
        raise IllegalMove(f"{name}: {width} elements do not lie together everywhere")
    widths = [found.width_across(access) for access in found.crossing]
    largest = max(width, *widths)
    if along * across % (threads * largest) or max(widths) > across:
        tile = f"{along} x {across} in vectors of {largest}"
        raise IllegalMove(f"{name}: a tile of {tile} is too small for {threads} threads")
    geometry.require_block(hardware, found.nest, threads=threads, held_registers=_held_registers(found, settings))
    shared_bytes = sum(found.nest.buffer(access.buffer).type.size_bytes for access in found.crossing) * along * across
    if shared_bytes > STATIC_SHARED_BYTES:
        most = STATIC_SHARED_BYTES
        raise IllegalMove(f"{name}: tiles of {shared_bytes} bytes, of {most} that a kernel may declare")


def _tiles(found: Turn, settings: TransposeSettings) -> int:
    count = found.nest.row_count // (found.along.extent * found.across.extent)
    for axis, size in ((found.along, settings.along), (found.across, settings.across)):
        count *= -(-axis.extent // size)
    return count
