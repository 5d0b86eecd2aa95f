"""The text of scans on the CPU: block after block of a row, or row after row of a tile of columns.

See `cpu_scan` for the strategies; this file only writes them down. Running values are double or 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.accumulation import FUNCTORS
from agent_synthesis.emit.cpu import cpu_function
from agent_synthesis.emit.cpu.cpu_settings import ScanSettings, Shared
from agent_synthesis.emit.expression import Function, Scope
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests.ir import REDUCTIONS, SCANS, Axis, Nest, Scan
from agent_synthesis.settings import Stores

PIECES = 32
"""Parts of a split row: fixed, so that the bits do not depend on the number of threads."""


class _ScanWriter:
    """What both writers share: how running values are declared, converted and spelled."""

    def __init__(self, nest: Nest, settings: ScanSettings) -> None:
        self.nest = nest
        self.function = Function(CPP, nest)
        self.entry = function_text.name_everything(self.function)
        self.threads = settings.threads
        self.scans: tuple[Scan, ...] = nest.scans
        self.names = {scan.name: self.function.reductions[scan.name] for scan in self.scans}
        self.known: list[str] = []

    @staticmethod
    def kind(scan: Scan) -> str:
        """Type of running values."""
        return "double" if scan.type.is_float else "std::int64_t"

    @staticmethod
    def neutral(scan: Scan) -> str:
        return str(REDUCTIONS[SCANS[scan.operation]] if scan.type.is_float else int(REDUCTIONS[SCANS[scan.operation]]))

    @staticmethod
    def functor(scan: Scan) -> str:
        return f"ws::{FUNCTORS[SCANS[scan.operation]]}"

    def learn(self, scan: Scan, place: str) -> None:
        """From here on the scan's value at an element is known."""
        kind = CPP.compute(scan.type)
        self.function.reductions[scan.name] = place if kind == self.kind(scan) else f"static_cast<{kind}>({place})"
        self.known.append(f"%{scan.name}")

    def whole(self, header: Sequence[str], lines: Sequence[str]) -> list[str]:
        """The function without its closing brace."""
        return [*header, *cpu_function.prologue(self.function, self.entry), *lines]


class RowScanWriter(_ScanWriter):
    """Writes one function for a simplified nest that is scanned along its last axis; used once."""

    def __init__(self, nest: Nest, settings: ScanSettings) -> None:
        super().__init__(nest, settings)
        names = self.function.names
        self._axis = nest.reduced[0]
        self._split = settings.scan is Shared.SPLIT
        self._block = min(settings.block, self._axis.extent)
        self._j = self.function.axes[self._axis.name]
        self._begin, self._end = names.take(f"{self._j}_begin"), names.take(f"{self._j}_end")
        self._part = names.take("part")
        self._streamed = {
            store.buffer: names.take(f"{self.function.buffers[store.buffer]}_block")
            for store in nest.stores
            if settings.stores is Stores.STREAMING and store.index.coefficient(self._axis.name) == 1
        }
        self._in_block = f"for (long {self._j} = {self._begin}; {self._j} < {self._end}; ++{self._j})"

    def write(self, header: Sequence[str]) -> list[str]:
        """The lines without the closing brace."""
        nest, function = self.nest, self.function
        loops = [cpu_function.loop_over(function, axis) for axis in nest.parallel]
        top = Scope(function, None)
        top.line(f"constexpr long kExtent = {self._axis.extent}, kBlock = {self._block};")
        top.line("constexpr long kBlocks = (kExtent + kBlock - 1) / kBlock;")
        row = Scope(function, top, [axis.name for axis in nest.parallel], 1 + len(loops))
        (self._split_row if self._split else self._plain_row)(row)
        if self.threads != 1 and loops and not self._split:
            collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
            top.line(cpu_function.parallel_pragma(self.threads, f"for schedule(static){collapse}"))
        top.enclose(loops, row)
        return self.whole(header, top.lines)

    def _plain_row(self, row: Scope) -> None:
        self._declare(row, stored=True)
        for scan in self.scans:
            row.line(f"{self.kind(scan)} {self.names[scan.name]}_before = {self.neutral(scan)};")
        self._blocks(row, "0", "kBlocks", stored=True)

    def _split_row(self, row: Scope) -> None:
        """Totals of the parts, then each part from where the ones before it end."""
        (scan,) = self.scans
        name, kind = self.names[scan.name], self.kind(scan)
        first, last = f"{self._part} * kBlocks / kParts", f"({self._part} + 1) * kBlocks / kParts"
        row.line(f"constexpr long kParts = {PIECES};")
        row.line(f"{kind} {name}_of_part[kParts];")
        for stored in (False, True):
            body = row.child()
            self._declare(body, stored=stored)
            if stored:
                row.line(f"{kind} {name}_running = {self.neutral(scan)};")
                row.line(f"for (auto& {self._part} : {name}_of_part) {{")
                row.line(f"  const {kind} total = {self._part};")
                row.line(f"  {self._part} = {name}_running;")
                row.line(f"  {name}_running = {self.functor(scan)}::of({name}_running, total);")
                row.line("}")
            start = f"{name}_of_part[{self._part}]" if stored else self.neutral(scan)
            body.line(f"{kind} {name}_before = {start};")
            self._blocks(body, first, last, stored=stored)
            if not stored:
                body.line(f"{name}_of_part[{self._part}] = {name}_before;")
            if self.threads != 1:
                row.line(cpu_function.parallel_pragma(self.threads, "for schedule(static)"))
            row.enclose([f"for (long {self._part} = 0; {self._part} < kParts; ++{self._part})"], body)

    def _declare(self, scope: Scope, *, stored: bool) -> None:
        for scan in self.scans:
            scope.line(f"alignas(64) {self.kind(scan)} {self.names[scan.name]}_block[kBlock];")
        for buffer, held in self._streamed.items() if stored else ():
            scope.line(f"alignas(64) {CPP.storage[self.nest.buffer(buffer).type]} {held}[kBlock];")

    def _blocks(self, scope: Scope, first: str, last: str, *, stored: bool) -> None:
        """A loop over blocks in the order of the scan: their values, the scan of them, the stores."""
        block = scope.child()
        if self.scans[0].reverse:
            block.line(f"const long {self._end} = kExtent - block * kBlock;")
            block.line(f"const long {self._begin} = {self._end} > kBlock ? {self._end} - kBlock : 0;")
        else:
            block.line(f"const long {self._begin} = block * kBlock;")
            block.line(f"const long {self._end} = {self._begin} + kBlock < kExtent ? {self._begin} + kBlock : kExtent;")
        for scan in self.scans:
            name = self.names[scan.name]
            place = f"{name}_block[{self._j} - {self._begin}]"
            element = block.child([self._axis.name, *self.known])
            element.expect([scan.value])
            element.line(f"{place} = {element.converted(scan.value, scan.type)};")
            block.line("#pragma omp simd")
            block.enclose([self._in_block], element)
            flags = ", ".join("true" if flag else "false" for flag in (scan.reverse, scan.exclusive))
            arguments = (
                f"{name}_block, {self._end} - {self._begin}, {self.kind(scan)}({self.neutral(scan)}), {name}_before"
            )
            block.line(f"ws::scan<{self.functor(scan)}, {flags}>({arguments});")
            if stored:
                self.learn(scan, place)
        if stored:
            self._stores(block)
        scope.enclose([f"for (long block = {first}; block < {last}; ++block)"], block)
        if stored and self._streamed:
            scope.line("ws::stream_fence();")

    def _stores(self, block: Scope) -> None:
        element = block.child([self._axis.name, *self.known])
        element.expect(store.value for store in self.nest.stores)
        for store in self.nest.stores:
            held = self._streamed.get(store.buffer)
            element.store(store, held and f"{held}[{self._j} - {self._begin}]")
        block.line("#pragma omp simd")
        block.enclose([self._in_block], element)
        for store in self.nest.stores:
            if held := self._streamed.get(store.buffer):
                start = self.function.index(store.index, {self._axis.name: self._begin})
                target = f"{self.function.buffers[store.buffer]} + {start}"
                block.line(f"ws::stream({target}, {held}, {self._end} - {self._begin});")


