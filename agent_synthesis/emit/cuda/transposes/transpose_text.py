"""The text of a kernel that turns: what crosses goes into tiles, packs are computed, then results that cross leave.

The one idea: in every phase the same threads move the same tile, in packs of the axis that the phase's accesses lie
along; `ws::spot` says which pack is whose, and only a barrier stands between two phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.turns import Turn
from agent_synthesis.nests.ir import Load, Store, Type
from agent_synthesis.schedule import Parameters

_REQUEST_BYTES = 128
"""What the threads of a warp that lie side by side read together at least: a line of the first-level cache."""


def crossing(found: Turn) -> list[Load | Store]:
    """Accesses that pass through a tile, each once: loads, then stores."""
    loads: list[Load | Store] = [load for load in geometry.loads(found.nest) if found.crosses(load.index)]
    return loads + [store for store in found.nest.stores if found.crosses(store.index)]


def pack_of(found: Turn, access: Load | Store) -> int:
    """Elements that an access which crosses moves at once: 16 bytes, or less where they are not aligned."""
    pack = min(8, 16 // found.nest.buffer(access.buffer).type.size_bytes)
    aligned = (geometry.access(access.index, found.across.name, size) == "pack" for size in (8, 4, 2))
    fits = [size for size, fine in zip((8, 4, 2), aligned, strict=True) if fine and found.across.extent % size == 0]
    return max((size for size in fits if size <= pack), default=1)


@dataclass(frozen=True)
class _Phase:
    """How the threads of a block are spread over the packs of a tile."""

    pack: int
    packs: int
    """Packs of a row of the tile, in the direction of the phase."""
    count: int
    """Packs of the tile."""
    beside: int
    """Threads of a warp that lie side by side in a row; the others are in the next rows."""
    is_along: bool


def _phase(pack: int, size_bytes: int, row: int, rows: int, *, is_along: bool) -> _Phase:
    packs = row // pack
    beside = min(32, packs, max(8, _REQUEST_BYTES // (pack * size_bytes)))
    return _Phase(pack, packs, packs * rows, max(beside, 32 // rows), is_along)


def _times(pack: int, text: str) -> str:
    return f"{pack} * {text}" if pack > 1 else text


class TransposeText:
    """One kernel over the tiles of a turn."""

    def __init__(self, found: Turn, parameters: Parameters) -> None:
        self._found = found
        self._threads, self._along, self._across, self._pack = (
            parameters.integers[key] for key in ("threads", "along", "across", "pack")
        )
        self._choices = parameters.choices
        dialect = kernel_text.dialect_of(parameters.choices["exp"])
        self._text = kernel_text.KernelText(
            found.nest, found.along.name, self._pack, dialect,
            once=parameters.choices["loads"] == "once", streaming=parameters.choices["stores"] == "streaming",
        )  # fmt: skip
        function = self._text.function
        self._i, self._j = function.axes[found.across.name], self._text.j
        self._root = Scope(function, None)
        take = function.names.take
        self._i_begin = take(f"{self._i}_begin")
        self._i_tile, self._j_tile = take(f"{self._i}_tile"), take(f"{self._j}_tile")
        self._item, self._spot = take("item"), take("spot")
        size = found.nest.buffer(found.nest.stores[0].buffer).type.size_bytes
        self._phase_along = _phase(self._pack, size, self._along, self._across, is_along=True)
        sides = ((found.across, self._across), (found.along, self._along))
        self._outside = [axis for axis, side in sides if axis.extent % side]
        """Axes of which the last tile hangs over the end."""
        self._tiles = [(access, take(f"{function.buffers[access.buffer]}_tile")) for access in crossing(found)]

    def lines(self) -> list[str]:
        """The kernel, without its closing brace."""
        root = self._root
        for access, tile in self._tiles:
            root.line(f"__shared__ {self._tile_type(access)} {tile};")
        self._begin()
        arrived = self._read_across()
        held = self._read_along() if self._choices["preload"] == "yes" else []
        for phase, tile, array in arrived:
            self._loop(phase, [f"{tile}.put({self._place(phase)}, {array}[{self._item}]);"], only_spot=True)
        root.line("__syncthreads();")
        root.line("")
        self._compute(held)
        self._write_across()
        return [*self._text.signature(self._text.entry, self._threads, 1), *root.lines]

    # -- phases

    def _begin(self) -> None:
        """Says which tile the block has."""
        root, text, found = self._root, self._text, self._found
        if self._choices["overlap"] == "yes":
            root.line("ws::wait_for_previous();")
            root.line("ws::launch_dependents();")
        sides = [(found.across, self._across, self._i_tile), (found.along, self._along, self._j_tile)]
        if self._choices["order"] == "across":
            sides.reverse()
        counted = [(axis, axis.extent, text.function.axes[axis.name], 1) for axis in found.others]
        counted += [(axis, -(-axis.extent // size), name, size) for axis, size, name in sides]
        block = "blockIdx.x" if text.offset == "int" else "static_cast<ws::int64>(blockIdx.x)"
        inside = 1
        for number, (_, count, name, size) in reversed(list(enumerate(counted))):
            value = f"{block} / {inside}" if inside > 1 else block
            inside *= count
            value = f"{value} % {count}" if number else value
            value = "0" if count == 1 else value
            scaled = f"{size} * ({value})" if " " in value else f"{size} * {value}"
            root.line(f"const {text.offset} {name} = {scaled if size > 1 else value};")
        root.learn(axis.name for axis in found.others)

    def _read_across(self) -> list[tuple[_Phase, str, str]]:
        """Loads what crosses into registers; of each, how it was read, its tile and its registers."""
        arrived = []
        for access, tile in self._tiles:
            if not isinstance(access, Load):
                continue
            phase, name = self._phase_across(access), self._registers(access)
            reuse = "ws::kOnce" if self._choices["loads"] == "once" else "ws::kShared"
            reuse = "ws::kWritten" if self._found.nest.buffer(access.buffer).written else reuse
            load = f"{name}[{self._item}] = ws::load<{phase.pack}, {reuse}>({self._address(access)});"
            self._loop(phase, [load])
            arrived.append((phase, tile, name))
        return arrived

    def _read_along(self) -> list[tuple[Load, str]]:
        """Loads packs of the other operands into registers, so that all are under way before the exchange."""
        text, held = self._text, []
        for load in text.varying_loads(store.value for store in self._found.nest.stores):
            if text.access_of(load) != "pack":
                continue
            name = self._registers(load)
            self._loop(self._phase_along, [f"{name}[{self._item}] = {text.pack_load(load, text.begin)};"])
            held.append((load, f"{name}[{self._item}]"))
        return held

    def _compute(self, held: Sequence[tuple[Load, str]]) -> None:
        """Computes packs along, reads tiles, and writes to memory or to tiles."""
        text, stores = self._text, self._found.nest.stores
        inner = self._root.child()
        inner.learn([self._found.across.name])
        tiles = {id(access): tile for access, tile in self._tiles}
        wide: dict[str, str] = {}
        for store in stores:
            if id(store) not in tiles and text.access_of(store) == "pack":
                wide[store.buffer] = text.function.names.take(f"{text.function.buffers[store.buffer]}_pack")
                inner.line(f"{text.pack_type(text.storage(store.buffer))} {wide[store.buffer]};")
        place = _times(self._pack, f"{self._spot}.pack") + (f" + {text.e}" if self._pack > 1 else "")

        def body(element: Scope) -> None:
            for access, tile in self._tiles:
                if isinstance(access, Load):
                    name = text.function.names.take(f"{text.function.buffers[access.buffer]}_at")
                    value = f"{tile}.at({place}, {self._spot}.row)"
                    narrow = text.storage(access.buffer) in (Type.F16, Type.BF16)
                    kind = text.function.dialect.compute(access.type)
                    element.line(f"const {kind} {name} = {f'ws::widen({value})' if narrow else value};")
                    element.define(access, name)
            for store in stores:
                target = wide.get(store.buffer) and f"{wide[store.buffer]}[{text.lane}]"
                crossed = tiles.get(id(store))
                element.store(store, f"{crossed}.at({place}, {self._spot}.row)" if crossed else target)

        text.elements(inner, [store.value for store in stores], body, held=held)
        function = "ws::store_streaming" if text.streaming else "ws::store"
        for store in stores:
            if store.buffer in wide:
                inner.line(f"{function}({text.address(store.buffer, store, text.begin)}, {wide[store.buffer]});")
        self._loop(self._phase_along, inner.lines)

    def _write_across(self) -> None:
        """Writes results that cross."""
        stores = [(access, tile) for access, tile in self._tiles if isinstance(access, Store)]
        if stores:
            self._root.line("__syncthreads();")
        for access, tile in stores:
            phase = self._phase_across(access)
            function = "ws::store_streaming" if self._text.streaming else "ws::store"
            self._loop(phase, [f"{function}({self._address(access)}, {tile}.take({self._place(phase)}));"])

    # -- pieces

    def _phase_across(self, access: Load | Store) -> _Phase:
        size = self._text.storage(access.buffer).size_bytes
        return _phase(pack_of(self._found, access), size, self._across, self._along, is_along=False)

    def _tile_type(self, access: Load | Store) -> str:
        kind = self._text.function.dialect.storage[self._text.storage(access.buffer)]
        return f"ws::Tile<{kind}, {self._along}, {self._across}, {pack_of(self._found, access)}, {self._pack}>"

    def _registers(self, load: Load) -> str:
        """Declares a thread's packs of a load."""
        pack = pack_of(self._found, load) if self._found.crosses(load.index) else self._pack
        text = self._text
        name = text.function.names.take(f"{text.function.buffers[load.buffer]}_packs")
        kind = f"ws::Pack<{text.function.dialect.storage[text.storage(load.buffer)]}, {pack}>"
        count = self._along * self._across // pack // self._threads
        self._root.line(f"{kind} {name}[{count}]{' = {}' if self._outside else ''};")
        return name

    def _address(self, access: Load | Store) -> str:
        """Of a pack that lies across."""
        function = self._text.function
        index = function.index(access.index, {self._found.across.name: self._i_begin})
        return f"{function.buffers[access.buffer]} + {f'({index})' if ' + ' in index else index}"

    def _place(self, phase: _Phase) -> str:
        """Row and column of a pack in a tile."""
        return f"{self._spot}.row, {_times(phase.pack, f'{self._spot}.pack')}"

    def _loop(self, phase: _Phase, body: Sequence[str], *, only_spot: bool = False) -> None:
        """The body for each pack that a thread has, inside the data."""
        root, offset, item, spot = self._root, self._text.offset, self._item, self._spot
        root.line(kernel_text.UNROLL)
        root.line(f"for (int {item} = 0; {item} < {phase.count // self._threads}; ++{item}) {{")
        number = f"threadIdx.x + {item} * {self._threads}"
        root.line(f"  const ws::Spot {spot} = ws::spot<{phase.packs}, {phase.beside}>({number});")
        if not only_spot:
            i, j = (self._i, self._text.begin) if phase.is_along else (self._i_begin, self._j)
            parts = {True: _times(phase.pack, f"{spot}.pack"), False: f"{spot}.row"}
            root.line(f"  const {offset} {i} = {self._i_tile} + {parts[not phase.is_along]};")
            root.line(f"  const {offset} {j} = {self._j_tile} + {parts[phase.is_along]};")
            places = {self._found.across: i, self._found.along: j}
            if self._outside:
                outside = (f"{places[axis]} >= {axis.extent}" for axis in self._outside)
                root.line(f"  if ({' || '.join(outside)}) continue;")
        for line in body:
            root.lines.append(line if line.startswith(" ") else f"    {line}")
        root.line("}")
