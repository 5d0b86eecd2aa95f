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
from agent_synthesis.emit.spelling import accumulator
from agent_synthesis.nests.analysis.stages import Stage, accumulator_bytes
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Axis, Expression, Load, Nest, Store
from agent_synthesis.schedule import Emission
from agent_synthesis.settings import Exp, Loads, Settings, Stores, setting
from warpsmith.v1 import candidate_pb2

HEADERS = (*geometry.HEADERS, "ws_columns.cuh")
_MEMBERS = ("load", "fold", "results", "begin", "outer", "row", "part", "store_columns", "store_row")
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


class ColumnKernel:
    """Writes one kernel; used once."""

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
        spaces = self._workspaces(original) if self._settings.ctas > 1 else {}
        name = f"{text.entry}_columns"
        lines = [
            *header,
            *generated_struct.struct(
                name, text, self._members.fields(), self._constants(),
                generated_struct.function("void begin(unsigned outer)", begin) if begin else [],
                *visits, stores,
            ),
            *generated_struct.kernel(
                name, text, "reduce_columns", self._settings.threads, self._settings.min_blocks,
                {argument: kind for argument, (kind, _) in spaces.items()},
            ),
        ]  # fmt: skip
        buffers = [buffer for _, buffer in spaces.values()]
        return geometry.one_kernel(
            original, lines, HEADERS, grid=team.blocks, threads=self._settings.threads,
            dependent=self._settings.dependent_launch, workspaces=buffers,
        )  # fmt: skip

    def _constants(self) -> list[str]:
        team = self._team
        return [
            f"  using Offset = {self._text.offset};",
            *generated_struct.constant("ws::ColumnTiling", "kTiling", {
                "rows": team.rows, "columns": team.axis.extent, "others": team.others, "visits": len(self._stages),
                "vector_width": self._text.vector_width, "threads": self._settings.threads,
                "lanes": self._settings.lanes, "ctas_per_column": self._settings.ctas,
                "rows_in_flight": self._settings.unroll, "overlap": self._settings.dependent_launch,
            }),
        ]  # fmt: skip

    def _workspaces(self, original: Nest) -> dict[str, tuple[str, candidate_pb2.Buffer]]:
        """Argument → type and buffer: counters of arrivals, and partial results of each reduction."""
        names, team = self._function.names, self._team
        counters = geometry.workspace(original, "arrived", -(-team.tiles * team.others // 2), zero=True)
        found = {names.take("arrived"): ("unsigned", counters)}
        for reduction in self._nest.reductions:
            name = names.take(f"{reduction.name}_partials")
            words = -(-self._nest.row_count * self._settings.ctas * accumulator_bytes(reduction) // 8)
            kind = accumulator(reduction, self._function.dialect)
            found[name] = (kind, geometry.workspace(original, name, words))
        return found

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
        lanes = [
            f"ws::Lanes<{functor(r.operation)}, {accumulator(r, self._function.dialect)}, {self._text.vector_width}>"
            for r in stage.reductions
        ]
        roots = [reduction.value for reduction in stage.reductions]

        def take(inner: Scope) -> None:
            for i, reduction in enumerate(stage.reductions):
                inner.line(f"part.take<{i}>({self._text.lane}, {inner.converted(reduction.value, reduction.type)});")

        fold = self._uses_row(
            number, roots, "fold", f", {kind}& part",
            lambda scope, held: self._text.elements(scope, roots, take, held=held, known=self._known),
        )  # fmt: skip
        for i, reduction in enumerate(stage.reductions):
            position = ".position" if reduction.operation in ARG_REDUCTIONS else ""
            self._function.reductions[reduction.name] = f"{result}.value<{i}>({self._text.lane}){position}"
            self._known.append(f"%{reduction.name}")
        return [
            f"  using {kind} = ws::Results<{', '.join(lanes)}>;",
            f"  {kind} {result};",
            f"  WS_INLINE {kind}& results(ws::ColumnVisit<{number}>) {{ return {result}; }}",
            *fold,
        ]

    def _stores(self) -> list[str]:
        """What is stored once a column, and of every row."""
        nest, text = self._nest, self._text
        each = [store for store in nest.stores if nest.is_element_store(store)]
        once = [store for store in nest.stores if store not in each]

        def write(stores: Sequence[Store], scope: Scope, held: Sequence[tuple[Load, str]] = ()) -> None:
            text.stores(scope, stores, lambda inner: inner.learn(self._known), held=held)

        lines = []
        if once:
            body = self._members.child()
            write(once, body)
            lines += generated_struct.function(f"void store_columns({text.offset} {text.begin}) const", body.lines)
        if each:
            values = [store.value for store in each]
            lines += self._uses_row(len(self._stages), values, "store_row", "", lambda s, held: write(each, s, held))
        return lines
