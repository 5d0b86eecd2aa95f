"""The struct of a row reduction on CUDA: what a row loads, folds and stores, which the skeletons `ws_rows_*.cuh` take.

The one idea: all strategies do the same to a row's elements, at other times and from other places. So this writes
types, members and expressions, once for all of them, and no loop, index of a thread, barrier or copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.generated_struct import function
from agent_synthesis.emit.cuda.rows.row_elements import RowElements
from agent_synthesis.emit.cuda.rows.row_loads import RowLoads
from agent_synthesis.emit.cuda.rows.row_team import Team, team_of
from agent_synthesis.emit.cuda.rows.settings.row_settings import RowSettings
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.analysis.stages import Stage
from agent_synthesis.nests.ir import Load, Nest
from agent_synthesis.schedule import Emission
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2

ROW_HEADERS = (*geometry.HEADERS, "ws_stream.cuh", "ws_rows.cuh")
"""What a skeleton of rows is on top of."""
_MEMBERS = (
    "Index", "Vector", "Stored", "Stages", "Load", "kLoadBytes", "each_load", "each_value", "each_store", "at", "once",
    "start", "learn", "element", "element_quick", "top", "term", "value", "square", "finish", "finish_quick",
    "store_row", "shift", "visit", "vector", "stored", "state", "own", "pivot", "mean", "ordinary", "row", "min", "max",
    "slots", "arrivals", "mailboxes", "boxes", "box", "Sums", "sums", "add", "each_sum",
)  # fmt: skip
"""What a struct has besides what the nest names, and parameters of its functions."""


@dataclass(frozen=True)
class Skeleton:
    """One kernel that makes all of a reduction."""

    name: str
    """Of the function."""
    headers: Sequence[str]
    places: str = ""
    """Function that says how many states of a stage its threads leave for each other; empty where they leave none."""
    settings: Sequence[str] = ()
    """Template arguments behind the tiling."""
    sets: Sequence[tuple[str, Iterable[Load]]] = ()
    """Sets of loads that it asks for, by name."""
    workspaces: Sequence[candidate_pb2.Buffer] = ()
    """Of 64-bit words; they follow the struct."""


@dataclass(frozen=True)
class RowProblem:
    """What a strategy writes a kernel for."""

    hardware: Hardware
    nest: Nest
    """Canonical."""
    original: Nest
    """As it was handed over; launches and workspaces have its names."""
    settings: RowSettings
    stages: Sequence[Stage]
    header: Sequence[str]
    """The comment over the kernel."""


class RowStruct:
    """Writes the struct of one nest; used once."""

    def __init__(self, problem: RowProblem, *, values: Sequence[Load] = (), keeps: bool = False) -> None:
        """`values`: loads of one element for all of a row that come ahead of it; `keeps`: as `RowElements` has it."""
        nest, settings, stages = problem.nest, problem.settings, problem.stages
        self._problem, self.nest, self.stages = problem, nest, list(stages)
        self.team: Team = team_of(problem.hardware, nest, settings)
        self.min_blocks = settings.min_blocks
        self._settings = settings
        self._skew = memory_access.skew(nest, nest.reduced[0], self.team.vector_width)
        self.text = kernel_text.KernelText(
            nest, nest.reduced[0].name, self.team.vector_width, settings.loads, settings.stores,
            kernel_text.dialect_of(settings.exp), skew=self._skew,
        )  # fmt: skip
        self.function, self.entry = self.text.function, self.text.entry
        self.dialect = self.function.dialect
        self._reserve()
        self._loads = RowLoads(nest, self.text)
        self._elements = RowElements(nest, self.text, self._loads, stages, keeps=keeps)
        self._values = [(load, self.function.names.take(f"{self._buffer(load)}_at")) for load in values]

    def _reserve(self) -> None:
        """Keeps the names of the struct's own members for them."""
        names, function = self.function.names, self.function
        for name in _MEMBERS:
            names.take(name)
        for table in (function.axes, function.buffers, function.reductions):
            for key, given in table.items():
                if given in _MEMBERS:
                    table[key] = names.take(f"{given}_given")
        self.text.j = self.function.axes[self.text.axis]

    def _buffer(self, load: Load) -> str:
        return self.function.buffers[load.buffer]

    @property
    def stores_elements(self) -> bool:
        """Whether there is more than one store a row."""
        return bool(self._elements.element_stores)

    def lines(self, sets: Sequence[tuple[str, Iterable[Load]]] = ()) -> list[str]:
        """The struct; `sets`: sets of loads that the strategy asks for, by name."""
        elements, offset = self._elements, self.text.offset
        once, row = elements.once, elements.row
        for load, name in self._values:
            row.define(load, row.member(self.dialect.compute(load.type), name))
        functions, kinds, learned = [], [], []
        for number in range(len(self.stages)):
            kind, lines = elements.stage(number)
            kinds.append(kind)
            functions += lines
            learned.append(row.taken())
            elements.learn(number)
        functions += elements.stores() if self.stores_elements else []
        functions += elements.sums()
        functions += elements.row_stores()
        learned.append(row.taken())
        moments = [function("void once()", once.statements())] if once.statements() else []
        moments += [function("void start()", learned[0])] if learned[0] else []
        for number, lines in enumerate(learned[1:]):
            head = f"void learn(ws::RowNumber<{number}>, const State& state, const State& own)"
            moments.append(["  template <class State>", *function(head, lines)])
        axes = geometry.coordinates(self.nest.parallel, "row")
        at = [f"    {self.function.axes[axis]} = {value};" for axis, value in axes.items()]
        return [
            f"struct {self.entry}_row : ws::RowBase {{",
            *([] if self.stores_elements else ["  static constexpr bool kStoresElements = false;"]),
            f"  using Index = {offset};",
            *(f"  {self.text.argument(buffer)};" for buffer in self.nest.buffers),
            *(f"  {offset} {self.function.axes[axis]};" for axis in axes),
            *once.fields(),
            *row.fields(),
            *self._loads.lines(sets),
            f"  using Stages = ws::RowStages<{', '.join(kinds)}>;",
            *self._each_value(),
            *function(f"void at({offset} row)", at),
            *self._shift(),
            *(line for moment in moments for line in moment),
            *functions,
            "};",
        ]

    def _each_value(self) -> list[str]:
        if not self._values:
            return []
        visits, before = [], 0
        for load, name in self._values:
            address = f"{self._buffer(load)} + {self.function.index(load.index)}"
            visits.append(f"    visit(ws::RowNumber<{before}>(), {name}, {address});")
            before += self.text.storage(load.buffer).size_bytes
        head = "void each_value(const Visit& visit)"
        flag = "  static constexpr bool kHasValues = true;"
        return [flag, "  template <class Visit>", *function(head, visits)]

    def _shift(self) -> list[str]:
        """How far before the row its first vector begins, where rows begin anywhere."""
        if self._skew is None:
            return []
        first, width = self.function.index(self._skew), self.team.vector_width
        return function("int shift() const", [f"    return ({first}) % {width};"])

    def tiling(self, constant: str, team: Team | None = None, **more: int) -> list[str]:
        """The constant that says who has what of a row."""
        team = team or self.team
        fields: dict[str, int | bool] = {
            "rows": self.nest.row_count, "columns": team.columns, "threads": team.threads, "lanes": team.lanes,
            "ctas": team.ctas, "vector_width": team.vector_width, "vectors": team.vectors, "slice": team.slice,
            "interleaved": team.interleaved, "unaligned": team.unaligned, "overlap": self._settings.dependent_launch,
            "preload": self._settings.preload, "streaming": self.text.streaming, **more,
        }  # fmt: skip
        given = [f".{name} = {str(value).lower()}" for name, value in fields.items() if value is not False]
        lines = kernel_text.wrapped(given)
        lines[-1] = lines[-1].removesuffix(") {") + "};"
        return [f"constexpr ws::RowTiling {constant}{{", *lines]

    def emission(
        self, skeleton: Skeleton, *, grid: int, cluster: int = 1, cooperative: bool = False, shared_bytes: int = 0,
        **tiling: int,
    ) -> Emission:  # fmt: skip
        """The struct in the one kernel of a skeleton; `tiling`: what its tiling says besides."""
        original = self._problem.original
        names = [space.name.removeprefix(f"{function_text.entry_name(original)}_") for space in skeleton.workspaces]
        signature = self.text.signature(
            self.entry, self.team.threads, self.min_blocks, workspaces=dict.fromkeys(names, "ws::uint64")
        )
        settings = ", ".join([f"{self.entry}_tiling", *skeleton.settings])
        boxes = [self.boxes(f"ws::{skeleton.places}({settings})")] if skeleton.places else []
        arguments = ", ".join([self.value(), *(["boxes"] if boxes else []), *names])
        lines = [
            *self._problem.header, *self.lines(skeleton.sets), "",
            *self.tiling(f"{self.entry}_tiling", None, **tiling), "",
            *signature, *boxes, f"  ws::{skeleton.name}<{settings}>({arguments});", "}", "",
        ]  # fmt: skip
        launch = geometry.launch(
            original, grid=grid, threads=self.team.threads, cluster=cluster, cooperative=cooperative,
            dependent=self._settings.dependent_launch, workspaces=[space.name for space in skeleton.workspaces],
            shared_bytes=shared_bytes,
        )  # fmt: skip
        return Emission("\n".join(lines), tuple(skeleton.headers), (launch,), tuple(skeleton.workspaces))

    def boxes(self, places: str) -> str:
        """Where a kernel's threads leave states for each other."""
        return f"  __shared__ ws::StageBoxes<{self.entry}_row, {places}> boxes;"

    def value(self, *, reads_only: bool = False) -> str:
        """The struct with a kernel's arguments; `reads_only`: a kernel has none of those that are written."""
        given = [
            "nullptr" if reads_only and buffer.written else self.function.buffers[buffer.name]
            for buffer in self.nest.buffers
        ]
        return f"{self.entry}_row{{{{}}, {', '.join(given)}}}"
