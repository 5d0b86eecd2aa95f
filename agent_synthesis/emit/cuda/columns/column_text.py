"""The text of a column reduction on CUDA.

See `cuda_column_reduction` for the strategy; this file only writes it down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.reduction_stages import Stage
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import accumulator, accumulator_bytes
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Axis, Expression, Load, Nest, Reduction
from agent_synthesis.schedule import Emission, Parameters


@dataclass(frozen=True)
class ColumnTeam:
    """Who has which columns and rows."""

    axis: Axis
    """The contiguous axis."""
    others: int
    """Points of the other parallel axes."""
    rows: int
    """Elements that each column reduces."""
    threads: int
    """Threads of a block."""
    lanes: int
    """Threads next to each other; the others of the block have other rows of the same columns."""
    splits: int
    """Blocks that share the rows of a column."""
    pack: int
    """Columns of a thread."""
    unroll: int
    """Rows that a thread has in flight."""

    @property
    def depth(self) -> int:
        """Threads of a block that share a column."""
        return self.threads // self.lanes

    @property
    def tiles(self) -> int:
        """Blocks next to each other along the axis."""
        return -(-self.axis.extent // (self.lanes * self.pack))

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.tiles * self.splits * self.others

    @property
    def is_whole(self) -> bool:
        """Whether every thread has columns."""
        return self.axis.extent % (self.lanes * self.pack) == 0

    @property
    def is_even(self) -> bool:
        """Whether every thread has equally many rows, in whole groups of `unroll`."""
        return self.rows % (self.splits * self.depth * self.unroll) == 0


class ColumnKernel:
    """Writes one kernel; used once."""

    def __init__(self, nest: Nest, team: ColumnTeam, parameters: Parameters, stages: Sequence[Stage]) -> None:
        self._nest, self._team, self._stages = nest, team, stages
        self._min_blocks = parameters.integers["min_blocks"]
        self._overlap = parameters.choices["overlap"] == "yes"
        self._text = kernel_text.KernelText(
            nest, team.axis.name, team.pack, kernel_text.dialect_of(parameters.choices["exp"]),
            once=parameters.choices["loads"] == "once", streaming=parameters.choices["stores"] == "streaming",
        )  # fmt: skip
        self._function = self._text.function
        names = self._function.names
        self._k = self._function.axes[nest.reduced[0].name]
        self._first, self._end, self._chunk = (names.take(f"{self._k}_{part}") for part in ("first", "end", "chunk"))
        self._u, self._tile, self._split, self._depth = (names.take(n) for n in ("u", "tile", "split", "depth"))
        self._root = Scope(self._function, None)
        self._known: list[str] = []

    def write(self, original: Nest, header: Sequence[str]) -> Emission:
        """The emission."""
        team, root, names = self._team, self._root, self._function.names
        shared = team.splits > 1
        partials = [names.take(f"{r.name}_partials") for r in self._nest.reductions] if shared else []
        counter = names.take("arrived") if shared else ""
        self._prologue()
        for stage in self._stages:
            lanes = self._accumulate(stage)
            if self._overlap and stage is self._stages[-1]:
                self._root.line("ws::launch_dependents();")
            self._over_depth(stage, lanes)
        if shared:
            self._over_splits(partials, counter)
        self._store()
        kinds = [self._kind(reduction) for reduction in self._nest.reductions]
        types = dict(zip(partials, kinds, strict=False))
        spaces = [
            geometry.workspace(original, name, -(-self._nest.row_count * team.splits * accumulator_bytes(r) // 8))
            for name, r in zip(partials, self._nest.reductions, strict=False)
        ]
        if shared:
            types[counter] = "unsigned"
            spaces.append(geometry.workspace(original, "arrived", -(-team.tiles * team.others // 2), zero=True))
        record = geometry.launch(
            original,
            grid=team.blocks,
            threads=team.threads,
            workspaces=[s.name for s in spaces],
            dependent=self._overlap,
        )
        signature = self._text.signature(self._text.entry, team.threads, self._min_blocks, workspaces=types)
        text = "\n".join([*header, *signature, *root.lines, "}", ""])
        return Emission(text, geometry.HEADERS, (record,), tuple(spaces))

    def _kind(self, reduction: Reduction) -> str:
        return accumulator(reduction, self._function.dialect)

    def _lanes_type(self, stage: Stage, reduction: Reduction) -> str:
        return f"ws::Lanes<{stage.functor(reduction)}, {self._kind(reduction)}, {self._team.pack}>"

    def _prologue(self) -> None:
        team, root, text = self._team, self._root, self._text
        if self._overlap:
            root.line("ws::wait_for_previous();")
        root.line(f"constexpr int kLanes = {team.lanes}, kDepth = {team.depth}, kUnroll = {team.unroll};")
        root.line(f"constexpr int kRows = {team.rows}, kTiles = {team.tiles};")
        root.line(f"const int {self._tile} = blockIdx.x % kTiles;")
        if team.splits > 1:
            root.line(f"constexpr int kSplits = {team.splits};")
            root.line(f"const int {self._split} = blockIdx.x / kTiles % kSplits;")
        others = [axis for axis in self._nest.parallel if axis.name != team.axis.name]
        inside = team.tiles * team.splits
        for position, axis in reversed(list(enumerate(others))):
            value = f"blockIdx.x / {inside}" + (f" % {axis.extent}" if position else "")
            root.line(f"const {text.offset} {self._function.axes[axis.name]} = {value};")
            inside *= axis.extent
        root.line(f"const int lane_of_tile = threadIdx.x % kLanes, {self._depth} = threadIdx.x / kLanes;")
        scaled = f"{team.pack} * lane_of_tile" if team.pack > 1 else "lane_of_tile"
        place = f"{self._tile} * {team.lanes * team.pack} + {scaled}"
        if team.is_whole:
            root.line(f"const {text.offset} {text.begin} = {place};")
        else:
            root.line(f"const bool inside = {place} < {team.axis.extent};")
            # Outside, a column of the same tile: another tile's partial results may not be there yet.
            first = f"{self._tile} * {team.lanes * team.pack}"
            root.line(f"const {text.offset} {text.begin} = inside ? {place} : {first};")
        if team.splits > 1:
            many = "static_cast<ws::int64>(kRows)" if team.rows * team.splits >= 2**31 else "kRows"
            root.line(f"const int {self._first} = {many} * {self._split} / kSplits + {self._depth};")
            root.line(f"const int {self._end} = {many} * ({self._split} + 1) / kSplits;")
        else:
            root.line(f"const int {self._first} = {self._depth}, {self._end} = kRows;")
        root.learn(axis.name for axis in others)

    def _rows(
        self,
        write: Callable[[Scope, list[tuple[Load, str]]], None],
        roots: Sequence[Expression],
        before: Callable[[Scope], None] = lambda _: None,
        after: Callable[[Scope], None] = lambda _: None,
    ) -> None:
        """A loop over this thread's rows, some of which are loaded before any is used."""
        team, root, text = self._team, self._root, self._text
        loop = root.child()
        held = []
        for load in text.varying_loads(roots):
            if (
                self._nest.reduced[0].name in load.index.axes()
                and text.access_of(load) != "same"
                and (text.access_of(load) == "pack" or team.pack == 1)
            ):
                name = self._function.names.take(f"{self._function.buffers[load.buffer]}_rows")
                loop.line(f"{text.pack_type(text.storage(load.buffer))} {name}[kUnroll];")
                held.append((load, name))
        if held:

            def fill(scope: Scope) -> None:
                for load, name in held:
                    scope.line(f"{name}[{self._u}] = {text.pack_load(load, text.begin)};")

            self._unrolled(loop, fill)
        before(loop)
        self._unrolled(loop, lambda scope: write(scope, [(load, f"{name}[{self._u}]") for load, name in held]))
        after(loop)
        step = "kUnroll * kDepth"
        root.line(f"for (int {self._chunk} = {self._first}; {self._chunk} < {self._end}; {self._chunk} += {step}) {{")
        root.absorb(loop)
        root.line("}")

    def _unrolled(self, scope: Scope, write: Callable[[Scope], object]) -> None:
        inner = scope.child([self._nest.reduced[0].name], deeper=1 if self._team.is_even else 2)
        write(inner)
        scope.line(kernel_text.UNROLL)
        scope.line(f"for (int {self._u} = 0; {self._u} < kUnroll; ++{self._u}) {{")
        scope.line(f"  const int {self._k} = {self._chunk} + {self._u} * kDepth;")
        if self._team.is_even:
            scope.absorb(inner)
        else:
            scope.line(f"  if ({self._k} < {self._end}) {{")
            scope.absorb(inner)
            scope.line("  }")
        scope.line("}")

    def _accumulate(self, stage: Stage) -> list[str]:
        lanes = []
        for reduction in stage.reductions:
            name = self._function.names.take(f"{reduction.name}_lanes")
            self._root.line(
                f"ws::Lanes<{stage.functor(reduction)}, {self._kind(reduction)}, {self._team.pack}> {name};"
            )
            lanes.append(name)
        roots = [reduction.value for reduction in stage.reductions]
        parts = [self._function.names.take(f"{reduction.name}_part") for reduction in stage.reductions]

        def write(scope: Scope, held: list[tuple[Load, str]]) -> None:
            def body(inner: Scope) -> None:
                for reduction, name in zip(stage.reductions, parts, strict=True):
                    inner.line(f"{name}.take({self._text.lane}, {inner.converted(reduction.value, reduction.type)});")

            self._text.elements(scope, roots, body, held=held, known=self._known)

        def declare(loop: Scope) -> None:  # a sum of sums, so that many rows stay exact
            for reduction, name in zip(stage.reductions, parts, strict=True):
                kind = self._lanes_type(stage, reduction)
                loop.line(f"{kind} {name};")

        def join(loop: Scope) -> None:
            for name, lane in zip(parts, lanes, strict=True):
                loop.line(f"{lane}.join({name}.pack());")

        self._rows(write, roots, declare, join)
        return lanes

    def _over_depth(self, stage: Stage, lanes: Sequence[str]) -> None:
        """Every thread gets its columns' results over the block."""
        for reduction, lane in zip(stage.reductions, lanes, strict=True):
            result = lane
            if self._team.depth > 1:
                box = self._function.names.take(f"{reduction.name}_box")
                result = self._function.names.take(f"block_{reduction.name}")
                kind = self._lanes_type(stage, reduction)
                self._root.line(
                    f"__shared__ ws::Pack<{self._kind(reduction)}, {self._team.pack}> {box}[kDepth * kLanes];"
                )
                call = f"ws::over_depth<kDepth, kLanes>({lane}, {box})"
                self._root.line(f"const {kind} {result} = {call};")
            self._function.reductions[reduction.name] = self._result(reduction, result)
            self._known.append(f"%{reduction.name}")
        self._root.line("")

    def _result(self, reduction: Reduction, lanes: str) -> str:
        """The result of one column, of a thread's columns."""
        return f"{lanes}.lane[{self._text.lane}]{'.position' if reduction.operation in ARG_REDUCTIONS else ''}"

    def _over_splits(self, partials: Sequence[str], counter: str) -> None:
        """The last block of a tile to arrive adds what all have left, in order."""
        team, root, names = self._team, self._root, self._function.names
        (stage,) = self._stages
        point = names.take("point")
        size = team.axis.extent
        outer = f"blockIdx.x / (kTiles * kSplits) * {size} + " if team.others > 1 else ""
        root.line(f"const ws::int64 {point} = {outer}{self._text.begin};")
        guard = "" if team.is_whole else " && inside"
        root.line(f"if ({self._depth} == 0{guard}) {{")
        for reduction, space in zip(stage.reductions, partials, strict=True):
            result = self._function.reductions[reduction.name].split(".")[0]
            total = team.others * size
            root.line(f"  ws::store({space} + {self._split} * ws::int64({total}) + {point}, {result}.pack());")
        root.line("}")
        root.line("__threadfence();")
        last = names.take("is_last")
        root.line(f"__shared__ bool {last};")
        root.line("__syncthreads();")
        group = f"blockIdx.x / (kTiles * kSplits) * kTiles + {self._tile}" if team.others > 1 else self._tile
        root.line("if (threadIdx.x == 0) {")
        root.line(f"  {last} = ws::arrive({counter} + {group}) == kSplits - 1;")
        root.line(f"  if ({last}) {counter}[{group}] = 0;")
        root.line("}")
        root.line("__syncthreads();")
        root.line(f"if (!{last}) return;")
        for reduction, space in zip(stage.reductions, partials, strict=True):
            lane = names.take(f"all_{reduction.name}")
            kind = self._lanes_type(stage, reduction)
            root.line(f"{kind} {lane};")
            root.line("#pragma unroll 8")
            root.line(f"for (int s = {self._depth}; s < kSplits; s += kDepth) {{")
            place = f"{space} + s * ws::int64({team.others * size}) + {point}"
            root.line(f"  {lane}.join(ws::load<{team.pack}, ws::kWritten>({place}));")
            root.line("}")
            result = lane
            if team.depth > 1:
                box, result = names.take(f"{reduction.name}_box"), names.take(f"whole_{reduction.name}")
                root.line(f"__shared__ ws::Pack<{self._kind(reduction)}, {team.pack}> {box}[kDepth * kLanes];")
                root.line(f"const {kind} {result} = ws::over_depth<kDepth, kLanes>({lane}, {box});")
            self._function.reductions[reduction.name] = self._result(reduction, result)
        root.line("")

    def _store(self) -> None:
        nest, root, text, team = self._nest, self._root, self._text, self._team
        once = [store for store in nest.stores if not nest.is_element_store(store)]
        each = [store for store in nest.stores if nest.is_element_store(store)]

        def learned(scope: Scope) -> None:
            scope.learn(self._known)

        if once:
            inner = root.child()
            text.stores(inner, once, learned)
            root.line(f"if ({self._depth} == 0{'' if team.is_whole else ' && inside'}) {{")
            root.absorb(inner)
            root.line("}")
        if each:
            if not team.is_whole:
                root.line("if (!inside) return;")
            self._rows(lambda scope, held: text.stores(scope, each, learned, held=held), [s.value for s in each])
