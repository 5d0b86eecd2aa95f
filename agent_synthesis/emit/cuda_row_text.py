"""The text of a row reduction on CUDA: a row's packs are held by a team of threads, or visited again stage by stage.

The team is some lanes, a block, a cluster, or several blocks of a grid; only the prologue and the exchange differ. See
`cuda_row_reduction` for the strategies; this file only writes them down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_synthesis.emit import cuda_ordinary, cuda_shape, cuda_text, sweeps
from agent_synthesis.emit.cuda_stages import Stage, kept_parts, narrowed
from agent_synthesis.emit.cuda_team import team_of
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import accumulator
from agent_synthesis.ir import Expression, Load, Nest, Reduction
from agent_synthesis.schedule import Parameters
from warpsmith.hardware import Hardware


class RowKernel:
    """Writes one kernel of a row reduction; used once."""

    def __init__(self, hardware: Hardware, nest: Nest, parameters: Parameters, stages: Sequence[Stage]) -> None:
        self.nest = nest
        self.team = team_of(hardware, nest, parameters)
        self.stages = list(stages)
        self.min_blocks = parameters.integers["min_blocks"]
        self._preload = parameters.choices["preload"] == "yes"
        self._place = cuda_shape.skew(nest, nest.reduced[0], self.team.pack)
        self.text = cuda_text.KernelText(
            nest, nest.reduced[0].name, self.team.pack, cuda_text.dialect_of(parameters.choices["exp"]),
            once=parameters.choices["loads"] == "once", streaming=parameters.choices["stores"] == "streaming",
            skew=self._place,
        )  # fmt: skip
        self.function = self.text.function
        names = self.function.names
        self.row, self.first, self.end = names.take("row"), names.take("first"), names.take("end")
        self.rank, self.v, self.chunk = names.take("rank"), names.take("v"), names.take("chunk")
        self._whole = names.take("whole") if self.team.skewed else ""
        self.root = Scope(self.function, None)
        self.element_stores = [store for store in nest.stores if nest.is_element_store(store)]
        self.row_stores = [store for store in nest.stores if not nest.is_element_store(store)]
        self._pack_count = "kPacks"
        self._held: list[tuple[Load, str]] = []
        self._keep = kept_parts(nest, stages) if self.team.holds_row else {}
        self._kept: list[tuple[Expression, str]] = []
        """Kept parts with the text of an element, once their stage is done."""
        self.dialect = self.function.dialect
        self._results = dict(self.function.reductions)

    # -- who has what

    def prologue(self, *, backwards: bool = False, together: int = 0) -> None:
        """Constants, the row of this team, its axes, and the first element of this thread.

        `backwards`: the first blocks have the last rows; `together`: so many parts of a row come before the next row's
        parts, instead of all.
        """
        team, root, offset = self.team, self.root, self.text.offset
        root.line(f"constexpr int kColumns = {team.columns};")
        root.line(f"constexpr int kPacks = {team.packs};{'' if team.holds_row else '  // in registers at once'}")
        block = "blockIdx.x" if offset == "int" else "static_cast<ws::int64>(blockIdx.x)"
        if team.splits > 1 or team.reduce in ("cluster", "grid"):
            root.line(f"constexpr int kSplits = {team.splits};")
            rows, number = self.nest.row_count, block
            if backwards:
                number = self.function.names.take("number")
                root.line(f"const {offset} {number} = {rows * team.splits - 1} - {block};  // what was read last first")
            if together > 1:
                part = f"{number} / {rows * together} * {together} + {number} % {together}"
                root.line(f"const int {self.rank} = {f'static_cast<int>({part})' if offset != 'int' else part};")
                root.line(f"const {offset} {self.row} = {number} / {together} % {rows};")
            elif together:
                root.line(f"const int {self.rank} = {number if backwards else 'blockIdx.x'} / {rows};")
                root.line(f"const {offset} {self.row} = {number} % {rows};")
            else:
                root.line(f"const int {self.rank} = {number if backwards else 'blockIdx.x'} % kSplits;")
                root.line(f"const {offset} {self.row} = {number} / kSplits;")
        elif team.rows_a_block > 1:
            rows = self.nest.row_count
            root.line(f"constexpr int kLanes = {team.lanes};")
            place = f"{block} * {team.rows_a_block} + threadIdx.x / kLanes"
            if rows % team.rows_a_block:
                wanted = self.function.names.take("wanted_row")
                root.line(f"const {offset} {wanted} = {place};")
                root.line(f"const bool inside = {wanted} < {rows};")
                root.line(f"const {offset} {self.row} = inside ? {wanted} : {rows - 1};")
            else:
                root.line(f"const {offset} {self.row} = {place};")
        else:
            root.line(f"const {offset} {self.row} = {block};")
        for axis, value in cuda_shape.row_axes(self.nest, self.row).items():
            root.line(f"const {offset} {self.function.axes[axis]} = {value};")
        self.columns(root)
        root.learn(axis.name for axis in self.nest.parallel)

    def columns(self, root: Scope) -> None:
        """The first element of this thread, and where those of its block end."""
        team = self.team
        thread = "threadIdx.x" if team.lanes == team.threads else "(threadIdx.x % kLanes)"
        scaled = f"{team.pack} * {thread}" if team.pack > 1 else thread.strip("()")
        start = f"{self.rank} * {team.begin} + " if team.splits > 1 else ""
        before = ""
        if self._place is not None:
            shift = self.function.names.take("shift")
            place = self.function.index(self._place)
            root.line(f"const int {shift} = ({place}) % {team.pack};  // the row's first pack begins so far before it")
            before = f" - {shift}"
        root.line(f"const int {self.first} = {start}{scaled}{before};")
        if not team.is_even:
            last = "kColumns"
            if team.splits > 1 and not team.interleaved:
                last = f"min(kColumns, ({self.rank} + 1) * {team.slice}{before})"
            root.line(f"const int {self.end} = {last};")

    @property
    def leader(self) -> str:
        """Condition of the thread that stores what is stored once a row."""
        team = self.team
        if team.splits > 1:
            return f"{self.rank} == 0 && threadIdx.x == 0"
        if team.lanes == team.threads:
            return "threadIdx.x == 0"
        inside = " && inside" if self.nest.row_count % team.rows_a_block else ""
        return f"threadIdx.x % kLanes == 0{inside}"

    # -- visits

    def _packs(self, scope: Scope, base: str, write: object, *, guard: bool = True) -> None:
        """An unrolled loop over the packs in registers; `write(scope)` adds the body for the pack `v`."""
        assert callable(write)
        team = self.team
        single = team.packs == 1
        inner = scope.child()
        begin = base if single else f"{base} + {self.v} * {team.step}"
        inner.line(f"const int {self.text.begin} = {begin};")
        if guard and team.skewed and base == self.first and team.whole_packs > 2:
            self.text.whole = self._whole
            place = f"0 < {self.v} && {self.v} < {team.whole_packs}"
            inner.line(f"const bool {self.text.whole} = {place};  // packs that surely lie inside")
        known = f"{self.text.whole} || " if self.text.whole else ""
        body = inner.child(deeper=int(guard and not team.is_even))
        write(body)
        self.text.whole = ""
        if single:
            scope.line("{")
        else:
            scope.line(cuda_text.UNROLL)
            scope.line(f"for (int {self.v} = 0; {self.v} < {self._pack_count}; ++{self.v}) {{")
        if guard and not team.is_even:
            inner.line(f"if ({known}{self.text.begin} < {self.end}) {{")
            inner.absorb(body)
            inner.line("}")
        else:
            inner.absorb(body)
        scope.absorb(inner)
        scope.line("}")

    @property
    def _slot(self) -> str:
        return f"[{self.v}]" if self.team.packs > 1 else "[0]"

    def hold(self, scope: Scope, loads: Sequence[Load], base: str) -> list[tuple[Load, str]]:
        """Declares and fills the packs of loads; the text of the pack `v` of each."""
        wide = [load for load in loads if self._is_holdable(load)]
        held = []
        for load in wide:
            name = self.function.names.take(f"{self.function.buffers[load.buffer]}_row")
            scope.line(f"{self.text.pack_type(self.text.storage(load.buffer))} {name}[{self._pack_count}];")
            held.append((load, name))

        def write(inner: Scope) -> None:
            for load, name in held:
                inner.line(f"{name}{self._slot} = {self.text.pack_load(load, self.text.begin)};")

        if held:
            self._packs(scope, base, write)
        return [(load, f"{name}{self._slot}") for load, name in held]

    def _is_holdable(self, load: Load) -> bool:
        return self.text.access_of(load) == "pack" or (
            self.team.pack == 1 and cuda_shape.access(load.index, self.text.axis, 1) == "each"
        )

    def _reduction_loads(self) -> list[Load]:
        return self.text.varying_loads([reduction.value for stage in self.stages for reduction in stage.reductions])

    def _row_loads(self) -> list[Load]:
        """What a thread keeps from the first visit on: loads of reductions, and with `preload` those of stores."""
        first = self._reduction_loads()
        later = self.text.varying_loads(store.value for store in self.element_stores) if self._preload else []
        number = self.function.interner.number
        known = {number(load) for load in first}
        return first + [load for load in later if number(load) not in known]

    def hold_row(self) -> None:
        """Loads the row once, where a thread has registers for its part."""
        if self.team.holds_row:
            row = self._row_loads()
            first = len(self._reduction_loads())
            self._held = self.hold(self.root, row[:first], self.first)
            if row[first:]:
                self._held += self.hold(self.root, row[first:], self.first)
            self.root.line("")

    def hold_common(self) -> None:
        """Loads once what no row changes, for a block that takes many rows; with `preload` only."""
        if self._preload:
            roots = [reduction.value for stage in self.stages for reduction in stage.reductions]
            found = self.text.varying_loads([*roots, *(store.value for store in self.element_stores)])
            common = [load for load in found if not self.text.varies_by_row(load)]
            self._held = self.hold(self.root, common, self.first)

    def keep_nothing(self) -> None:
        """Parts are computed again where they are needed again."""
        self._keep = {}

    def each_pack(self, scope: Scope, write: object) -> None:
        """`write(scope)` for every pack that this thread has of a row."""
        self._packs(scope, self.first, write)

    def wait_for_previous(self) -> None:
        """Waits for the previous kernel, having asked for this block's part of rows that fit a cache all at once."""
        team, axis, card = self.team, self.text.axis, self.team.hardware
        one_wave = team.lanes == team.threads and self.nest.row_count * team.splits <= card.sm_count * self.min_blocks
        if one_wave and cuda_shape.row_data_bytes(self.nest) <= card.l2_bytes:
            for load in self._reduction_loads():
                size = self.text.storage(load.buffer).size_bytes
                rows = load.index.axes() - {axis}
                contiguous = load.index.coefficient(axis) == 1 and rows and self.text.access_of(load) == "pack"
                if contiguous and not team.skewed and team.columns % team.slice == 0 and team.pack * size % 16 == 0:
                    start = f"{self.rank} * {team.slice}" if team.splits > 1 else "0"
                    address = self.text.address(load.buffer, load, start)
                    self.root.line(f"if (threadIdx.x == 0) ws::prefetch({address}, {team.slice * size});")
        self.root.line("ws::wait_for_previous();")

    def hold_stores(self, varying: tuple[bool, ...] = (False, True)) -> None:
        """Loads once what the stores read, what rows share or what they do not, for a kernel that only stores."""
        if self.team.holds_row and self.element_stores:
            loads = self.text.varying_loads(store.value for store in self.element_stores)
            wanted = [load for load in loads if self.text.varies_by_row(load) in varying]
            self._held += self.hold(self.root, wanted, self.first)
        self._keep = {}

    def chunks(self, roots: Sequence[Expression], write: object) -> None:
        """Runs `write(scope, base, held)` on the held row, or on chunk after chunk of it."""
        assert callable(write)
        if self.team.holds_row:
            write(self.root, self.first, self._held)
            return
        team = self.team
        step = team.packs * team.stride
        stop = self.end if not team.is_even else f"{self.first} + {team.slice}"
        inner = self.root.child()
        held = self.hold(inner, self.text.varying_loads(roots), self.chunk)
        write(inner, self.chunk, held)
        self.root.line(f"for (int {self.chunk} = {self.first}; {self.chunk} < {stop}; {self.chunk} += {step}) {{")
        self.root.absorb(inner)
        self.root.line("}")

    def _define_kept(self, inner: Scope) -> None:
        for part, text in self._kept:
            inner.define(part, text)

    # -- stages

    def accumulate(self, number: int) -> str:
        """A thread's own state of a stage; the name of the variable."""
        stage = self.stages[number]
        return self._folds(number) if stage.kind == "folds" else self._merged(number)

    def _folds(self, number: int) -> str:
        stage, root = self.stages[number], self.root
        state_type = stage.state_type(self.dialect)
        running = self.function.names.take(f"own_{stage.name}")
        if not self.team.holds_row:  # a sum of sums, so that long rows stay exact
            root.line(f"{state_type} {running} = {state_type}::empty();")
        lanes = [self.function.names.take(f"{reduction.name}_lanes") for reduction in stage.reductions]
        roots = [reduction.value for reduction in stage.reductions]
        keeps = self._declare_kept(self.root, number)
        logarithms = cuda_ordinary.logarithms(roots, self.text.axis)

        def write(scope: Scope, base: str, held: list[tuple[Load, str]]) -> None:
            for reduction, lane in zip(stage.reductions, lanes, strict=True):
                kind = accumulator(reduction, self.dialect)
                scope.line(f"ws::Lanes<{stage.functor(reduction)}, {kind}, {self.team.pack}> {lane};")

            def visit(where: Scope, reductions: Sequence[Reduction], before: Callable[[Scope], None]) -> None:
                def body(inner: Scope) -> None:
                    self._define_kept(inner)
                    before(inner)
                    for reduction, lane in zip(reductions, lanes, strict=True):
                        value = inner.converted(reduction.value, reduction.type)
                        inner.line(f"{lane}.take({self.text.lane}, {value});")

                values = [reduction.value for reduction in reductions]
                self._packs(where, base, lambda s: self.text.elements(s, values, body, held=held))

            if logarithms and not keeps:
                cuda_ordinary.fold(scope, stage.reductions, logarithms, lanes, visit)
            else:
                visit(scope, stage.reductions, lambda inner: self._keep_in(inner, keeps))
            parts = stage.state_of([f"{lane}.folded()" for lane in lanes])
            self._finish_chunk(scope, state_type, running, f"{state_type}{parts}")

        self.chunks(roots, write)
        self._kept += [(part, f"{name}{self._slot}[{self.text.lane}]") for part, name in keeps]
        return running

    def _declare_kept(self, scope: Scope, number: int) -> list[tuple[Expression, str]]:
        keeps = []
        for part in self._keep.get(number, ()):
            name = self.function.names.take("kept")
            scope.line(f"ws::Pack<{self.dialect.compute(part.type)}, {self.team.pack}> {name}[kPacks];")
            keeps.append((part, name))
        return keeps

    def _keep_in(self, inner: Scope, keeps: Sequence[tuple[Expression, str]]) -> None:
        for part, name in keeps:
            place = f"{name}{self._slot}[{self.text.lane}]"
            inner.line(f"{place} = {inner.value(part).text};")
            inner.define(part, place)

    def _merged(self, number: int) -> str:
        """Stages of two passes over registers: about a thread's own maximum or mean."""
        stage, root = self.stages[number], self.root
        state_type = stage.state_type(self.dialect)
        running = self.function.names.take(f"own_{stage.name}")
        if not self.team.holds_row:
            root.line(f"{state_type} {running} = {state_type}::empty();")
        write = self._shifted if stage.kind == "shifted" else self._moments
        roots = [reduction.value for reduction in stage.reductions]
        self.chunks(roots, lambda scope, base, held: write(scope, base, held, number, running))
        return running

    def _finish_chunk(self, scope: Scope, state_type: str, running: str, parts: str) -> None:
        if self.team.holds_row:
            scope.line(f"const {state_type} {running} = {parts};")
        else:
            scope.line(f"{running} = {state_type}::join({running}, {parts});")

    def _shifted(self, scope: Scope, base: str, held: list[tuple[Load, str]], number: int, running: str) -> None:
        stage = self.stages[number]
        top, total = stage.reductions
        names, kind, pack = self.function.names, self.dialect.compute(top.type), self.team.pack
        state_type = stage.state_type(self.dialect)
        greatest, pivot = names.take(f"{top.name}_lanes"), names.take("pivot")
        scope.line(f"ws::Lanes<ws::Maximum, {kind}, {pack}> {greatest};")

        def first(inner: Scope) -> None:
            self._define_kept(inner)
            inner.line(f"{greatest}.take({self.text.lane}, {inner.converted(top.value, top.type)});")

        self._packs(scope, base, lambda s: self.text.elements(s, [top.value], first, held=held))
        own = names.take(f"thread_{top.name}")
        scope.line(f"const {kind} {own} = {greatest}.folded();")
        scope.line(f"const {kind} {pivot} = {state_type}::pivot({own});")
        sum_lanes = names.take(f"{total.name}_lanes")
        scope.line(f"ws::Lanes<ws::Sum, {kind}, {pack}> {sum_lanes};")
        assert stage.shared is not None
        number_of = self.function.interner.number
        wanted = {number_of(part) for part in self._keep.get(number, ())}
        kept = names.take("shifted") if number_of(stage.shared) in wanted and self.team.holds_row else ""
        if kept:
            scope.line(f"ws::Pack<{kind}, {pack}> {kept}[kPacks];")
        self.function.reductions[top.name] = pivot

        def second(inner: Scope) -> None:
            self._define_kept(inner)
            if kept:
                self._keep_in(inner, [(stage.shared, kept)])  # type: ignore[list-item]
            inner.line(f"{sum_lanes}.take({self.text.lane}, {inner.converted(total.value, total.type)});")

        def visit(s: Scope) -> None:
            self.text.elements(s, [total.value], second, held=held, known=[f"%{top.name}"])

        self._packs(scope, base, visit)
        self._finish_chunk(scope, state_type, running, f"{state_type}{{{own}, {sum_lanes}.folded()}}")
        if kept:
            self._rescale = (stage, f"{kept}{self._slot}[{self.text.lane}]", own)

    _rescale: tuple[Stage, str, str] | None = None
    """Stage, element and thread's own maximum of exponentials that are kept about a thread's own maximum."""

    def _moments(self, scope: Scope, base: str, held: list[tuple[Load, str]], number: int, running: str) -> None:
        stage = self.stages[number]
        total, squares = stage.reductions
        names, pack = self.function.names, self.team.pack
        kind, squares_kind = self.dialect.compute(total.type), self.dialect.compute(squares.type)
        # A thread's few elements add up in the narrower type, also where the row's sum is a wider one.
        own_value = narrowed(total.value, squares.type)
        state_type = stage.state_type(self.dialect)
        lanes, count, mean = names.take(f"{total.name}_lanes"), names.take("count"), names.take("thread_mean")
        scope.line(f"ws::Lanes<ws::Sum, {squares_kind}, {pack}> {lanes};")
        even = self.team.is_even
        suffix = "f" if kind == "float" else ""
        if not even:
            scope.line(f"{squares_kind} {count} = 0;")

        def first(inner: Scope) -> None:
            self._define_kept(inner)
            inner.line(f"{lanes}.take({self.text.lane}, {inner.converted(own_value, squares.type)});")
            if self.team.skewed:
                inner.line(f"{count} += 1;")

        def visit(s: Scope) -> None:
            self.text.elements(s, [own_value], first, held=held)
            if not even and not self.team.skewed:
                s.line(f"{count} += {pack};")

        self._packs(scope, base, visit)
        if even:
            scope.line(f"constexpr {squares_kind} {count} = {self.team.packs * pack};")
            scope.line(f"const {kind} {mean} = {lanes}.folded() * (1.0{suffix} / {count});")
        else:
            least = f"max({count}, 1.0{'' if squares_kind == 'double' else 'f'})"
            own_sum = f"{lanes}.folded()" if kind == squares_kind else f"static_cast<{kind}>({lanes}.folded())"
            scope.line(f"const {kind} {mean} = {own_sum} / {least};")
        square_lanes = names.take(f"{squares.name}_lanes")
        scope.line(f"ws::Lanes<ws::Sum, {squares_kind}, {pack}> {square_lanes};")

        def second(inner: Scope) -> None:
            self._define_kept(inner)
            assert stage.shared is not None
            inner.define(stage.shared, mean if kind == squares_kind else f"static_cast<{squares_kind}>({mean})")
            inner.line(f"{square_lanes}.take({self.text.lane}, {inner.converted(squares.value, squares.type)});")

        def again(s: Scope) -> None:
            self.text.elements(s, [squares.value], second, held=held, known=[f"%{total.name}"])

        self._packs(scope, base, again)
        self._finish_chunk(scope, state_type, running, f"{state_type}{{{mean}, {count}, {square_lanes}.folded()}}")

    def learn(self, number: int, state: str) -> None:
        """From here on the stage's results are known, from the row's state."""
        stage = self.stages[number]
        for name, text in stage.results(state).items():
            reduction = next(r for r in stage.reductions if r.name == name)
            identifier = self._results[name]
            self.root.line(f"const {self.dialect.compute(reduction.result)} {identifier} = {text};")
            self.function.reductions[name] = identifier
        self.root.learn(sweeps.names_of(stage.reductions))
        if stage.kind == "moments" and stage.shared is not None:
            narrow = self.dialect.compute(stage.shared.type)
            same = stage.shared.type is stage.reductions[0].type
            self.root.define(stage.shared, f"{state}.mean" if same else f"static_cast<{narrow}>({state}.mean)")
        if self._rescale is not None and self._rescale[0] is stage and stage.shared is not None:
            _, element, own = self._rescale
            factor = self.function.names.take("rescale")
            top = self.function.reductions[stage.name]
            kind = self.dialect.compute(stage.reductions[0].type)
            self.root.line(f"const {kind} {factor} = {stage.state_type(self.dialect)}::exponential({own} - {top});")
            self._kept.append((stage.shared, f"({element} * {factor})"))
            self._rescale = None

    # -- ends

    def store(self) -> None:
        """The row's own stores and those of its elements.

        What a row's stores read of what they overwrite only the thread that writes it may read, so nothing of them is
        computed further out; they come last, since the others wait for nobody who waits for that.
        """
        names = {store.buffer for store in self.row_stores}
        values = [store.value for store in self.row_stores]
        in_place = any(load.buffer in names for load in cuda_shape.loads_below(values))
        if in_place:
            self._store_elements()
        if self.row_stores:
            scope = self.root.child(closed=in_place)
            (scope if in_place else self.root).expect(values)
            for store in self.row_stores:
                scope.store(store)
            self.root.line(f"if ({self.leader}) {{")
            self.root.absorb(scope)
            self.root.line("}")
        if not in_place:
            self._store_elements()

    def _store_elements(self) -> None:
        if not self.element_stores:
            return
        ragged_rows = self.team.rows_a_block > 1 and self.nest.row_count % self.team.rows_a_block
        if ragged_rows:
            self.root.line("if (!inside) return;")

        quick = cuda_ordinary.quick_quotients(self.root, self.element_stores, self.text.axis)

        def write(scope: Scope, base: str, held: list[tuple[Load, str]]) -> None:
            def body(s: Scope) -> None:
                self.text.stores(s, self.element_stores, self._define_kept, held=held, quick=quick)

            self._packs(scope, base, body)

        self.chunks([store.value for store in self.element_stores], write)

    def lines(self, signature: Sequence[str]) -> list[str]:
        """The finished kernel."""
        return [*signature, *self.root.lines, "}", ""]
