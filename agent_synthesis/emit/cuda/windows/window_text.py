"""The text of the CUDA window kernel: what a team of threads reads, joins by columns, and joins along rows.

The one idea: all extents of a tile are constants, so loops over its rows unroll and every load is used for all windows
that it belongs to. Which parameters are good is in `cuda_window`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from agent_synthesis.emit import windows
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.windows import Join, Loops, Slide, Tiling
from agent_synthesis.nests.ir import Axis, Index, Nest, Windowed
from agent_synthesis.schedule import Parameters
from warpsmith.errors import IllegalMove


@dataclass(frozen=True)
class Layout:
    """Tiles: which outputs a team makes, and where joined rows lie in shared memory.

    Column `q` of a joined row holds the data's column `q − left` in the first tile of a row, and so on.
    """

    tiling: Tiling
    threads: int
    pack: int
    rows: int
    """Rows of outputs of a tile."""
    items: int
    """Packs of a thread at most, along the row."""

    @staticmethod
    def of(tiling: Tiling, parameters: Parameters) -> Layout:
        """The layout that parameters ask for."""
        integers = parameters.integers
        return Layout(tiling, integers["threads"], integers["pack"], integers["rows"], integers["items"])

    @staticmethod
    def widest_pack(tiling: Tiling) -> int:
        """The most neighbouring columns that every access can move at once."""
        return geometry.widest_pack(_columns_only(tiling), Axis(tiling.row.position, tiling.row.data))

    def require(self, name: str) -> None:
        """Raises IllegalMove where the parameters do not fit the data."""
        if self.pack < 1 or self.widest_pack(self.tiling) % self.pack:
            raise IllegalMove(f"{name}: {self.pack} elements do not lie together everywhere")
        if self.rows > 1 and (self.down is None or self.rows > self.down.outputs):
            raise IllegalMove(f"{name}: it has no {self.rows} rows of outputs to make at once")
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
        """Columns before the first element of the data: the padding, up to whole packs."""
        return geometry.round_up(self.row.padding, self.pack)

    @property
    def whole(self) -> bool:
        """Whether a tile has whole rows; the columns outside of the data are then filled once, by nobody's pack."""
        return -(-self._last_column // self.pack) <= self.threads * self.items

    @property
    def _last_column(self) -> int:
        """Columns of the data that the windows use."""
        return min(self.row.data, geometry.round_up(self.row.span(self.row.outputs) - self.row.padding, self.pack))

    @property
    def outputs(self) -> int:
        """Outputs of a row of a tile; tiles start at whole packs of data."""
        if self.whole:
            return self.row.outputs
        columns = self.threads * self.items * self.pack - (self.left - self.row.padding)
        most = (columns - self.row.reach - 1) // self.row.stride + 1
        unit = self.pack // math.gcd(self.pack, self.row.stride)
        most = most // unit * unit
        if most < 1:
            return 0
        tiles = -(-self.row.outputs // most)
        return geometry.round_up(-(-self.row.outputs // tiles), unit)

    @property
    def packs(self) -> int:
        """Packs that a team reads of a row of data."""
        if self.whole:
            return -(-self._last_column // self.pack)
        return -(-(self.left - self.row.padding + self.row.span(self.outputs)) // self.pack)

    @property
    def team(self) -> int:
        """Threads that make a tile: a power of two that divides the block."""
        least = -(-self.packs // self.items)
        return min(self.threads, geometry.power_of_two_at_least(least))

    @property
    def turns(self) -> int:
        """Packs of a thread."""
        return -(-self.packs // self.team)

    @property
    def busy(self) -> float:
        """Share of the packs that a team could read which are data that the windows use."""
        return self._last_column / (self.row_tiles * self.team * self.turns * self.pack)

    @property
    def teams(self) -> int:
        """Tiles of a block."""
        return self.threads // self.team

    @property
    def columns(self) -> int:
        """Columns of a joined row in shared memory."""
        used = self.left - self.row.padding + self.row.span(self.outputs)
        kept = self.packs * self.pack + (self.left if self.whole else 0)
        return geometry.round_up(max(used, kept), max(4, self.pack))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        each = sum(reduction.type.compute.size_bytes for reduction in self.tiling.nest.reductions)
        return self.teams * self.rows * self.columns * each

    @property
    def row_tiles(self) -> int:
        """Tiles along a row."""
        return -(-self.row.outputs // self.outputs)

    @property
    def down_tiles(self) -> int:
        """Tiles along the other dimension of a tile."""
        return -(-self.down.outputs // self.rows) if self.down else 1

    @property
    def others(self) -> list[Axis]:
        """Axes along which a tile has one output."""
        several = self.down.output.name if self.down and self.down.output else ""
        return [axis for axis in self.tiling.outputs if axis.name != several]

    @property
    def tiles(self) -> int:
        """All tiles."""
        return self.row_tiles * self.down_tiles * math.prod(axis.extent for axis in self.others)


def _columns_only(tiling: Tiling) -> Nest:
    return replace(tiling.nest, stores=())


def by_columns(layout: Layout, window: Windowed, parameters: Parameters) -> list[str]:
    """The kernel's lines, without the closing brace."""
    return _Kernel(layout, window).lines(parameters)


class _Kernel:
    def __init__(self, layout: Layout, window: Windowed) -> None:
        self.layout = layout
        dialect = kernel_text.dialect_of("accurate")
        self.text = kernel_text.KernelText(
            layout.tiling.nest, layout.row.position, layout.pack, dialect, once=False, streaming=False
        )
        self.function = self.text.function
        windows.name_elements(self.function, window)
        self.joins = windows.joins(self.function)
        take = self.function.names.take
        self.columns = {
            j.reduction.name: take(f"{self.function.reductions[j.reduction.name]}_columns") for j in self.joins
        }
        self.held = {j.reduction.name: take(f"{self.function.reductions[j.reduction.name]}_packs") for j in self.joins}
        self.team, self.lane, self.tile, self.wanted = take("team"), take("rank"), take("tile"), take("wanted")
        self.row_begin, self.down_begin, self.o = take("row_begin"), take("down_begin"), take("o")

    def lines(self, parameters: Parameters) -> list[str]:
        layout, text = self.layout, self.text
        root = Scope(self.function, None)
        for join in self.joins:
            shared = f"{self.columns[join.reduction.name]}[{layout.teams}][{layout.rows}][{layout.columns}]"
            root.line(f"alignas(16) __shared__ {join.kind} {shared};")
        if parameters.choices["overlap"] == "yes":
            root.line("ws::wait_for_previous();")
            root.line("ws::launch_dependents();")
        self._place(root)
        self._fill_edges(root)
        self._join_columns(root)
        root.line("__syncthreads();")
        if layout.tiles % layout.teams:
            root.line(f"if ({self.wanted} >= {layout.tiles}) return;")
        self._join_rows(root)
        return [*text.signature(text.entry, layout.threads, parameters.integers["blocks"]), *root.lines]

    def _place(self, root: Scope) -> None:
        """Says which tile the thread works on, and where it begins."""
        layout, offset = self.layout, self.text.offset
        root.line(f"const int {self.team} = threadIdx.x / {layout.team};")
        root.line(f"const int {self.lane} = threadIdx.x % {layout.team};")
        block = "blockIdx.x" if offset == "int" else "static_cast<ws::int64>(blockIdx.x)"
        number = f"{block} * {layout.teams} + {self.team}" if layout.teams > 1 else block
        if layout.tiles % layout.teams:
            # Teams without a tile join the last one too, for the barrier's sake, and leave before they store.
            root.line(f"const {offset} {self.wanted} = {number};")
            number = f"ws::min<{offset}>({self.wanted}, {layout.tiles - 1})"
        root.line(f"const {offset} {self.tile} = {number};")
        inside = 1
        if layout.row_tiles > 1:
            root.line(f"const {offset} {self.row_begin} = {self.tile} % {layout.row_tiles} * {layout.outputs};")
            inside = layout.row_tiles
        if layout.down and layout.down_tiles > 1:
            value = f"{self.tile} / {inside}" if inside > 1 else self.tile
            root.line(f"const {offset} {self.down_begin} = {value} % {layout.down_tiles} * {layout.rows};")
            inside *= layout.down_tiles
        outer = math.prod(axis.extent for axis in layout.others)
        for position, axis in reversed(list(enumerate(layout.others))):
            value = f"{self.tile} / {inside}" if inside > 1 else self.tile
            outer //= axis.extent
            if position:
                value = f"{value} % {axis.extent}"
            root.line(f"const {offset} {self.function.axes[axis.name]} = {value};")
            inside *= axis.extent
        root.learn(axis.name for axis in layout.others)

    def _fill_edges(self, root: Scope) -> None:
        """Where a tile has whole rows, no pack covers the padding."""
        layout = self.layout
        if not layout.whole:
            return
        end = layout.left + layout.packs * layout.pack
        used = layout.left - layout.row.padding + layout.row.span(layout.outputs)
        for first, last in ((layout.left - layout.row.padding, layout.left), (end, used)):
            if first >= last:
                continue
            root.line(f"for (int q = {first} + {self.lane}; q < {last}; q += {layout.team}) {{")
            root.line(f"  for (int {self.o} = 0; {self.o} < {layout.rows}; ++{self.o}) {{")
            for join in self.joins:
                root.line(f"    {self.columns[join.reduction.name]}[{self.team}][{self.o}][q] = {join.neutral};")
            root.line("  }")
            root.line("}")

    # -- columns

    def _join_columns(self, root: Scope) -> None:
        layout, pack = self.layout, self.layout.pack
        item, number = self.function.names.take("item"), self.function.names.take("pack")
        looped = layout.turns > 1
        body = root.child(deeper=int(looped))
        body.line(f"const int {number} = {self.lane}{f' + {item} * {layout.team}' if looped else ''};")
        first = f"{pack} * {number}" if pack > 1 else number
        if not layout.whole:
            start = f"{layout.row.stride} * {self.row_begin}" if layout.row.stride > 1 else self.row_begin
            start = f"{start} + {first}" if layout.row_tiles > 1 else first
            first = f"{start} - {layout.left}" if layout.left else start
        body.line(f"const {self.text.offset} {self.text.begin} = {first};")
        for join in self.joins:
            kind = f"ws::Pack<{join.kind}, {pack}>"
            body.line(f"{kind} {self.held[join.reduction.name]}[{layout.rows}];")
            body.line(kernel_text.UNROLL)
            body.line(f"for (int {self.o} = 0; {self.o} < {layout.rows}; ++{self.o})")
            body.line(
                f"  {self.held[join.reduction.name]}[{self.o}] = ws::filled<{join.kind}, {pack}>({join.neutral});"
            )
        guard = self._guard(number)
        inside = body.child(deeper=int(bool(guard)))
        self._join_rows_of_data(inside)
        if guard:
            body.line(f"if ({guard}) {{")
        body.absorb(inside)
        if guard:
            body.line("}")
        place = f"{self.o}][{f'{layout.left} + ' if layout.whole and layout.left else ''}{pack} * {number}]"
        stored = body.child()
        for join in self.joins:
            name = join.reduction.name
            stored.line(f"ws::store(&{self.columns[name]}[{self.team}][{place}, {self.held[name]}[{self.o}]);")
        short = layout.packs % layout.team != 0
        body.line(kernel_text.UNROLL)
        body.line(f"for (int {self.o} = 0; {self.o} < {layout.rows}; ++{self.o}) {{")
        if short:
            body.line(f"  if ({number} < {layout.packs}) {{")
            body.lines.extend(f"  {line}" for line in stored.lines)
            body.line("  }")
        else:
            body.absorb(stored)
        body.line("}")
        if looped:
            root.line(kernel_text.UNROLL)
            root.line(f"for (int {item} = 0; {item} < {layout.turns}; ++{item}) {{")
        root.absorb(body)
        if looped:
            root.line("}")

    def _guard(self, number: str) -> str:
        """The condition under which a thread's pack lies in the data."""
        layout = self.layout
        tests = []
        if layout.packs % layout.team:
            tests.append(f"{number} < {layout.packs}")
        if not layout.whole:
            if layout.left:
                tests.append(f"{self.text.begin} >= 0")
            tests.append(f"{self.text.begin} < {layout.row.data}")
        return " && ".join(tests)

    def _join_rows_of_data(self, scope: Scope) -> None:
        """Loops over the other dimensions of the window, then over the tile's rows of data."""
        loops = Loops(scope)
        for slide in self.layout.tiling.outer[:-1]:
            loops.slide(slide, "int", self.text.offset)
        if self.layout.down:
            self._down(loops.inner, self.layout.down)
        else:
            self._take(loops.inner, "", "")
        loops.close()

    def _down(self, scope: Scope, down: Slide) -> None:
        """The tile's rows of data, each read once and joined to every row of outputs whose windows it belongs to."""
        layout, offset = self.layout, self.text.offset
        name = self.function.axes[down.position]
        step = self.function.names.take(f"d{name}")
        inner = scope.child([down.position])
        begin = self.down_begin if layout.down_tiles > 1 else "0"
        index = Index.axis("begin", down.stride).shifted(-down.padding) + Index.axis("step")
        value = f"{down.stride} * {begin} + {step}" if begin != "0" and down.stride > 1 else f"{begin} + {step}"
        if begin == "0":
            value = step
        if down.padding:
            value += f" - {down.padding}"
        span = down.span(layout.rows)
        extents = {"begin": layout.down_tiles * layout.rows - layout.rows + 1, "step": span}
        low, high = index.bounds(extents)
        inside = ""
        if low < 0 or high >= down.data:
            tests = [f"{name} >= 0"] * (low < 0) + [f"{name} < {down.data}"] * (high >= down.data)
            seen, inside = self.function.names.take(f"{name}_seen"), self.function.names.take("inside")
            inner.line(f"const {offset} {seen} = {value};")
            clamped = f"ws::max<{offset}>({seen}, 0)" if low < 0 else seen
            clamped = f"ws::min<{offset}>({clamped}, {down.data - 1})" if high >= down.data else clamped
            inner.line(f"const {offset} {name} = {clamped};")
            inner.line(f"const bool {inside} = {' && '.join(t.replace(name, seen, 1) for t in tests)};")
        else:
            inner.line(f"const {offset} {name} = {value};")
        self._take(inner, step, inside)
        scope.line(kernel_text.UNROLL)
        scope.line(f"for (int {step} = 0; {step} < {span}; ++{step}) {{")
        scope.absorb(inner)
        scope.line("}")

    def _take(self, scope: Scope, step: str, inside: str) -> None:
        """Joins one row of data, at the thread's pack, to the accumulators."""
        down = self.layout.down

        def body(element: Scope) -> None:
            for join in self.joins:
                value = element.converted(join.reduction.value, join.reduction.type)
                if inside:
                    value = f"{inside} ? {value} : {join.neutral}"
                accumulator = f"{self.held[join.reduction.name]}[{self.o if down else 0}][{self.text.lane}]"
                if not down:
                    element.line(join.step(accumulator, value))
                    continue
                name = self.function.names.take("value")
                element.line(f"const {join.kind} {name} = {value};")
                self._take_everywhere(element, join, accumulator, name, step, down)

        self.text.elements(scope, [join.reduction.value for join in self.joins], body)

    def _take_everywhere(self, scope: Scope, join: Join, accumulator: str, value: str, step: str, down: Slide) -> None:
        """The statement for every row of outputs whose window has an element at the row of data `step`."""
        layout = self.layout
        if layout.rows == 1:
            if down.dilation > 1:
                scope.line(
                    f"if ({step} % {down.dilation} == 0) {join.step(accumulator.replace(self.o, '0', 1), value)}"
                )
            else:
                scope.line(join.step(accumulator.replace(f"[{self.o}]", "[0]", 1), value))
            return
        k = self.function.names.take("k")
        scope.line(kernel_text.UNROLL)
        scope.line(f"for (int {self.o} = 0; {self.o} < {layout.rows}; ++{self.o}) {{")
        times = f"{down.stride} * {self.o}" if down.stride > 1 else self.o
        scope.line(f"  const int {k} = {step} - {times};")
        tests = [f"{k} >= 0", f"{k} <= {down.reach}"] + [f"{k} % {down.dilation} == 0"] * (down.dilation > 1)
        scope.line(f"  if ({' && '.join(tests)}) {join.step(accumulator, value)}")
        scope.line("}")

    # -- rows

    def _join_rows(self, root: Scope) -> None:
        """Joins the windows along the joined rows, and stores."""
        layout, offset = self.layout, self.text.offset
        row, down = layout.row, layout.down
        assert row.output is not None
        q = self.function.names.take("q")
        i = self.function.axes[row.output.name]
        column = root.child([row.output.name])
        column.line(f"const {offset} {i} = {f'{self.row_begin} + ' if layout.row_tiles > 1 else ''}{q};")
        if layout.row_tiles > 1 and row.outputs % layout.outputs:
            column.line(f"if ({i} >= {row.outputs}) break;")
        several = layout.rows > 1
        known = [down.output.name] if down and down.output else []
        inner = column.child(known, deeper=int(several))
        if down and down.output:
            place = self.function.axes[down.output.name]
            begin = self.down_begin if layout.down_tiles > 1 else ""
            value = " + ".join([begin] * bool(begin) + [self.o] * several) or "0"
            inner.line(f"const {offset} {place} = {value};")
            if down.outputs % layout.rows:
                inner.line(f"if ({place} >= {down.outputs}) break;")
        shift = layout.left - row.padding
        start = f"{row.stride} * {q}" if row.stride > 1 else q
        start = f"{start} + {shift}" if shift else start
        for join in self.joins:
            name = join.reduction.name
            from_ = f"&{self.columns[name]}[{self.team}][{self.o if several else 0}][{start}]"
            call = f"ws::join_steps<ws::{join.operation}, {row.size}, {row.dilation}>({from_})"
            inner.line(f"const {join.kind} {self.function.reductions[name]} = {call};")
            inner.learn([f"%{name}"])
        inner.expect(store.value for store in layout.tiling.nest.stores)
        for store in layout.tiling.nest.stores:
            inner.store(store)
        if several:
            column.line(kernel_text.UNROLL)
            column.line(f"for (int {self.o} = 0; {self.o} < {layout.rows}; ++{self.o}) {{")
        column.absorb(inner)
        if several:
            column.line("}")
        root.line(f"for (int {q} = {self.lane}; {q} < {layout.outputs}; {q} += {layout.team}) {{")
        root.absorb(column)
        root.line("}")
