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
    early_values,
    kept_loads,
    looked_up_by_vectors,
    own_loads,
    prefetched_loads,
    reduced_loads,
    row_values,
    shared_loads,
    shared_words,
    values_again,
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
    ctas: int
    """Blocks that share a row."""
    vector_width: int
    """Elements of a vector."""
    vectors: int
    """Vectors that a thread has on chip at once; for resident and ring, of a part."""
    columns: int
    """Elements of a row."""
    depth: int = 0
    """The setting `stages`."""
    lag: int = 0
    """The setting; 0 where a pipelined row has one CTA."""
    held: int = 0
    """The setting, as a multiple of `vectors`."""
    grain: int = 0
    """Vectors that come in one go, where `vectors` are several of those; else 0."""
    interleaved: bool = False
    """Whether the blocks of a row take turns with their vectors, so that together they walk through it as one: where
    data comes from memory, that is 1 to 3 % faster (L1 norm of 32768x65535: 4282 us instead of 4332)."""
    unaligned: bool = False
    """Whether vectors begin before the row, by as much as aligns them: then the first and the last are ragged."""

    @property
    def comes_in_parts(self) -> bool:
        """Whether a block's row comes to shared memory in parts."""
        return self.reduce in (Reduce.RESIDENT, Reduce.RING)

    @property
    def slice(self) -> int:
        """Elements of a row that one block has."""
        reach = self.columns + (self.vector_width - 1 if self.unaligned else 0)
        whole = self.vector_width * (32 if self.comes_in_parts else 1)  # a warp's vectors: whole lines of the caches
        return geometry.round_up(-(-reach // self.ctas), whole)

    @property
    def stride(self) -> int:
        """Elements of a vector of all threads that share a block's part."""
        return self.vector_width * self.lanes

    @property
    def step(self) -> int:
        """Elements from one vector of a thread to its next."""
        return self.stride * self.ctas if self.interleaved else self.stride

    @property
    def begin(self) -> int:
        """Elements from where one block of a row begins to where the next does."""
        return self.stride if self.interleaved else self.slice

    @property
    def holds_row(self) -> bool:
        """Whether the vectors in registers are all that a thread has of a row."""
        return not self.comes_in_parts and self.vectors * self.stride >= self.slice

    @property
    def whole_vectors(self) -> int:
        """Vectors of a thread, counted from its first, of which only the first may lie outside the row."""
        if self.interleaved:
            return self.columns // self.step
        return min(self.slice, self.columns - (self.ctas - 1) * self.slice) // self.stride if self.holds_row else 0

    @property
    def is_even(self) -> bool:
        """Whether every thread has equally many vectors, in whole chunks."""
        chunk = (self.grain or self.vectors) * self.stride
        return self.columns == self.slice * self.ctas and self.slice % chunk == 0 and not self.unaligned

    @property
    def exchanges_evenly(self) -> bool:
        """Whether the lanes that meet in any exchange have equally many elements."""
        counts = (self.warps, self.ctas)
        return self.is_even and all(count & (count - 1) == 0 for count in counts)

    @property
    def places(self) -> int:
        """Where rows come to shared memory: vectors of a row, or of a part, there, those of ragged ends included."""
        return self.vectors * self.threads * (self.parts if self.reduce is Reduce.PREFETCHED else 1)

    @property
    def mailboxes(self) -> int:
        """For pipelined: slots of a team. A row's are used again 2 * lag rows later, when all have read them."""
        return 2 * self.lag * self.ctas**2

    def teams(self, rows: int, min_blocks: int) -> int:
        """For pipelined, resident, ring and prefetched: rows in work at once, one for each team of resident blocks."""
        if self.reduce is Reduce.PREFETCHED:
            return min(rows, self.hardware.resident_clusters(self.ctas) * min_blocks)
        return min(rows, self.hardware.resident_blocks(min_blocks) // self.ctas)

    def ring_bytes(self, nest: Nest) -> int:
        """Where blocks stay on their SM: shared memory of a block's ring, of what it keeps, or of its next row."""
        vectors = sum(nest.buffer(load.buffer).type.size_bytes for load in self.copied(nest))
        if self.reduce is Reduce.RING:
            return self.depth * self.places * self.vector_width * vectors
        values = row_values(nest) if self.reduce is Reduce.PIPELINED else early_values(nest)
        singles = sum(nest.buffer(load.buffer).type.size_bytes for load in values)
        rows = 1 if self.reduce is Reduce.RESIDENT else self.depth
        return self.depth * self.places * self.vector_width * vectors + rows * self.threads * singles

    def copied(self, nest: Nest) -> Sequence[Load]:
        """For pipelined, resident, ring and prefetched: loads whose vectors lie in shared memory."""
        if self.reduce is Reduce.PREFETCHED:
            return prefetched_loads(nest, self.vector_width)
        return kept_loads(nest, self.vector_width) if self.comes_in_parts else own_loads(nest)

    @property
    def chunks(self) -> int:
        """Parts of a row that the vectors in registers of a block make."""
        reach = self.columns + (self.vector_width - 1 if self.unaligned else 0)
        return -(-reach // (self.vectors * self.stride))

    @property
    def part(self) -> int:
        """For resident, ring and prefetched: elements of a part of a block's slice, a few vectors of each thread."""
        return self.vectors * self.stride

    @property
    def parts(self) -> int:
        """For resident, ring and prefetched: parts of a block's slice."""
        return -(-self.slice // self.part)

    @property
    def on_chip(self) -> int:
        """For resident: parts of a block's slice in shared memory and in registers."""
        return self.depth + self.held // self.vectors

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // 32

    @property
    def rows_a_block(self) -> int:
        """Rows that a block works on at once."""
        return self.threads // self.lanes if self.ctas == 1 else 1


def team_of(hardware: Hardware, nest: Nest, settings: RowSettings) -> Team:
    """The team of a canonical nest, as many vectors in registers as the settings want and a row has."""
    reduce = settings.reduce
    lanes = settings.lanes if reduce is Reduce.WARP else settings.threads
    ctas = 1 if reduce in (Reduce.WARP, Reduce.BLOCK) else settings.ctas
    width = settings.vector_width
    team = Team(hardware, reduce, settings.threads, lanes, ctas, width, settings.vectors, nest.column_count)
    team = replace(team, unaligned=memory_access.skew(nest, nest.reduced[0], width) is not None)
    most = -(-team.slice // team.stride)
    if reduce is Reduce.RESIDENT:
        team = replace(team, vectors=min(team.vectors, most), lag=settings.lag)
        team = replace(team, depth=min(settings.stages, team.parts))
        held = min(settings.held // team.vectors, team.parts - team.depth)
        return replace(team, held=held * team.vectors)
    if reduce is Reduce.RING:
        team = replace(team, vectors=min(team.vectors, most), lag=settings.lag, depth=settings.stages, interleaved=True)
        held = min(settings.held // team.vectors, team.parts * len(shared_loads(nest, width)))
        return replace(team, held=held * team.vectors)
    if reduce is Reduce.PIPELINED:
        return replace(team, vectors=most, depth=settings.stages, lag=settings.lag if ctas > 1 else 0)
    depths = {Reduce.TWO_KERNELS: settings.stages, Reduce.PREFETCHED: max(1, settings.stages)}
    team = replace(team, vectors=min(team.vectors, most), depth=depths.get(reduce, 0))
    beyond_cache = memory_access.row_data_bytes(nest) > hardware.l2_bytes
    return replace(team, interleaved=reduce in (Reduce.CLUSTER, Reduce.PREFETCHED) and team.holds_row and beyond_cache)


def stages_of(hardware: Hardware, nest: Nest, settings: RowSettings) -> list[Stage]:
    """The stages that a team exchanges, merged or not as the settings say."""
    even = team_of(hardware, nest, settings).exchanges_evenly
    return plan(nest, merge=settings.merge, even=even, beside=True)


def asked_loads(nest: Nest, team: Team, min_blocks: int) -> list[Load]:
    """Loads of which a block asks for its slice before the previous kernel ends: of rows that fit a cache at once."""
    axis, card = nest.reduced[0].name, team.hardware
    wave = team.lanes == team.threads and nest.row_count * team.ctas <= card.sm_count * min_blocks
    if not wave or memory_access.row_data_bytes(nest) > card.l2_bytes or team.unaligned or team.columns % team.slice:
        return []
    found = [load for load in reduced_loads(nest) if load.index.coefficient(axis) == 1 and load.index.axes() - {axis}]
    found = [load for load in found if memory_access.access(load.index, axis, team.vector_width) == "vector"]
    return [load for load in found if team.vector_width * nest.buffer(load.buffer).type.size_bytes % 16 == 0]


def require(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int, *, preload: bool) -> None:
    """Checks that a block of the team fits an SM.

    Raises:
        IllegalMove: names the limit.
    """
    stays = team.reduce in (Reduce.PIPELINED, Reduce.RESIDENT, Reduce.RING)
    width, elements = team.vector_width, team.vector_width * team.vectors
    axis = nest.reduced[0].name
    roots = [reduction.value for stage in stages for reduction in stage.reductions]
    roots += [store.value for store in nest.stores] if preload else []
    held = [load for load in memory_access.loads_below(roots) if axis in load.index.axes()]
    if stays:
        checks = {Reduce.RESIDENT: _require_resident, Reduce.RING: _require_ring, Reduce.PIPELINED: _require_pipelined}
        checks[team.reduce](nest, team, stages, min_blocks)
        held = [load for load in held if load not in team.copied(nest)]
    if team.reduce is Reduce.PREFETCHED:
        _require_prefetched(nest, team, min_blocks)
    if team.reduce is Reduce.TWO_KERNELS and not 0 <= team.depth <= (1 if team.unaligned else 64):
        raise IllegalMove(f"{nest.name}: a block stores its columns of 1 to 64 rows, or of one that begins anywhere")
    if team.reduce is Reduce.TWO_KERNELS and team.depth:
        stored = memory_access.loads_below(store.value for store in nest.stores if nest.is_element_store(store))
        held = max(held, [load for load in stored if axis in load.index.axes()], key=len)
    registers = sum(max(1, elements * nest.buffer(load.buffer).type.size_bytes // 4) for load in held)
    if team.holds_row and not stays:
        registers = max(registers, elements * values_again(nest)) + team.vectors * looked_up_by_vectors(nest)
    # ptxas keeps what it read from the ring for the second visit.
    of_held = shared_words(nest, width) if team.reduce is Reduce.RING else width * len(team.copied(nest))
    registers += elements + team.held * of_held if stays else 0
    if nest.summed:  # beside the sums, elements as they are added, and where parts of a row lie
        sums = sum(store.type.size_bytes // 4 for store in nest.summed)
        registers += elements * (1 + sums * team.parts) + (0 if team.holds_row else 16)
    clustered = team.reduce in (Reduce.CLUSTER, Reduce.PREFETCHED)
    boxes = sum(stage.state_bytes() for stage in stages) * team.warps * (team.ctas if clustered else 1)
    shared = 2 * boxes + 16 + team.ring_bytes(nest) if stays or team.reduce is Reduce.PREFETCHED else boxes
    geometry.require_block(
        team.hardware, nest, threads=team.threads, min_blocks=min_blocks, shared_bytes=shared, held_registers=registers
    )


def _require_pipelined(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int) -> None:
    """Raises IllegalMove where rows cannot be pipelined through shared memory."""
    ring = own_loads(nest)
    if len(stages) != 1:
        raise IllegalMove(f"{nest.name}: a row is pipelined through one exchange, and this one needs {len(stages)}")
    if any(nest.buffer(load.buffer).written for load in memory_access.loads(nest)):
        raise IllegalMove(f"{nest.name}: rows that are overwritten in place cannot be read ahead")
    for load in ring:
        size = team.vector_width * nest.buffer(load.buffer).type.size_bytes
        if size % 16 or memory_access.access(load.index, nest.reduced[0].name, team.vector_width) != "vector":
            raise IllegalMove(f"{nest.name}: asynchronous copies are of 16 bytes, which {load.buffer} does not have")
    if not ring or not 2 + team.lag <= team.depth <= 32:
        raise IllegalMove(f"{nest.name}: {team.depth} stages do not reach ahead of a lag of {team.lag}")
    if team.ctas > 1 and not 1 <= team.lag <= 4:
        raise IllegalMove(f"{nest.name}: lag = {team.lag}; blocks agree within 1 to 4 rows")
    if team.teams(nest.row_count, min_blocks) < 1:
        raise IllegalMove(f"{nest.name}: {team.ctas} blocks wait for each other, more than fit the GPU")


def _require_copies(nest: Nest, copied: Sequence[Load], width: int) -> None:
    """Raises IllegalMove where vectors cannot be prefetched, or there are none."""
    if any(nest.buffer(load.buffer).written for load in copied):
        raise IllegalMove(f"{nest.name}: rows that are overwritten in place cannot be read ahead")
    is_wanted = bool(copied or nest.summed)  # these go on where nothing comes ahead
    if not is_wanted or any(width * nest.buffer(load.buffer).type.size_bytes % 16 for load in copied):
        raise IllegalMove(f"{nest.name}: nothing can be prefetched by copies of 16 bytes")


def _require_resident(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int) -> None:
    """Raises IllegalMove where blocks cannot stay and keep parts of their rows."""
    if len(stages) != 1 or not any(nest.is_element_store(store) for store in nest.stores):
        raise IllegalMove(f"{nest.name}: resident visits a row twice, once for one exchange and once to store")
    _require_copies(nest, kept_loads(nest, team.vector_width), team.vector_width)
    if not 1 <= team.depth <= 128 or not 0 <= team.lag <= team.parts:
        raise IllegalMove(f"{nest.name}: stages = {team.depth}, lag = {team.lag}; a slice has {team.parts} parts")
    if team.teams(nest.row_count, min_blocks) < 1:
        raise IllegalMove(f"{nest.name}: {team.ctas} blocks wait for each other, more than fit the GPU")


def _require_ring(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int) -> None:
    """Raises IllegalMove where rows cannot pass through a ring in parts."""
    _require_resident(nest, replace(team, lag=0), stages, min_blocks)
    kept, axis = kept_loads(nest, team.vector_width), nest.reduced[0].name
    if team.ctas < 2 or any(axis in load.index.axes() and load not in kept for load in reduced_loads(nest)):
        raise IllegalMove(f"{nest.name}: a ring takes rows of two CTAs and more that store what they add up")
    if not team.parts <= team.lag < min(team.depth, 2 * team.parts):
        raise IllegalMove(
            f"{nest.name}: {team.lag} of {team.depth} parts are added up before they are stored; a row has {team.parts}"
        )
    if (nest.row_count + 2) * team.parts + team.depth >= 2**31:
        raise IllegalMove(f"{nest.name}: more parts than 32 bits count")


def _require_prefetched(nest: Nest, team: Team, min_blocks: int) -> None:
    """Raises IllegalMove where the next rows cannot come into shared memory."""
    if team.ctas not in (1, 2, 4, 8, 16):
        raise IllegalMove(f"{nest.name}: a prefetched row has 1, 2, 4, 8 or 16 CTAs")
    if team.unaligned and not team.holds_row:
        raise IllegalMove(
            f"{nest.name}: {team.vectors} vectors are less than a thread has of a row that begins anywhere"
        )
    if not 1 <= team.depth <= 8:
        raise IllegalMove(f"{nest.name}: stages = {team.depth}; from 1 to 8 rows are on their way")
    _require_copies(nest, prefetched_loads(nest, team.vector_width), team.vector_width)
    if team.teams(nest.row_count, min_blocks) < 1:
        raise IllegalMove(f"{nest.name}: no cluster of {team.ctas} blocks is resident")
