"""Row reductions by blocks that stay on their SM and keep as much of a long row in shared memory as fits there.

The one idea: a row is shared by as many blocks as keep all of it, up to all of the GPU, and comes in parts. What is
kept arrives by a thread's own copies while the row before is stored, so no barrier guards it; registers hold some packs
more, likewise. The parts beyond are visited last before the blocks agree and first, backwards, after it, when the
second-level cache still has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from agent_synthesis.emit import cuda_shape
from agent_synthesis.emit.cuda_row_accumulate import accumulate, learn
from agent_synthesis.emit.cuda_row_text import RowKernel
from agent_synthesis.emit.cuda_stages import Stage, slot_words
from agent_synthesis.emit.cuda_team import Team, early_values, kept_loads, team_of
from agent_synthesis.emit.expression import Scope
from agent_synthesis.ir import Expression, Load, Nest
from agent_synthesis.schedule import Emission, Parameters
from warpsmith.hardware import Hardware

HEADERS = (*cuda_shape.HEADERS, "ws_stream.cuh")

_OTHER_SHARED_BYTES = 2 << 10
"""What a block that keeps its row needs of shared memory besides: the states of its warps."""
_HELD_PACKS, _HELD_OF_A_REST = 8, 12
"""Packs of a thread in registers beside shared memory; in the second case others are left, which the L2 has to keep."""
_EVEN_SHARE = 0.96
"""Blocks that may work on rows, of those that the GPU has room for, so that all have equally much of one."""


def holders(hardware: Hardware, nest: Nest, draft: Parameters, most_reread: float) -> list[Parameters]:
    """As many blocks a row as keep all of it, or all blocks of the GPU where not even they can, if the share of a row
    that is read twice stays below `most_reread`; with and without packs in registers.

    `draft` says how large blocks and parts are, and how many blocks share an SM.
    """
    team, min_blocks = team_of(hardware, nest, draft), draft.integers["min_blocks"]
    without = replace(team, depth=0).ring_bytes(nest)
    part_bytes = replace(team, depth=1).ring_bytes(nest) - without
    room = hardware.shared_bytes // min_blocks - hardware.reserved_shared_bytes - _OTHER_SHARED_BYTES - without
    depth = room // max(1, part_bytes)
    if not part_bytes or depth < 1:
        return []
    resident = hardware.resident_blocks(min_blocks)
    found = []
    for held in (_HELD_OF_A_REST, _HELD_PACKS, 0):
        kept = depth + held // team.packs
        teams = max(1, min(nest.row_count, resident // -(-nest.column_count // (kept * team.part))))
        splits = _even_splits(nest, replace(team, splits=resident // teams))
        parts = replace(team, splits=splits).parts
        rest = max(0, parts - kept)
        if rest > most_reread * parts or (held == _HELD_OF_A_REST and not rest):
            continue
        settings = {"splits": splits, "depth": min(depth, parts), "lag": 0 if rest else min(2, parts), "held": held}
        loads = "shared" if rest else draft.choices["loads"]
        found.append(Parameters({**draft.choices, "loads": loads}, {**draft.integers, **settings}))
    return found


def _even_splits(nest: Nest, most: Team) -> int:
    """Blocks of a row, as many as there may be or a few less that all have equally much of it."""
    for splits in range(most.splits, int(most.splits * _EVEN_SHARE), -1):
        if replace(most, splits=splits).is_even:
            return splits
    return -(-nest.column_count // most.slice)


def emit(
    hardware: Hardware,
    nest: Nest,
    original: Nest,
    parameters: Parameters,
    stages: Sequence[Stage],
    header: Sequence[str],
) -> Emission:
    """One persistent kernel of a nest with one stage; it is cooperative where blocks share a row."""
    kernel = _HoldKernel(hardware, nest, parameters, stages[0])
    lines = kernel.body()
    team = kernel.team
    shared_row = team.splits > 1
    teams = team.teams(nest.row_count, kernel.min_blocks)
    words = 2 * teams * team.splits * slot_words(stages[0])
    spaces = [
        cuda_shape.workspace(original, "slots", words, zero=True),
        cuda_shape.workspace(original, "arrivals", teams, zero=True),
    ]
    types = {kernel.slots: "ws::uint64", kernel.arrivals: "ws::uint64"}
    signature = kernel.text.signature(
        kernel.text.entry, team.threads, kernel.min_blocks, workspaces=types if shared_row else {}
    )
    record = cuda_shape.launch(
        original,
        grid=teams * team.splits,
        threads=team.threads,
        cooperative=shared_row,
        dependent=parameters.choices["overlap"] == "yes",
        workspaces=[space.name for space in spaces] if shared_row else [],
        shared_bytes=team.ring_bytes(nest),
    )
    text = "\n".join([*header, *signature, *lines])
    return Emission(text, HEADERS, (record,), tuple(spaces) if shared_row else ())


class _HoldKernel(RowKernel):
    """Writes the kernel; used once. A visit is a loop over the parts that are kept and one over those that are not."""

    def __init__(self, hardware: Hardware, nest: Nest, parameters: Parameters, stage: Stage) -> None:
        super().__init__(hardware, nest, parameters, [stage])
        names, buffers = self.function.names, self.function.buffers
        self._stage = stage
        self._overlap = parameters.choices["overlap"] == "yes"
        shared_row = self.team.splits > 1
        self.slots, self.arrivals = (names.take("slots"), names.take("arrivals")) if shared_row else ("", "")
        self._team, self._turn, self._part = names.take("team"), names.take("turn"), names.take("part")
        self._fetch, self._box = names.take("fetch"), names.take(f"{stage.name}_box")
        self._begin = names.take("begin")
        self._kept_packs = [
            (load, names.take(f"{buffers[load.buffer]}_kept")) for load in kept_loads(nest, self.team.pack)
        ]
        packs = self._kept_packs if self.team.held else []
        self._held_packs = [(load, names.take(f"{buffers[load.buffer]}_held")) for load, _ in packs]
        self._refill = names.take("refill") if packs else ""
        self._values = [(load, names.take(f"{buffers[load.buffer]}_value")) for load in early_values(nest)]
        self._storing = False

    def body(self) -> list[str]:
        """The kernel behind its signature, with the closing brace."""
        outer = self.root
        self._prologue(outer)
        loop = outer.child([axis.name for axis in self.nest.parallel])
        self.root = loop
        self._axes(loop)
        self._read_values(loop)
        own = accumulate(self, 0)
        self._ask_ahead(loop)
        learn(self, 0, self._exchange(loop, own))
        self._storing = True
        self.store()
        rows = self.nest.row_count
        outer.line(f"int {self._turn} = 0;")
        outer.line(
            f"for ({self.text.offset} {self.row} = {self._team}; {self.row} < {rows}; "
            f"{self.row} += kTeams, ++{self._turn}) {{"
        )
        outer.absorb(loop)
        outer.line("}")
        if self._overlap:
            outer.line("ws::launch_dependents();")
        if self.team.splits > 1:
            slots = f"{self._slots_of(self._team)} * (2 * kSplits)"
            outer.line(f"ws::clear_slots<kSplits>({slots}, {self.arrivals} + {self._team});")
        return [*outer.lines, "}", ""]

    def _slots_of(self, number: str) -> str:
        kind = self._stage.state_type(self.dialect)
        return f"reinterpret_cast<ws::Slot<{kind}>*>({self.slots}) + {number}"

    # -- before the rows

    def _prologue(self, root: Scope) -> None:
        team = self.team
        root.line(f"constexpr int kColumns = {team.columns};")
        root.line(f"constexpr int kThreads = {team.threads};")
        root.line(f"constexpr int kPacks = {team.packs};  // of a thread, in each part of a row")
        root.line(f"constexpr int kPart = {team.part};  // elements")
        root.line(f"constexpr int kKept = {team.depth};  // parts of a block's row that stay in shared memory")
        if team.held:
            root.line(f"constexpr int kHeld = {team.held};  // packs of a thread behind them that stay in registers")
        root.line(
            f"constexpr int kTeams = {team.teams(self.nest.row_count, self.min_blocks)};  // rows in work at once"
        )
        if team.splits > 1:
            root.line(f"constexpr int kSplits = {team.splits};")
            root.line(f"const int {self.rank} = blockIdx.x % kSplits;")
            root.line(f"const int {self._team} = blockIdx.x / kSplits;")
        else:
            root.line(f"const int {self._team} = blockIdx.x;")
        start = f"{self.rank} * {team.slice} + " if team.splits > 1 else ""
        root.line(f"const int {self.first} = {start}{team.pack} * threadIdx.x;")
        if not team.is_even:
            last = f"min(kColumns, ({self.rank} + 1) * {team.slice})" if team.splits > 1 else "kColumns"
            root.line(f"const int {self.end} = {last};")
        root.line("extern __shared__ uint4 on_chip[];")
        offset = 0
        for load, kept in self._kept_packs:
            size = self.text.storage(load.buffer).size_bytes
            place = f"on_chip + {offset // 16}" if offset else "on_chip"
            pack = self.text.pack_type(self.text.storage(load.buffer))
            root.line(f"auto* {kept} = reinterpret_cast<{pack}*>({place}) + threadIdx.x;")
            offset += team.depth * team.part * size
        for load, value in self._values:
            kind = self.dialect.storage[self.text.storage(load.buffer)]
            root.line(f"auto* {value} = reinterpret_cast<{kind}*>(on_chip + {offset // 16}) + threadIdx.x;")
            offset += team.threads * self.text.storage(load.buffer).size_bytes
        root.line(f"__shared__ {self._stage.state_type(self.dialect)} {self._box}[2][{team.warps}];")
        self._write_fetch(root)
        self._write_refill(root)
        if self._overlap:
            root.line("ws::wait_for_previous();")
        root.line(
            f"for (int {self._part} = 0; {self._part} < kKept; ++{self._part}) "
            f"{self._fetch}({self._team}, {self._part});"
        )
        if self._refill:
            root.line(f"{self._refill}({self._team});")

    def _axes(self, scope: Scope) -> None:
        for axis, value in cuda_shape.row_axes(self.nest, self.row).items():
            scope.line(f"const {self.text.offset} {self.function.axes[axis]} = {value};")

    def _write_fetch(self, root: Scope) -> None:
        """Starts the copies of a part of a row, as one group; the first brings what is loaded once a row, too."""
        root.line(f"const auto {self._fetch} = [&]({self.text.offset} {self.row}, int {self._part}) {{")
        inner = root.child()
        inner.line(f"if ({self.row} < {self.nest.row_count}) {{")
        body = inner.child()
        self._axes(body)
        body.line(f"const int {self._begin} = {self.first} + {self._part} * kPart;")

        def copies(scope: Scope) -> None:
            for load, kept in self._kept_packs:
                address = self.text.address(load.buffer, load, self.text.begin)
                scope.line(f"ws::copy_async<ws::kLast>({kept} + {self._kept_place}, {address});")

        self.each_pack(body, self._begin, copies)
        if self._values:
            body.line(f"if ({self._part} == 0) {{")
            for load, value in self._values:
                address = f"{self.function.buffers[load.buffer]} + {self.function.index(load.index)}"
                body.line(f"  ws::copy_async({value}, {address});")
            body.line("}")
        inner.absorb(body)
        inner.line("}")
        inner.line("ws::commit_copies();")
        root.absorb(inner)
        root.line("};")

    def _write_refill(self, root: Scope) -> None:
        """Asks for the packs of a row that registers hold."""
        if not self._refill:
            return
        for load, name in self._held_packs:
            root.line(f"{self.text.pack_type(self.text.storage(load.buffer))} {name}[kHeld];")
        root.line(f"const auto {self._refill} = [&]({self.text.offset} {self.row}) {{")
        inner = root.child()
        inner.line(f"if ({self.row} < {self.nest.row_count}) {{")
        body = inner.child()
        self._axes(body)

        def ask(scope: Scope) -> None:
            for load, name in self._held_packs:
                scope.line(f"{name}{self.slot} = {self.text.pack_load(load, self.text.begin, reuse='ws::kLast')};")

        with self._of_registers():
            self.each_pack(body, self._held_begin, ask)
        inner.absorb(body)
        inner.line("}")
        root.absorb(inner)
        root.line("};")

    @contextlib.contextmanager
    def _of_registers(self) -> Iterator[None]:
        """Meanwhile a thread's packs are those that registers hold."""
        team, self.pack_count = self.team, "kHeld"
        self.team = replace(team, packs=team.held, grain=team.packs)
        yield
        self.team, self.pack_count = team, "kPacks"

    @property
    def _held_begin(self) -> str:
        return f"{self.first} + kKept * kPart"

    @property
    def _kept_place(self) -> str:
        """Where a thread's pack `v` of a part lies from the thread's first place."""
        part = self._part
        return f"({part} * kPacks + {self.v}) * kThreads" if self.team.packs > 1 else f"{part} * kThreads"

    # -- a row

    def _read_values(self, loop: Scope) -> None:
        if self._values:
            loop.line("ws::wait_copies<kKept - 1>();")
        for load, value in self._values:
            name = self.function.names.take(f"{self.function.buffers[load.buffer]}_at")
            loop.line(f"const {self.dialect.compute(load.type)} {name} = *{value};")
            loop.define(load, name)

    def _ask_ahead(self, loop: Scope) -> None:
        """While the blocks agree, memory goes on to bring the next row's first parts into the second-level cache."""
        team, axis = self.team, self.text.axis
        wide = 32 * team.pack  # a warp's packs
        loads = [load for load, _ in self._kept_packs if cuda_shape.access(load.index, axis, wide) == "pack"]
        if not team.lag or not loads or team.columns % wide:
            return
        following = self.function.names.take("next_row")
        loop.line(f"const {self.text.offset} {following} = {self.row} + kTeams;")
        loop.line(f"if (threadIdx.x % 32 == 0 && {following} < {self.nest.row_count}) {{")
        places = {name: f"({text})" for name, text in cuda_shape.row_axes(self.nest, following).items()}
        ahead = loop.child()
        ahead.line(f"for (int {self._part} = 0; {self._part} < {team.lag}; ++{self._part}) {{")
        inner = ahead.child()
        inner.line(f"const int {self._begin} = {self.first} + {self._part} * kPart;")

        def ask(scope: Scope) -> None:
            for load in loads:
                at = self.function.index(load.index, {**places, axis: self.text.begin})
                size = wide * self.text.storage(load.buffer).size_bytes
                scope.line(f"ws::prefetch({self.function.buffers[load.buffer]} + {at}, {size});")

        self.each_pack(inner, self._begin, ask)
        ahead.absorb(inner)
        ahead.line("}")
        loop.absorb(ahead)
        loop.line("}")

    def _exchange(self, loop: Scope, own: str) -> str:
        kind = self._stage.state_type(self.dialect)
        names = self.function.names
        if self.team.splits > 1:
            turn_slots = names.take("turn_slots")
            set_of_turn = f"({self._team} * 2 + {self._turn} % 2) * kSplits"
            loop.line(f"auto* {turn_slots} = {self._slots_of(set_of_turn)};")
            arguments = f"{own}, {self._box}, {turn_slots}, {self.rank}, {self._turn} + 1"
            exchange = f"ws::over_team<{self.team.warps}, kSplits>({arguments})"
        else:
            exchange = f"ws::over_block<{self.team.warps}>({own}, {self._box}[{self._turn} % 2])"
        state = names.take(f"{self._stage.name}_state")
        loop.line(f"const {kind} {state} = {exchange};")
        return state

    def chunks(self, roots: Sequence[Expression], write: object) -> None:
        """Runs `write(scope, base, held)` on what is kept, then on the rest; backwards on the way to the stores."""
        visits = (self._kept_parts, self._registers, self._rest)
        for visit in reversed(visits) if self._storing else visits:
            visit(roots, write)

    def _kept_parts(self, roots: Sequence[Expression], write: object) -> None:
        number = self.function.interner.number
        inner = self.root.child()
        if not self._storing:
            inner.line("ws::wait_copies<kKept - 1>();")
        self.text.places = {number(load): f"{kept}[{self._kept_place}]" for load, kept in self._kept_packs}
        self._visit(inner, roots, write)
        self.text.places = {}
        if self._storing:
            inner.line(f"{self._fetch}({self.row} + kTeams, {self._part});")
        else:
            inner.line("ws::commit_copies();  // an empty group: the next wait is for the next part")
        self._loop(f"int {self._part} = 0; {self._part} < kKept; ++{self._part}", inner)

    def _registers(self, roots: Sequence[Expression], write: object) -> None:
        """The packs that registers hold, and on the way to the stores the next row's after them."""
        if not self._refill:
            return
        assert callable(write)
        inner = self.root.child()
        inner.line(f"const int {self._begin} = {self._held_begin};")
        known = {load for load, _ in self._held_packs}
        with self._of_registers():
            held = [(load, f"{name}{self.slot}") for load, name in self._held_packs]
            others = [load for load in self.text.varying_loads(roots) if load not in known]
            write(inner, self._begin, held + self.hold(inner, others, self._begin))
        if self._storing:
            inner.line(f"{self._refill}({self.row} + kTeams);")
        self.root.line("{")
        self.root.absorb(inner)
        self.root.line("}")

    def _rest(self, roots: Sequence[Expression], write: object) -> None:
        part, parts = self._part, self.team.parts
        if parts <= self.team.on_chip:
            return
        inner = self.root.child()
        self._visit(inner, roots, write)
        begin = "kKept + kHeld / kPacks" if self._refill else "kKept"
        forth, back = f"int {part} = {begin}; {part} < {parts}; ++{part}", f"int {part} = {parts}; {part}-- > {begin};"
        self._loop(back if self._storing else forth, inner)

    def _visit(self, inner: Scope, roots: Sequence[Expression], write: object) -> None:
        assert callable(write)
        inner.line(f"const int {self._begin} = {self.first} + {self._part} * kPart;")
        wanted: list[Load] = self.text.varying_loads(roots)
        write(inner, self._begin, self.hold(inner, wanted, self._begin))

    def _loop(self, head: str, inner: Scope) -> None:
        self.root.line(f"for ({head}) {{")
        self.root.absorb(inner)
        self.root.line("}")
