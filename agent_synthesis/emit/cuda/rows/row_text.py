"""The text of a row reduction on CUDA: a row's packs are held by a team of threads, or visited again stage by stage.

The one idea: everything that a kernel does to a row's elements, it does pack by pack in `chunks`; whether these are
registers, parts in shared memory or memory itself, what is done to them is the same. What a thread's first element is
is said at the end of this file; what it adds up, `row_accumulate`; how threads then agree, `row_exchange` and the files
of the other strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_synthesis.emit.cuda import geometry, kernel_text, ordinary_numbers
from agent_synthesis.emit.cuda.reduction_stages import Stage, kept_parts
from agent_synthesis.emit.cuda.rows.row_team import team_of
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.ir import Expression, Load, Nest
from agent_synthesis.schedule import Parameters
from warpsmith.hardware import Hardware

Held = list[tuple[Load, str]]
"""Loads whose packs are on chip, each with the text of the pack `v`."""
Write = Callable[[Scope, str, Held], None]
"""Adds to a scope what is done to the packs from a thread's element on, some of which are held."""


class RowKernel:
    """Writes one kernel of a row reduction; used once."""

    def __init__(self, hardware: Hardware, nest: Nest, parameters: Parameters, stages: Sequence[Stage]) -> None:
        self.nest = nest
        self.team = team_of(hardware, nest, parameters)
        self.stages = list(stages)
        self.min_blocks = parameters.integers["min_blocks"]
        self._preload = parameters.choices["preload"] == "yes"
        self.skew = geometry.skew(nest, nest.reduced[0], self.team.pack)
        self.text = kernel_text.KernelText(
            nest, nest.reduced[0].name, self.team.pack, kernel_text.dialect_of(parameters.choices["exp"]),
            once=parameters.choices["loads"] == "once", streaming=parameters.choices["stores"] == "streaming",
            skew=self.skew,
        )  # fmt: skip
        self.function = self.text.function
        names = self.function.names
        self.row, self.first, self.end = names.take("row"), names.take("first"), names.take("end")
        self.rank, self.v, self.chunk = names.take("rank"), names.take("v"), names.take("chunk")
        self._whole = names.take("whole") if self.team.skewed else ""
        self.root = Scope(self.function, None)
        self.element_stores = [store for store in nest.stores if nest.is_element_store(store)]
        self.row_stores = [store for store in nest.stores if not nest.is_element_store(store)]
        self.pack_count = "kPacks"
        self.held: Held = []
        self.to_keep = kept_parts(nest, stages) if self.team.holds_row else {}
        """Stage number → parts of its elements that registers keep for later stages and stores."""
        self.kept: list[tuple[Expression, str]] = []
        """Kept parts with the text of an element, once their stage is done."""
        self.rescale: tuple[Stage, str, str] | None = None
        """Stage, element and thread's own maximum of exponentials that are kept about a thread's own maximum."""
        self.dialect = self.function.dialect
        self.results = dict(self.function.reductions)
        """Reduction → the name that its result gets."""

    # -- visits

    def each_pack(self, scope: Scope, base: str, write: Callable[[Scope], None]) -> None:
        """An unrolled loop over the packs in registers; `write(scope)` adds the body for the pack `v`."""
        team = self.team
        single = team.packs == 1
        inner = scope.child()
        begin = base if single else f"{base} + {self.v} * {team.step}"
        inner.line(f"const int {self.text.begin} = {begin};")
        if team.skewed and base == self.first and team.whole_packs > 2:
            self.text.whole = self._whole
            place = f"0 < {self.v} && {self.v} < {team.whole_packs}"
            inner.line(f"const bool {self.text.whole} = {place};  // packs that surely lie inside")
        known = f"{self.text.whole} || " if self.text.whole else ""
        body = inner.child(deeper=not team.is_even)
        write(body)
        self.text.whole = ""
        if single:
            scope.line("{")
        else:
            scope.line(kernel_text.UNROLL)
            scope.line(f"for (int {self.v} = 0; {self.v} < {self.pack_count}; ++{self.v}) {{")
        if not team.is_even:
            inner.line(f"if ({known}{self.text.begin} < {self.end}) {{")
            inner.absorb(body)
            inner.line("}")
        else:
            inner.absorb(body)
        scope.absorb(inner)
        scope.line("}")

    @property
    def slot(self) -> str:
        """Index of the pack `v` among those in registers."""
        return f"[{self.v}]" if self.team.packs > 1 else "[0]"

    def hold(self, scope: Scope, loads: Sequence[Load], base: str) -> Held:
        """Declares and fills the packs of loads; the text of the pack `v` of each."""
        wide = [load for load in loads if self._is_holdable(load)]
        held = []
        for load in wide:
            name = self.function.names.take(f"{self.function.buffers[load.buffer]}_row")
            scope.line(f"{self.text.pack_type(self.text.storage(load.buffer))} {name}[{self.pack_count}];")
            held.append((load, name))

        def write(inner: Scope) -> None:
            for load, name in held:
                inner.line(f"{name}{self.slot} = {self.text.pack_load(load, self.text.begin)};")

        if held:
            self.each_pack(scope, base, write)
        return [(load, f"{name}{self.slot}") for load, name in held]

    def _is_holdable(self, load: Load) -> bool:
        return self.text.access_of(load) == "pack" or (
            self.team.pack == 1 and geometry.access(load.index, self.text.axis, 1) == "each"
        )

    def reduction_loads(self) -> list[Load]:
        """What the stages read along the row."""
        return self.text.varying_loads([reduction.value for stage in self.stages for reduction in stage.reductions])

    def row_loads(self) -> list[Load]:
        """What a thread keeps from the first visit on: loads of reductions, and with `preload` those of stores."""
        first = self.reduction_loads()
        later = self.text.varying_loads(store.value for store in self.element_stores) if self._preload else []
        number = self.function.interner.number
        known = {number(load) for load in first}
        return first + [load for load in later if number(load) not in known]

    def hold_row(self) -> None:
        """Loads the row once, where a thread has registers for its part."""
        if self.team.holds_row:
            row = self.row_loads()
            first = len(self.reduction_loads())
            self.held = self.hold(self.root, row[:first], self.first)
            if row[first:]:
                self.held += self.hold(self.root, row[first:], self.first)
            self.root.line("")

    def hold_common(self) -> None:
        """Loads once what no row changes, for a block that takes many rows; with `preload` only."""
        if self._preload:
            roots = [reduction.value for stage in self.stages for reduction in stage.reductions]
            found = self.text.varying_loads([*roots, *(store.value for store in self.element_stores)])
            common = [load for load in found if not self.text.varies_by_row(load)]
            self.held = self.hold(self.root, common, self.first)

    def keep_nothing(self) -> None:
        """Parts are computed again where they are needed again."""
        self.to_keep = {}

    def hold_stores(self, varying: tuple[bool, ...] = (False, True)) -> None:
        """Loads once what the stores read, what rows share or what they do not, for a kernel that only stores."""
        if self.team.holds_row and self.element_stores:
            loads = self.text.varying_loads(store.value for store in self.element_stores)
            wanted = [load for load in loads if self.text.varies_by_row(load) in varying]
            self.held += self.hold(self.root, wanted, self.first)
        self.to_keep = {}

    def chunks(self, roots: Sequence[Expression], write: Write) -> None:
        """Runs `write(scope, base, held)` on the held row, or on chunk after chunk of it."""
        if self.team.holds_row:
            write(self.root, self.first, self.held)
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

    def define_kept(self, inner: Scope) -> None:
        """Makes the kept parts known in the scope of an element."""
        for part, text in self.kept:
            inner.define(part, text)

    # -- ends

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

    def store(self) -> None:
        """The row's own stores and those of its elements.

        What a row's stores read of what they overwrite only the thread that writes it may read, so nothing of them is
        computed further out; they come last, since the others wait for nobody who waits for that.
        """
        names = {store.buffer for store in self.row_stores}
        values = [store.value for store in self.row_stores]
        in_place = any(load.buffer in names for load in geometry.loads_below(values))
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

        quick = ordinary_numbers.quick_quotients(self.root, self.element_stores, self.text.axis)

        def write(scope: Scope, base: str, held: Held) -> None:
            def body(s: Scope) -> None:
                self.text.stores(s, self.element_stores, self.define_kept, held=held, quick=quick)

            self.each_pack(scope, base, body)

        self.chunks([store.value for store in self.element_stores], write)

    def lines(self, signature: Sequence[str]) -> list[str]:
        """The finished kernel."""
        return [*signature, *self.root.lines, "}", ""]


