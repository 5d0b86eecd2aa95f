"""CUDA schedule of nests without reductions that turn: tiles over two axes, exchanged in shared memory.

The one idea: values are computed in packs along one axis; whatever lies along the other axis passes through a tile, so
that every access is of neighbours. A permutation of more axes has a tile in two of them, and the others count tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.transposes.transpose_text import TransposeText, crossing, pack_of
from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.ir import Load, Nest
from agent_synthesis.nests.transposition import Turn, turn
from agent_synthesis.schedule import Emission, Footprint, Parameters
from warpsmith.errors import IllegalMove
from warpsmith.hardware import STATIC_SHARED_BYTES, Hardware

SECTOR_BYTES = 32
"""What a GPU's memory moves at least (CUDA programming guide, device memory accesses)."""
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
    """Choices: `loads` once or shared, `stores` plain or streaming, `preload` (yes: what runs along is read before the
    exchange), `order` (the axis along which tiles come one after the other: along or across), `exp` accurate or fast,
    `overlap` (yes: may start while the previous kernel ends).

    Integers: `threads` of a block, `along` and `across` (elements of a tile, powers of two), `pack` (elements that are
    computed together, a power of two).
    """

    name = "cuda_transpose"

    def accepts(self, nest: Nest) -> bool:
        """Nests that reduce nothing, read what they overwrite only in place, and have accesses that cross others."""
        return bool(self._legal_defaults(nest))

    def defaults(self, nest: Nest) -> Parameters:
        """The largest tile of which there are several for each SM."""
        legal = self._legal_defaults(nest)
        found = turn(nest, SECTOR_BYTES)
        assert found is not None
        return next((p for p in legal if _tiles(found, p) >= 4 * self.hardware.sm_count), legal[-1])

    def alternatives(self, nest: Nest, current: Parameters) -> Sequence[Parameters]:
        """One change away; a tile may change in both directions at once."""
        found = turn(nest, SECTOR_BYTES)
        assert found is not None
        widest = memory_access.widest_pack(found.nest, found.along)
        changes = geometry.domain_without(current, {
            "loads": ("once", "shared"),
            "stores": ("plain", "streaming"),
            "preload": ("yes", "no"),
            "order": ("along", "across"),
            "exp": ("accurate", "fast"),
            "overlap": self.overlaps,
            "threads": (128, 256, 512),
            "along": (32, 64, 128),
            "across": (32, 64, 128),
            "pack": tuple(pack for pack in (1, 2, 4, 8) if pack <= widest),
        })  # fmt: skip
        for side in (32, 64, 128):
            if side not in (current.integers["along"], current.integers["across"]):
                square = {"along": side, "across": side}
                changes.append(Parameters(current.choices, {**current.integers, **square}))
        return geometry.legal(changes, lambda parameters: _require(self.hardware, found, parameters))

    def footprint(self, nest: Nest, parameters: Parameters) -> Footprint:
        """Nothing beyond the nest's own bytes."""
        found = turn(nest, SECTOR_BYTES)
        assert found is not None
        return Footprint(0, _tiles(found, parameters), 1)

    def emit(self, nest: Nest, parameters: Parameters) -> Emission:
        """One kernel."""
        found = turn(nest, SECTOR_BYTES)
        if found is None:
            raise IllegalMove(f"{nest.name}: no access runs across another")
        _require(self.hardware, found, parameters)
        text = TransposeText(found, parameters)
        lines = function_text.header(nest, self.name, parameters) + text.lines()
        threads, overlap = parameters.integers["threads"], parameters.choices["overlap"] == "yes"
        record = geometry.launch(nest, grid=_tiles(found, parameters), threads=threads, dependent=overlap)
        return Emission("\n".join(lines), HEADERS, (record,))

    def _legal_defaults(self, nest: Nest) -> list[Parameters]:
        """What could be the default, larger tiles first."""
        if nest.reductions or not iteration_space.is_safe_in_place(nest):
            return []
        found = turn(nest, SECTOR_BYTES)
        if found is None or not found.pays:
            return []
        return geometry.legal(
            _candidates(found, self.overlaps[0]), lambda parameters: _require(self.hardware, found, parameters)
        )


