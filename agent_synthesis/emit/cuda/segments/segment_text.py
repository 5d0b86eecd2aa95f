"""The text of a reduction over parts of rows on CUDA: the struct that `ws_segments.cuh` is instantiated over.

See `segments` for the strategy and the skeleton for how it goes; this file only says where a part begins, what a row
loads, how it is folded and what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.cuda import generated_struct, geometry, kernel_text
from agent_synthesis.emit.cuda.schedule import DEPENDENT_LAUNCH
from agent_synthesis.emit.expression import Names, Scope
from agent_synthesis.emit.spelling import accumulator
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.analysis.segments import Segments
from agent_synthesis.nests.ir import Expression, Load, Nest
from agent_synthesis.schedule import Emission
from agent_synthesis.settings import Exp, Settings, Stores, setting

HEADERS = (*geometry.HEADERS, "ws_columns.cuh", "ws_segments.cuh")
PIECES = (0, 32, 64, 128, 256, 512)
"""Rows of a piece."""
_MEMBERS = ("Offset", "kTiling", "Row", "Found", "found", "load", "fold", "few", "begin", "part", "row", "first_row",
            "end_row", "store_columns")  # fmt: skip


@dataclass(frozen=True)
class SegmentSettings(Settings):
    """Of `cuda_segments`."""

    stores: Stores = setting(Stores.PLAIN, "whether results pass the caches")
    exp: Exp = setting(Exp.ACCURATE, "the exponential")
    dependent_launch: bool = setting(True, DEPENDENT_LAUNCH)
    threads: int = setting(128, "threads of a block", (128, 256, 512))
    lanes: int = setting(32, "of them next to each other", (1, 2, 4, 8, 16, 32, 64, 128, 256))
    vectors: int = setting(1, "vector accesses of a thread in a row", (1, 2, 4))
    vector_width: int = setting(1, "columns of an access", (1, 2, 4, 8))
    unroll: int = setting(4, "rows in flight in a thread", (1, 2, 4, 8))
    piece: int = setting(0, "rows that are reduced ahead where they are of one part; 0: none", PIECES)


@dataclass(frozen=True)
class SegmentTeam:
    """Who has which parts and columns."""

    problem: Segments
    settings: SegmentSettings

    @property
    def depth(self) -> int:
        """Parts of a block."""
        return self.settings.threads // self.settings.lanes

    @property
    def tiles(self) -> int:
        """Blocks next to each other along the columns."""
        settings = self.settings
        return -(-self.problem.axis.extent // (settings.lanes * settings.vectors * settings.vector_width))

    @property
    def blocks(self) -> int:
        """Of the kernel that stores."""
        return self.tiles * -(-self.problem.count // self.depth)

    @property
    def pieces(self) -> int:
        """Whole pieces of all rows."""
        return self.problem.nest.column_count // self.settings.piece if self.settings.piece else 0


def emission(original: Nest, team: SegmentTeam, header: Sequence[str]) -> Emission:
    """The kernel of the parts, and the one of pieces ahead of it."""
    return _Text(team).write(original, header)


class _Text:
    def __init__(self, team: SegmentTeam) -> None:
        problem, settings = team.problem, team.settings
        self._team, self._problem, self._nest, self._settings = team, problem, problem.nest, settings
        self._text = kernel_text.KernelText(
            problem.nest, problem.axis.name, settings.vector_width, stores=settings.stores,
            dialect=kernel_text.dialect_of(settings.exp), reserved=_MEMBERS,
        )  # fmt: skip
        self._function = self._text.function
        self._row = problem.nest.reduced[0].name
        self._members = generated_struct.Members(self._function, [axis.name for axis in problem.others])

    def write(self, original: Nest, header: Sequence[str]) -> Emission:
        text, settings, team = self._text, self._settings, self._team
        for axis, value in geometry.coordinates(self._problem.others, "part").items():
            self._members.member(text.offset, self._function.axes[axis], value)
        for name, place in (("first_row", self._problem.begin), ("end_row", self._problem.end)):
            self._members.member("int", name, f"static_cast<int>({self._members.value(place).text})")
        rows, stores, name = self._rows(), self._stores(), f"{text.entry}_segments"
        begin = generated_struct.function(f"void begin({text.offset} part)", self._members.statements())
        lines = [
            *header,
            *generated_struct.struct(name, text, self._members.fields(), self._constants(), begin, rows, stores),
        ]
        reductions = self._nest.reductions if team.pieces else ()
        arguments = [self._function.names.take(f"{each.name}_pieces") for each in reductions]
        types = dict(zip(arguments, (accumulator(each, self._function.dialect) for each in reductions), strict=True))
        counts = [team.pieces * self._problem.axis.extent * each.type.size_bytes for each in reductions]
        buffers = [
            geometry.workspace(original, of, -(-count // 8)) for of, count in zip(arguments, counts, strict=True)
        ]
        names, launches = [buffer.name for buffer in buffers], []
        if team.pieces:
            entry, read = f"{text.entry}_ahead", [each for each in self._nest.buffers if not each.written]
            lines += generated_struct.kernel(
                name, text, "reduce_pieces", settings.threads, 1, types, entry, stores=False
            )  # fmt: skip
            launches.append(geometry.launch(
                original, entry=entry, grid=team.tiles * -(-team.pieces // team.depth), threads=settings.threads,
                buffers=read, workspaces=names, dependent=settings.dependent_launch, writes=names,
            ))  # fmt: skip
        lines += generated_struct.kernel(name, text, "reduce_segments", settings.threads, 1, types)
        launches.append(geometry.launch(
            original, grid=team.blocks, threads=settings.threads, workspaces=names,
            dependent=settings.dependent_launch or team.pieces > 0,
            writes=[buffer.name for buffer in self._nest.buffers if buffer.written],
        ))  # fmt: skip
        return Emission("\n".join(lines), HEADERS, tuple(launches), tuple(buffers))

    def _constants(self) -> list[str]:
        settings, problem = self._settings, self._problem
        return [
            f"  using Offset = {self._text.offset};",
            *generated_struct.constant("ws::SegmentTiling", "kTiling", {
                "parts": problem.count, "columns": problem.axis.extent, "rows": self._nest.column_count,
                "piece": settings.piece, "vector_width": settings.vector_width, "vectors": settings.vectors,
                "rows_in_flight": settings.unroll, "threads": settings.threads, "lanes": settings.lanes,
                "overlap": settings.dependent_launch,
            }),
        ]  # fmt: skip

    def _rows(self) -> list[str]:
        """What a row loads of a thread's columns, and how it is folded."""
        text, function, width = self._text, self._function, self._settings.vector_width
        values = [(reduction.value, reduction.type) for reduction in self._nest.reductions]
        roots, fields = [value for value, _ in values], Names()
        place = f"int {function.axes[self._row]}, {text.offset} {text.begin}"
        loading = self._members.child([self._row])
        held: list[tuple[Load | memory_access.Lookup, str]] = []
        kinds, loads = [], []

        def hold(part: Load | memory_access.Lookup, load: str) -> None:
            field = fields.take(function.buffers[part.buffer])
            held.append((part, f"row.{field}"))
            kinds.append(f"{text.vector_type(text.storage(part.buffer))} {field};")
            loads.append(load)

        for load in text.varying_loads(roots):
            if self._row in load.index.axes() and (width == 1 or text.access_of(load) == "vector"):
                hold(load, text.vector_load(load, text.begin))
        for lookup in self._lookups(roots):
            hold(lookup, text.vector_lookup(loading, lookup, text.begin))
        lanes = ", ".join(
            f"ws::Lanes<{functor(each.operation)}, {accumulator(each, function.dialect)}, {width}>"
            for each in self._nest.reductions
        )
        loading.line(f"return {{{', '.join(loads)}}};")
        folding = self._members.child([self._row])

        def take(inner: Scope) -> None:
            for i, (value, type_) in enumerate(values):
                inner.line(f"few.take<{i}>({text.lane}, {inner.converted(value, type_)});")

        text.elements(folding, roots, take, held=held)
        return [
            f"  struct Row {{ {' '.join(kinds)} }};",
            *generated_struct.function(f"Row load({place}) const", loading.lines),
            *generated_struct.wrapped(f"using Found = ws::Results<{lanes}>;"),
            "  Found found;",
            *generated_struct.function(f"void fold(const Row& row, {place}, Found& few) const", folding.lines),
        ]

    def _lookups(self, roots: Sequence[Expression]) -> list[memory_access.Lookup]:
        """Those of a row that are loaded ahead: of single columns, all whose place a row decides."""
        if self._settings.vector_width > 1:
            return self._text.wide_lookups(roots)
        found = memory_access.lookups_below(roots)
        return [each for each in found if self._row in self._function.interner.needs(each.call)]

    def _stores(self) -> list[str]:
        text, known = self._text, [f"%{reduction.name}" for reduction in self._nest.reductions]
        for i, reduction in enumerate(self._nest.reductions):
            self._function.reductions[reduction.name] = f"found.value<{i}>({text.lane})"
        body = self._members.child()
        text.stores(body, self._nest.stores, lambda inner: inner.learn(known))
        return generated_struct.function(f"void store_columns({text.offset} {text.begin}) const", body.lines)