class ColumnScanWriter(_ScanWriter):
    """Writes one function for a simplified nest, vectorised along `axis`; used once."""

    def __init__(self, nest: Nest, axis: Axis, settings: ScanSettings) -> None:
        super().__init__(nest, settings)
        self._axis = axis
        self._tile = min(settings.tile, axis.extent)
        self._m = self.function.axes[axis.name]
        names = self.function.names
        self._begin, self._end = names.take(f"{self._m}_begin"), names.take(f"{self._m}_end")

    def write(self, header: Sequence[str]) -> list[str]:
        """The lines without the closing brace."""
        nest, function = self.nest, self.function
        others = [axis for axis in nest.parallel if axis is not self._axis]
        top = Scope(function, None)
        top.line(f"constexpr long kExtent = {self._axis.extent}, kTile = {self._tile};")
        heads = [cpu_function.loop_over(function, axis) for axis in others]
        heads.append(f"for (long {self._begin} = 0; {self._begin} < kExtent; {self._begin} += kTile)")
        tile = Scope(function, top, [axis.name for axis in others], 1 + len(heads))
        tile.line(f"const long {self._end} = {self._begin} + kTile < kExtent ? {self._begin} + kTile : kExtent;")
        for scan in self.scans:
            tile.line(f"alignas(64) {self.kind(scan)} {self.names[scan.name]}_tile[kTile];")
            tile.line(f"ws::fill({self.names[scan.name]}_tile, {self.kind(scan)}({self.neutral(scan)}));")
        row = tile.child([nest.reduced[0].name])
        self._row(row)
        k, rows = function.axes[nest.reduced[0].name], nest.reduced[0].extent
        down = f"for (long {k} = {rows - 1}; {k} >= 0; --{k})"
        tile.enclose([down if self.scans[0].reverse else f"for (long {k} = 0; {k} < {rows}; ++{k})"], row)
        if self.threads != 1:
            collapse = f" collapse({len(heads)})" if len(heads) > 1 else ""
            top.line(cpu_function.parallel_pragma(self.threads, f"for schedule(static){collapse}"))
        top.enclose(heads, tile)
        return self.whole(header, top.lines)

    def _row(self, row: Scope) -> None:
        """One row of a tile: the running values of its columns move on, and their results are stored."""
        element = row.child([self._axis.name])
        element.expect([*(scan.value for scan in self.scans), *(store.value for store in self.nest.stores)])
        for scan in self.scans:
            name, kind = self.names[scan.name], self.kind(scan)
            place = f"{name}_tile[{self._m} - {self._begin}]"
            here = self.function.names.take(f"{name}_here")
            value = element.converted(scan.value, scan.type)
            if scan.exclusive:
                element.line(f"const {kind} {here} = {place};")
                element.line(f"{place} = {self.functor(scan)}::of<{kind}>({here}, {value});")
            else:
                element.line(f"const {kind} {here} = {self.functor(scan)}::of<{kind}>({place}, {value});")
                element.line(f"{place} = {here};")
            self.learn(scan, here)
            element.learn(self.known)
        for store in self.nest.stores:
            element.store(store)
        row.line("#pragma omp simd")
        row.enclose([f"for (long {self._m} = {self._begin}; {self._m} < {self._end}; ++{self._m})"], element)