def _candidates(found: Turn, overlap: str) -> Iterator[Parameters]:
    """A tile of each area, as square as the axes allow, without and with less in registers."""
    widest = memory_access.widest_pack(found.nest, found.along)
    longest = geometry.power_of_two_at_least(found.along.extent)
    deepest = geometry.power_of_two_at_least(found.across.extent)
    packs = [widest, *(pack_of(found, access) for access in crossing(found))]
    areas = [_BYTE_AREA] if all(buffer.type.size_bytes == 1 for buffer in found.nest.buffers) else []
    areas += [_UNALIGNED_AREA] if min(packs) == 1 and min(longest, deepest) >= 128 else []
    for area in (*areas, *_AREAS):
        side = 1 << area.bit_length() // 2
        along = max(min(side, longest), area // deepest)
        if along > longest:  # both axes are short
            continue
        pack = min(widest, along)
        choices = {"loads": "shared", "stores": "plain", "preload": "yes", "order": "along", "exp": "accurate",
                   "overlap": overlap}  # fmt: skip
        threads = min(512 if area == _BYTE_AREA else 256, area // max(packs))
        integers = {"threads": threads, "along": along, "across": area // along, "pack": pack}
        made = Parameters(choices, integers)
        yield made if _held_registers(found, made) <= _HELD_REGISTERS else function_text.changed(made, "preload", "no")


def _held_registers(found: Turn, parameters: Parameters) -> int:
    """Registers of operands that a thread holds before the exchange."""
    area = parameters.integers["along"] * parameters.integers["across"]
    each = area // parameters.integers["threads"]
    held = [load for load in crossing(found) if isinstance(load, Load)]
    if parameters.choices["preload"] == "yes":
        pack = parameters.integers["pack"]
        direct = (load for load in memory_access.loads(found.nest) if load not in held)
        held += [load for load in direct if memory_access.access(load.index, found.along.name, pack) == "pack"]
    return sum(max(1, each * found.nest.buffer(load.buffer).type.size_bytes // 4) for load in held)


def _require(hardware: Hardware, found: Turn, parameters: Parameters) -> None:
    """Checks a tile against its axes, its threads and an SM.

    Raises:
        IllegalMove: names what does not fit.
    """
    name, integers = found.nest.name, parameters.integers
    threads, along, across, pack = (integers[key] for key in ("threads", "along", "across", "pack"))
    if any(size < 1 or size & (size - 1) for size in (threads, along, across, pack)):
        raise IllegalMove(f"{name}: {integers} are not all powers of two")
    if memory_access.widest_pack(found.nest, found.along) % pack or pack > along:
        raise IllegalMove(f"{name}: {pack} elements do not lie together everywhere")
    packs = [pack_of(found, access) for access in crossing(found)]
    largest = max(pack, *packs)
    if along * across % (threads * largest) or max(packs) > across:
        tile = f"{along} x {across} in packs of {largest}"
        raise IllegalMove(f"{name}: a tile of {tile} is too small for {threads} threads")
    geometry.require_block(hardware, found.nest, threads=threads, held_registers=_held_registers(found, parameters))
    shared_bytes = sum(found.nest.buffer(access.buffer).type.size_bytes for access in crossing(found)) * along * across
    if shared_bytes > STATIC_SHARED_BYTES:
        most = STATIC_SHARED_BYTES
        raise IllegalMove(f"{name}: tiles of {shared_bytes} bytes, of {most} that a kernel may declare")


def _tiles(found: Turn, parameters: Parameters) -> int:
    count = found.nest.row_count // (found.along.extent * found.across.extent)
    for axis, size in ((found.along, "along"), (found.across, "across")):
        count *= -(-axis.extent // parameters.integers[size])
    return count
