"""The text of scans along rows on CUDA, and what they share with those down columns (`scan_columns`).

See `cuda_scan` for the strategies; this file only writes them down. A place counts elements in the order of the scan: a
scan from the end runs over places from 0 on too, and only its addresses go down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.sweeps import FUNCTORS
from agent_synthesis.nests.ir import SCANS, Load, Nest, Scan, Type
from agent_synthesis.schedule import Emission, Parameters

HEADERS = (*geometry.HEADERS, "ws_scan.cuh")
"""What a scan includes."""

Held = list[tuple[Load, str]]


@dataclass(frozen=True)
class RowTeam:
    """Who has which part of a row."""

    grid: bool
    """Whether every block has one chunk of a row; else a row's threads take one chunk after the other."""
    threads: int
    """Threads of a block."""
    lanes: int
    """Threads that share a row: some of a warp, or all of the block."""
    pack: int
    """Elements of one access."""
    packs: int
    """Packs of a thread in a chunk."""
    columns: int
    """Elements of a row."""

    @property
    def is_block(self) -> bool:
        """Whether the whole block shares a row."""
        return self.lanes > 32

    @property
    def warps(self) -> int:
        """Warps that share a row."""
        return self.lanes // 32 if self.is_block else 1

    @property
    def stride(self) -> int:
        """Elements from one pack of a thread to its next: a warp's packs lie together."""
        return self.pack * min(32, self.lanes)

    @property
    def chunk(self) -> int:
        """Elements of a row that are in work at once."""
        return self.lanes * self.pack * self.packs

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return -(-self.columns // self.chunk)

    @property
    def rows_a_block(self) -> int:
        """Rows of a block."""
        return self.threads // self.lanes


class ScanKernel:
    """What both kernels share: the values of a chunk, their scan, the stores."""

    def __init__(self, nest: Nest, parameters: Parameters, axis: str, pack: int) -> None:
        self.nest, self.pack = nest, pack
        self.scans: tuple[Scan, ...] = nest.scans
        self.reverse = self.scans[0].reverse
        self.overlap = parameters.choices["overlap"] == "yes"
        self.min_blocks = parameters.integers["min_blocks"]
        self.text = kernel_text.KernelText(
            nest, axis, pack, kernel_text.dialect_of(parameters.choices["exp"]),
            once=parameters.choices["loads"] == "once", streaming=parameters.choices["stores"] == "streaming",
        )  # fmt: skip
        self.function = self.text.function
        names = self.function.names
        self.slot, self.place, self.chunk = names.take("v"), names.take("place"), names.take("chunk")
        self.root = Scope(self.function, None)
        self.values = {scan.name: self.function.reductions[scan.name] for scan in self.scans}
        self.known: list[str] = []
        if self.overlap:
            self.root.line("ws::wait_for_previous();")
            self.root.line("ws::launch_dependents();")

    def functor(self, scan: Scan) -> str:
        return f"ws::{FUNCTORS[SCANS[scan.operation]]}"

    def kind(self, scan: Scan) -> str:
        return self.function.dialect.compute(scan.type)

    def carried(self, scan: Scan) -> str:
        """Type of what a row carries from chunk to chunk: f32 sums add up in double, so that long rows stay exact."""
        return "double" if (scan.operation, scan.type) == ("cumsum", Type.F32) else self.kind(scan)

    def lanes_type(self, scan: Scan) -> str:
        return f"ws::Lanes<{self.functor(scan)}, {self.kind(scan)}, {self.pack}>"

    def loads(self) -> list[Load]:
        """What scans read along the row, wide."""
        found = self.text.varying_loads(scan.value for scan in self.scans)
        axis = self.nest.reduced[0].name
        return [
            load
            for load in found
            if axis in load.index.axes()
            and (self.text.access_of(load) == "pack" or (self.pack == 1 and self.text.access_of(load) == "each"))
        ]

    def declare(self, scope: Scope, count: str) -> Held:
        """Registers for what is loaded."""
        held = []
        for load in self.loads():
            name = self.function.names.take(f"{self.function.buffers[load.buffer]}_part")
            scope.line(f"{self.text.pack_type(self.text.storage(load.buffer))} {name}[{count}];")
            held.append((load, f"{name}[{self.slot}]"))
        return held

    def fill(self, scope: Scope, held: Held) -> None:
        for load, name in held:
            scope.line(f"{name} = {self.text.pack_load(load, self.text.begin)};")

    def take(self, scope: Scope, scan: Scan, held: Held) -> None:
        """The values of one pack."""
        name = self.values[scan.name]

        def body(inner: Scope) -> None:
            value = inner.converted(scan.value, scan.type)
            inner.line(f"{name}[{self.slot}].lane[{self.text.lane}] = {value};")

        self.text.elements(scope, [scan.value], body, held=held, known=self.known)

    def learn(self, scan: Scan) -> None:
        """From here on the scan's values are known."""
        name = self.values[scan.name]
        self.function.reductions[scan.name] = f"{name}[{self.slot}].lane[{self.text.lane}]"
        self.known.append(f"%{scan.name}")

    def store(self, scope: Scope, held: Held) -> None:
        self.text.stores(scope, self.nest.stores, lambda inner: inner.learn(self.known), held=held)

    @staticmethod
    def flags(*wanted: bool) -> str:
        return ", ".join("true" if flag else "false" for flag in wanted)


class RowScan(ScanKernel):
    """Writes one kernel; used once."""

    def __init__(self, nest: Nest, team: RowTeam, parameters: Parameters) -> None:
        super().__init__(nest, parameters, nest.reduced[0].name, team.pack)
        self.team = team
        self._loops = team.chunks > 1 and not team.grid
        self._ahead = self._loops and parameters.choices["ahead"] == "yes"
        names = self.function.names
        self.row, self.tile, self._first = names.take("row"), names.take("tile"), names.take("first")
        self._total = names.take("total")

    def write(self, original: Nest, header: Sequence[str]) -> Emission:
        """The emission."""
        team, root, names = self.team, self.root, self.function.names
        before = {scan.name: names.take(f"{self.values[scan.name]}_before") for scan in self.scans}
        boards = {scan.name: names.take(f"{self.values[scan.name]}_board") for scan in self.scans if team.grid}
        counts = names.take("counts") if team.grid else ""
        self._prologue(counts)
        if self._loops:
            for scan in self.scans:
                carried = self.carried(scan)
                root.line(f"{carried} {before[scan.name]} = {self.functor(scan)}::neutral<{carried}>();")
        if team.is_block:
            for scan in self.scans:
                turns = "[2]" if self._loops else ""
                root.line(f"__shared__ {self.kind(scan)} {self.values[scan.name]}_box{turns}[{team.warps}];")
        held: Held = []
        if self._ahead:
            held = self.declare(root, "kPacks")
            self._packs(root, "0", lambda scope: self.fill(scope, held))
        body = root.child() if self._loops else root
        if not self._ahead:
            held = self.declare(body, "kPacks")
            if held:
                self._packs(body, self.chunk, lambda scope: self.fill(scope, held))
        for number, scan in enumerate(self.scans):
            body.line(f"{self.lanes_type(scan)} {self.values[scan.name]}[kPacks];")
            self._packs(body, self.chunk, functools.partial(self.take, scan=scan, held=held))
            if self._ahead and number == len(self.scans) - 1:
                self._fetch_next(body, held)
            self._scan(body, scan, before[scan.name], boards.get(scan.name, ""))
            self.learn(scan)
        inside = body.child() if self._ragged_rows else body
        kept = [] if self._ahead else held
        self._packs(inside, self.chunk, lambda scope: self.store(scope, kept))
        if self._ragged_rows:
            body.line("if (inside) {")
            body.absorb(inside)
            body.line("}")
        if self._loops:
            root.line(f"for (int {self.chunk} = 0; {self.chunk} < kColumns; {self.chunk} += {team.chunk}) {{")
            root.absorb(body)
            root.line("}")
        types: dict[str, str] = {}
        spaces = []
        if team.grid:
            self._clear(boards, counts)
            types = {boards[scan.name]: self._board(scan) for scan in self.scans} | {counts: "unsigned"}
            words = [*(self._board_words() for _ in self.scans), 1]
            spaces = [geometry.workspace(original, n, w, zero=True) for n, w in zip(types, words, strict=True)]
        record = geometry.launch(
            original,
            grid=self.nest.row_count * team.chunks if team.grid else -(-self.nest.row_count // team.rows_a_block),
            threads=team.threads,
            workspaces=[space.name for space in spaces],
            dependent=self.overlap,
        )
        signature = self.text.signature(self.text.entry, team.threads, self.min_blocks, workspaces=types)
        return Emission("\n".join([*header, *signature, *root.lines, "}", ""]), HEADERS, (record,), tuple(spaces))

    @property
    def _ragged_rows(self) -> bool:
        return self.nest.row_count % self.team.rows_a_block > 0

    def _prologue(self, counts: str) -> None:
        team, root, text = self.team, self.root, self.text
        root.line(f"constexpr int kColumns = {team.columns}, kPacks = {team.packs};")
        block = "blockIdx.x" if text.offset == "int" else "static_cast<ws::int64>(blockIdx.x)"
        if team.grid:
            number = self.function.names.take("number")
            root.line(f"__shared__ unsigned {number};  // blocks take tiles in the order in which they begin")
            root.line(f"if (threadIdx.x == 0) {number} = ws::arrive({counts});")
            root.line("__syncthreads();")
            root.line(f"const int {self.tile} = {number} % {team.chunks};")
            root.line(f"const {text.offset} {self.row} = {number} / {team.chunks};")
            root.line(f"const int {self.chunk} = {self.tile} * {team.chunk};")
        elif team.is_block:
            root.line(f"const {text.offset} {self.row} = {block};")
        else:
            root.line(f"constexpr int kLanes = {team.lanes};")
            place = f"{block} * {team.rows_a_block} + threadIdx.x / kLanes"
            if self._ragged_rows:
                wanted = self.function.names.take("wanted_row")
                root.line(f"const {text.offset} {wanted} = {place};")
                root.line(f"const bool inside = {wanted} < {self.nest.row_count};")
                place = f"inside ? {wanted} : {self.nest.row_count - 1}"
            root.line(f"const {text.offset} {self.row} = {place};")
        for axis, value in geometry.row_axes(self.nest, self.row).items():
            root.line(f"const {text.offset} {self.function.axes[axis]} = {value};")
        lane = f"threadIdx.x % {'32' if team.is_block else 'kLanes'}"
        first = f"{team.pack} * ({lane})" if team.pack > 1 else lane
        if team.is_block:
            first = f"threadIdx.x / 32 * {32 * team.pack * team.packs} + {first}"
        root.line(f"const int {self._first} = {first};")
        root.learn(axis.name for axis in self.nest.parallel)

    def _packs(self, scope: Scope, chunk: str, write: Callable[[Scope], object]) -> None:
        """An unrolled loop over a thread's packs of a chunk."""
        team = self.team
        start = f"{chunk} + {self._first}" if (self._loops or team.grid) and chunk != "0" else self._first
        even = team.columns % team.chunk == 0
        inner = scope.child()
        place = f"{start} + {self.slot} * {team.stride}" if team.packs > 1 else start
        inner.line(f"const int {self.place} = {place};")
        body = inner.child(deeper=0 if even else 1)
        body.line(f"const int {self.text.begin} = {f'kColumns - {team.pack} - ' if self.reverse else ''}{self.place};")
        write(body)
        scope.line(kernel_text.UNROLL)
        scope.line(f"for (int {self.slot} = 0; {self.slot} < kPacks; ++{self.slot}) {{")
        if even:
            inner.absorb(body)
        else:
            inner.line(f"if ({self.place} < kColumns) {{")
            inner.absorb(body)
            inner.line("}")
        scope.absorb(inner)
        scope.line("}")

    def _fetch_next(self, body: Scope, held: Held) -> None:
        """Asks for the next chunk before the block's exchange of this one."""
        team = self.team
        body.line(f"if ({self.chunk} + {team.chunk} < kColumns) {{  // the next chunk, while this one is scanned")
        inner = body.child()
        self._packs(inner, f"{self.chunk} + {team.chunk}", lambda scope: self.fill(scope, held))
        body.absorb(inner)
        body.line("}")

    def _scan(self, body: Scope, scan: Scan, before: str, board: str) -> None:
        team, name, kind = self.team, self.values[scan.name], self.kind(scan)
        starts, total = self.function.names.take(f"{name}_starts"), self.function.names.take(f"{name}_total")
        body.line(f"{kind} {starts}[kPacks];")
        if team.is_block:
            box = f"{name}_box[{self.chunk} / {team.chunk} % 2]" if self._loops else f"{name}_box"
            arguments = f"<{self.functor(scan)}, {team.warps}, {self.flags(scan.reverse)}>({name}, {starts}, {box})"
            call = f"ws::scan_block{arguments}"
        else:
            arguments = f"<{self.functor(scan)}, kLanes, {self.flags(scan.reverse)}>({name}, {starts})"
            call = f"ws::scan_warp{arguments}"
        body.line(f"const {kind} {total} = {call};" if self._loops or team.grid else f"{call};")
        carried = self.carried(scan)

        def as_type(type_: str, value: str) -> str:
            return value if carried == kind else f"static_cast<{type_}>({value})"

        origin = before
        if team.grid:
            box, mine = self.function.names.take(f"{name}_board_box"), as_type(carried, total)
            body.line(f"__shared__ {carried} {box}[2];")
            call = f"ws::before_tile({mine}, {self.tile}, {board} + {self.row}, {box})"
            body.line(f"const {carried} {before} = {call};")
            origin = as_type(kind, before)
        elif not self._loops:
            origin = f"{self.functor(scan)}::neutral<{kind}>()"
        else:
            origin = as_type(kind, before)
        flags = self.flags(scan.reverse, scan.exclusive)
        body.line(f"ws::finish_scan<{self.functor(scan)}, {flags}>({name}, {starts}, {origin});")
        if self._loops:
            body.line(f"{before} = {self.functor(scan)}::of<{carried}>({before}, {total});")

    def _board(self, scan: Scan) -> str:
        return f"ws::Board<{self.functor(scan)}, {self.carried(scan)}, {self.team.chunks}>"

    def _board_words(self) -> int:
        slots = self.team.chunks + 2 * -(-self.team.chunks // 32)
        return 2 * self.nest.row_count * slots  # a slot of two words, for every type that is carried

    def _clear(self, boards: dict[str, str], counts: str) -> None:
        root, names = self.root, self.function.names
        last = names.take("is_last")
        root.line(f"__shared__ bool {last};")
        blocks = self.nest.row_count * self.team.chunks
        root.line(f"if (threadIdx.x == 0) {last} = ws::arrive({counts} + 1) == {blocks - 1};")
        root.line("__syncthreads();")
        root.line(f"if ({last}) {{")
        for board in boards.values():
            root.line(f"  ws::clear_boards({board}, {self.nest.row_count});")
        root.line(f"  if (threadIdx.x < 2) {counts}[threadIdx.x] = 0;")
        root.line("}")
