"""Who shares a row on CUDA: some lanes, a block, a cluster or several blocks, and what each thread holds of it.

Numbers only; `cuda_row_text` writes the kernel and `cuda_row_reduction` chooses the team.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit import cuda_shape
from agent_synthesis.emit.cuda_stages import Stage
from agent_synthesis.ir import Load, Nest
from agent_synthesis.schedule import Parameters
from warpsmith.errors import IllegalMove


@dataclass(frozen=True)
class Team:
    """Who shares a row, and how much of it each holds."""

    reduce: str
    """warp, block, cluster, grid, two_pass or stream."""
    threads: int
    """Threads of a block."""
    lanes: int
    """Threads of a block that share a row: a part of a warp, or all."""
    splits: int
    """Blocks that share a row."""
    pack: int
    """Elements of a pack."""
    packs: int
    """Packs that a thread has on chip at once: in registers, or for stream in shared memory."""
    columns: int
    """Elements of a row."""
    depth: int = 0
    """For stream: rows that a block has in shared memory or on the way there."""
    lag: int = 0
    """For stream: turns that the blocks of a row have to agree; 0 where a row has one block."""

    @property
    def slice(self) -> int:
        """Elements of a row that one block has."""
        return cuda_shape.round_up(-(-self.columns // self.splits), self.pack)

    @property
    def stride(self) -> int:
        """Elements from one pack of a thread to its next."""
        return self.pack * self.lanes

    @property
    def holds_row(self) -> bool:
        """Whether the packs in registers are all that a thread has of a row."""
        return self.packs * self.stride >= self.slice

    @property
    def is_even(self) -> bool:
        """Whether every thread has equally many packs, in whole chunks."""
        return self.columns == self.slice * self.splits and self.slice % (self.packs * self.stride) == 0

    @property
    def exchanges_evenly(self) -> bool:
        """Whether the lanes that meet in any exchange have equally many elements."""
        counts = (self.warps, self.splits)
        return self.is_even and all(count & (count - 1) == 0 for count in counts)

    @property
    def places(self) -> int:
        """For stream: packs of a row in shared memory, those of ragged ends included."""
        return self.packs * self.threads

    @property
    def mailboxes(self) -> int:
        """For stream: slots of a team. A turn's are used again 2 * lag turns later, when all have read them."""
        return 2 * self.lag * self.splits**2

    def teams(self, rows: int, min_blocks: int) -> int:
        """For stream: rows in work at once, one for each team of resident blocks."""
        return min(rows, cuda_shape.resident_blocks(self.threads, min_blocks) // self.splits)

    def ring_bytes(self, nest: Nest) -> int:
        """For stream: shared memory of a block's ring."""
        packs = sum(nest.buffer(load.buffer).type.size_bytes for load in ring_loads(nest))
        singles = sum(nest.buffer(load.buffer).type.size_bytes for load in ring_values(nest))
        return self.depth * (self.places * self.pack * packs + self.threads * singles)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // 32

    @property
    def rows_a_block(self) -> int:
        """Rows that a block works on at once."""
        return self.threads // self.lanes if self.splits == 1 else 1


def team_of(nest: Nest, parameters: Parameters) -> Team:
    """The team of a canonical nest, as many packs in registers as the parameters want and a row has."""
    reduce, integers = parameters.choices["reduce"], parameters.integers
    lanes = integers["lanes"] if reduce == "warp" else integers["threads"]
    splits = 1 if reduce in ("warp", "block") else integers["splits"]
    team = Team(reduce, integers["threads"], lanes, splits, integers["pack"], integers["packs"], nest.column_count)
    most = -(-team.slice // team.stride)
    if reduce == "stream":
        return replace(team, packs=most, depth=integers["depth"], lag=integers["lag"] if splits > 1 else 0)
    return replace(team, packs=min(team.packs, most))


def ring_loads(nest: Nest) -> list[Load]:
    """Loads that differ from row to row, which stream has copied ahead."""
    rows, axis = {axis.name for axis in nest.parallel}, nest.reduced[0].name
    found = cuda_shape.loads(nest)
    return [load for load in found if load.index.axes() & rows and axis in load.index.axes()]


def ring_values(nest: Nest) -> list[Load]:
    """Loads of one element for all of a row, which stream has copied ahead too, for each thread."""
    rows, axis = {axis.name for axis in nest.parallel}, nest.reduced[0].name
    found = [load for load in cuda_shape.loads(nest) if load.index.axes() & rows and axis not in load.index.axes()]
    return [load for load in found if nest.buffer(load.buffer).type.size_bytes in (4, 8)]


def require(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int, *, preload: bool) -> None:
    """Checks that a block of the team fits an SM.

    Raises:
        IllegalMove: names the limit.
    """
    stream = team.reduce == "stream"
    elements = team.pack * team.packs
    axis = nest.reduced[0].name
    roots = [reduction.value for stage in stages for reduction in stage.reductions]
    roots += [store.value for store in nest.stores] if preload else []
    held = [load for load in cuda_shape.loads_below(roots) if axis in load.index.axes()]
    if stream:
        _require_stream(nest, team, stages, min_blocks)
        held = [load for load in held if load not in ring_loads(nest)]
    registers = sum(max(1, elements * nest.buffer(load.buffer).type.size_bytes // 4) for load in held)
    registers += elements if stream else 0  # ptxas keeps what it read from the ring for the second visit
    boxes = sum(stage.state_bytes() for stage in stages) * team.warps * (team.splits if team.reduce == "cluster" else 1)
    shared = 2 * boxes + team.ring_bytes(nest) if stream else boxes
    cuda_shape.require_sm90(
        nest, threads=team.threads, min_blocks=min_blocks, shared_bytes=shared, held_registers=registers
    )


def _require_stream(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int) -> None:
    """Raises IllegalMove where rows cannot stream through shared memory."""
    ring = ring_loads(nest)
    if len(stages) != 1:
        raise IllegalMove(f"{nest.name}: a row streams through one exchange, and this one needs {len(stages)}")
    if any(nest.buffer(load.buffer).written for load in cuda_shape.loads(nest)):
        raise IllegalMove(f"{nest.name}: rows that are overwritten in place cannot be read ahead")
    for load in ring:
        size = team.pack * nest.buffer(load.buffer).type.size_bytes
        if size % 16 or cuda_shape.access(load.index, nest.reduced[0].name, team.pack) != "pack":
            raise IllegalMove(f"{nest.name}: asynchronous copies are of 16 bytes, which {load.buffer} does not have")
    if not ring or not 2 + team.lag <= team.depth <= 32:
        raise IllegalMove(f"{nest.name}: a ring of {team.depth} rows does not reach ahead of a lag of {team.lag}")
    if team.splits > 1 and not 1 <= team.lag <= 4:
        raise IllegalMove(f"{nest.name}: lag = {team.lag}; blocks agree in 1 to 4 turns")
    if team.teams(nest.row_count, min_blocks) < 1:
        raise IllegalMove(f"{nest.name}: {team.splits} blocks wait for each other, more than fit the GPU")
