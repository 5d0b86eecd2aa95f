"""Who shares a row on CUDA: some lanes, a block, a cluster or several blocks, and what each thread holds of it.

Numbers only; `row_text` writes the kernel and `row_defaults` chooses the team.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows.settings.row_settings import Reduce, RowSettings
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.analysis.row_loads import (
    ahead_loads,
    early_values,
    kept_loads,
    own_loads,
    reduced_loads,
    row_values,
    shared_loads,
    shared_words,
)
from agent_synthesis.nests.analysis.stages import Stage, plan
from agent_synthesis.nests.ir import Load, Nest
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware


@dataclass(frozen=True)
class Team:
    """Who shares a row, and how much of it each holds."""

    hardware: Hardware
    """The card."""
    reduce: Reduce
    threads: int
    """Threads of a block."""
    lanes: int
    """Threads of a block that share a row: a part of a warp, or all."""
    splits: int
    """Blocks that share a row."""
    pack: int
    """Elements of a pack."""
    packs: int
    """Packs that a thread has on chip at once: in registers, or for stream in shared memory. For hold and roll: of a
    part."""
    columns: int
    """Elements of a row."""
    depth: int = 0
    """For stream: rows that a block has in shared memory or on the way there; for roll: parts. For hold: parts of its
    row there. For two_pass: rows of which a block stores a chunk, 0 where it stores a slice."""
    lag: int = 0
    """For stream: turns that the blocks of a row have to agree; 0 where a row has one block.
    For hold: parts of the next row that are asked for meanwhile. For roll: parts that are added up before stored."""
    held: int = 0
    """Packs of a thread that registers hold, a multiple of `packs`. For hold: behind the parts in shared memory. For
    roll: of what rows share."""
    grain: int = 0
    """Packs that come in one go, where `packs` are several of those; else 0."""
    interleaved: bool = False
    """Whether the blocks of a row take turns with their packs, so that together they walk through it as one: where data
    comes from memory, that is 1 to 3 % faster (L1 norm of 32768x65535: 4282 us instead of 4332)."""
    skewed: bool = False
    """Whether packs begin before the row, by as much as aligns them: then the first and the last are ragged."""

    @property
    def comes_in_parts(self) -> bool:
        """Whether a block's row comes to shared memory in parts."""
        return self.reduce in (Reduce.HOLD, Reduce.ROLL)

    @property
    def slice(self) -> int:
        """Elements of a row that one block has."""
        reach = self.columns + (self.pack - 1 if self.skewed else 0)
        whole = 32 * self.pack if self.comes_in_parts else self.pack  # a warp's packs: whole lines of the caches
        return geometry.round_up(-(-reach // self.splits), whole)

    @property
    def stride(self) -> int:
        """Elements of a pack of all threads that share a block's part."""
        return self.pack * self.lanes

    @property
    def step(self) -> int:
        """Elements from one pack of a thread to its next."""
        return self.stride * self.splits if self.interleaved else self.stride

    @property
    def begin(self) -> int:
        """Elements from where one block of a row begins to where the next does."""
        return self.stride if self.interleaved else self.slice

    @property
    def holds_row(self) -> bool:
        """Whether the packs in registers are all that a thread has of a row."""
        return not self.comes_in_parts and self.packs * self.stride >= self.slice

    @property
    def whole_packs(self) -> int:
        """Packs of a thread, counted from its first, of which only the first may lie outside the row."""
        if self.interleaved:
            return self.columns // self.step
        return min(self.slice, self.columns - (self.splits - 1) * self.slice) // self.stride if self.holds_row else 0

    @property
    def is_even(self) -> bool:
        """Whether every thread has equally many packs, in whole chunks."""
        chunk = (self.grain or self.packs) * self.stride
        return self.columns == self.slice * self.splits and self.slice % chunk == 0 and not self.skewed

    @property
    def exchanges_evenly(self) -> bool:
        """Whether the lanes that meet in any exchange have equally many elements."""
        counts = (self.warps, self.splits)
        return self.is_even and all(count & (count - 1) == 0 for count in counts)

    @property
    def places(self) -> int:
        """Where rows come to shared memory: packs of a row, or of a part, there, those of ragged ends included."""
        return self.packs * self.threads

    @property
    def mailboxes(self) -> int:
        """For stream: slots of a team. A turn's are used again 2 * lag turns later, when all have read them."""
        return 2 * self.lag * self.splits**2

    def teams(self, rows: int, min_blocks: int) -> int:
        """For stream, hold, roll and ahead: rows in work at once, one for each team of resident blocks."""
        if self.reduce is Reduce.AHEAD:
            return min(rows, self.hardware.resident_clusters(self.splits) * min_blocks)
        return min(rows, self.hardware.resident_blocks(min_blocks) // self.splits)

    def ring_bytes(self, nest: Nest) -> int:
        """For stream, hold, roll and ahead: shared memory of a block's ring, of what it keeps, or of its next row."""
        packs = sum(nest.buffer(load.buffer).type.size_bytes for load in self.copied(nest))
        if self.reduce in (Reduce.AHEAD, Reduce.ROLL):
            return (self.depth if self.reduce is Reduce.ROLL else 1) * self.places * self.pack * packs
        hold = self.reduce is Reduce.HOLD
        values = early_values(nest) if hold else row_values(nest)
        singles = sum(nest.buffer(load.buffer).type.size_bytes for load in values)
        turns = 1 if hold else self.depth
        return self.depth * self.places * self.pack * packs + turns * self.threads * singles

    def copied(self, nest: Nest) -> list[Load]:
        """For stream, hold, roll and ahead: loads whose packs lie in shared memory."""
        if self.reduce is Reduce.AHEAD:
            return ahead_loads(nest, self.pack)
        return kept_loads(nest, self.pack) if self.comes_in_parts else own_loads(nest)

    @property
    def chunks(self) -> int:
        """Parts of a row that the packs in registers of a block make."""
        reach = self.columns + (self.pack - 1 if self.skewed else 0)
        return -(-reach // (self.packs * self.stride))

    @property
    def part(self) -> int:
        """For hold and roll: elements of one part of a block's slice, a few packs of each thread."""
        return self.packs * self.stride

    @property
    def parts(self) -> int:
        """For hold and roll: parts of a block's slice."""
        return -(-self.slice // self.part)

    @property
    def on_chip(self) -> int:
        """For hold: parts of a block's slice in shared memory and in registers."""
        return self.depth + self.held // self.packs

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // 32

    @property
    def rows_a_block(self) -> int:
        """Rows that a block works on at once."""
        return self.threads // self.lanes if self.splits == 1 else 1


def team_of(hardware: Hardware, nest: Nest, settings: RowSettings) -> Team:
    """The team of a canonical nest, as many packs in registers as the settings want and a row has."""
    reduce = settings.reduce
    lanes = settings.lanes if reduce is Reduce.WARP else settings.threads
    splits = 1 if reduce in (Reduce.WARP, Reduce.BLOCK) else settings.splits
    pack = settings.pack
    team = Team(hardware, reduce, settings.threads, lanes, splits, pack, settings.packs, nest.column_count)
    team = replace(team, skewed=memory_access.skew(nest, nest.reduced[0], pack) is not None)
    most = -(-team.slice // team.stride)
    if reduce is Reduce.HOLD:
        team = replace(team, packs=min(team.packs, most), lag=settings.lag)
        team = replace(team, depth=min(settings.depth, team.parts))
        held = min(settings.held // team.packs, team.parts - team.depth)
        return replace(team, held=held * team.packs)
    if reduce is Reduce.ROLL:
        team = replace(team, packs=min(team.packs, most), lag=settings.lag, depth=settings.depth, interleaved=True)
        held = min(settings.held // team.packs, team.parts * len(shared_loads(nest, pack)))
        return replace(team, held=held * team.packs)
    if reduce is Reduce.STREAM:
        return replace(team, packs=most, depth=settings.depth, lag=settings.lag if splits > 1 else 0)
    depth = settings.depth if reduce is Reduce.TWO_PASS else 0
    team = replace(team, packs=min(team.packs, most), depth=depth)
    beyond_cache = memory_access.row_data_bytes(nest) > hardware.l2_bytes
    return replace(team, interleaved=reduce in (Reduce.CLUSTER, Reduce.AHEAD) and team.holds_row and beyond_cache)


def stages_of(hardware: Hardware, nest: Nest, settings: RowSettings) -> list[Stage]:
    """The stages that a team exchanges, merged or not as the settings say."""
    even = team_of(hardware, nest, settings).exchanges_evenly
    return plan(nest, merge=settings.merge, even=even)


def asked_loads(nest: Nest, team: Team, min_blocks: int) -> list[Load]:
    """Loads of which a block asks for its slice before the previous kernel ends: of rows that fit a cache at once."""
    axis, card = nest.reduced[0].name, team.hardware
    one_wave = team.lanes == team.threads and nest.row_count * team.splits <= card.sm_count * min_blocks
    if not one_wave or memory_access.row_data_bytes(nest) > card.l2_bytes or team.skewed or team.columns % team.slice:
        return []
    found = [load for load in reduced_loads(nest) if load.index.coefficient(axis) == 1 and load.index.axes() - {axis}]
    found = [load for load in found if memory_access.access(load.index, axis, team.pack) == "pack"]
    return [load for load in found if team.pack * nest.buffer(load.buffer).type.size_bytes % 16 == 0]


def require(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int, *, preload: bool) -> None:
    """Checks that a block of the team fits an SM.

    Raises:
        IllegalMove: names the limit.
    """
    stream = team.reduce in (Reduce.STREAM, Reduce.HOLD, Reduce.ROLL)
    elements = team.pack * team.packs
    axis = nest.reduced[0].name
    roots = [reduction.value for stage in stages for reduction in stage.reductions]
    roots += [store.value for store in nest.stores] if preload else []
    held = [load for load in memory_access.loads_below(roots) if axis in load.index.axes()]
    if stream:
        checks = {Reduce.HOLD: _require_hold, Reduce.ROLL: _require_roll, Reduce.STREAM: _require_stream}
        checks[team.reduce](nest, team, stages, min_blocks)
        held = [load for load in held if load not in team.copied(nest)]
    if team.reduce is Reduce.AHEAD:
        _require_ahead(nest, team, min_blocks)
    if team.reduce is Reduce.TWO_PASS and not 0 <= team.depth <= (1 if team.skewed else 64):
        raise IllegalMove(f"{nest.name}: a block stores its columns of 1 to 64 rows, or of one that begins anywhere")
    if team.reduce is Reduce.TWO_PASS and team.depth:
        stored = memory_access.loads_below(store.value for store in nest.stores if nest.is_element_store(store))
        held = max(held, [load for load in stored if axis in load.index.axes()], key=len)
    registers = sum(max(1, elements * nest.buffer(load.buffer).type.size_bytes // 4) for load in held)
    # ptxas keeps what it read from the ring for the second visit.
    of_held = shared_words(nest, team.pack) if team.reduce is Reduce.ROLL else team.pack * len(team.copied(nest))
    registers += elements + team.held * of_held if stream else 0
    clustered = team.reduce in (Reduce.CLUSTER, Reduce.AHEAD)
    boxes = sum(stage.state_bytes() for stage in stages) * team.warps * (team.splits if clustered else 1)
    shared = 2 * boxes + 16 + team.ring_bytes(nest) if stream or team.reduce is Reduce.AHEAD else boxes
    geometry.require_block(
        team.hardware, nest, threads=team.threads, min_blocks=min_blocks, shared_bytes=shared, held_registers=registers
    )


def _require_stream(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int) -> None:
    """Raises IllegalMove where rows cannot stream through shared memory."""
    ring = own_loads(nest)
    if len(stages) != 1:
        raise IllegalMove(f"{nest.name}: a row streams through one exchange, and this one needs {len(stages)}")
    if any(nest.buffer(load.buffer).written for load in memory_access.loads(nest)):
        raise IllegalMove(f"{nest.name}: rows that are overwritten in place cannot be read ahead")
    for load in ring:
        size = team.pack * nest.buffer(load.buffer).type.size_bytes
        if size % 16 or memory_access.access(load.index, nest.reduced[0].name, team.pack) != "pack":
            raise IllegalMove(f"{nest.name}: asynchronous copies are of 16 bytes, which {load.buffer} does not have")
    if not ring or not 2 + team.lag <= team.depth <= 32:
        raise IllegalMove(f"{nest.name}: a ring of {team.depth} rows does not reach ahead of a lag of {team.lag}")
    if team.splits > 1 and not 1 <= team.lag <= 4:
        raise IllegalMove(f"{nest.name}: lag = {team.lag}; blocks agree in 1 to 4 turns")
    if team.teams(nest.row_count, min_blocks) < 1:
        raise IllegalMove(f"{nest.name}: {team.splits} blocks wait for each other, more than fit the GPU")


def _require_copies(nest: Nest, copied: Sequence[Load], pack: int) -> None:
    """Raises IllegalMove where packs cannot be copied ahead of their row's turn, or there are none."""
    if any(nest.buffer(load.buffer).written for load in copied):
        raise IllegalMove(f"{nest.name}: rows that are overwritten in place cannot be read ahead")
    if not copied or any(pack * nest.buffer(load.buffer).type.size_bytes % 16 for load in copied):
        raise IllegalMove(f"{nest.name}: nothing comes ahead that copies of 16 bytes can fetch")


def _require_hold(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int) -> None:
    """Raises IllegalMove where blocks cannot stay and keep parts of their rows."""
    if len(stages) != 1 or not any(nest.is_element_store(store) for store in nest.stores):
        raise IllegalMove(f"{nest.name}: hold visits a row twice, once for one exchange and once to store")
    _require_copies(nest, kept_loads(nest, team.pack), team.pack)
    if not 1 <= team.depth <= 128 or not 0 <= team.lag <= team.parts:
        raise IllegalMove(f"{nest.name}: depth = {team.depth}, lag = {team.lag}; a slice has {team.parts} parts")
    if team.teams(nest.row_count, min_blocks) < 1:
        raise IllegalMove(f"{nest.name}: {team.splits} blocks wait for each other, more than fit the GPU")


def _require_roll(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int) -> None:
    """Raises IllegalMove where rows cannot roll through shared memory in parts."""
    _require_hold(nest, replace(team, lag=0), stages, min_blocks)
    kept, axis = kept_loads(nest, team.pack), nest.reduced[0].name
    if team.splits < 2 or any(axis in load.index.axes() and load not in kept for load in reduced_loads(nest)):
        raise IllegalMove(f"{nest.name}: rows of two blocks and more roll, of which what is added up is stored too")
    if not team.parts <= team.lag < min(team.depth, 2 * team.parts):
        raise IllegalMove(
            f"{nest.name}: {team.lag} of {team.depth} parts are added up before they are stored; a row has {team.parts}"
        )
    if (nest.row_count + 2) * team.parts + team.depth >= 2**31:
        raise IllegalMove(f"{nest.name}: more parts than 32 bits count")


def _require_ahead(nest: Nest, team: Team, min_blocks: int) -> None:
    """Raises IllegalMove where the next row cannot come into shared memory while registers hold this one."""
    if team.splits not in (1, 2, 4, 8, 16):
        raise IllegalMove(f"{nest.name}: a row that comes ahead has 1, 2, 4, 8 or 16 blocks")
    if not team.holds_row:
        raise IllegalMove(f"{nest.name}: registers hold {team.packs} packs of a row that has more")
    _require_copies(nest, ahead_loads(nest, team.pack), team.pack)
    if team.teams(nest.row_count, min_blocks) < 1:
        raise IllegalMove(f"{nest.name}: no cluster of {team.splits} blocks is resident")
