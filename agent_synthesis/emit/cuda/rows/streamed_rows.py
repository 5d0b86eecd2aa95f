"""Row reductions by blocks that stay on their SM and take row after row through a ring in shared memory.

The one idea: a thread's asynchronous copies fill its own places, so no barrier guards them, and while the blocks of a
row agree on its result the next rows arrive. What no row changes is loaded once. Resident blocks of the whole GPU form
the teams, since clusters would leave SMs idle: at 4096x393216, 112 to 120 of 132.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.reduction_stages import Stage, slot_words
from agent_synthesis.emit.cuda.rows.row_accumulate import accumulate, learn
from agent_synthesis.emit.cuda.rows.row_team import Team, ring_loads, ring_values
from agent_synthesis.emit.cuda.rows.row_text import RowKernel
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Parameters
from warpsmith.hardware import Hardware

HEADERS = (*geometry.HEADERS, "ws_stream.cuh")


def emit(
    hardware: Hardware,
    nest: Nest,
    original: Nest,
    parameters: Parameters,
    stages: Sequence[Stage],
    header: Sequence[str],
) -> Emission:
    """One persistent kernel of a nest with one stage; it is cooperative where blocks share a row."""
    writer = _Writer(hardware, nest, parameters, stages[0])
    lines = writer.lines()
    kernel, team = writer.kernel, writer.team
    shared_row = team.splits > 1
    words = team.teams(nest.row_count, writer.kernel.min_blocks) * team.mailboxes * slot_words(stages[0])
    spaces = [geometry.workspace(original, "mailboxes", words, zero=True)] if shared_row else []
    types = {writer.mailboxes: "ws::uint64"} if shared_row else {}
    signature = kernel.text.signature(kernel.text.entry, team.threads, kernel.min_blocks, workspaces=types)
    record = geometry.launch(
        original,
        grid=team.teams(nest.row_count, kernel.min_blocks) * team.splits,
        threads=team.threads,
        cooperative=shared_row,
        dependent=parameters.choices["overlap"] == "yes",
        workspaces=[space.name for space in spaces],
        shared_bytes=team.ring_bytes(nest),
    )
    return Emission("\n".join([*header, *signature, *lines]), HEADERS, (record,), tuple(spaces))


class _Writer:
    """Writes the kernel; used once."""

    def __init__(self, hardware: Hardware, nest: Nest, parameters: Parameters, stage: Stage) -> None:
        self.nest, self._stage = nest, stage
        self.kernel = RowKernel(hardware, nest, parameters, [stage])
        self.kernel.keep_nothing()
        self.team: Team = self.kernel.team
        self._overlap = parameters.choices["overlap"] == "yes"
        names = self.kernel.function.names
        self.mailboxes = names.take("mailboxes") if self.team.splits > 1 else ""
        self._member, self._turn, self._turns = names.take("team"), names.take("turn"), names.take("turns")
        self._fetch, self._slot = names.take("fetch"), names.take("slot")
        self._newest, self._oldest = names.take("newest"), names.take("oldest")
        self._box, self._agreed = names.take(f"{stage.name}_box"), names.take(f"{stage.name}_agreed")
        self._inbox, self._state = names.take("inbox"), names.take(f"{stage.name}_state")
        self._kind = stage.state_type(self.kernel.dialect)
        self._ring = [
            (load, names.take(f"{self.kernel.function.buffers[load.buffer]}_ring"),
             names.take(f"{self.kernel.function.buffers[load.buffer]}_places"))
            for load in ring_loads(nest)
        ]  # fmt: skip
        self._values = [
            (load, names.take(f"{self.kernel.function.buffers[load.buffer]}_value_ring")) for load in ring_values(nest)
        ]
        self._mail = names.take("mail")

    def lines(self) -> list[str]:
        """The body, with the closing brace."""
        root = self.kernel.root
        self._prologue(root)
        loop = root.child()
        self._accumulate(loop)
        self._exchange(loop)
        self._finish(loop)
        head = f"for (int {self._turn} = 0; {self._turn} < {self._turns}{self._plus_lag}; ++{self._turn}) {{"
        root.line(head)
        root.absorb(loop)
        root.line("}")
        if self._overlap:
            root.line("ws::launch_dependents();")
        if self.team.splits > 1:
            root.line("if (threadIdx.x < 32)")
            root.line("  for (int turn_of_box = 0; turn_of_box < 2 * kLag; ++turn_of_box)")
            root.line(f"    ws::clear_mailboxes<kSplits>({self._inbox}(turn_of_box), {self.kernel.rank});")
        return [*root.lines, "}", ""]

    @property
    def _plus_lag(self) -> str:
        return " + kLag" if self.team.lag else ""

    @property
    def _past(self) -> str:
        """The turn whose row is finished now."""
        return f"({self._turn} - kLag)" if self.team.lag else self._turn

    def _step(self, before: str = "") -> str:
        """Distance of the pack `v` from a thread's first place of a row; empty where there is one."""
        return f"{before}{self.kernel.v} * kThreads" if self.team.packs > 1 else ""

    # -- before the loop

    def _prologue(self, root: Scope) -> None:
        team, kernel, rows = self.team, self.kernel, self.nest.row_count
        root.line(f"constexpr int kColumns = {team.columns};")
        root.line(f"constexpr int kPacks = {team.packs};  // of a thread, in each row")
        root.line(f"constexpr int kThreads = {team.threads};")
        root.line(f"constexpr int kTeams = {team.teams(rows, kernel.min_blocks)};  // rows in work at once")
        root.line(f"constexpr int kDepth = {team.depth};  // rows that a block has on chip or on the way")
        if team.splits > 1:
            root.line(f"constexpr int kSplits = {team.splits};")
            root.line(f"constexpr int kLag = {team.lag};  // turns from a block's own state to the row's")
            root.line(f"const int {kernel.rank} = blockIdx.x % kSplits;")
            root.line(f"const int {self._member} = blockIdx.x / kSplits;")
        else:
            root.line(f"const int {self._member} = blockIdx.x;")
        start = f"{kernel.rank} * {team.slice} + " if team.splits > 1 else ""
        root.line(f"const int {kernel.first} = {start}{team.pack} * threadIdx.x;")
        if not team.is_even:
            last = f"min(kColumns, ({kernel.rank} + 1) * {team.slice})" if team.splits > 1 else "kColumns"
            root.line(f"const int {kernel.end} = {last};")
        root.line("extern __shared__ uint4 ring[];")
        offset = 0
        for load, ring, _ in self._ring:
            place = f"ring + {offset // 16}" if offset else "ring"
            pack = kernel.text.pack_type(kernel.text.storage(load.buffer))
            root.line(f"auto* {ring} = reinterpret_cast<{pack}*>({place}) + threadIdx.x;")
            offset += team.depth * team.places * kernel.text.storage(load.buffer).size_bytes * team.pack
        for load, ring in self._values:
            kind = kernel.dialect.storage[kernel.text.storage(load.buffer)]
            root.line(f"auto* {ring} = reinterpret_cast<{kind}*>(ring + {offset // 16}) + threadIdx.x;")
            offset += team.depth * team.threads * kernel.text.storage(load.buffer).size_bytes
        root.line(f"__shared__ {self._kind} {self._box}[2][{team.warps}];")
        if team.splits > 1:
            root.line(f"__shared__ {self._kind} {self._agreed}[2];")
            root.line(f"auto {self._inbox} = [&](int {self._turn}) {{  // of all blocks of the row")
            turn = f"({self._member} * 2 * kLag + {self._turn} % (2 * kLag))"
            slots = f"reinterpret_cast<ws::Slot<{self._kind}>*>({self.mailboxes})"
            root.line(f"  return {slots} + {turn} * (kSplits * kSplits);")
            root.line("};")
        self._write_fetch(root)
        if self._overlap:
            root.line("ws::wait_for_previous();")
        root.line(f"for (int {self._slot} = 0; {self._slot} < kDepth; ++{self._slot}) "
                  f"{self._fetch}({self._slot}, {self._slot});")  # fmt: skip
        kernel.hold_common()
        root.line(f"const int {self._turns} = ({rows - 1} - {self._member}) / kTeams + 1;")
        root.line(f"int {self._newest} = 0, {self._oldest} = 0;  // slots of the ring")
        root.line("")

    def _write_fetch(self, root: Scope) -> None:
        """Starts the copies of a turn's row into a slot of the ring, as one group."""
        kernel = self.kernel
        root.line(f"auto {self._fetch} = [&](int {self._turn}, int {self._slot}) {{")
        inner = root.child()
        self._row(inner, self._turn)
        inner.line(f"if ({kernel.row} < {self.nest.row_count}) {{")
        body = inner.child()
        self._axes(body)

        def copies(scope: Scope) -> None:
            for load, ring, _ in self._ring:
                place = f"{ring} + {self._slot} * (kPacks * kThreads){self._step(' + ')}"
                scope.line(f"ws::copy_async({place}, {kernel.text.address(load.buffer, load, kernel.text.begin)});")

        kernel.each_pack(body, kernel.first, copies)
        for load, ring in self._values:
            address = f"{kernel.function.buffers[load.buffer]} + {kernel.function.index(load.index)}"
            body.line(f"ws::copy_async({ring} + {self._slot} * kThreads, {address});")
        inner.absorb(body)
        inner.line("}")
        inner.line("ws::commit_copies();")
        root.absorb(inner)
        root.line("};")

    def _row(self, scope: Scope, turn: str) -> None:
        kind = self.kernel.text.offset
        member = self._member if kind == "int" else f"static_cast<{kind}>({self._member})"
        scope.line(f"const {kind} {self.kernel.row} = {member} + {turn} * kTeams;")

    def _axes(self, scope: Scope) -> None:
        for axis, value in geometry.row_axes(self.nest, self.kernel.row).items():
            scope.line(f"const {self.kernel.text.offset} {self.kernel.function.axes[axis]} = {value};")

    # -- a turn

    _taker = "threadIdx.x < 32"
    """The first warp takes from the other blocks, the last one sends, so that neither has both to do."""

    def _row_scope(self, loop: Scope, turn: str, slot: str) -> Scope:
        """Inside of a block in which the turn's row is known and what it loads is read from the slot."""
        scope = loop.child([axis.name for axis in self.nest.parallel])
        self._row(scope, turn)
        self._axes(scope)
        number = self.kernel.function.interner.number
        for load, ring, places in self._ring:
            pack = self.kernel.text.pack_type(self.kernel.text.storage(load.buffer))
            scope.line(f"const {pack}* {places} = {ring} + {slot} * (kPacks * kThreads);")
            self.kernel.text.places[number(load)] = f"{places}[{self._step() or '0'}]"
        return scope

    def _read_values(self, scope: Scope, slot: str) -> None:
        """What is loaded once a row, from the slot."""
        for load, ring in self._values:
            name = self.kernel.function.names.take(f"{self.kernel.function.buffers[load.buffer]}_at")
            scope.line(f"const {self.kernel.dialect.compute(load.type)} {name} = {ring}[{slot} * kThreads];")
            scope.define(load, name)

    def _accumulate(self, loop: Scope) -> None:
        turn, warp = self._turn, "threadIdx.x / 32"
        if self.team.splits > 1:
            loop.line(f"ws::Mail<kSplits, {self._kind}> {self._mail};")
            look = f"ws::look<kSplits>({self._inbox}{self._past}, {self.kernel.rank})"
            loop.line(f"if ({self._taker} && {turn} >= kLag) {self._mail} = {look};")
        loop.line(f"if ({turn} < {self._turns}) {{" if self.team.lag else "{")
        scope = self._row_scope(loop, turn, self._newest)
        self.kernel.root = scope
        scope.line(f"ws::wait_copies<kDepth - 1{' - kLag' if self.team.lag else ''}>();")
        self._read_values(scope, self._newest)
        own = accumulate(self.kernel, 0)
        mine = self.kernel.function.names.take("mine")
        scope.line(f"const {self._kind} {mine} = {self._kind}::over_lanes<32>({own});")
        scope.line(f"if (threadIdx.x % 32 == 0) {self._box}[{turn} % 2][{warp}] = {mine};")
        scope.line(f"{self._newest} = {self._newest} + 1 == kDepth ? 0 : {self._newest} + 1;")
        loop.absorb(scope)
        loop.line("}")

    def _exchange(self, loop: Scope) -> None:
        """One barrier a turn: it ends the turn's own states and the agreed one of the row that is finished now."""
        turn, rank = self._turn, self.kernel.rank
        if self.team.splits > 1:
            loop.line(f"if ({self._taker} && {turn} >= kLag) {{")
            all_ = self.kernel.function.names.take("all")
            take = f"ws::take_from_blocks({self._mail}, {self._inbox}{self._past}, {rank}, {self._past})"
            loop.line(f"  const {self._kind} {all_} = {take};")
            loop.line(f"  if (threadIdx.x == 0) {self._agreed}[{turn} % 2] = {all_};")
            loop.line("}")
        loop.line("__syncthreads();")
        block = f"ws::over_array<{self.team.warps}>({self._box}[{turn} % 2])"
        if self.team.splits > 1:
            loop.line(f"if (threadIdx.x >= kThreads - 32 && {turn} < {self._turns})")
            loop.line(f"  ws::send_to_blocks<kSplits>({block}, {self._inbox}({turn}), {rank}, {turn});")
            self._result = f"{self._agreed}[{turn} % 2]"
        else:
            self._result = block

    def _finish(self, loop: Scope) -> None:
        loop.line(f"if ({self._turn} >= kLag) {{" if self.team.lag else "{")
        scope = self._row_scope(loop, self._past, self._oldest)
        self.kernel.root = scope
        self._read_values(scope, self._oldest)
        scope.line(f"const {self._kind} {self._state} = {self._result};")
        learn(self.kernel, 0, self._state)
        self.kernel.store()
        scope.line(f"{self._fetch}({self._past} + kDepth, {self._oldest});")
        scope.line(f"{self._oldest} = {self._oldest} + 1 == kDepth ? 0 : {self._oldest} + 1;")
        loop.absorb(scope)
        loop.line("}")
