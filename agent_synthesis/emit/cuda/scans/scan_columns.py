"""The text of scans down columns on CUDA: threads lie across the scanned axis, those of a block above each other too.

See `cuda_scan` for the strategies; this file only writes them down. Where columns are few, blocks share the rows of a
column: one kernel leaves the totals of their parts, and a second scans each part from the totals above it on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.scans.scan_text import HEADERS, ScanKernel
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.ir import Axis, Nest
from agent_synthesis.schedule import Emission, Parameters
from warpsmith.v1 import candidate_pb2


@dataclass(frozen=True)
class ColumnTeam:
    """Who has which columns, and which rows of them."""

    axis: Axis
    """The contiguous axis."""
    threads: int
    """Threads of a block."""
    lanes: int
    """Threads next to each other; those above have the next rows of the same columns."""
    pack: int
    """Columns of a thread."""
    unroll: int
    """Rows of a thread in a chunk."""
    splits: int
    """Blocks that share the rows of a column."""
    rows: int
    """Elements of a column."""

    @property
    def depth(self) -> int:
        """Threads that share a column in a block."""
        return self.threads // self.lanes

    @property
    def chunk(self) -> int:
        """Rows that a block has in work at once."""
        return self.depth * self.unroll

    @property
    def part(self) -> int:
        """Rows of a block, in whole chunks."""
        return geometry.round_up(-(-self.rows // self.splits), self.chunk)

    @property
    def tiles(self) -> int:
        """Blocks next to each other along the axis."""
        return -(-self.axis.extent // (self.lanes * self.pack))

    @property
    def is_whole(self) -> bool:
        """Whether every thread has columns."""
        return self.axis.extent % (self.lanes * self.pack) == 0


def emit(nest: Nest, original: Nest, team: ColumnTeam, parameters: Parameters, header: Sequence[str]) -> Emission:
    """One kernel, or with splits one for the totals and one for the scan."""
    lines, launches = list(header), []
    size = max(scan.type.compute.size_bytes for scan in nest.scans)
    words = -(-team.splits * nest.row_count * size // 8)
    spaces = [geometry.workspace(original, f"{scan.name}_totals", words) for scan in nest.scans if team.splits > 1]
    for totals in (True, False) if team.splits > 1 else (False,):
        kernel = _ColumnScan(nest, team, parameters, totals)
        lines += kernel.write()
        launches.append(kernel.launch(original, [space.name for space in spaces]))
    return Emission("\n".join(lines), HEADERS, tuple(launches), tuple(spaces))


class _ColumnScan(ScanKernel):
    """Writes one kernel; used once. With `totals` it leaves the totals of its rows instead of scanning them."""

    def __init__(self, nest: Nest, team: ColumnTeam, parameters: Parameters, totals: bool) -> None:
        super().__init__(nest, parameters, team.axis.name, team.pack)
        self._team, self._totals = team, totals
        names = self.function.names
        self._k = self.function.axes[nest.reduced[0].name]
        self._tile, self._depth, self._split = names.take("tile"), names.take("depth"), names.take("split")
        self._end = names.take(f"{self._k}_end")
        self._spaces = [names.take(f"{self.values[scan.name]}_totals") for scan in self.scans if team.splits > 1]
        self._entry = f"{self.text.entry}_totals" if totals else self.text.entry
        self._buffers = [buffer for buffer in nest.buffers if not (totals and buffer.written)]

    def write(self) -> list[str]:
        """The lines of the kernel."""
        team, root = self._team, self.root
        self._prologue()
        for number, scan in enumerate(self.scans):
            name = self.values[scan.name]
            root.line(f"{self.lanes_type(scan)} {name}_before;")
            if team.splits > 1 and not self._totals:
                place = f"{self._spaces[number]} + s * ws::int64({self.nest.row_count}) + point"
                root.line("#pragma unroll 8")
                root.line(f"for (int s = 0; s < {self._split}; ++s) {{")
                root.line(f"  {name}_before.join(ws::load<{team.pack}, ws::kWritten>({place}));")
                root.line("}")
            if team.depth > 1:
                pack = f"ws::Pack<{self.kind(scan)}, {team.pack}>"
                root.line(f"__shared__ {pack} {name}_box[2][kDepth * kLanes];")
        self._chunks()
        if self._totals:
            root.line(f"if ({self._depth} == 0{'' if team.is_whole else ' && inside'}) {{")
            for scan, space in zip(self.scans, self._spaces, strict=True):
                place = f"{space} + {self._split} * ws::int64({self.nest.row_count}) + point"
                root.line(f"  ws::store({place}, {self.values[scan.name]}_before.pack());")
            root.line("}")
        kinds = [f"{'' if self._totals else 'const '}{self.kind(scan)}" for scan in self.scans]
        types = dict(zip(self._spaces, kinds, strict=False))
        signature = self.text.signature(self._entry, team.threads, self.min_blocks, self._buffers, types)
        return [*signature, *root.lines, "}", ""]

    def launch(self, original: Nest, spaces: Sequence[str]) -> candidate_pb2.Launch:
        """The launch record."""
        team = self._team
        record: candidate_pb2.Launch = geometry.launch(
            original,
            grid=self.nest.row_count // team.axis.extent * team.tiles * team.splits,
            threads=team.threads,
            entry=self._entry,
            buffers=self._buffers,
            workspaces=spaces,
            dependent=self.overlap,
            writes=spaces if self._totals else [buffer.name for buffer in self._buffers if buffer.written],
        )
        return record

    def _prologue(self) -> None:
        team, root, text = self._team, self.root, self.text
        root.line(f"constexpr int kLanes = {team.lanes}, kDepth = {team.depth}, kUnroll = {team.unroll};")
        root.line(f"constexpr int kRows = {team.rows}, kTiles = {team.tiles};")
        root.line(f"const int {self._tile} = blockIdx.x % kTiles;")
        if team.splits > 1:
            root.line(f"const int {self._split} = blockIdx.x / kTiles % {team.splits};")
        others = [axis for axis in self.nest.parallel if axis.name != team.axis.name]
        inside = team.tiles * team.splits
        for position, axis in reversed(list(enumerate(others))):
            value = f"blockIdx.x / {inside}" + (f" % {axis.extent}" if position else "")
            root.line(f"const {text.offset} {self.function.axes[axis.name]} = {value};")
            inside *= axis.extent
        root.line(f"const int lane_of_tile = threadIdx.x % kLanes, {self._depth} = threadIdx.x / kLanes;")
        scaled = f"{team.pack} * lane_of_tile" if team.pack > 1 else "lane_of_tile"
        place = f"{self._tile} * {team.lanes * team.pack} + {scaled}"
        if not team.is_whole:
            root.line(f"const bool inside = {place} < {team.axis.extent};")
            place = f"inside ? {place} : 0"
        root.line(f"const {text.offset} {text.begin} = {place};")
        if team.splits > 1:
            before = f"blockIdx.x / {team.tiles * team.splits} * ws::int64({team.axis.extent}) + " if others else ""
            root.line(f"const ws::int64 point = {before}{text.begin};")
            root.line(f"const int {self._end} = min(kRows, ({self._split} + 1) * {team.part});")
        root.learn(axis.name for axis in others)

    def _chunks(self) -> None:
        """The loop over this block's rows."""
        team, root = self._team, self.root
        body = root.child()
        held = self.declare(body, "kUnroll")
        if held:
            self._rows(body, lambda scope: self.fill(scope, held))
        for scan in self.scans:
            name = self.values[scan.name]
            body.line(f"{self.lanes_type(scan)} {name}[kUnroll];")
            self._rows(body, functools.partial(self.take, scan=scan, held=held))
            box = f"{name}_box[{self.chunk} / {team.chunk} % 2]"
            if team.depth == 1:
                box = f"static_cast<ws::Pack<{self.kind(scan)}, {team.pack}>*>(nullptr)"
            arguments = f"{self.functor(scan)}, kDepth, kLanes, {self.flags(scan.exclusive)}"
            body.line(f"ws::scan_columns<{arguments}>({name}, {name}_before, {box});")
            self.learn(scan)
        if not self._totals:
            self._rows(body, lambda scope: self.store(scope, held), inside=not team.is_whole)
        first, last = (f"{self._split} * {team.part}", self._end) if team.splits > 1 else ("0", "kRows")
        root.line(f"for (int {self.chunk} = {first}; {self.chunk} < {last}; {self.chunk} += {team.chunk}) {{")
        root.absorb(body)
        root.line("}")

    def _rows(self, scope: Scope, write: Callable[[Scope], object], *, inside: bool = False) -> None:
        """An unrolled loop over a thread's rows of a chunk."""
        team = self._team
        even = team.rows % team.chunk == 0
        tests = ([] if even else [f"{self.place} < kRows"]) + (["inside"] if inside else [])
        inner = scope.child()
        first = f"{self.chunk} + {self._depth} * kUnroll" if team.depth > 1 else self.chunk
        inner.line(f"const int {self.place} = {first} + {self.slot};")
        body = inner.child([self.nest.reduced[0].name], deeper=1 if tests else 0)
        body.line(f"const int {self._k} = {'kRows - 1 - ' if self.reverse else ''}{self.place};")
        write(body)
        scope.line(kernel_text.UNROLL)
        scope.line(f"for (int {self.slot} = 0; {self.slot} < kUnroll; ++{self.slot}) {{")
        if tests:
            inner.line(f"if ({' && '.join(tests)}) {{")
            inner.absorb(body)
            inner.line("}")
        else:
            inner.absorb(body)
        scope.absorb(inner)
        scope.line("}")