def prologue(kernel: RowKernel, *, backwards: bool = False, together: int = 0) -> None:
    """Constants, the row of this team, its axes, and the first element of this thread.

    `backwards`: the first blocks have the last rows; `together`: so many parts of a row come before the next row's
    parts, instead of all.
    """
    team, root, offset = kernel.team, kernel.root, kernel.text.offset
    root.line(f"constexpr int kColumns = {team.columns};")
    root.line(f"constexpr int kPacks = {team.packs};{'' if team.holds_row else '  // in registers at once'}")
    block = "blockIdx.x" if offset == "int" else "static_cast<ws::int64>(blockIdx.x)"
    if team.splits > 1 or team.reduce in ("cluster", "grid"):
        root.line(f"constexpr int kSplits = {team.splits};")
        rows, number = kernel.nest.row_count, block
        if backwards:
            number = kernel.function.names.take("number")
            root.line(f"const {offset} {number} = {rows * team.splits - 1} - {block};  // what was read last first")
        if together > 1:
            part = f"{number} / {rows * together} * {together} + {number} % {together}"
            root.line(f"const int {kernel.rank} = {f'static_cast<int>({part})' if offset != 'int' else part};")
            root.line(f"const {offset} {kernel.row} = {number} / {together} % {rows};")
        elif together:
            root.line(f"const int {kernel.rank} = {number if backwards else 'blockIdx.x'} / {rows};")
            root.line(f"const {offset} {kernel.row} = {number} % {rows};")
        else:
            root.line(f"const int {kernel.rank} = {number if backwards else 'blockIdx.x'} % kSplits;")
            root.line(f"const {offset} {kernel.row} = {number} / kSplits;")
    elif team.rows_a_block > 1:
        rows = kernel.nest.row_count
        root.line(f"constexpr int kLanes = {team.lanes};")
        place = f"{block} * {team.rows_a_block} + threadIdx.x / kLanes"
        if rows % team.rows_a_block:
            wanted = kernel.function.names.take("wanted_row")
            root.line(f"const {offset} {wanted} = {place};")
            root.line(f"const bool inside = {wanted} < {rows};")
            root.line(f"const {offset} {kernel.row} = inside ? {wanted} : {rows - 1};")
        else:
            root.line(f"const {offset} {kernel.row} = {place};")
    else:
        root.line(f"const {offset} {kernel.row} = {block};")
    declare_axes(kernel, root)
    declare_columns(kernel, root)
    root.learn(axis.name for axis in kernel.nest.parallel)


