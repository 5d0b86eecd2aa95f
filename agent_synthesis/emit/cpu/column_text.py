"""The struct of a column reduction on the CPU, over which `ws_columns.hpp` is instantiated.

See `cpu_column_reduction` for the strategy and the skeleton for how it goes; this file only says how a row is taken and
what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit.accumulation import reductions_type
from agent_synthesis.emit.cpu.cpu_struct import CpuStruct
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests import passes
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Axis, Expression, Load, Nest, Reduction, Type
from agent_synthesis.schedule import Emission

_AHEAD_BYTES = 8192
"""How far ahead of a sweep its rows are asked for: processors look no farther than the end of a page."""


class ColumnWriter:
    """Writes one kernel for a simplified nest, vectorised along `axis`; used once."""

    def __init__(
        self, nest: Nest, axis: Axis, *, tile: int, pieces: int, threads: int, streaming: bool,
        part: tuple[Expression, Expression] | None = None,
    ) -> None:  # fmt: skip
        """`part`: the first row that a column reduces and the one after the last, where it does not reduce all."""
        self._nest, self._axis, self._tile, self._streaming = nest, axis, min(tile, axis.extent), streaming
        others = [other for other in nest.parallel if other is not axis]
        self._struct = CpuStruct(
            nest,
            "columns",
            others,
            ("Sweeps", "row", "ahead", "fold", "learn", "prepare", "piece", "first_row", "end_row"),
        )
        self._function = self._struct.function
        self._struct.constant("ws::ColumnTiling", {
            "columns": axis.extent, "rows": nest.reduced[-1].extent, "tile": self._tile, "pieces": pieces,
            "threads": threads,
        })  # fmt: skip
        self._struct.space("Outer", others)
        for name, place in zip(("first_row", "end_row"), part or (), strict=False):
            text = self._struct.located.value(place).text
            member = self._struct.located.declare("long", name.partition("_")[0], text)
            self._struct.add(f"long {name}() const", [f"    return {member};"])
        self._struct.space("Rows", nest.reduced[:-1])
        self._j = self._function.axes[axis.name]
        self._row = self._struct.level(
            "void row(const long* at)", {a.name: f"at[{n}]" for n, a in enumerate(nest.reduced)}
        )
        self._known = [axis.name]
        """What is known at a column of a tile."""
        self._of_column: list[tuple[Expression, str]] = []
        """What is computed once a column, and where it lies."""
        for number, reduction in enumerate(nest.reductions if pieces > 1 else ()):
            widens = reduction.operation == "sum" and reduction.type.compute is Type.F32
            type_ = Type.F64 if widens else reduction.type.compute
            stem = f"{self._function.reductions[reduction.name]}_pieces"
            name = self._struct.workspace(stem, type_, pieces * nest.row_count)
            self._struct.add(f"auto piece(ws::Number<{number}>) const", [f"    return {name};"])

    def write(self, original: Nest, header: Sequence[str]) -> Emission:
        """The emission."""
        nest, struct = self._nest, self._struct
        planned = passes.levels(nest)
        for number, sweep in enumerate(planned):
            self._sweep(number, sweep)
        struct.using("Sweeps", f"ws::List<{', '.join(f'Sweep{number}' for number in range(len(planned)))}>")
        once = [store for store in nest.stores if not nest.is_element_store(store)]
        each = [store for store in nest.stores if nest.is_element_store(store)]
        if once:
            column = struct.located.child(self._known)
            column.store_all(once)
            struct.add(f"void store_column(long {self._j}, long e) const", column.lines)
        if each:
            self._prepare(len(planned), [store.value for store in each])
            streamed = self._tile if self._streaming else 0
            struct.stores(self._row, self._known, each, self._axis, streamed, self._of_column)
        return struct.emission(original, header, "reduce_columns", "ws_columns.hpp")

    def _sweep(self, number: int, sweep: Sequence[Reduction]) -> None:
        """How a row is taken into the sweep's reductions, and where they stay."""
        struct, function, kind = self._struct, self._function, f"Sweep{number}"
        struct.using(kind, reductions_type(function, sweep))
        self._prepare(number, [reduction.value for reduction in sweep])
        self._ahead(sweep if number == 0 else ())
        element = self._row.child(self._known)
        element.expect(reduction.value for reduction in sweep)
        for part, text in self._of_column:
            element.define(part, text)
        for place, reduction in enumerate(sweep):
            element.line(f"found.take<{place}>(e, {element.converted(reduction.value, reduction.type)});")
        running, found = f"{kind}::Running<{self._tile}>", function.names.take(f"found{number}")
        head = f"void fold(ws::Number<{number}>, {running}& found, long {self._j}, long e) const"
        struct.add(head, element.lines)
        struct.located.member(f"const {running}*", found)
        struct.add(f"void learn(ws::Number<{number}>, const {running}& found)", [f"    {found} = &found;"])
        for place, reduction in enumerate(sweep):
            position = ".position" if reduction.operation in ARG_REDUCTIONS else ""
            function.reductions[reduction.name] = f"{found}->get<{place}>(e){position}"
            self._known.append(f"%{reduction.name}")

    def _ahead(self, sweep: Sequence[Reduction]) -> None:
        """Asks for what a row that comes soon reads of this tile of columns."""
        function, last, asked = self._function, self._nest.reduced[-1].name, []
        parts = function.interner.parts([reduction.value for reduction in sweep]).values()
        for load in dict.fromkeys(part for part in parts if isinstance(part, Load)):
            if load.index.coefficient(self._axis.name) == 1 and load.index.coefficient(last):
                rows = -(-_AHEAD_BYTES // (self._tile * self._nest.buffer(load.buffer).type.size_bytes))
                soon = function.index(load.index, {last: f"({function.axes[last]} + {rows})"})
                asked.append(f"    ws::ask_for({function.buffers[load.buffer]} + ({soon}), count);")
        if asked:
            self._struct.add(f"void ahead(long {self._j}, long count) const", asked)

    def _prepare(self, number: int, roots: Sequence[Expression]) -> None:
        """Computes what needs no row once for each column, before a sweep or the stores."""
        found = passes.per_column(self._nest, roots, self._function.interner)
        column = self._struct.located.child(self._known)
        column.expect(found)
        for part in found:
            held = self._struct.hold(CPP.compute(part.type), "of_column", self._tile)
            column.line(f"{held}[e] = {column.value(part).text};")
            self._of_column.append((part, f"{held}[e]"))
        if found:
            self._struct.add(f"void prepare(ws::Number<{number}>, long {self._j}, long e) const", column.lines)
