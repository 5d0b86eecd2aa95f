"""The text of a row reduction: sweeps over the blocks of a row, then the stores.

See `cpu_row_reduction` for the strategy; this file only writes it down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.accumulation import Accumulation, accumulation
from agent_synthesis.emit.cpu import cpu_function
from agent_synthesis.emit.cpu.cpu_settings import RowSettings, Shared
from agent_synthesis.emit.expression import Function, Scope
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests import passes
from agent_synthesis.nests.ir import Expression, Nest, Reduction, Store, Type
from agent_synthesis.settings import Stores

Workspace = tuple[str, Type, int]
"""Name, element type, elements."""


class RowWriter:
    """Writes one function for a simplified nest; used once."""

    def __init__(self, nest: Nest, settings: RowSettings) -> None:
        self._nest = nest
        self._function = Function(CPP, nest)
        self._entry = function_text.name_everything(self._function)
        self._split = settings.reduce is Shared.SPLIT
        self._threads = settings.threads
        self._streaming = settings.stores is Stores.STREAMING
        self._visits = settings.sweeps
        self._lanes = settings.lanes
        self._inner = nest.reduced[-1]
        self._outer = nest.reduced[:-1]
        self._block = min(settings.block, self._inner.extent)
        self._one_block = self._inner.extent <= self._block and not self._outer
        self._j = self._function.axes[self._inner.name]
        names = self._function.names
        self._extent = names.take(f"k{self._inner.name.capitalize()}Extent")
        self._begin, self._end = names.take(f"{self._j}_begin"), names.take(f"{self._j}_end")
        self._keep = passes.worth_keeping(nest) if self._visits == "cached" else {}
        self._in_output = None if self._streaming else passes.output_that_keeps(nest)
        if not self._keep:
            self._in_output = None
        self._kept: list[tuple[Expression, str]] = [
            (part, "" if self._in_output else names.take("kept_row")) for parts in self._keep.values() for part in parts
        ]
        self._available: list[Expression] = []
        """Parts that a finished sweep has kept."""
        self._streamed = [
            store
            for store in nest.stores
            if self._streaming and nest.is_element_store(store) and store.index.coefficient(self._inner.name) == 1
        ]
        self._stream_blocks = {
            store.buffer: names.take(f"{self._function.buffers[store.buffer]}_block") for store in self._streamed
        }

    def write(self, header: Sequence[str]) -> tuple[list[str], list[Workspace]]:
        """The lines without the closing brace, and the workspaces in order of their arguments."""
        nest, function = self._nest, self._function
        loops = [cpu_function.loop_over(function, axis) for axis in nest.parallel]
        region = not self._split and bool(loops) and self._threads != 1
        root = Scope(function, None)
        row = Scope(function, root, [axis.name for axis in nest.parallel], 1 + region + len(loops))
        self._fill_row(row)

        workspaces: list[Workspace] = []
        if self._split and not self._in_output:
            workspaces = [(name, part.type, nest.column_count) for part, name in self._kept]
        pointers = {name: CPP.storage[type_] for name, type_, _ in workspaces}
        top = Scope(function, None)
        top.line(f"constexpr long {self._extent} = {self._inner.extent};")
        if not self._one_block:
            top.line(f"constexpr long kBlock = {self._block};")
        top.line(f"constexpr long kLanes = {self._lanes};")
        top.line("")
        around = Scope(function, top, depth=1 + region)
        if not self._split:
            for part, name in self._kept if not self._in_output else ():
                around.line(f"alignas(64) {CPP.compute(part.type)} {name}[{nest.column_count}];")
            self._declare_blocks(around)
        if region:
            collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
            around.line(f"#pragma omp for schedule(static){collapse}")
        around.enclose(loops, row)
        if self._streamed and not self._split:
            around.line("ws::stream_fence();")
        top.lines += root.lines
        if region:
            top.line(cpu_function.parallel_pragma(self._threads))
            top.enclose([""], around)
        else:
            top.absorb(around)
        return [*header, *cpu_function.prologue(function, self._entry, pointers), *top.lines], [
            (f"{nest.name}_{name}", type_, count) for name, type_, count in workspaces
        ]

    # ---- a row ---------------------------------------------------------------------------------------

    def _fill_row(self, row: Scope) -> None:
        nest = self._nest
        planned = passes.levels(nest)
        row_stores = [store for store in nest.stores if not nest.is_element_store(store)]
        row.expect(store.value for store in row_stores)
        pair = passes.online_pair(nest) if self._visits == "online" else None
        for number, sweep in enumerate(planned):
            if pair and number == 0:
                self._online_sweep(row, *pair)
            elif not (pair and number == 1):
                self._sweep(row, sweep, self._keep.get(number, []))
                self._available += self._keep.get(number, [])
            row.learn(passes.names_of(sweep))
        for store in row_stores:
            row.store(store)
        element_stores = [store for store in nest.stores if nest.is_element_store(store)]
        if element_stores:
            self._element_stores(row, element_stores)

    def _sweep(self, row: Scope, sweep: passes.Sweep, keep: Sequence[Expression]) -> None:
        how = [accumulation(self._function, reduction) for reduction in sweep]
        names = [self._function.reductions[reduction.name] for reduction in sweep]
        held = self._held_between_blocks(row, how, names)
        block = self._block_scope(row)
        visit = block.child([axis.name for axis in self._nest.reduced])
        visit.expect([*(reduction.value for reduction in sweep), *keep])
        self._recall(visit)
        for part in keep:
            place = self._kept_place(part)
            value = visit.value(part)
            name = value.text
            if not name.isidentifier():
                name = self._function.names.take("kept")
                visit.line(f"const {CPP.compute(part.type)} {name} = {value.text};")
            visit.line(f"{place} = {name};")
            visit.define(part, name)
        for accumulated, name in zip(how, names, strict=True):
            block.line(accumulated.array(f"{name}_lanes", "kLanes"))
            block.line(f"ws::fill({name}_lanes, {accumulated.neutral});")
            taken = visit.converted(accumulated.reduction.value, accumulated.reduction.type)
            visit.line(accumulated.step(f"{name}_lanes", "lane", taken))
        self._visit_lanes(block, visit)
        for accumulated, name, place in zip(how, names, held, strict=True):
            folded = f"ws::fold<ws::{accumulated.operation}>({name}_lanes)"
            if self._one_block:
                block.line(f"const {accumulated.kind} {name} = {folded};")
            elif self._split:
                block.line(f"{place} = {folded};")
            else:
                total = accumulated.total
                block.line(f"{place} = ws::{accumulated.operation}::of<{total}>({place}, {folded});")
        self._close_blocks(row, block)
        if not self._one_block:
            self._join(row, how, names)
        for accumulated, name in zip(how, names, strict=True):
            if accumulated.finds_place:
                self._function.reductions[accumulated.reduction.name] = f"{name}.position"

    def _held_between_blocks(self, row: Scope, how: Sequence[Accumulation], names: Sequence[str]) -> list[str]:
        """Declares what carries results from block to block; returns where a block puts its own."""
        if self._one_block:
            return [""] * len(how)
        if self._split:
            for accumulated, name in zip(how, names, strict=True):
                row.line(f"{accumulated.total} {name}_of_block[{self._piece_count()}];")
            return [f"{name}_of_block[{self._piece()}]" for name in names]
        for accumulated, name in zip(how, names, strict=True):
            row.line(f"{accumulated.total} {name}_total = {accumulated.neutral_total};")
        return [f"{name}_total" for name in names]

    def _join(self, row: Scope, how: Sequence[Accumulation], names: Sequence[str]) -> None:
        for accumulated, name in zip(how, names, strict=True):
            total = f"{name}_total"
            if self._split:
                row.line(f"{accumulated.total} {total} = {accumulated.neutral_total};")
                row.line(f"for (long piece = 0; piece < {self._piece_count()}; ++piece) {{")
                step = f"ws::{accumulated.operation}::of<{accumulated.total}>({total}, {name}_of_block[piece])"
                row.line(f"  {total} = {step};")
                row.line("}")
            row.line(f"const {accumulated.kind} {name} = static_cast<{accumulated.kind}>({total});")

    def _online_sweep(self, row: Scope, top: Reduction, total: Reduction) -> None:
        function = self._function
        kind = CPP.compute(top.type)
        top_name, total_name = function.reductions[top.name], function.reductions[total.name]
        if self._split:
            row.line(f"ws::OnlineSum<{kind}> online_of_block[{self._piece_count()}];")
        row.line(f"ws::OnlineSum<{kind}> online;")
        block = self._block_scope(row)
        for reduction, name in ((top, top_name), (total, total_name)):
            accumulated = accumulation(function, reduction)
            visit = block.child([axis.name for axis in self._nest.reduced])
            if reduction is total:
                # Inside a block the block's own maximum stands in for the row's.
                function.reductions[top.name] = f"{top_name}_shift"
                visit.learn(passes.names_of([top]))
            visit.expect([reduction.value])
            value = visit.converted(reduction.value, reduction.type)
            visit.line(accumulated.step(f"{name}_lanes", "lane", value))
            block.line(f"alignas(64) {kind} {name}_lanes[kLanes];")
            block.line(f"ws::fill({name}_lanes, {accumulated.neutral});")
            self._visit_lanes(block, visit)
            if reduction is top:
                block.line(f"const {kind} {top_name}_block = ws::fold<ws::Maximum>({top_name}_lanes);")
                block.line(f"const {kind} {top_name}_shift = ws::OnlineSum<{kind}>::shift({top_name}_block);")
        function.reductions[top.name] = top_name
        target = f"online_of_block[{self._piece()}]" if self._split else "online"
        block.line(f"{target}.merge({top_name}_block, ws::fold<ws::Sum>({total_name}_lanes));")
        self._close_blocks(row, block)
        if self._split:
            row.line("for (const auto& part : online_of_block) online.merge(part.maximum, part.sum);")
        row.line(f"const {kind} {top_name} = online.maximum;")
        row.line(f"const {kind} {total_name} = static_cast<{kind}>(online.result());")

    def _element_stores(self, row: Scope, stores: Sequence[Store]) -> None:
        block = self._block_scope(row)
        element = block.child([axis.name for axis in self._nest.reduced])
        element.expect(store.value for store in stores)
        self._recall(element)
        for store in stores:
            held = self._stream_blocks.get(store.buffer)
            offset = self._j if self._one_block else f"{self._j} - {self._begin}"
            element.store(store, held and f"{held}[{offset}]")
        if self._split:
            self._declare_blocks(block)
        first, last = ("0", self._extent) if self._one_block else (self._begin, self._end)
        block.line("#pragma omp simd")
        block.enclose([f"for (long {self._j} = {first}; {self._j} < {last}; ++{self._j})"], element)
        for store in self._streamed:
            start = self._function.index(store.index, {self._inner.name: first})
            count = last if self._one_block else f"{last} - {first}"
            held = self._stream_blocks[store.buffer]
            block.line(f"ws::stream({self._function.buffers[store.buffer]} + {start}, {held}, {count});")
        if self._split and self._streamed:
            block.line("ws::stream_fence();")
        self._close_blocks(row, block)

    # ---- blocks of a row -----------------------------------------------------------------------------

    def _block_scope(self, row: Scope) -> Scope:
        """The inside of the loops over a row's blocks; with one block the row itself, one brace deeper."""
        # It adds no axis, so that what it does not need is computed outside.
        depth = 0 if self._one_block else 1 + len(self._outer)
        block = row.child(deeper=depth)
        if not self._one_block:
            last = f"{self._begin} + kBlock"
            ragged = self._inner.extent % self._block
            text = f"{last} < {self._extent} ? {last} : {self._extent}" if ragged else last
            block.line(f"const long {self._end} = {text};")
        return block

    def _close_blocks(self, row: Scope, block: Scope) -> None:
        if self._one_block:
            row.absorb(block)
            return
        loops = [cpu_function.loop_over(self._function, axis) for axis in self._outer]
        loops.append(f"for (long {self._begin} = 0; {self._begin} < {self._extent}; {self._begin} += kBlock)")
        if self._split and self._threads != 1:
            collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
            row.line(cpu_function.parallel_pragma(self._threads, f"for schedule(static){collapse}"))
        row.enclose(loops, block)

    def _visit_lanes(self, block: Scope, visit: Scope) -> None:
        first, last = ("0", self._extent) if self._one_block else (self._begin, self._end)
        block.line(f"ws::for_lanes<kLanes>({first}, {last}, [&](long {self._j}, long lane) WS_BODY {{")
        block.absorb(visit)
        block.line("});")

    def _declare_blocks(self, scope: Scope) -> None:
        for buffer, held in self._stream_blocks.items():
            size = self._extent if self._one_block else "kBlock"
            scope.line(f"alignas(64) {CPP.storage[self._nest.buffer(buffer).type]} {held}[{size}];")

    def _recall(self, scope: Scope) -> None:
        """Inside the scope, values kept by an earlier sweep are read back."""
        for part in self._available:
            scope.define(part, self._kept_place(part))

    def _kept_place(self, part: Expression) -> str:
        """Where the kept value of this element lies."""
        if store := self._in_output:
            return f"{self._function.buffers[store.buffer]}[{self._function.index(store.index)}]"
        number = self._function.interner.number
        name = next(name for kept, name in self._kept if number(kept) == number(part))
        return f"{name}[{self._position()}]"

    def _position(self) -> str:
        """Number of the element in its row."""
        text = ""
        for axis in self._outer:
            name = self._function.axes[axis.name]
            text = f"({text}) * {axis.extent} + {name}" if text else name
        return f"({text}) * {self._extent} + {self._j}" if text else self._j

    def _piece(self) -> str:
        """Number of the block in its row."""
        text = ""
        for axis in self._outer:
            name = self._function.axes[axis.name]
            text = f"({text}) * {axis.extent} + {name}" if text else name
        block = f"{self._begin} / kBlock"
        return f"({text}) * {self._blocks_of_inner()} + {block}" if text else block

    def _blocks_of_inner(self) -> int:
        return -(-self._inner.extent // self._block)

    def _piece_count(self) -> int:
        return math.prod(axis.extent for axis in self._outer) * self._blocks_of_inner()
