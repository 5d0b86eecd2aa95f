"""The text of a column reduction: tiles of columns, past which the rows stream.

See `cpu_column_reduction` for the strategy; this file only writes it down.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.accumulation import Accumulation, accumulation
from agent_synthesis.emit.cpu import cpu_function
from agent_synthesis.emit.cpu.cpu_settings import ColumnSettings, Shared
from agent_synthesis.emit.expression import Function, Scope
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests import passes
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Axis, Expression, Load, Nest, Reduction, Type
from agent_synthesis.settings import Stores

_GROUP = 64
"""Rows that add up in the lane's own type before they are added to a double."""
_AHEAD_BYTES = 8192
"""How far ahead of a sweep its rows are asked for: processors look no farther than the end of a page."""

Workspace = tuple[str, Type, int]
"""Name, element type, elements."""


class ColumnWriter:
    """Writes one function for a simplified nest, vectorised along `axis`; used once."""

    def __init__(self, nest: Nest, axis: Axis, settings: ColumnSettings, pieces: int) -> None:
        self._nest = nest
        self._axis = axis
        self._others = [other for other in nest.parallel if other is not axis]
        self._function = Function(CPP, nest)
        self._entry = function_text.name_everything(self._function)
        self._split = settings.reduce is Shared.SPLIT
        self._streaming = settings.stores is Stores.STREAMING
        self._threads = settings.threads
        self._tile = min(settings.tile, axis.extent)
        self._pieces = pieces
        self._m = self._function.axes[axis.name]
        names = self._function.names
        self._extent = names.take(f"k{axis.name.capitalize()}Extent")
        self._begin, self._end = names.take(f"{self._m}_begin"), names.take(f"{self._m}_end")
        first = self._function.axes[nest.reduced[0].name]
        self._first_begin, self._first_end = names.take(f"{first}_first"), names.take(f"{first}_last")
        self._column = f"{self._m} - {self._begin}"
        self._in_tile = f"for (long {self._m} = {self._begin}; {self._m} < {self._end}; ++{self._m})"

    def write(self, header: Sequence[str]) -> tuple[list[str], list[Workspace]]:
        """The lines without the closing brace, and the workspaces in order of their arguments."""
        nest, function = self._nest, self._function
        top = Scope(function, None)
        root = Scope(function, top)
        top.line(f"constexpr long {self._extent} = {self._axis.extent};")
        top.line(f"constexpr long kTile = {self._tile};")
        workspaces: list[Workspace] = []
        if self._split:
            top.line(f"constexpr long kPieces = {self._pieces};")
            for reduction in nest.reductions:
                how = accumulation(function, reduction)
                type_ = Type.F64 if how.total == "double" else reduction.type.compute
                name = function.names.take(f"{function.reductions[reduction.name]}_pieces")
                workspaces.append((name, type_, self._pieces * nest.row_count))
        top.line("")
        places = [name for name, _, _ in workspaces]
        tiles = [cpu_function.loop_over(function, axis) for axis in self._others]
        tiles.append(f"for (long {self._begin} = 0; {self._begin} < {self._extent}; {self._begin} += kTile)")
        passes: list[tuple[list[str], Scope]] = []
        if self._split:
            heads = ["for (long piece = 0; piece < kPieces; ++piece)", *tiles]
            passes.append((heads, self._piece_pass(root, len(heads), places)))
        passes.append((tiles, self._tile_pass(root, len(tiles), places)))
        top.lines += root.lines
        for heads, body in passes:
            collapse = f" collapse({len(heads)})" if len(heads) > 1 else ""
            if self._threads != 1:
                top.line(cpu_function.parallel_pragma(self._threads, f"for schedule(static){collapse}"))
            top.enclose(heads, body)
        pointers = {name: CPP.storage[type_] for name, type_, _ in workspaces}
        return [*header, *cpu_function.prologue(function, self._entry, pointers), *top.lines], [
            (f"{nest.name}_{name}", type_, count) for name, type_, count in workspaces
        ]

    def _tile_scope(self, root: Scope, loops: int) -> Scope:
        tile = Scope(self._function, root, [axis.name for axis in self._others], 1 + loops)
        last = f"{self._begin} + kTile"
        ragged = self._axis.extent % self._tile
        text = f"{last} < {self._extent} ? {last} : {self._extent}" if ragged else last
        tile.line(f"const long {self._end} = {text};")
        return tile

    def _piece_pass(self, root: Scope, loops: int, places: Sequence[str]) -> Scope:
        """Each piece of the rows leaves a total for each column in the workspace."""
        tile = self._tile_scope(root, loops)
        rows = self._nest.reduced[0].extent
        tile.line(f"const long {self._first_begin} = piece * {rows} / kPieces;")
        tile.line(f"const long {self._first_end} = (piece + 1) * {rows} / kPieces;")
        totals = self._accumulate(tile, self._nest.reductions)
        for place, total in zip(places, totals, strict=True):
            where = f"{place}[piece * {self._nest.row_count} + {self._row_number()}]"
            tile.line("#pragma omp simd")
            tile.line(f"{self._in_tile} {where} = {total}[{self._column}];")
        return tile

    def _tile_pass(self, root: Scope, loops: int, places: Sequence[str]) -> Scope:
        """Everything for one tile of columns; with pieces, only their joining and the stores."""
        nest, function = self._nest, self._function
        tile = self._tile_scope(root, loops)
        tile_values: list[tuple[Expression, str]] = []
        if self._split:
            for reduction, place in zip(nest.reductions, places, strict=True):
                self._join(tile, reduction, place)
        for sweep in passes.levels(nest):
            if not self._split:
                tile_values += self._per_column(tile, [reduction.value for reduction in sweep])
                names = [function.reductions[reduction.name] for reduction in sweep]
                totals = self._accumulate(tile, sweep, tile_values)
                for reduction, name, total in zip(sweep, names, totals, strict=True):
                    kind = CPP.compute(reduction.type)
                    if total != f"{name}_tile":
                        tile.line(f"alignas(64) {kind} {name}_tile[kTile];")
                        tile.line("#pragma omp simd")
                        value = f"static_cast<{kind}>({total}[{self._column}])"
                        tile.line(f"{self._in_tile} {name}_tile[{self._column}] = {value};")
            for reduction in sweep:
                name = function.reductions[reduction.name]
                positions = ".position" if reduction.operation in ARG_REDUCTIONS else ""
                function.reductions[reduction.name] = f"{name}_tile{positions}[{self._column}]"
        known = {f"%{reduction.name}" for reduction in nest.reductions} | {self._axis.name}
        row_stores = [store for store in nest.stores if not nest.is_element_store(store)]
        if row_stores:
            column = tile.child(known)
            column.expect(store.value for store in row_stores)
            for store in row_stores:
                column.store(store)
            tile.line("#pragma omp simd")
            tile.enclose([self._in_tile], column)
        if passes.element_stores(nest):
            self._element_stores(tile, tile_values)
        return tile

    def _accumulate(
        self, tile: Scope, sweep: Sequence[Reduction], tile_values: Sequence[tuple[Expression, str]] = ()
    ) -> list[str]:
        """Adds the loops over rows; returns the arrays, one element a column, that hold the totals."""
        function, nest = self._function, self._nest
        how = [accumulation(function, reduction) for reduction in sweep]
        names = [function.reductions[reduction.name] for reduction in sweep]
        last = nest.reduced[-1]
        rows = nest.reduced[0].extent // self._pieces if self._split and len(nest.reduced) == 1 else last.extent
        grouped = [nest.column_count > _GROUP and accumulated.total != accumulated.kind for accumulated in how]
        for accumulated, name, in_groups in zip(how, names, grouped, strict=True):
            if in_groups:
                tile.line(f"alignas(64) {accumulated.total} {name}_total[kTile];")
                tile.line(f"ws::fill({name}_total, 0.0);")
            else:
                tile.line(accumulated.array(f"{name}_tile", "kTile"))
                tile.line(f"ws::fill({name}_tile, {accumulated.neutral});")
        heads = []
        for number, axis in enumerate(nest.reduced[:-1]):
            heads.append(
                self._piece_loop(axis) if self._split and number == 0 else cpu_function.loop_over(function, axis)
            )
        k = function.axes[last.name]
        begin, end = (
            (self._first_begin, self._first_end) if self._split and len(nest.reduced) == 1 else ("0", str(last.extent))
        )
        blocked = any(grouped)
        group = tile.child(deeper=len(heads) + blocked)
        if blocked:
            step = _GROUP if rows > _GROUP else rows
            heads.append(f"for (long {k}_begin = {begin}; {k}_begin < {end}; {k}_begin += {max(step, 1)})")
            group.line(f"const long {k}_end = {k}_begin + {step} < {end} ? {k}_begin + {step} : {end};")
        for accumulated, name, in_groups in zip(how, names, grouped, strict=True):
            if in_groups:
                group.line(f"alignas(64) {accumulated.kind} {name}_tile[kTile];")
                group.line(f"ws::fill({name}_tile, {accumulated.neutral});")
        first, stop = (f"{k}_begin", f"{k}_end") if blocked else (begin, end)
        row = group.child([axis.name for axis in nest.reduced])
        element = row.child([self._axis.name, *(need for need in self._known_reductions(sweep))])
        element.expect(reduction.value for reduction in sweep)
        for part, text in tile_values:
            element.define(part, text)
        for accumulated, name in zip(how, names, strict=True):
            value = element.converted(accumulated.reduction.value, accumulated.reduction.type)
            element.line(accumulated.step(f"{name}_tile", self._column, value))
        if self._nest.reductions[0] in sweep:  # later sweeps find what the first one read
            self._ask_ahead(row, sweep, last)
        row.line("#pragma omp simd")
        row.enclose([self._in_tile], element)
        group.enclose([f"for (long {k} = {first}; {k} < {stop}; ++{k})"], row)
        for name, in_groups in zip(names, grouped, strict=True):
            if in_groups:
                group.line("#pragma omp simd")
                group.line(f"{self._in_tile} {name}_total[{self._column}] += {name}_tile[{self._column}];")
        tile.enclose(heads, group)
        return [f"{name}_{'total' if g else 'tile'}" for name, g in zip(names, grouped, strict=True)]

    def _ask_ahead(self, row: Scope, sweep: Sequence[Reduction], last: Axis) -> None:
        """Asks for what a row that comes soon reads of this tile of columns."""
        function = self._function
        parts = function.interner.parts([reduction.value for reduction in sweep]).values()
        for load in dict.fromkeys(part for part in parts if isinstance(part, Load)):
            if load.index.coefficient(self._axis.name) == 1 and load.index.coefficient(last.name):
                rows = -(-_AHEAD_BYTES // (self._tile * self._nest.buffer(load.buffer).type.size_bytes))
                soon = {self._axis.name: self._begin, last.name: f"({function.axes[last.name]} + {rows})"}
                place = f"{function.buffers[load.buffer]} + {function.index(load.index, soon)}"
                row.line(f"ws::ask_for({place}, {self._end} - {self._begin});")

    def _known_reductions(self, sweep: Sequence[Reduction]) -> list[str]:
        """Reductions of earlier sweeps."""
        interner = self._function.interner
        return [need for reduction in sweep for need in interner.needs(reduction.value) if need.startswith("%")]

    def _piece_loop(self, axis: Axis) -> str:
        name = self._function.axes[axis.name]
        return f"for (long {name} = {self._first_begin}; {name} < {self._first_end}; ++{name})"

    def _join(self, tile: Scope, reduction: Reduction, place: str) -> None:
        function = self._function
        how: Accumulation = accumulation(function, reduction)
        name = function.reductions[reduction.name]
        tile.line(f"alignas(64) {how.total} {name}_total[kTile];")
        tile.line(f"ws::fill({name}_total, {how.neutral_total});")
        tile.line("for (long piece = 0; piece < kPieces; ++piece) {")
        inner = tile.child()
        total = f"{name}_total[{self._column}]"
        part = f"{place}[piece * {self._nest.row_count} + {self._row_number()}]"
        inner.line("#pragma omp simd")
        inner.line(f"{self._in_tile} {total} = ws::{how.operation}::of<{how.total}>({total}, {part});")
        tile.absorb(inner)
        tile.line("}")
        tile.line(f"alignas(64) {how.kind} {name}_tile[kTile];")
        tile.line("#pragma omp simd")
        tile.line(f"{self._in_tile} {name}_tile[{self._column}] = static_cast<{how.kind}>({total});")

    def _row_number(self) -> str:
        """Number of the column among all parallel points."""
        text = ""
        for axis in [*self._others, self._axis]:
            name = self._function.axes[axis.name]
            text = f"({text}) * {axis.extent} + {name}" if text else name
        return text

    def _per_column(self, tile: Scope, roots: Sequence[Expression]) -> list[tuple[Expression, str]]:
        """Computes what needs no row once for each column; returns where it is held."""
        found = passes.per_column(self._nest, roots, self._function.interner)
        if not found:
            return []
        known = {need for part in found for need in self._function.interner.needs(part)} | {self._axis.name}
        column = tile.child(known)
        column.expect(found)
        held = []
        for part in found:
            name = self._function.names.take("of_column")
            tile.line(f"alignas(64) {CPP.compute(part.type)} {name}[kTile];")
            column.line(f"{name}[{self._column}] = {column.value(part).text};")
            held.append((part, f"{name}[{self._column}]"))
        tile.line("#pragma omp simd")
        tile.enclose([self._in_tile], column)
        return held

    def _element_stores(self, tile: Scope, tile_values: list[tuple[Expression, str]]) -> None:
        nest, function = self._nest, self._function
        stores = [store for store in nest.stores if nest.is_element_store(store)]
        held = tile_values + self._per_column(tile, [store.value for store in stores])
        row = tile.child([axis.name for axis in nest.reduced], deeper=len(nest.reduced))
        element = row.child([self._axis.name, *(f"%{reduction.name}" for reduction in nest.reductions)])
        element.expect(store.value for store in stores)
        for part, text in held:
            element.define(part, text)
        streamed: dict[str, str] = {}
        for store in stores:
            if self._streaming and store.index.coefficient(self._axis.name) == 1:
                streamed[store.buffer] = function.names.take(f"{function.buffers[store.buffer]}_block")
                kind = CPP.storage[nest.buffer(store.buffer).type]
                tile.line(f"alignas(64) {kind} {streamed[store.buffer]}[kTile];")
            block = streamed.get(store.buffer)
            element.store(store, block and f"{block}[{self._column}]")
        row.line("#pragma omp simd")
        row.enclose([self._in_tile], element)
        for store in stores:
            if store.buffer in streamed:
                start = function.index(store.index, {self._axis.name: self._begin})
                row.line(
                    f"ws::stream({function.buffers[store.buffer]} + {start}, {streamed[store.buffer]}, "
                    f"{self._end} - {self._begin});"
                )
        tile.enclose([cpu_function.loop_over(function, axis) for axis in nest.reduced], row)
        if streamed:
            tile.line("ws::stream_fence();")
