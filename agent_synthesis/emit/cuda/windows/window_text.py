"""What sliding windows add to `ws_window.cuh`: the sizes of a tile, and how values are loaded, joined and stored.

The one idea: the skeleton walks tiles, rows of data and windows; it sees the nest as a struct of a few functions. Which
settings are good is in `cuda_window`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit import window_loops
from agent_synthesis.emit.cuda import generated_struct, geometry, kernel_text
from agent_synthesis.emit.cuda.kernel_text import KernelText
from agent_synthesis.emit.cuda.schedule import DEPENDENT_LAUNCH
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.window_loops import Join, Reuse
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.ir import Axis, Nest, Windowed
from agent_synthesis.nests.sliding_window import STILL, Slide, Tiling
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove

_LONGEST_UNROLLED_WINDOW = 128
"""Elements of a window whose loops are unrolled."""
_MEMBERS = (
    "Offset", "kTiling", "kRow", "kDown", "Deep", "Outer", "State", "empty", "join", "load", "store", "at", "values",
    "inside", "total", "columns", "kThreads", "kOverlap",
)  # fmt: skip
"""What the struct calls things of its own."""


@dataclass(frozen=True)
class WindowSettings(Settings):
    """Of `cuda_window`."""

    reuse: Reuse = setting(Reuse.NONE, "what windows share: joined columns, or nothing")
    dependent_launch: bool = setting(True, DEPENDENT_LAUNCH)
    threads: int = setting(256, "threads of a block", (64, 128, 256, 512))
    vector_width: int = setting(1, "elements of a row that are read at once", (1, 2, 4, 8))
    rows: int = setting(1, "rows of outputs of a thread", (1, 2, 4, 8, 16))
    vectors: int = setting(1, "vector accesses of a thread at most, along the row", (1, 2, 4))
    min_blocks: int = setting(1, "blocks of an SM, for which registers suffice", (1, 2, 3, 4, 6, 8))


@dataclass(frozen=True)
class Layout:
    """Tiles: which outputs a team makes, and where joined rows lie in shared memory.

    Column `q` of a joined row holds the data's column `q − left` in the first tile of a row, and so on.
    """

    tiling: Tiling
    settings: WindowSettings

    @staticmethod
    def widest_vector(tiling: Tiling) -> int:
        """The most neighbouring columns that every access can move at once."""
        return memory_access.widest_vector(replace(tiling.nest, stores=()), Axis(tiling.row.position, tiling.row.data))

    def require(self, name: str) -> None:
        """Raises IllegalMove where they do not fit the data."""
        if self.settings.vector_width < 1 or self.widest_vector(self.tiling) % self.settings.vector_width:
            raise IllegalMove(f"{name}: {self.settings.vector_width} elements do not lie together everywhere")
        if self.settings.rows > 1 and (self.down is None or self.settings.rows > self.down.outputs):
            raise IllegalMove(f"{name}: it has no {self.settings.rows} rows of outputs to make at once")
        if self.outputs < 1:
            raise IllegalMove(f"{name}: a window is longer than what a block reads of a row")

    @property
    def row(self) -> Slide:
        """The row's slide."""
        return self.tiling.row

    @property
    def down(self) -> Slide | None:
        """The slide along which a tile has several rows."""
        return self.tiling.outer[-1] if self.tiling.outer else None

    @property
    def left(self) -> int:
        """Columns before the first element of the data: the padding, up to whole vectors."""
        return geometry.round_up(self.row.padding, self.settings.vector_width)

    @property
    def whole(self) -> bool:
        """Whether a tile has whole rows; the columns outside of the data are then filled once, by no vector."""
        return -(-self._last_column // self.settings.vector_width) <= self.settings.threads * self.settings.vectors

    @property
    def _last_column(self) -> int:
        """Columns of the data that the windows use."""
        used = self.row.span(self.row.outputs) - self.row.padding
        return min(self.row.data, geometry.round_up(used, self.settings.vector_width))

    @property
    def outputs(self) -> int:
        """Outputs of a row of a tile; tiles start at whole vectors of data."""
        if self.whole:
            return self.row.outputs
        width = self.settings.vector_width
        columns = self.settings.threads * self.settings.vectors * width - (self.left - self.row.padding)
        most = (columns - self.row.reach - 1) // self.row.stride + 1
        unit = width // math.gcd(width, self.row.stride)
        most = most // unit * unit
        if most < 1:
            return 0
        tiles = -(-self.row.outputs // most)
        return geometry.round_up(-(-self.row.outputs // tiles), unit)

    @property
    def vectors(self) -> int:
        """Vectors that a team reads of a row of data."""
        if self.whole:
            return -(-self._last_column // self.settings.vector_width)
        return -(-(self.left - self.row.padding + self.row.span(self.outputs)) // self.settings.vector_width)

    @property
    def team(self) -> int:
        """Threads that make a tile: a power of two that divides the block."""
        least = -(-self.vectors // self.settings.vectors)
        return min(self.settings.threads, geometry.power_of_two_at_least(least))

    @property
    def thread_vectors(self) -> int:
        """Vectors of a thread."""
        return -(-self.vectors // self.team)

    @property
    def busy(self) -> float:
        """Share of the vectors that a team could read which are data that the windows use."""
        return self._last_column / (self.row_tiles * self.team * self.thread_vectors * self.settings.vector_width)

    @property
    def teams(self) -> int:
        """Tiles of a block."""
        return self.settings.threads // self.team

    @property
    def columns(self) -> int:
        """Columns of a joined row in shared memory."""
        used = self.left - self.row.padding + self.row.span(self.outputs)
        kept = self.vectors * self.settings.vector_width + (self.left if self.whole else 0)
        return geometry.round_up(max(used, kept), max(4, self.settings.vector_width))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.teams * self.settings.rows * self.columns * self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Size of a struct with a field for each reduction."""
        sizes = [reduction.type.compute.size_bytes for reduction in self.tiling.nest.reductions]
        size = 0
        for field in sizes:
            size = geometry.round_up(size, field) + field
        return geometry.round_up(size, max(sizes))

    @property
    def row_tiles(self) -> int:
        """Tiles along a row."""
        return -(-self.row.outputs // self.outputs)

    @property
    def down_tiles(self) -> int:
        """Tiles along the other dimension of a tile."""
        return -(-self.down.outputs // self.settings.rows) if self.down else 1

    @property
    def others(self) -> list[Axis]:
        """Axes along which a tile has one output."""
        several = self.down.output.name if self.down and self.down.output else ""
        return [axis for axis in self.tiling.outputs if axis.name != several]

    @property
    def tiles(self) -> int:
        """All tiles."""
        return self.row_tiles * self.down_tiles * math.prod(axis.extent for axis in self.others)


def by_columns(layout: Layout, window: Windowed) -> list[str]:
    """The struct and the kernel."""
    text = kernel_text.KernelText(
        layout.tiling.nest, layout.row.position, layout.settings.vector_width, reserved=_MEMBERS,
    )  # fmt: skip
    window_loops.name_elements(text.function, window)
    joins = window_loops.joins(text.function)
    name = f"{text.entry}_window"
    lines = generated_struct.struct(
        name, text, [""], _sizes(layout, text),
        _state(text, joins), [""], _load(layout, text, joins), _store(layout, text),
    )  # fmt: skip
    threads, min_blocks = layout.settings.threads, layout.settings.min_blocks
    shared = {"columns": "ws::WindowTile<%>::Columns"}
    return lines + generated_struct.kernel(name, text, "reduce_windows", threads, min_blocks, shared=shared)


def _sizes(layout: Layout, text: KernelText) -> list[str]:
    """What the skeleton asks of a tile and of each dimension that windows slide over."""
    places = {axis.name: place for place, axis in enumerate(layout.others)}
    sizes = {
        "threads": layout.settings.threads, "group": layout.team, "vector_width": layout.settings.vector_width,
        "vectors": layout.vectors, "rows": layout.settings.rows, "outputs": layout.outputs, "columns": layout.columns,
        "whole_rows": layout.whole, "overlap": layout.settings.dependent_launch,
    }  # fmt: skip
    deep = (
        generated_struct.value("ws::Slide", {**each.fields, "axis": places[each.output.name] if each.output else -1})
        for each in layout.tiling.outer[:-1]
    )
    return [
        f"  using Offset = {text.offset};",
        *generated_struct.constant("ws::WindowTiling", "kTiling", sizes),
        *generated_struct.constant("ws::Slide", "kRow", layout.row.fields),
        *generated_struct.constant("ws::Slide", "kDown", (layout.down or STILL).fields),
        f"  using Deep = ws::Slides<{', '.join(deep)}>;",
        f"  using Outer = ws::Axes<{', '.join(str(axis.extent) for axis in layout.others) or 1}>;",
        "",
    ]


def _state(text: KernelText, joins: Sequence[Join]) -> list[str]:
    """What windows are reduced to: a field for each reduction."""
    fields = [(join, text.function.reductions[join.reduction.name]) for join in joins]
    return [
        f"  struct State {{ {' '.join(f'{join.kind} {name};' for join, name in fields)} }};",
        f"  WS_INLINE static State empty() {{ return {{{', '.join(join.neutral for join in joins)}}}; }}",
        *generated_struct.function(
            "static void join(State& a, const State& b)",
            [f"    {join.step(f'a.{name}', f'b.{name}')}" for join, name in fields],
        ),
    ]


def _load(layout: Layout, text: KernelText, joins: Sequence[Join]) -> list[str]:
    """Neighbours of the data as states."""
    axes, offset = text.function.axes, text.offset
    places = [axes[axis.name] for axis in layout.others]
    positions = [axes[slide.position] for slide in layout.tiling.outer] or [text.function.names.take("only")]
    inner = generated_struct.body(text, [axis.name for axis in layout.others])
    inner.learn(slide.position for slide in layout.tiling.outer)
    kind = f"ws::States<State, {layout.settings.vector_width}>"
    inner.line(f"{kind} values;")

    def element(scope: Scope) -> None:
        given = [(scope.converted(join.reduction.value, join.reduction.type), join.neutral) for join in joins]
        fields = (f"inside ? {value} : {neutral}" for value, neutral in given)
        scope.line(f"values[{text.lane}] = {{{', '.join(fields)}}};")

    text.elements(inner, [join.reduction.value for join in joins], element)
    inner.line("return values;")
    arguments = ", ".join(f"{offset} {name}" for name in (*positions, text.begin))
    head = f"{kind} load(const {offset} (&at)[{max(1, len(places))}], {arguments}, bool inside) const"
    return generated_struct.function(head, generated_struct.located(places, "at") + inner.lines)


def _store(layout: Layout, text: KernelText) -> list[str]:
    """One output, from the state of its window."""
    function, offset, nest = text.function, text.offset, layout.tiling.nest
    places = [function.axes[axis.name] for axis in layout.others]
    assert layout.row.output is not None
    down = layout.down.output if layout.down else None
    axes = [function.axes[down.name] if down else function.names.take("only"), function.axes[layout.row.output.name]]
    function.reductions.update({name: f"total.{field}" for name, field in function.reductions.items()})
    inner = generated_struct.body(text, [axis.name for axis in (*layout.others, down, layout.row.output) if axis])
    inner.learn(f"%{reduction.name}" for reduction in nest.reductions)
    inner.store_all(nest.stores)
    arguments = ", ".join(f"{offset} {name}" for name in axes)
    head = f"void store(const {offset} (&at)[{max(1, len(places))}], {arguments}, const State& total) const"
    return generated_struct.function(head, generated_struct.located(places, "at") + inner.lines)


def by_outputs(simple: Nest, settings: WindowSettings) -> list[str]:
    """The same for a thread for each output, which walks the windows of all reductions."""
    text = kernel_text.KernelText(simple, "", 1, reserved=_MEMBERS)
    window_loops.name_elements(text.function, simple.windows[0])
    inner = generated_struct.body(text, [axis.name for axis in simple.parallel])
    unroll = kernel_text.UNROLL if simple.column_count <= _LONGEST_UNROLLED_WINDOW else ""
    window_loops.walk_windows(inner, unroll=unroll, kind="int")
    inner.store_all(simple.stores)
    places = [text.function.axes[axis.name] for axis in simple.parallel]
    head = f"void operator()(const {text.offset} (&at)[{max(1, len(places))}]) const"
    sizes = [
        "",
        f"  using Offset = {text.offset};",
        f"  using Outer = ws::Axes<{', '.join(str(axis.extent) for axis in simple.parallel) or 1}>;",
        f"  static constexpr int kThreads = {settings.threads};",
        f"  static constexpr bool kOverlap = {str(settings.dependent_launch).lower()};",
        "",
    ]
    lines = generated_struct.function(head, generated_struct.located(places, "at") + inner.lines)
    name = f"{text.entry}_window"
    return generated_struct.struct(name, text, sizes, lines) + generated_struct.kernel(
        name, text, "reduce_each_window", settings.threads, settings.min_blocks
    )
