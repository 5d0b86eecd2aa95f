"""The text of a column reduction on CUDA: the struct that `ws_columns.cuh` is instantiated over.

See `cuda_column_reduction` for the strategy and the skeleton for how it goes; this file only says what a row loads, how
it is folded and what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.cuda import generated_struct, geometry, kernel_text
from agent_synthesis.emit.cuda.schedule import DEPENDENT_LAUNCH
from agent_synthesis.emit.expression import Names, Scope
from agent_synthesis.emit.spelling import Dialect, accumulator
from agent_synthesis.nests import passes
from agent_synthesis.nests.analysis.stages import Stage, accumulator_bytes, narrowed
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Axis, Expression, Load, Nest, Store, Type
from agent_synthesis.schedule import Emission
from agent_synthesis.settings import Exp, Loads, Settings, Stores, setting
from warpsmith.v1 import candidate_pb2

HEADERS = (*geometry.HEADERS, "ws_columns.cuh")
_MEMBERS = ("load", "few", "fold", "results", "finish", "settle", "begin", "outer", "row", "part", "store_columns",
            "store_row")  # fmt: skip
"""What the struct has besides what the nest names, and parameters of its functions."""


@dataclass(frozen=True)
class ColumnSettings(Settings):
    """Of `cuda_column_reduction`."""

    loads: Loads = setting(Loads.EVICT_FIRST, "whether what is read is kept for others")
    stores: Stores = setting(Stores.PLAIN, "whether results pass the caches")
    exp: Exp = setting(Exp.ACCURATE, "the exponential")
    dependent_launch: bool = setting(True, DEPENDENT_LAUNCH)
    threads: int = setting(256, "threads of a block", (128, 256, 512))
    lanes: int = setting(32, "vectors of columns of a block", (8, 16, 32, 64, 128, 256, 512))
    ctas: int = setting(1, "blocks that share the rows of a column")
    vector_width: int = setting(1, "columns of a thread", (1, 2, 4, 8))
    unroll: int = setting(8, "rows in flight in a thread", (2, 4, 8, 16))
    min_blocks: int = setting(1, "blocks that share an SM", (1, 2, 4))


@dataclass(frozen=True)
class ColumnTeam:
    """Who has which columns and rows."""

    axis: Axis
    """The contiguous axis."""
    others: int
    """Points of the other parallel axes."""
    rows: int
    """Elements that each column reduces."""
    settings: ColumnSettings

    @property
    def depth(self) -> int:
        """Threads of a block that share a column."""
        return self.settings.threads // self.settings.lanes

    @property
    def tiles(self) -> int:
        """Blocks next to each other along the axis."""
        return -(-self.axis.extent // (self.settings.lanes * self.settings.vector_width))

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.tiles * self.settings.ctas * self.others


def found_bytes(stage: Stage) -> list[int]:
    """Bytes of what a visit finds of a column, for each reduction. Moments are sums of rows and squares in float64."""
    return [8 if stage.kind == "moments" else accumulator_bytes(reduction) for reduction in stage.reductions]


def _found_types(stage: Stage, dialect: Dialect) -> list[str]:
    return ["double" if stage.kind == "moments" else accumulator(each, dialect) for each in stage.reductions]


@dataclass(frozen=True)
class _Space:
    """A workspace as an argument of kernels."""

    argument: str
    type: str
    buffer: candidate_pb2.Buffer


class ColumnKernel:
    """Writes one kernel, or one for each visit and one that stores; used once."""

    def __init__(self, nest: Nest, team: ColumnTeam, stages: Sequence[Stage]) -> None:
        self._nest, self._team, self._stages = nest, team, stages
        settings = self._settings = team.settings
        self._text = kernel_text.KernelText(
            nest, team.axis.name, settings.vector_width, settings.loads, settings.stores,
            kernel_text.dialect_of(settings.exp), reserved=_MEMBERS,
        )  # fmt: skip
        self._function = self._text.function
        self._axis = nest.reduced[0].name
        self._others = [axis for axis in nest.parallel if axis.name != team.axis.name]
        self._members = generated_struct.Members(self._function, [axis.name for axis in self._others])
        self._known: list[str] = []

    def write(self, original: Nest, header: Sequence[str]) -> Emission:
        """The emission."""
        team, text = self._team, self._text
        for axis, value in geometry.coordinates(self._others, "outer").items():
            self._members.member(text.offset, self._function.axes[axis], value)
        visits = [self._visit(number, stage) for number, stage in enumerate(self._stages)]
        stores = self._stores()
        begin = self._members.statements()
        name = f"{text.entry}_columns"
        lines = [
            *header,
            *generated_struct.struct(
                name, text, self._members.fields(), self._constants(),
                generated_struct.function("void begin(unsigned outer)", begin) if begin else [],
                *visits, stores,
            ),
        ]  # fmt: skip
        spaces = [space for number in range(len(self._stages)) for space in self._partials(original, number)]
        if self._settings.ctas > 1 and not passes.is_visited_once(self._nest):
            return self._several_kernels(original, name, lines, spaces)
        if self._settings.ctas > 1:
            counters = geometry.workspace(original, "arrived", -(-team.tiles * team.others // 2), zero=True)
            spaces.insert(0, _Space(self._function.names.take("arrived"), "unsigned", counters))
        else:
            spaces = []
        lines += generated_struct.kernel(
            name, text, "reduce_columns", self._settings.threads, self._settings.min_blocks,
            {space.argument: space.type for space in spaces},
        )  # fmt: skip
        return geometry.one_kernel(
            original, lines, HEADERS, grid=team.blocks, threads=self._settings.threads,
            dependent=self._settings.dependent_launch, workspaces=[space.buffer for space in spaces],
        )  # fmt: skip

    def _several_kernels(self, original: Nest, name: str, lines: list[str], spaces: Sequence[_Space]) -> Emission:
        """A kernel for each visit, which leaves what its blocks find, and one that joins all that and stores."""
        text, team, settings = self._text, self._team, self._settings
        counts = [len(stage.reductions) for stage in self._stages]
        launches = []
        for number in range(len(counts) + 1):
            stores, before, until = number == len(counts), sum(counts[:number]), sum(counts[: number + 1])
            entry = text.entry if stores else f"{text.entry}_{self._stages[number].name}"
            used = [buffer for buffer in self._nest.buffers if stores or not buffer.written]
            passed = {space.argument: space.type for space in spaces[:until]}
            skeleton = "store_columns" if stores else f"leave_columns<{number}, {before}>"
            lines += generated_struct.kernel(
                name, text, skeleton, settings.threads, settings.min_blocks, passed, entry, stores=stores
            )
            own = [buffer.name for buffer in used if buffer.written]
            grid = team.blocks // (1 if not stores or passes.element_stores(self._nest) else settings.ctas)
            launches.append(geometry.launch(
                original, entry=entry, grid=grid, threads=settings.threads, buffers=used,
                workspaces=[space.buffer.name for space in spaces[:until]],
                dependent=number > 0 or settings.dependent_launch,
                writes=own + [space.buffer.name for space in spaces[before:until]],
            ))  # fmt: skip
        return Emission("\n".join(lines), HEADERS, tuple(launches), tuple(space.buffer for space in spaces))

    def _constants(self) -> list[str]:
        team = self._team
        return [
            f"  using Offset = {self._text.offset};",
            *generated_struct.constant("ws::ColumnTiling", "kTiling", {
                "rows": team.rows, "columns": team.axis.extent, "others": team.others, "visits": len(self._stages),
                "vector_width": self._text.vector_width, "threads": self._settings.threads,
                "lanes": self._settings.lanes, "ctas_per_column": self._settings.ctas,
                "rows_in_flight": self._settings.unroll, "overlap": self._settings.dependent_launch,
                "counts": any(stage.kind == "moments" for stage in self._stages),
            }),
        ]  # fmt: skip

    def _partials(self, original: Nest, number: int) -> list[_Space]:
        """What blocks leave of a visit, an array for each of its values."""
        stage, spaces = self._stages[number], []
        types = _found_types(stage, self._function.dialect)
        for reduction, kind, size in zip(stage.reductions, types, found_bytes(stage), strict=True):
            name = self._function.names.take(f"{reduction.name}_partials")
            words = -(-self._nest.row_count * self._settings.ctas * size // 8)
            spaces.append(_Space(name, kind, geometry.workspace(original, name, words)))
        return spaces

    def _held(self, roots: Iterable[Expression]) -> list[Load]:
        """Loads of a row that are made ahead of their use."""
        text = self._text
        return [
            load
            for load in text.varying_loads(roots)
            if self._axis in load.index.axes()
            and text.access_of(load) != "same"
            and (text.access_of(load) == "vector" or self._settings.vector_width == 1)
        ]

    def _uses_row(
        self,
        number: int,
        roots: Sequence[Expression],
        head: str,
        more: str,
        write: Callable[[Scope, list[tuple[Load, str]]], None],
    ) -> list[str]:
        """What visit `number` loads of a row, and the function that uses it: `head`, with `more` parameters."""
        text, fields, offset, kind = self._text, Names(), self._text.offset, f"Row{number}"
        held = [(load, fields.take(self._function.buffers[load.buffer])) for load in self._held(roots)]
        types = " ".join(f"{text.vector_type(text.storage(load.buffer))} {field};" for load, field in held)
        loads = ", ".join(text.vector_load(load, text.begin) for load, _ in held)
        body = self._members.child([self._axis])
        write(body, [(load, f"row.{field}") for load, field in held])
        place = f"{offset} {self._function.axes[self._axis]}, {offset} {text.begin}"
        return [
            f"  struct {kind} {{ {types} }};",
            *generated_struct.function(
                f"Row{number} load(ws::ColumnVisit<{number}>, {place}) const", [f"    return {{{loads}}};"]
            ),
            *generated_struct.function(f"void {head}(const {kind}& row, {place}{more}) const", body.lines),
        ]

    def _visit(self, number: int, stage: Stage) -> list[str]:
        """A visit of the rows: its results, and how it takes a row."""
        kind, result = f"Results{number}", self._function.reductions[stage.name]
        few = f"Few{number}" if stage.kind == "moments" else kind
        types, width = _found_types(stage, self._function.dialect), self._text.vector_width
        functors = [functor(reduction.operation) for reduction in stage.reductions]
        lanes = [f"ws::Lanes<{op}, {type_}, {width}>" for op, type_ in zip(functors, types, strict=True)]
        merged = stage.kind == "moments"
        # A thread's few rows add up in the type of the squares, also where the column's mean is wider.
        own = stage.reductions[-1].type
        narrow = f"ws::FewMoments<{accumulator(stage.reductions[-1], self._function.dialect)}, {width}>"
        taken = [(reduction.value, reduction.type) for reduction in stage.reductions]
        taken = [(narrowed(taken[0][0], own), own)] if merged else taken
        roots = [value for value, _ in taken]
        ahead, settled = self._settle(number, roots)

        def take(inner: Scope) -> None:
            for i, (value, type_) in enumerate(taken):
                inner.line(f"part.take<{i}>({self._text.lane}, {inner.converted(value, type_)});")

        fold = self._uses_row(
            number, roots, "fold", f", {few}& part",
            lambda scope, held: self._text.elements(
                scope, roots, take, held=held, known=self._known, settled=settled
            ),
        )  # fmt: skip
        for i, reduction in enumerate(stage.reductions):
            position = ".position" if reduction.operation in ARG_REDUCTIONS else ""
            self._function.reductions[reduction.name] = f"{result}.value<{i}>({self._text.lane}){position}"
            self._known.append(f"%{reduction.name}")
            if merged and reduction.type is not Type.F64:
                narrowed_text = f"static_cast<{self._function.dialect.compute(reduction.type)}>"
                self._function.reductions[reduction.name] = f"{narrowed_text}({result}.value<{i}>({self._text.lane}))"
        return [
            f"  using {kind} = ws::Results<{', '.join(lanes)}>;",
            *([f"  using {few} = {narrow};"] if merged else []),
            f"  static WS_INLINE {few} few(ws::ColumnVisit<{number}>) {{ return {few}(); }}",
            f"  {kind} {result};",
            f"  WS_INLINE {kind}& results(ws::ColumnVisit<{number}>) {{ return {result}; }}",
            *(
                [f"  WS_INLINE void finish(ws::ColumnVisit<{number}>) {{ {result}.about_mean(kTiling.rows); }}"]
                * merged
            ),
            *ahead,
            *fold,
        ]

    def _settle(self, number: int, roots: Sequence[Expression]) -> tuple[list[str], list[tuple[Expression, str]]]:
        """Members for what rows need in visit `number` and do not change, with what sets them; and elements' texts."""
        text, parts = self._text, passes.per_column(self._nest, roots, self._function.interner)
        if not parts:
            return [], []
        names = [self._function.names.take("of_column") for _ in parts]
        types = [self._function.dialect.compute(part.type) for part in parts]

        def settle(inner: Scope) -> None:
            for name, part in zip(names, parts, strict=True):
                inner.line(f"{name}[{text.lane}] = {inner.value(part).text};")

        body = self._members.child()
        text.elements(body, parts, settle, known=self._known)
        head = f"void settle(ws::ColumnVisit<{number}>, {text.offset} {text.begin})"
        lines = [
            *(f"  {kind} {name}[{text.vector_width}];" for kind, name in zip(types, names, strict=True)),
            *generated_struct.function(head, body.lines),
        ]
        return lines, [(part, f"{name}[{text.lane}]") for name, part in zip(names, parts, strict=True)]

    def _stores(self) -> list[str]:
        """What is stored once a column, and of every row."""
        nest, text = self._nest, self._text
        each = [store for store in nest.stores if nest.is_element_store(store)]
        once = [store for store in nest.stores if store not in each]

        lines, settled = self._settle(len(self._stages), [store.value for store in each])

        def write(stores: Sequence[Store], scope: Scope, held: Sequence[tuple[Load, str]] = ()) -> None:
            text.stores(scope, stores, lambda inner: inner.learn(self._known), held=held, settled=settled)

        if once:
            body = self._members.child()
            write(once, body)
            lines += generated_struct.function(f"void store_columns({text.offset} {text.begin}) const", body.lines)
        if each:
            values = [store.value for store in each]
            lines += self._uses_row(len(self._stages), values, "store_row", "", lambda s, held: write(each, s, held))
        return lines
