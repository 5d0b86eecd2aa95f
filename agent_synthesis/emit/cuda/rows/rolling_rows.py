"""Row reductions by blocks that stay on their SM while row after row rolls through their shared memory, part by part.

The one idea: the results of a row are wanted some parts after its last part has come, so the blocks of a row agree
while memory still brings the next row and takes the one before: each byte moves once, without a pause. What rows share
lies in registers as far as it fits there; the second-level cache keeps the rest, and gives it a part ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.reduction_stages import Stage, slot_words
from agent_synthesis.emit.cuda.rows.row_accumulate import accumulate, learn
from agent_synthesis.emit.cuda.rows.row_team import Team, kept_loads, shared_loads, shared_words, team_of
from agent_synthesis.emit.cuda.rows.row_text import RowKernel, Write, declare_axes, declare_columns
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.ir import Expression, Load, Nest
from agent_synthesis.schedule import Emission, Parameters
from warpsmith.hardware import Hardware

HEADERS = (*geometry.HEADERS, "ws_stream.cuh")

_OTHER_SHARED_BYTES = 2 << 10
"""What a block needs of shared memory beside its ring: the states of its warps."""
_ON_THE_WAY = 2
"""Parts between the last one that has come and the last one that was asked for."""
_SHARE_OF_RING = 4 / 7
"""Most of a ring that a row may take, so that the rest gives its blocks time to agree: some 4 us."""
_GUARD_REGISTERS = 8
"""What the ends of uneven rows take of a thread's registers, or offsets of 64 bits (-v output)."""
_EVEN_SHARE = 0.96
"""Blocks that may work on rows, of those that the GPU has room for, so that all have equally much of one, or are a
power of two (layer norm of 16x4000004 by 128 blocks 188 us, by 132 198)."""


