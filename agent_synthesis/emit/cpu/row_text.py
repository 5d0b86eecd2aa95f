"""The struct of a row reduction on the CPU, over which `ws_rows.hpp` is instantiated.

See `cpu_row_reduction` for the strategy and the skeleton for how it goes; this file only says how an element is taken,
what is kept of it for later sweeps, and what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit.accumulation import reductions_type
from agent_synthesis.emit.cpu.cpu_settings import Sweeps
from agent_synthesis.emit.cpu.cpu_struct import CpuStruct
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests import passes
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Expression, Index, Nest, Reduction
from agent_synthesis.schedule import Emission


class RowWriter:
    """Writes one kernel for a simplified nest; used once."""

    def __init__(
        self, nest: Nest, *, split: bool, visits: Sweeps, streaming: bool, lanes: int, block: int, threads: int
    ) -> None:
        self._nest, self._split, self._inner = nest, split, nest.reduced[-1]
        self._streamed = min(block, self._inner.extent) if streaming else 0
        self._struct = CpuStruct(
            nest, "rows", nest.parallel, ("Sweeps", "Parts", "enter", "fold", "learn", "store_row")
        )
        self._function = self._struct.function
        self._struct.constant("ws::RowTiling", {
            "columns": self._inner.extent, "block": min(block, self._inner.extent), "lanes": lanes, "split": split,
            "online": visits is Sweeps.ONLINE, "threads": threads,
        })  # fmt: skip
        self._struct.space("Outer", nest.parallel)
        self._struct.space("Parts", nest.reduced[:-1])
        axes = [(self._function.axes[axis.name], number) for number, axis in enumerate(nest.reduced[:-1])]
        for axis, _ in axes:
            self._struct.located.member("long", axis)
        if axes:
            self._struct.add("void enter(const long* at)", [f"    {axis} = at[{number}];" for axis, number in axes])
        self._keep = passes.worth_keeping(nest) if visits is Sweeps.CACHED else {}
        self._kept: list[tuple[Expression, str]] = []
        """What finished sweeps have kept, and where it lies."""
        self._row: Scope = self._struct.located
        """What is known of a row so far."""

    def write(self, original: Nest, header: Sequence[str]) -> Emission:
        """The emission."""
        nest, struct = self._nest, self._struct
        planned = passes.levels(nest)
        for number, sweep in enumerate(planned):
            self._sweep(number, sweep, self._keep.get(number, []))
        struct.using("Sweeps", f"ws::List<{', '.join(f'Sweep{number}' for number in range(len(planned)))}>")
        once = [store for store in nest.stores if not nest.is_element_store(store)]
        each = [store for store in nest.stores if nest.is_element_store(store)]
        if once:
            row = self._row.child()
            row.store_all(once)
            struct.add("void store_row() const", row.lines)
        if each:
            known = [axis.name for axis in nest.reduced[:-1]]
            struct.stores(self._row, known, each, self._inner, self._streamed, self._kept)
        return struct.emission(original, header, "reduce_rows", "ws_rows.hpp")

    def _sweep(self, number: int, sweep: Sequence[Reduction], keep: Sequence[Expression]) -> None:
        """How an element is taken into the sweep's reductions, and what is known of the row then."""
        struct, function, kind = self._struct, self._function, f"Sweep{number}"
        struct.using(kind, reductions_type(function, sweep))
        element = self._row.child([axis.name for axis in self._nest.reduced])
        element.expect([*(reduction.value for reduction in sweep), *keep])
        for part, text in self._kept:
            element.define(part, text)
        for part in keep:
            self._kept.append((part, self._place(part)))
            text = element.value(part).text
            name = text if text.isidentifier() else element.declare(CPP.compute(part.type), "kept", text)
            element.line(f"{self._kept[-1][1]} = {name};")
            element.define(part, name)
        for place, reduction in enumerate(sweep):
            element.line(f"found.take<{place}>(lane, {element.converted(reduction.value, reduction.type)});")
        running = f"{kind}::Running<kTiling.lanes>& found, long {function.axes[self._inner.name]}, long lane"
        struct.add(f"void fold(ws::Number<{number}>, {running}) const", element.lines)
        level = struct.level(
            f"void learn(ws::Number<{number}>, const {kind}::Running<1>& found)", {}, passes.names_of(sweep)
        )
        for place, reduction in enumerate(sweep):
            finds_place = reduction.operation in ARG_REDUCTIONS
            type_ = CPP.compute(reduction.result if finds_place else reduction.type)
            name = function.reductions[reduction.name]
            level.member(type_, name, f"found.get<{place}>(){'.position' if finds_place else ''}")
        self._row = level

    def _place(self, part: Expression) -> str:
        """Where a value of this element is kept: in the output until that is made, or in a row of its own."""
        nest, function = self._nest, self._function
        store = None if self._streamed else passes.output_that_keeps(nest)
        if store is not None:
            return f"{function.buffers[store.buffer]}[{function.index(store.index)}]"
        place, stride = Index(), 1
        for axis in reversed(nest.reduced):
            place, stride = place + Index.axis(axis.name, stride), stride * axis.extent
        if self._split:
            row = self._struct.workspace("kept_row", part.type, nest.column_count)
        else:
            row = self._struct.hold(CPP.compute(part.type), "kept_row", nest.column_count)
        return f"{row}[{function.index(place)}]"