def declare_axes(kernel: RowKernel, scope: Scope) -> None:
    """The axes of the row."""
    for axis, value in geometry.row_axes(kernel.nest, kernel.row).items():
        scope.line(f"const {kernel.text.offset} {kernel.function.axes[axis]} = {value};")


def declare_columns(kernel: RowKernel, root: Scope) -> None:
    """The first element of this thread, and where those of its block end."""
    team = kernel.team
    thread = "threadIdx.x" if team.lanes == team.threads else "(threadIdx.x % kLanes)"
    scaled = f"{team.pack} * {thread}" if team.pack > 1 else thread.strip("()")
    start = f"{kernel.rank} * {team.begin} + " if team.splits > 1 else ""
    before = ""
    if kernel.skew is not None:
        shift = kernel.function.names.take("shift")
        place = kernel.function.index(kernel.skew)
        root.line(f"const int {shift} = ({place}) % {team.pack};  // the row's first pack begins so far before it")
        before = f" - {shift}"
    root.line(f"const int {kernel.first} = {start}{scaled}{before};")
    if not team.is_even:
        last = "kColumns"
        if team.splits > 1 and not team.interleaved:
            last = f"min(kColumns, ({kernel.rank} + 1) * {team.slice}{before})"
        root.line(f"const int {kernel.end} = {last};")


def wait_for_previous(kernel: RowKernel) -> None:
    """Waits for the previous kernel, having asked for this block's part of rows that fit a cache all at once."""
    team, axis, card = kernel.team, kernel.text.axis, kernel.team.hardware
    one_wave = team.lanes == team.threads and kernel.nest.row_count * team.splits <= card.sm_count * kernel.min_blocks
    if one_wave and geometry.row_data_bytes(kernel.nest) <= card.l2_bytes:
        for load in kernel.reduction_loads():
            size = kernel.text.storage(load.buffer).size_bytes
            rows = load.index.axes() - {axis}
            contiguous = load.index.coefficient(axis) == 1 and rows and kernel.text.access_of(load) == "pack"
            if contiguous and not team.skewed and team.columns % team.slice == 0 and team.pack * size % 16 == 0:
                start = f"{kernel.rank} * {team.slice}" if team.splits > 1 else "0"
                address = kernel.text.address(load.buffer, load, start)
                kernel.root.line(f"if (threadIdx.x == 0) ws::prefetch({address}, {team.slice * size});")
    kernel.root.line("ws::wait_for_previous();")
