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

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.reduction_stages import Stage, slot_words
from agent_synthesis.emit.cuda.rows.row_accumulate import accumulate, learn
from agent_synthesis.emit.cuda.rows.row_prologue import declare_axes, declare_columns
from agent_synthesis.emit.cuda.rows.row_team import Team, early_values, kept_loads, team_of
from agent_synthesis.emit.cuda.rows.row_text import RowKernel, Write
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.ir import Expression, Nest
from agent_synthesis.schedule import Emission, Parameters
from warpsmith.hardware import Hardware

HEADERS = (*geometry.HEADERS, "ws_stream.cuh")

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
        geometry.workspace(original, "slots", words, zero=True),
        geometry.workspace(original, "arrivals", teams, zero=True),
    ]
    types = {kernel.slots: "ws::uint64", kernel.arrivals: "ws::uint64"}
    signature = kernel.text.signature(
        kernel.text.entry, team.threads, kernel.min_blocks, workspaces=types if shared_row else {}
    )
    record = geometry.launch(
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
        names = self.function.names
        self._stage = stage
        self._overlap = parameters.choices["overlap"] == "yes"
        shared_row = self.team.splits > 1
        self.slots, self.arrivals = (names.take("slots"), names.take("arrivals")) if shared_row else ("", "")
        self._team, self._turn, self._box = names.take("team"), names.take("turn"), names.take(f"{stage.name}_box")
        self._on_chip = _OnChip(self)
        self._storing = False

    def body(self) -> list[str]:
        """The kernel behind its signature, with the closing brace."""
        outer = self.root
        self._prologue(outer)
        loop = outer.child([axis.name for axis in self.nest.parallel])
        self.root = loop
        declare_axes(self, loop)
        self._on_chip.read_values(loop)
        own = accumulate(self, 0)
        self._on_chip.ask_ahead(loop)
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

    def _prologue(self, root: Scope) -> None:
        team, chip = self.team, self._on_chip
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
        declare_columns(self, root)
        chip.declare_places(root)
        root.line(f"__shared__ {self._stage.state_type(self.dialect)} {self._box}[2][{team.warps}];")
        chip.write_fetch(root)
        chip.write_refill(root)
        if self._overlap:
            root.line("ws::wait_for_previous();")
        over_kept = f"for (int {chip.part} = 0; {chip.part} < kKept; ++{chip.part})"
        root.line(f"{over_kept} {chip.fetch}({self._team}, {chip.part});")
        if chip.refill:
            root.line(f"{chip.refill}({self._team});")

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

    def chunks(self, roots: Sequence[Expression], write: Write) -> None:
        """Runs `write(scope, base, held)` on what is kept, then on the rest; backwards on the way to the stores."""
        visits = (self._kept_parts, self._registers, self._rest)
        for visit in reversed(visits) if self._storing else visits:
            visit(roots, write)

    def _kept_parts(self, roots: Sequence[Expression], write: Write) -> None:
        chip, number = self._on_chip, self.function.interner.number
        inner = self.root.child()
        if not self._storing:
            inner.line("ws::wait_copies<kKept - 1>();")
        self.text.places = {number(load): f"{kept}[{chip.kept_place}]" for load, kept in chip.kept_packs}
        self._visit(inner, roots, write)
        self.text.places = {}
        if self._storing:
            inner.line(f"{chip.fetch}({self.row} + kTeams, {chip.part});")
        else:
            inner.line("ws::commit_copies();  // an empty group: the next wait is for the next part")
        self._loop(f"int {chip.part} = 0; {chip.part} < kKept; ++{chip.part}", inner)

    def _registers(self, roots: Sequence[Expression], write: Write) -> None:
        """The packs that registers hold, and on the way to the stores the next row's after them."""
        chip = self._on_chip
        if not chip.refill:
            return
        inner = self.root.child()
        inner.line(f"const int {chip.begin} = {chip.held_begin};")
        known = {load for load, _ in chip.held_packs}
        with chip.in_registers():
            held = [(load, f"{name}{self.slot}") for load, name in chip.held_packs]
            others = [load for load in self.text.varying_loads(roots) if load not in known]
            write(inner, chip.begin, held + self.hold(inner, others, chip.begin))
        if self._storing:
            inner.line(f"{chip.refill}({self.row} + kTeams);")
        self.root.line("{")
        self.root.absorb(inner)
        self.root.line("}")

    def _rest(self, roots: Sequence[Expression], write: Write) -> None:
        part, parts = self._on_chip.part, self.team.parts
        if parts <= self.team.on_chip:
            return
        inner = self.root.child()
        self._visit(inner, roots, write)
        begin = "kKept + kHeld / kPacks" if self._on_chip.refill else "kKept"
        forth, back = f"int {part} = {begin}; {part} < {parts}; ++{part}", f"int {part} = {parts}; {part}-- > {begin};"
        self._loop(back if self._storing else forth, inner)

    def _visit(self, inner: Scope, roots: Sequence[Expression], write: Write) -> None:
        chip = self._on_chip
        inner.line(f"const int {chip.begin} = {self.first} + {chip.part} * kPart;")
        wanted = self.text.varying_loads(roots)
        write(inner, chip.begin, self.hold(inner, wanted, chip.begin))

    def _loop(self, head: str, inner: Scope) -> None:
        self.root.line(f"for ({head}) {{")
        self.root.absorb(inner)
        self.root.line("}")


class _OnChip:
    """What a block keeps of its row in shared memory and in registers, and how the next row's comes there."""

    def __init__(self, kernel: RowKernel) -> None:
        self.kernel = kernel
        names, buffers, nest = kernel.function.names, kernel.function.buffers, kernel.nest
        self.part, self.begin, self.fetch = names.take("part"), names.take("begin"), names.take("fetch")
        self.kept_packs = [
            (load, names.take(f"{buffers[load.buffer]}_kept")) for load in kept_loads(nest, kernel.team.pack)
        ]
        """Loads with the places in shared memory of a thread's packs."""
        packs = self.kept_packs if kernel.team.held else []
        self.held_packs = [(load, names.take(f"{buffers[load.buffer]}_held")) for load, _ in packs]
        """The same loads with the registers of the packs behind those."""
        self.refill = names.take("refill") if packs else ""
        self.values = [(load, names.take(f"{buffers[load.buffer]}_value")) for load in early_values(nest)]
        """What is loaded once a row, with its places."""

    @property
    def held_begin(self) -> str:
        """Where the packs in registers begin."""
        return f"{self.kernel.first} + kKept * kPart"

    @property
    def kept_place(self) -> str:
        """Where a thread's pack `v` of a part lies from the thread's first place."""
        part = self.part
        return f"({part} * kPacks + {self.kernel.v}) * kThreads" if self.kernel.team.packs > 1 else f"{part} * kThreads"

    def declare_places(self, root: Scope) -> None:
        """Where each thread's packs and values lie in shared memory."""
        kernel, team = self.kernel, self.kernel.team
        root.line("extern __shared__ uint4 on_chip[];")
        offset = 0
        for load, kept in self.kept_packs:
            size = kernel.text.storage(load.buffer).size_bytes
            place = f"on_chip + {offset // 16}" if offset else "on_chip"
            pack = kernel.text.pack_type(kernel.text.storage(load.buffer))
            root.line(f"auto* {kept} = reinterpret_cast<{pack}*>({place}) + threadIdx.x;")
            offset += team.depth * team.part * size
        for load, value in self.values:
            kind = kernel.dialect.storage[kernel.text.storage(load.buffer)]
            root.line(f"auto* {value} = reinterpret_cast<{kind}*>(on_chip + {offset // 16}) + threadIdx.x;")
            offset += team.threads * kernel.text.storage(load.buffer).size_bytes

    def write_fetch(self, root: Scope) -> None:
        """Starts the copies of a part of a row, as one group; the first brings what is loaded once a row, too."""
        kernel = self.kernel
        root.line(f"const auto {self.fetch} = [&]({kernel.text.offset} {kernel.row}, int {self.part}) {{")
        inner = root.child()
        inner.line(f"if ({kernel.row} < {kernel.nest.row_count}) {{")
        body = inner.child()
        declare_axes(kernel, body)
        body.line(f"const int {self.begin} = {kernel.first} + {self.part} * kPart;")

        def copies(scope: Scope) -> None:
            for load, kept in self.kept_packs:
                address = kernel.text.address(load.buffer, load, kernel.text.begin)
                scope.line(f"ws::copy_async<ws::kLast>({kept} + {self.kept_place}, {address});")

        kernel.each_pack(body, self.begin, copies)
        if self.values:
            body.line(f"if ({self.part} == 0) {{")
            for load, value in self.values:
                address = f"{kernel.function.buffers[load.buffer]} + {kernel.function.index(load.index)}"
                body.line(f"  ws::copy_async({value}, {address});")
            body.line("}")
        inner.absorb(body)
        inner.line("}")
        inner.line("ws::commit_copies();")
        root.absorb(inner)
        root.line("};")

    def write_refill(self, root: Scope) -> None:
        """Asks for the packs of a row that registers hold."""
        kernel = self.kernel
        if not self.refill:
            return
        for load, name in self.held_packs:
            root.line(f"{kernel.text.pack_type(kernel.text.storage(load.buffer))} {name}[kHeld];")
        root.line(f"const auto {self.refill} = [&]({kernel.text.offset} {kernel.row}) {{")
        inner = root.child()
        inner.line(f"if ({kernel.row} < {kernel.nest.row_count}) {{")
        body = inner.child()
        declare_axes(kernel, body)

        def ask(scope: Scope) -> None:
            for load, name in self.held_packs:
                scope.line(
                    f"{name}{kernel.slot} = {kernel.text.pack_load(load, kernel.text.begin, reuse='ws::kLast')};"
                )

        with self.in_registers():
            kernel.each_pack(body, self.held_begin, ask)
        inner.absorb(body)
        inner.line("}")
        root.absorb(inner)
        root.line("};")

    @contextlib.contextmanager
    def in_registers(self) -> Iterator[None]:
        """Meanwhile a thread's packs are those that registers hold."""
        kernel = self.kernel
        team, kernel.pack_count = kernel.team, "kHeld"
        kernel.team = replace(team, packs=team.held, grain=team.packs)
        yield
        kernel.team, kernel.pack_count = team, "kPacks"

    def read_values(self, loop: Scope) -> None:
        """Makes known what was loaded once for the row."""
        kernel = self.kernel
        if self.values:
            loop.line("ws::wait_copies<kKept - 1>();")
        for load, value in self.values:
            name = kernel.function.names.take(f"{kernel.function.buffers[load.buffer]}_at")
            loop.line(f"const {kernel.dialect.compute(load.type)} {name} = *{value};")
            loop.define(load, name)

    def ask_ahead(self, loop: Scope) -> None:
        """While the blocks agree, memory goes on to bring the next row's first parts into the second-level cache."""
        kernel = self.kernel
        team, axis = kernel.team, kernel.text.axis
        wide = 32 * team.pack  # a warp's packs
        loads = [load for load, _ in self.kept_packs if geometry.access(load.index, axis, wide) == "pack"]
        if not team.lag or not loads or team.columns % wide:
            return
        following = kernel.function.names.take("next_row")
        loop.line(f"const {kernel.text.offset} {following} = {kernel.row} + kTeams;")
        loop.line(f"if (threadIdx.x % 32 == 0 && {following} < {kernel.nest.row_count}) {{")
        places = {name: f"({text})" for name, text in geometry.row_axes(kernel.nest, following).items()}
        ahead = loop.child()
        ahead.line(f"for (int {self.part} = 0; {self.part} < {team.lag}; ++{self.part}) {{")
        inner = ahead.child()
        inner.line(f"const int {self.begin} = {kernel.first} + {self.part} * kPart;")

        def ask(scope: Scope) -> None:
            for load in loads:
                at = kernel.function.index(load.index, {**places, axis: kernel.text.begin})
                size = wide * kernel.text.storage(load.buffer).size_bytes
                scope.line(f"ws::prefetch({kernel.function.buffers[load.buffer]} + {at}, {size});")

        kernel.each_pack(inner, self.begin, ask)
        ahead.absorb(inner)
        ahead.line("}")
        loop.absorb(ahead)
        loop.line("}")
