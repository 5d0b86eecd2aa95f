"""Row reductions by blocks or clusters that stay on their SM, each with a row in registers and the next one on its way.

The one idea: a row arrives in shared memory by each thread's own copies, moves on to its registers, and leaves room for
the next, which arrives while this one is agreed upon and stored. So memory always has something to do, and no barrier
guards what a thread copies for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.reduction_stages import Stage
from agent_synthesis.emit.cuda.rows.row_accumulate import accumulate, learn
from agent_synthesis.emit.cuda.rows.row_team import ahead_loads, early_values
from agent_synthesis.emit.cuda.rows.row_text import RowKernel, declare_axes, declare_columns
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.ir import Load, Nest
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
    """One persistent kernel; a row has a block or a cluster."""
    kernel = _AheadKernel(hardware, nest, parameters, stages)
    lines = kernel.body()
    team = kernel.team
    signature = kernel.text.signature(kernel.text.entry, team.threads, kernel.min_blocks)
    record = geometry.launch(
        original,
        grid=team.teams(nest.row_count, kernel.min_blocks) * team.splits,
        threads=team.threads,
        cluster=team.splits,
        dependent=parameters.choices["overlap"] == "yes",
        shared_bytes=team.ring_bytes(nest),
    )
    return Emission("\n".join([*header, *signature, *lines]), HEADERS, (record,))


class _AheadKernel(RowKernel):
    """Writes the kernel; used once."""

    def __init__(self, hardware: Hardware, nest: Nest, parameters: Parameters, stages: Sequence[Stage]) -> None:
        super().__init__(hardware, nest, parameters, stages)
        names, buffers = self.function.names, self.function.buffers
        self._overlap = parameters.choices["overlap"] == "yes"
        self._team, self._turn, self._fetch = names.take("team"), names.take("turn"), names.take("fetch")
        self._boxes = [names.take(f"{stage.name}_box") for stage in stages]
        self._next = [(load, names.take(f"next_{buffers[load.buffer]}")) for load in ahead_loads(nest, self.team)]

    def body(self) -> list[str]:
        """The kernel behind its signature, with the closing brace."""
        outer, cluster = self.root, self.team.splits > 1
        self._prologue(outer)
        loop = outer.child([axis.name for axis in self.nest.parallel])
        self.root = loop
        self._row_place(loop)
        for load in early_values(self.nest):
            name = self.function.names.take(f"{self.function.buffers[load.buffer]}_at")
            element = f"{self.function.buffers[load.buffer]}[{self.function.index(load.index)}]"
            kind = self.dialect.compute(load.type)
            loop.line(f"const {kind} {name} = {element};")
            loop.define(load, name)
        self._take(loop)
        for number, stage in enumerate(self.stages):
            own = accumulate(self, number)
            state = self.function.names.take(f"{stage.name}_state")
            box = f"{self._boxes[number]}[{self._turn} % 2]"
            over = f"ws::over_cluster<{self.team.warps}, kSplits>({own}, {box}, {self.rank})"
            exchange = over if cluster else f"ws::over_block<{self.team.warps}>({own}, {box})"
            loop.line(f"const {stage.state_type(self.dialect)} {state} = {exchange};")
            learn(self, number, state)
        self.store()
        outer.line(f"int {self._turn} = 0;")
        outer.line(
            f"for ({self.text.offset} {self.row} = {self._team}; {self.row} < {self.nest.row_count}; "
            f"{self.row} += kTeams, ++{self._turn}) {{"
        )
        outer.absorb(loop)
        outer.line("}")
        if self._overlap:
            outer.line("ws::launch_dependents();")
        return [*outer.lines, "}", ""]

    def _prologue(self, root: Scope) -> None:
        team = self.team
        root.line(f"constexpr int kColumns = {team.columns};")
        root.line(f"constexpr int kThreads = {team.threads};")
        root.line(f"constexpr int kPacks = {team.packs};")
        teams = team.teams(self.nest.row_count, self.min_blocks)
        root.line(f"constexpr int kTeams = {teams};  // rows in work at once")
        places = team.warps
        if team.splits > 1:
            root.line(f"constexpr int kSplits = {team.splits};")
            root.line(f"const int {self.rank} = blockIdx.x % kSplits;")
            root.line(f"const int {self._team} = blockIdx.x / kSplits;")
            places *= team.splits
        else:
            root.line(f"const int {self._team} = blockIdx.x;")
        if self.skew is None:
            declare_columns(self, root)
        for stage, box in zip(self.stages, self._boxes, strict=True):
            root.line(f"__shared__ {stage.state_type(self.dialect)} {box}[2][{places}];  // rows take turns")
        root.line("extern __shared__ uint4 ahead[];")
        offset = 0
        for load, place in self._next:
            storage = self.text.storage(load.buffer)
            start = f"ahead + {offset // 16}" if offset else "ahead"
            root.line(f"auto* {place} = reinterpret_cast<{self.text.pack_type(storage)}*>({start}) + threadIdx.x;")
            offset += team.places * team.pack * storage.size_bytes
        self._write_fetch(root)
        if self._overlap:
            root.line("ws::wait_for_previous();")
        if team.splits > 1:
            root.line("ws::cluster_arrive();  // every block runs before another writes to it")
        root.line(f"{self._fetch}({self._team});")
        if team.splits > 1:
            root.line("ws::cluster_wait();")

    def _row_place(self, scope: Scope) -> None:
        """The row's axes; where rows begin anywhere, this thread's place in it too."""
        declare_axes(self, scope)
        if self.skew is not None:
            declare_columns(self, scope)

    def _write_fetch(self, root: Scope) -> None:
        """Starts the copies of a thread's part of a row, as one group."""
        root.line(f"const auto {self._fetch} = [&]({self.text.offset} {self.row}) {{")
        inner = root.child()
        inner.line(f"if ({self.row} < {self.nest.row_count}) {{")
        body = inner.child()
        self._row_place(body)

        def copies(scope: Scope) -> None:
            for load, place in self._next:
                address = self.text.address(load.buffer, load, self.text.begin)
                to = f"{place}{self._step(' + ')}"
                if self.skew is not None:
                    scope.line(
                        f"ws::copy_inside_async<kColumns>({to}, {address}, {self.text.begin}{self.text.is_whole});"
                    )
                else:
                    scope.line(f"ws::copy_async({to}, {address});")

        self.each_pack(body, self.first, copies)
        inner.absorb(body)
        inner.line("}")
        inner.line("ws::commit_copies();")
        root.absorb(inner)
        root.line("};")

    def _step(self, before: str = "") -> str:
        return f"{before}{self.v} * kThreads" if self.team.packs > 1 else ""

    def _take(self, loop: Scope) -> None:
        """Brings the row from shared memory into registers, and asks for the next."""
        held: list[tuple[Load, str, str]] = []
        for load, place in self._next:
            name = self.function.names.take(f"{self.function.buffers[load.buffer]}_row")
            loop.line(f"{self.text.pack_type(self.text.storage(load.buffer))} {name}[kPacks];")
            held.append((load, name, place))
        loop.line("ws::wait_copies<0>();")
        if self.team.packs > 1:
            loop.line(kernel_text.UNROLL)
            loop.line(f"for (int {self.v} = 0; {self.v} < kPacks; ++{self.v}) {{")
        indent = "  " if self.team.packs > 1 else ""
        for _, name, place in held:
            loop.line(f"{indent}{name}{self.slot} = {place}[{self._step() or '0'}];")
        if self.team.packs > 1:
            loop.line("}")
        loop.line(f"{self._fetch}({self.row} + kTeams);")
        self.held = [(load, f"{name}{self.slot}") for load, name, _ in held]
        number = self.function.interner.number
        known = {number(load) for load, _ in self._next}
        self.held += self.hold(loop, [load for load in self.row_loads() if number(load) not in known], self.first)
