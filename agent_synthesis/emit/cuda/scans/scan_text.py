"""The text of scans along rows on CUDA, and what they share with those down columns (`scan_columns`).

See `cuda_scan` for the strategies, and the skeletons `ws_scan_*.cuh` for how they go; this file says what is loaded,
what scans take of it and what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.cuda import generated_struct, geometry, kernel_text
from agent_synthesis.emit.cuda.schedule import DEPENDENT_LAUNCH
from agent_synthesis.emit.expression import Names, Scope
from agent_synthesis.nests.ir import SCANS, Load, Nest, Scan, Type
from agent_synthesis.schedule import Emission
from agent_synthesis.settings import Exp, Loads, Settings, Stores, setting

HEADERS = (*geometry.HEADERS, "ws_scan.cuh")
"""What all scans include."""
_MEMBERS = ("load", "value", "store", "of", "begin", "row", "outer", "values", "vector", "v")
"""What the struct has besides what the nest names, and parameters of its functions."""


By = StrEnum("By", "ROWS GRID COLUMNS")
"""What threads share."""


@dataclass(frozen=True)
class ScanSettings(Settings):
    """Of `cuda_scan`."""

    scan: By = setting(By.ROWS, "what threads share: rows, chunk by chunk; a grid of chunks of a row; or columns")
    loads: Loads = setting(Loads.CACHED, "whether what is read is kept for others")
    stores: Stores = setting(Stores.PLAIN, "whether results pass the caches")
    exp: Exp = setting(Exp.ACCURATE, "the exponential")
    dependent_launch: bool = setting(True, DEPENDENT_LAUNCH)
    prefetch: bool = setting(False, "whether a row's next chunk is asked for before this one is scanned", (True, False))
    threads: int = setting(256, "threads of a block", (64, 128, 256, 512, 1024))
    lanes: int = setting(32, "threads of a row, or next to each other across columns", (4, 8, 16, 32, 64, 128))
    vector_width: int = setting(1, "elements of a vector access", (1, 2, 4, 8))
    vectors: int = setting(1, "vector accesses of a thread, of a row or down a column", (1, 2, 4, 8, 16))
    ctas: int = setting(1, "blocks that share a column")
    min_blocks: int = setting(1, "blocks that share an SM", (1, 2, 3, 4, 5, 6, 8))


@dataclass(frozen=True)
class RowTeam:
    """Who has which part of a row."""

    settings: ScanSettings
    columns: int
    """Elements of a row."""

    @property
    def grid(self) -> bool:
        """Whether every block has one chunk of a row; else a row's threads take one chunk after the other."""
        return self.settings.scan is By.GRID

    @property
    def chunk(self) -> int:
        """Elements of a row that are in work at once."""
        return self.settings.lanes * self.settings.vector_width * self.settings.vectors

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return -(-self.columns // self.chunk)

    @property
    def rows_a_block(self) -> int:
        """Rows of a block."""
        return self.settings.threads // self.settings.lanes


class ScanStruct:
    """Writes the struct of one nest; used once."""

    def __init__(self, nest: Nest, settings: ScanSettings, axis: str) -> None:
        self.nest, self.vector_width = nest, settings.vector_width
        self.scans: tuple[Scan, ...] = nest.scans
        self.text = kernel_text.KernelText(
            nest, axis, settings.vector_width, settings.loads, settings.stores, kernel_text.dialect_of(settings.exp),
            reserved=_MEMBERS,
        )  # fmt: skip
        self.function, self.name = self.text.function, f"{self.text.entry}_scan"
        self._scanned = nest.reduced[0].name
        self._across = [self._scanned] if axis != self._scanned else []
        """The scanned axis, where vectors lie across it."""
        names = [*(self.function.axes[name] for name in self._across), self.text.begin]
        self._place = ", ".join(f"{self.text.offset} {name}" for name in names)
        self._fields = {scan.name: self.function.reductions[scan.name] for scan in self.scans}

    def kind(self, scan: Scan) -> str:
        """Type of a scan's values."""
        return self.function.dialect.compute(scan.type)

    def carried(self, scan: Scan) -> str:
        """Type of what a row carries from chunk to chunk: f32 sums add up in double, so that long rows stay exact."""
        return "double" if (scan.operation, scan.type) == ("cumsum", Type.F32) else self.kind(scan)

    def lines(
        self, tiling: Sequence[str], count: int, number: str, coordinates: Mapping[str, str], *, kept: bool = True
    ) -> list[str]:
        """The struct, for a thread with `count` vectors of a chunk.

        `number`: the parameter that `coordinates`, axis → text, are made of; `kept`: whether a vector is still there
        when it is stored.
        """
        members = generated_struct.Members(self.function, coordinates)
        for axis, value in coordinates.items():
            members.member(self.text.offset, self.function.axes[axis], value)
        functions = self._functions(members, kept)
        statements = members.statements()
        return generated_struct.struct(
            self.name, self.text, members.fields(),
            [f"  using Offset = {self.text.offset};", *tiling], self._scans(count),
            generated_struct.function(f"void begin({number})", statements) if statements else [], functions,
        )  # fmt: skip

    def _scans(self, count: int) -> list[str]:
        """The scans, and room for their values."""
        names = [f"Scan{number}" for number in range(len(self.scans))]
        types, rooms = [], []
        for number, (name, scan) in enumerate(zip(names, self.scans, strict=True)):
            op, kind, field = functor(SCANS[scan.operation]), self.kind(scan), self._fields[scan.name]
            flag = str(scan.exclusive).lower()
            types.append(f"  using {name} = ws::Scan<{number}, {op}, {kind}, {self.carried(scan)}, {flag}>;")
            rooms.append(f"    ws::Lanes<{op}, {kind}, {self.vector_width}> {field}[{count}];")
            rooms.append(f"    WS_INLINE auto& of({name}) {{ return {field}; }}")
        return [*types, f"  using Scans = ws::ScanList<{', '.join(names)}>;", "  struct Values {", *rooms, "  };"]

    def _functions(self, members: generated_struct.Members, kept: bool) -> list[str]:
        """What is loaded, what each scan takes of it, and what is stored."""
        text, fields, known = self.text, Names(), list[str]()
        loads = [(load, fields.take(self.function.buffers[load.buffer])) for load in self._loads()]
        types = " ".join(f"{text.vector_type(text.storage(load.buffer))} {field};" for load, field in loads)
        vectors = ", ".join(text.vector_load(load, text.begin) for load, _ in loads)
        held = [(load, f"vector.{field}") for load, field in loads]
        lines = [
            f"  struct Vector {{ {types} }};",
            *generated_struct.function(f"Vector load({self._place}) const", [f"    return {{{vectors}}};"]),
        ]
        given = f"int v, const Vector& vector, {self._place}"
        for number, scan in enumerate(self.scans):
            place = f"values.{self._fields[scan.name]}[v].lane[{text.lane}]"

            def take(inner: Scope, scan: Scan = scan, place: str = place) -> None:
                inner.line(f"{place} = {inner.converted(scan.value, scan.type)};")

            body = members.child(self._across)
            text.elements(body, [scan.value], take, held=held, known=known)
            lines += generated_struct.function(f"void value(Scan{number}, Values& values, {given}) const", body.lines)
            self.function.reductions[scan.name] = place
            known.append(f"%{scan.name}")
        body = members.child(self._across)
        text.stores(body, self.nest.stores, lambda inner: inner.learn(known), held=held if kept else [])
        return lines + generated_struct.function(f"void store(const Values& values, {given}) const", body.lines)

    def _loads(self) -> list[Load]:
        """What scans read along the row, wide."""
        text = self.text
        return [
            load
            for load in text.varying_loads(scan.value for scan in self.scans)
            if self._scanned in load.index.axes()
            and (text.access_of(load) == "vector" or (self.vector_width == 1 and text.access_of(load) == "each"))
        ]


def scan_rows(nest: Nest, original: Nest, team: RowTeam, header: Sequence[str]) -> Emission:
    """One kernel, whose blocks have rows, or each a chunk of one."""
    settings = team.settings
    made = ScanStruct(nest, settings, nest.reduced[0].name)
    names = made.function.names
    prefetch = settings.prefetch and team.chunks > 1 and not team.grid
    tiling = generated_struct.constant("ws::RowScanTiling", "kTiling", {
        "rows": nest.row_count, "columns": team.columns, "vector_width": settings.vector_width,
        "vectors": settings.vectors, "threads": settings.threads, "lanes": settings.lanes,
        "reverse": made.scans[0].reverse, "prefetch": prefetch, "overlap": settings.dependent_launch,
    })  # fmt: skip
    spaces = {}
    if team.grid:
        slots = team.chunks + 2 * -(-team.chunks // 32)
        spaces[names.take("counts")] = ("unsigned", 1)
        for scan in made.scans:
            board = f"ws::Board<{functor(SCANS[scan.operation])}, {made.carried(scan)}, {team.chunks}>"
            # A slot of two words, for every type that is carried.
            spaces[names.take(f"{scan.name}_board")] = (board, 2 * nest.row_count * slots)
    axes = geometry.coordinates(nest.parallel, "row")
    lines = made.lines(tiling, settings.vectors, f"{made.text.offset} row", axes, kept=not prefetch)
    skeleton = "scan_rows_by_tiles" if team.grid else "scan_rows"
    types = {name: kind for name, (kind, _) in spaces.items()}
    lines += generated_struct.kernel(made.name, made.text, skeleton, settings.threads, settings.min_blocks, types)
    buffers = [geometry.workspace(original, name, words, zero=True) for name, (_, words) in spaces.items()]
    return geometry.one_kernel(
        original, [*header, *lines], (*HEADERS, "ws_scan_rows.cuh"),
        grid=nest.row_count * team.chunks if team.grid else -(-nest.row_count // team.rows_a_block),
        threads=settings.threads, dependent=settings.dependent_launch, workspaces=buffers,
    )  # fmt: skip