def rollers(hardware: Hardware, nest: Nest, draft: Parameters) -> list[Parameters]:
    """As many blocks a row as their rings want, where a row takes no more than its share of them; else none.

    `draft` says how large blocks and parts are, and how many blocks share an SM.
    """
    team, min_blocks = team_of(hardware, nest, draft), draft.integers["min_blocks"]
    part_bytes = replace(team, depth=1).ring_bytes(nest)
    room = hardware.shared_bytes // min_blocks - hardware.reserved_shared_bytes - _OTHER_SHARED_BYTES
    depth = room // max(1, part_bytes)
    longest = int(depth * _SHARE_OF_RING)
    resident = hardware.resident_blocks(min_blocks)
    if not part_bytes or longest < 2 or longest * team.part * resident < nest.column_count:
        return []
    wanted = -(-nest.column_count // (longest * team.part))
    most = resident // min(nest.row_count, resident // wanted)
    nearly = range(most, max(1, int(most * _EVEN_SHARE)), -1)
    splits = next((n for n in nearly if replace(team, splits=n).is_even or n & (n - 1) == 0), max(2, most))
    parts = replace(team, splits=splits).parts
    lag = min(depth - _ON_THE_WAY, 2 * parts - 1)
    held = _most_held(nest, replace(team, splits=splits), hardware.register_limit(team.threads, min_blocks))
    settings = {"splits": splits, "depth": min(depth, lag + _ON_THE_WAY), "lag": lag, "held": held}
    return [Parameters(draft.choices, {**draft.integers, **settings})] if lag >= parts else []


def _most_held(nest: Nest, team: Team, registers: int) -> int:
    """Packs of what rows share that a thread has registers for, beside a part of what it adds up and stores."""
    shared = shared_loads(nest, team.pack)
    wide = geometry.offset_type(nest) != "int"
    spare = registers - geometry.KERNEL_OVERHEAD_REGISTERS - ((not team.is_even) + wide) * _GUARD_REGISTERS
    for load in kept_loads(nest, team.pack):  # narrow elements lie there twice more, as they are and widened
        spare -= (2 if nest.buffer(load.buffer).type.size_bytes >= 4 else 4) * team.packs * team.pack
    part = max(1, team.packs * shared_words(nest, team.pack))
    return min(max(0, spare) // part, team.parts * len(shared)) * team.packs


def others(current: Parameters) -> Iterator[Parameters]:
    """One change away: more or less that is added up ahead, is on its way, or is held."""
    integers = current.integers
    lag, depth, held, packs = (integers[key] for key in ("lag", "depth", "held", "packs"))
    yield from geometry.domain_without(
        current, {"lag": (lag + 1, lag - 1), "depth": (depth - 1,), "held": (held + packs, held - packs, 0)}
    )


def emit(
    hardware: Hardware,
    nest: Nest,
    original: Nest,
    parameters: Parameters,
    stages: Sequence[Stage],
    header: Sequence[str],
) -> Emission:
    """One cooperative kernel of a nest with one stage."""
    kernel = _RollingKernel(hardware, nest, parameters, stages[0])
    lines = kernel.body()
    team = kernel.team
    teams = team.teams(nest.row_count, kernel.min_blocks)
    spaces = [
        geometry.workspace(original, "slots", 2 * teams * team.splits * slot_words(stages[0]), zero=True),
        geometry.workspace(original, "arrivals", teams, zero=True),
    ]
    types = {kernel.slots: "ws::uint64", kernel.arrivals: "ws::uint64"}
    signature = kernel.text.signature(kernel.text.entry, team.threads, kernel.min_blocks, workspaces=types)
    record = geometry.launch(
        original,
        grid=teams * team.splits,
        threads=team.threads,
        cooperative=True,
        dependent=parameters.choices["overlap"] == "yes",
        workspaces=[space.name for space in spaces],
        shared_bytes=team.ring_bytes(nest),
    )
    return Emission("\n".join([*header, *signature, *lines]), HEADERS, (record,), tuple(spaces))


class _RollingKernel(RowKernel):
    """Writes the kernel; used once. A part's number counts the parts of all rows of a team."""

    def __init__(self, hardware: Hardware, nest: Nest, parameters: Parameters, stage: Stage) -> None:
        super().__init__(hardware, nest, parameters, [stage])
        names, buffers = self.function.names, self.function.buffers
        self._stage = stage
        self._overlap = parameters.choices["overlap"] == "yes"
        self.slots, self.arrivals = names.take("slots"), names.take("arrivals")
        self._team, self._turn = names.take("team"), names.take("turn")
        self._number, self._part, self._begin = names.take("number"), names.take("part"), names.take("begin")
        self._fetch, self._ask, self._count = names.take("fetch"), names.take("ask"), names.take("add_up")
        self._box, self._set = names.take(f"{stage.name}_box"), names.take("slots_of")
        pack = self.team.pack
        self._ring = [(load, names.take(f"{buffers[load.buffer]}_ring")) for load in kept_loads(nest, pack)]
        self._shared = _SharedRow(self, self._part, self._begin)
        self._body = self.root

    def body(self) -> list[str]:
        """The kernel behind its signature, with the closing brace."""
        outer, rows = self.root, self.nest.row_count
        self._prologue(outer)
        self._write_fetch(outer)
        asks = self._write_ask(outer)
        self._write_count(outer)
        if self._overlap:
            outer.line("ws::wait_for_previous();")
        self._shared.load_first(outer)
        number = self._number
        outer.line(f"for (int {number} = 0; {number} < kDepth - kLead; ++{number}) {self._fetch}({number});")
        outer.line(f"for (int {number} = 0; {number} < kLead; ++{number}) {{")
        outer.line(f"  {self._fetch}({number} + kDepth - kLead);")
        outer.line(f"  {self._count}({number});")
        outer.line("}")
        outer.line(f"int {self._turn} = 0;")
        loop = outer.child([axis.name for axis in self.nest.parallel])
        self.root = loop
        declare_axes(self, loop)
        state, kind = self.function.names.take(f"{self._stage.name}_state"), self._stage.state_type(self.dialect)
        heard = f"{self._box}[1], {self._set}({self._turn}), {self._turn} + 1"
        loop.line(f"const {kind} {state} = ws::hear_team<{self.team.warps}, kSplits>({heard});")
        learn(self, 0, state)
        self._body = part = loop.child()
        part.line(f"const int {number} = {self._turn} * kParts + {self._part};")
        part.line(f"const int {self._begin} = {self.first} + {self._part} * kPart;")
        self.store()
        part.line(f"{self._fetch}({number} + kDepth);")
        if asks:
            part.line(f"{self._ask}({number} + kDepth + 1);")
        self._shared.load_next(part)
        part.line(f"{self._count}({number} + kLead);")
        loop.line(kernel_text.UNROLL)
        loop.line(f"for (int {self._part} = 0; {self._part} < kParts; ++{self._part}) {{")
        loop.absorb(part)
        loop.line("}")
        outer.line(
            f"for ({self.text.offset} {self.row} = {self._team}; {self.row} < {rows}; "
            f"{self.row} += kTeams, ++{self._turn}) {{"
        )
        outer.absorb(loop)
        outer.line("}")
        if self._overlap:
            outer.line("ws::launch_dependents();")
        outer.line(f"ws::clear_slots<kSplits>({self._set}(0), {self.arrivals} + {self._team});")
        return [*outer.lines, "}", ""]

    # -- before the rows

    def _prologue(self, root: Scope) -> None:
        team = self.team
        root.line(f"constexpr int kColumns = {team.columns};")
        root.line(f"constexpr int kThreads = {team.threads};")
        root.line(f"constexpr int kPacks = {team.packs};  // of a thread, in each part")
        root.line(f"constexpr int kParts = {team.parts};  // of a block's row")
        root.line(f"constexpr int kPart = {team.packs * team.step};  // elements from one to the next")
        root.line(f"constexpr int kDepth = {team.depth};  // parts in shared memory or on the way there")
        root.line(f"constexpr int kLead = {team.lag};  // parts that are added up before they are stored")
        root.line(
            f"constexpr int kTeams = {team.teams(self.nest.row_count, self.min_blocks)};  // rows in work at once"
        )
        root.line(f"constexpr int kSplits = {team.splits};")
        root.line(f"const int {self.rank} = blockIdx.x % kSplits;")
        root.line(f"const int {self._team} = blockIdx.x / kSplits;")
        declare_columns(self, root)
        root.line("extern __shared__ uint4 ring[];")
        offset = 0
        for load, ring in self._ring:
            storage = self.text.storage(load.buffer)
            place = f"ring + {offset // 16}" if offset else "ring"
            root.line(f"auto* {ring} = reinterpret_cast<{self.text.pack_type(storage)}*>({place}) + threadIdx.x;")
            offset += team.depth * team.part * storage.size_bytes
        kind = self._stage.state_type(self.dialect)
        root.line(f"__shared__ {kind} {self._box}[2][{team.warps}];")
        place = f"({self._team} * 2 + {self._turn} % 2) * kSplits"
        root.line(f"const auto {self._set} = [&](int {self._turn}) {{  // two sets of slots take turns")
        root.line(f"  return reinterpret_cast<ws::Slot<{kind}>*>({self.slots}) + {place};")
        root.line("};")

    @property
    def _ring_place(self) -> str:
        """Where a thread's pack `v` of a part lies from the thread's first place."""
        v = f" + {self.v}" if self.team.packs > 1 else ""
        return f"({self._number} % kDepth * kPacks{v}) * kThreads"

    def _of_part(self, root: Scope, name: str) -> tuple[Scope, Scope]:
        """A function of a part's number: its scope, and the one inside of where there is such a part."""
        root.line(f"const auto {name} = [&](int {self._number}) {{")
        inner = root.child()
        kind = self.text.offset
        turn = f"{self._number} / kParts" if kind == "int" else f"static_cast<{kind}>({self._number} / kParts)"
        inner.line(f"const {kind} {self.row} = {self._team} + {turn} * kTeams;")
        inner.line(f"if ({self.row} < {self.nest.row_count}) {{")
        body = inner.child([axis.name for axis in self.nest.parallel])
        declare_axes(self, body)
        body.line(f"const int {self._begin} = {self.first} + {self._number} % kParts * kPart;")
        return inner, body

    @staticmethod
    def _end(root: Scope, inner: Scope, body: Scope, last: str = "") -> None:
        inner.absorb(body)
        inner.line("}")
        if last:
            inner.line(last)
        root.absorb(inner)
        root.line("};")

    def _write_fetch(self, root: Scope) -> None:
        """Starts the copies of a part, as one group."""
        inner, body = self._of_part(root, self._fetch)

        def copies(scope: Scope) -> None:
            for load, ring in self._ring:
                address = self.text.address(load.buffer, load, self.text.begin)
                scope.line(f"ws::copy_async<ws::kLast>({ring} + {self._ring_place}, {address});")

        self.each_pack(body, self._begin, copies)
        self._end(root, inner, body, "ws::commit_copies();")

    def _write_ask(self, root: Scope) -> bool:
        """Asks memory for a part, a warp's packs at once; whether they lie together."""
        wide, axis = 32 * self.team.pack, self.text.axis

        def lies_together(load: Load) -> bool:
            affine = all(isinstance(atom, str) for atom, _ in load.index.terms)
            return affine or geometry.access(load.index, axis, wide) == "pack"

        loads = [load for load, _ in self._ring if lies_together(load)]
        if not loads:
            return False
        whole = self.team.columns % wide == 0
        inner, body = self._of_part(root, self._ask)
        once = body.child()

        def ask(scope: Scope) -> None:
            for load in loads:
                size = wide * self.text.storage(load.buffer).size_bytes
                inside = "" if whole else f"if ({self.text.begin} + {wide} <= kColumns) "
                scope.line(f"{inside}ws::prefetch({self.text.address(load.buffer, load, self.text.begin)}, {size});")

        self.each_pack(once, self._begin, ask)
        body.line("if (threadIdx.x % 32 == 0) {")
        body.absorb(once)
        body.line("}")
        self._end(root, inner, body)
        return True

    def _write_count(self, root: Scope) -> None:
        """Adds a part up; with a row's last one, tells the other blocks."""
        above = root.child(deeper=0)
        inner, self._body = self._of_part(above, self._count)
        body = self._body
        body.line("ws::wait_copies<kDepth - kLead>();")
        own = accumulate(self, 0)
        body.line(f"if ({self._number} % kParts == kParts - 1) {{")
        body.line(f"  const int {self._turn} = {self._number} / kParts;")
        told = f"{own}, {self._box}[0], {self._set}({self._turn}), {self.rank}, {self._turn} + 1"
        body.line(f"  ws::tell_team<{self.team.warps}>({told});")
        body.line(f"  {own} = {self._stage.state_type(self.dialect)}::empty();")
        body.line("}")
        self._end(above, inner, body)
        root.absorb(above)

    # -- a part

    def chunks(self, roots: Sequence[Expression], write: Write) -> None:
        """Runs `write(scope, base, held)` on the part at hand."""
        number = self.function.interner.number
        self.text.places = {number(load): f"{ring}[{self._ring_place}]" for load, ring in self._ring}
        wanted = self.text.varying_loads(roots)
        known = [self._shared.pack_of(load, self._body) for load in wanted if load in self._shared.held]
        others = self.hold(self._body, [load for load in wanted if load not in self._shared.held], self._begin)
        write(self._body, self._begin, known + others)
        self.text.places = {}


class _SharedRow:
    """What rows share, such as a weight: registers hold its first parts, the others come a part ahead."""

    def __init__(self, kernel: RowKernel, part: str, begin: str) -> None:
        self._kernel, self._part, self._begin = kernel, part, begin
        names, buffers, team = kernel.function.names, kernel.function.buffers, kernel.team
        self.held: dict[Load, int] = {}
        """What rows share → parts of it that registers hold."""
        spare = team.held // team.packs
        for load in shared_loads(kernel.nest, team.pack):
            self.held[load] = min(spare, team.parts)
            spare -= self.held[load]
        coming = [load for load, held in self.held.items() if held < team.parts]
        self._next = {load: names.take(f"next_{buffers[load.buffer]}") for load in coming}
        self._held_names = {
            load: names.take(f"{buffers[load.buffer]}_held") for load, held in self.held.items() if held
        }

    def load_first(self, root: Scope) -> None:
        """Loads what registers hold, and of the rest what the first part needs."""
        kernel, text = self._kernel, self._kernel.text
        for load, held in self.held.items():
            pack = text.pack_type(text.storage(load.buffer))
            if held:
                name = self._held_names[load]
                root.line(f"{pack} {name}[{held} * kPacks];")
                inner = root.child()
                inner.line(f"const int {self._begin} = {kernel.first} + {self._part} * kPart;")

                def fill(scope: Scope, load: Load = load, name: str = name) -> None:
                    scope.line(f"{name}[{self._place}] = {text.pack_load(load, text.begin, reuse='ws::kLast')};")

                kernel.each_pack(inner, self._begin, fill)
                root.line(kernel_text.UNROLL)
                root.line(f"for (int {self._part} = 0; {self._part} < {held}; ++{self._part}) {{")
                root.absorb(inner)
                root.line("}")
            if load in self._next:
                root.line(f"{pack} {self._next[load]}[kPacks];")
                if not held:
                    kernel.each_pack(root, kernel.first, partial(self._write_load, load=load, last="false"))

    @property
    def _place(self) -> str:
        """The number of a pack among those of a thread's row."""
        kernel = self._kernel
        return f"{self._part} * kPacks + {kernel.v}" if kernel.team.packs > 1 else self._part

    def _write_load(self, scope: Scope, load: Load, last: str) -> None:
        text = self._kernel.text
        value = f"ws::load_again<{text.pack}>({text.address(load.buffer, load, text.begin)}, {last})"
        scope.line(f"{self._next[load]}{self._kernel.slot} = {value};")

    def load_next(self, part: Scope) -> None:
        """Loads what the next part needs and registers do not hold."""
        kernel, names = self._kernel, self._kernel.function.names
        for load in self._next:
            held = self.held[load]
            following = names.take("following")
            part.line(f"const int {following} = ({self._part} + 1) % kParts;")
            inner = part.child(deeper=bool(held))
            begin = names.take("next_begin")
            inner.line(f"const int {begin} = {kernel.first} + {following} * kPart;")
            last = f"{kernel.row} + ({following} > 0 ? 1 : 2) * kTeams >= {kernel.nest.row_count}"
            kernel.each_pack(inner, begin, partial(self._write_load, load=load, last=last))
            if held:
                part.line(f"if ({following} >= {held}) {{")
            part.absorb(inner)
            if held:
                part.line("}")

    def pack_of(self, load: Load, body: Scope) -> tuple[Load, str]:
        """A load with the text of its pack `v` of the part at hand."""
        kernel, held = self._kernel, self.held[load]
        if load not in self._next:
            return load, f"{self._held_names[load]}[{self._place}]"
        coming = f"{self._next[load]}{kernel.slot}"
        if not held:
            return load, coming
        packs = kernel.function.names.take(f"{kernel.function.buffers[load.buffer]}_row")
        body.line(f"{kernel.text.pack_type(kernel.text.storage(load.buffer))} {packs}[kPacks];")
        held_pack = f"{self._held_names[load]}[{self._part} < {held} ? {self._place} : 0]"

        def choose(scope: Scope) -> None:
            scope.line(f"{packs}{kernel.slot} = {self._part} < {held} ? {held_pack} : {coming};")

        kernel.each_pack(body, self._begin, choose)
        return load, f"{packs}{kernel.slot}"
