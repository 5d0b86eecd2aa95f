"""Which settings to begin a row reduction on CUDA with: a list of candidates, the fastest as measured first.

The one idea: how many rows there are and how long each is decides who shares one. Lanes take short rows, a block or a
cluster what their registers hold, blocks that stay on their SM many long rows, and two kernels few of them. The times
in comments are of an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows import resident_rows, ring_rows
from agent_synthesis.emit.cuda.rows.row_team import team_of
from agent_synthesis.emit.cuda.rows.settings.row_legal import require
from agent_synthesis.emit.cuda.rows.settings.row_settings import Reduce, RowSettings
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import memory_access, passes
from agent_synthesis.nests.analysis import costly_parts
from agent_synthesis.nests.analysis.row_loads import has_common_loads
from agent_synthesis.nests.analysis.stages import can_merge, plan
from agent_synthesis.nests.ir import Nest
from agent_synthesis.settings import Exp, Loads, Stores

_SHORT_ROW = 1024
_CLUSTER_ELEMENTS = 256 << 10
"""Rows * columns up to which the data is read faster than the blocks of a grid meet."""
_MIDDLE_TENSOR, _LARGE_TENSOR = 1 << 20, 32 << 20
"""Elements from which on a reduction of few rows takes 256 blocks a row, and all that the GPU has room for."""
_LONG_BLOCK_ROW = 16384
_PIPELINED_SLICE = 8192
"""Elements of a row that a block pipelines at most: three or four such rows fit half an SM's shared memory."""
_LARGE_SLICE_BYTES = 160 << 10
"""Bytes of a row in one block from which on the next row is prefetched: so few rows are in work that memory waits."""
_RING_ROW = 512 << 10
"""Elements of a row from which on blocks that keep what rows share are fewer and larger, and rows pass rings."""
SHARED_ROWS = 16
"""Rows whose columns a block stores one after the other where they share weights."""
_MOST_REREAD = 1 / 2
"""Share of a row that blocks which keep the rest may read twice: beyond it two kernels are faster."""
_MOST_HELD_BYTES = 384
"""Bytes of a row that a thread may hold in registers."""


def preferred(schedule: CudaSchedule, simple: Nest) -> list[RowSettings]:
    """Settings for a canonical nest, the best first; not all of them are legal."""
    is_few = simple.row_count < schedule.hardware.sm_count
    found = [
        *_of_lanes(schedule, simple),
        *(_of_few_rows(schedule, simple) if is_few and simple.column_count > _SHORT_ROW else ()),
        *_summed_twice(schedule, simple),
        *_of_a_block(schedule, simple),
        *_of_long_rows(schedule, simple),
        *([two_kernels(schedule, simple)] if is_few else ()),
        # What is read again may still lie in the L2 (group norm, 896 slices of 2 M elements: 5463 us, not 5748).
        made(schedule, simple, Reduce.BLOCK, threads=512, vectors=8, loads=Loads.CACHED),
        made(schedule, simple, Reduce.BLOCK, threads=512, vectors=4),
        made(schedule, simple, Reduce.BLOCK, threads=256, vectors=2),
    ]
    return [p for p in found if _is_worth_its_exchange(schedule, simple, p)]


def made(
    schedule: CudaSchedule,
    simple: Nest,
    reduce: Reduce,
    *,
    threads: int,
    lanes: int = 32,
    ctas: int = 1,
    min_blocks: int = 1,
    vectors: int = 0,
    width: int = 0,
    loads: Loads = Loads.EVICT_FIRST,
    stages: int = 0,
    stores: Stores = Stores.PLAIN,
) -> RowSettings:
    """Settings of a strategy; what is not given suits the nest. 0 vectors: as many as registers have room for."""
    width = width or memory_access.best_vector(simple, simple.reduced[0])
    size = max((b.type.size_bytes for b in simple.buffers if not b.written), default=4)
    draft = RowSettings(
        reduce, merge=reduce is not Reduce.WARP and can_merge(simple), loads=loads, stores=stores,
        preload=reduce is Reduce.PIPELINED, dependent_launch=reduce is not Reduce.GRID and schedule.pdl[0],
        exp=Exp.FAST if costly_parts.distance_exponentials_only(simple) else Exp.ACCURATE, threads=threads,
        lanes=lanes if reduce is Reduce.WARP else threads, ctas=ctas, vector_width=width,
        vectors=vectors or max(1, _MOST_HELD_BYTES // (width * size)), min_blocks=min_blocks, stages=stages,
    )  # fmt: skip
    found = tight(schedule, simple, draft)
    team = team_of(schedule.hardware, simple, found)
    most = {Reduce.CLUSTER: 64, Reduce.GRID: 64, Reduce.WARP: 128}.get(reduce, 0)
    if team.holds_row and team.vectors * width * size <= most:
        eager = replace(found, preload=True)
        if geometry.legal([eager], lambda settings: require(schedule.hardware, simple, settings)):
            return eager
    return found


def tight(schedule: CudaSchedule, simple: Nest, settings: RowSettings) -> RowSettings:
    """The same with no more vectors than a thread has of a row."""
    if min(settings.lanes, settings.threads, settings.ctas, settings.vector_width, settings.vectors) < 1:
        return settings
    return replace(settings, vectors=team_of(schedule.hardware, simple, settings).vectors)


def _is_worth_its_exchange(schedule: CudaSchedule, simple: Nest, settings: RowSettings) -> bool:
    """Clusters and grids are only where the row stays in registers."""
    exchanges = settings.reduce in (Reduce.CLUSTER, Reduce.GRID)
    return not exchanges or team_of(schedule.hardware, simple, settings).holds_row


# -- rows that lanes or a block hold


def _of_lanes(schedule: CudaSchedule, simple: Nest) -> list[RowSettings]:
    rows, columns = simple.row_count, simple.column_count
    is_short = passes.is_visited_once(simple) and rows >= 4 * schedule.hardware.sm_count and columns < 4096
    if columns > _SHORT_ROW and not is_short:
        return []
    width = memory_access.widest_vector(simple, simple.reduced[0])
    lanes = min(32, geometry.power_of_two_at_least(-(-columns // width)))
    if columns == 64 and width == 4:
        lanes = 16
    threads, loads = 128 if lanes == 32 else 256, Loads.EVICT_FIRST if columns > 256 else Loads.CACHED
    return [made(schedule, simple, Reduce.WARP, threads=threads, lanes=lanes, loads=loads)]


def _of_a_block(schedule: CudaSchedule, simple: Nest) -> list[RowSettings]:
    choose, columns, found = partial(made, schedule, simple, Reduce.BLOCK), simple.column_count, []
    if passes.is_visited_once(simple):
        found.append(choose(threads=512 if columns >= 4096 else 256, vectors=4))
    # Of a maximum and a sum of exponentials, whose results are all, no row is read again, so no cluster has to hold it
    # (cross-entropy's step of 8192x128256 in bf16: 1990 us instead of 2490).
    is_one_pass = not passes.element_stores(simple) and len(plan(simple, merge=True, beside=True)) == 1
    if is_one_pass and columns > _LONG_BLOCK_ROW and simple.row_count >= 2 * schedule.hardware.sm_count:
        found.append(choose(threads=512, vectors=8, min_blocks=2, loads=Loads.CACHED))
    if columns <= _LONG_BLOCK_ROW:
        # Four vectors a thread (layer norm of 16384x4096 in bf16: 72 us, with two 88; of 8192x8192 73 and 93).
        width = max(4, memory_access.best_vector(simple, simple.reduced[0]))
        threads = min(512, max(64, geometry.power_of_two_at_least(-(-columns // (4 * width)))))
        # Half as many blocks where so many have no registers for what elements' stores need of the reductions again.
        for blocks in dict.fromkeys((1024 // threads, max(2, 512 // threads))):
            found.append(choose(threads=threads, min_blocks=blocks, loads=Loads.CACHED))
    return found


# -- few rows, which several blocks share


def _of_few_rows(schedule: CudaSchedule, simple: Nest) -> list[RowSettings]:
    choose, rows, columns = partial(made, schedule, simple), simple.row_count, simple.column_count
    found = []
    if rows * columns <= _CLUSTER_ELEMENTS and columns >= 4096:
        found.append(choose(Reduce.CLUSTER, threads=128, ctas=8))
    # A cluster's exchange is the cheapest; where very many blocks share a row, two kernels that overlap beat
    # one whose blocks meet (1x1048576: 6.9 us against 8.2).
    if 8192 <= columns <= 65536 and 16 <= rows <= 3 * schedule.hardware.resident_clusters(8):
        found.append(choose(Reduce.CLUSTER, threads=256, ctas=8, min_blocks=3, loads=Loads.CACHED))
    ctas = _ctas(schedule, simple, 1)
    if rows <= 8 and ctas > 1 and columns <= 8192 * ctas:
        found.append(choose(Reduce.TWO_KERNELS, threads=512, ctas=ctas, vectors=4, loads=Loads.CACHED))
    # Few slices of 8K to one block an SM; more data, more blocks of smaller slices whose waits overlap. Where
    # nothing is read twice, with two kernels no block waits for the sum (of 2 M elements: 8.4 us instead of 22.9).
    slices = ((1, 512, 8192), (4, 256, 4096), (2, 512, 16384), (1, 512, 32768))
    is_summed = passes.is_visited_once(simple) and columns >= 8192 and rows * columns > _MIDDLE_TENSOR
    for per_sm, threads, longest in () if is_summed else slices:
        ctas = _ctas(schedule, simple, per_sm)
        if ctas > 1 and columns <= longest * ctas:
            found.append(choose(Reduce.GRID, threads=threads, ctas=ctas, min_blocks=per_sm))
    return found


def _ctas(schedule: CudaSchedule, simple: Nest, per_sm: int) -> int:
    """Blocks of a row so that about `per_sm` blocks are on every SM; a slice of at least 2048 elements."""
    ctas = (1 << schedule.hardware.sm_count.bit_length() - 1) * per_sm // simple.row_count
    while ctas > 1 and simple.column_count // ctas < 2048:
        ctas //= 2
    return ctas


def _summed_twice(schedule: CudaSchedule, simple: Nest) -> list[RowSettings]:
    """Kernels of many blocks where few rows' results are all (8192x8192: sum 75 us, not 78; argmax 82, not 191)."""
    rows, columns, sm_count = simple.row_count, simple.column_count, schedule.hardware.sm_count
    if passes.element_stores(simple) or columns < 8192 or rows >= 2 * sm_count:
        return []
    choose, found = partial(made, schedule, simple, Reduce.TWO_KERNELS), []
    if costly_parts.logarithms([r.value for r in simple.reductions], simple.reduced[0].name):
        # Many instructions want many warps (two logarithms of 268 M pairs: 520 us instead of 572).
        ctas = max(2, min(2048, columns // 8192, 2048 // rows))
        found.append(choose(threads=512, ctas=ctas, vectors=2, min_blocks=2))
    # Mean of 5.9 M squared differences: 17.4 us with 256 blocks, 27.9 with 64.
    blocks, threads, vectors = 64, 256, 4
    if rows * columns > _MIDDLE_TENSOR:
        blocks, threads, vectors = 256, 512, 2
    if rows * columns >= _LARGE_TENSOR:
        blocks, threads, vectors = 4 * sm_count, 512, 4
    ctas = min(blocks, 4 * sm_count // max(1, rows))
    if ctas > 1:
        found.append(choose(threads=threads, ctas=ctas, vectors=vectors))
    return found


def two_kernels(schedule: CudaSchedule, simple: Nest) -> RowSettings:
    """Kernels of many blocks; the one that stores has a chunk of one row in each, or of several that share weights.

    Layer norm of 16x4194304: 214 us instead of 245. A tensor of 9 M elements over its norm: 35 us with 256 blocks,
    40.7 with 64.
    """
    ctas = 64
    while max(1, simple.row_count) * ctas < 256:
        ctas *= 2
    while ctas > 2 and simple.column_count < 16384 * ctas:
        ctas //= 2
    axis = simple.reduced[0]
    is_unaligned = memory_access.skew(simple, axis, memory_access.best_vector(simple, axis)) is not None
    stages = min(SHARED_ROWS, simple.row_count) if has_common_loads(simple) and not is_unaligned else 1
    vectors, blocks = (2, 2) if stages > 1 else (4, 1)
    return made(
        schedule, simple, Reduce.TWO_KERNELS, threads=512, ctas=ctas, stages=stages, vectors=vectors, min_blocks=blocks
    )


# -- many long rows: clusters, and blocks that stay on their SM


def _of_long_rows(schedule: CudaSchedule, simple: Nest) -> list[RowSettings]:
    # Blocks that stay hold what all rows share; where there is no such thing, clusters are as fast or faster
    # (4096x393216: layer norm 3495 us against 3970, softmax 3563 against 3239). Very long ones pass rings (layer norm
    # of 64x1048576: 150 us instead of 214; of 512x131072: 153 instead of 145).
    pipelined, rings = _pipelined(schedule, simple), ring(schedule, simple, threads=512, vectors=2)
    common = has_common_loads(simple)
    found = [*(rings if common and simple.column_count >= _RING_ROW else ()), *(pipelined if common else ())]
    found += _of_clusters(schedule, simple)
    # A slice that no cluster holds: group norm of 896 slices of 2 M elements 3777 us; by blocks that hold one, and
    # wait for each other before the next comes, 4187. These take too few rows for rings, or rows that not even all
    # blocks hold (64 channels of 16 M: 2701 us; two kernels 3112); but reading weights that rows share delays them
    # (layer norm of 16x4194304: 290 us, two kernels 259).
    kept = resident(schedule, simple, threads=512, vectors=4, min_blocks=1, most_reread=_MOST_REREAD)
    return [*found, *rings, *(() if common else kept), *pipelined]


def _of_clusters(schedule: CudaSchedule, simple: Nest) -> list[RowSettings]:
    found: list[RowSettings] = []
    clusters = [(2, 256, 2), (4, 256, 2), (8, 256, 2), (8, 256, 1), (8, 512, 1), (16, 512, 1)]
    best = memory_access.best_vector(simple, simple.reduced[0])
    if best == 1:
        # Rows read element by element want more threads (L1 norm of 32768x65535: 5758 us instead of 7855).
        clusters = [(2, 512, 2), (4, 512, 2), (8, 512, 2), *clusters]
    for ctas, threads, min_blocks in clusters:
        choose = partial(made, schedule, simple, threads=threads, ctas=ctas, min_blocks=min_blocks)
        found += _worth_prefetching(schedule, simple, choose(Reduce.PREFETCHED))
        # 7168x262144, 32 vectors of 256 threads: 3887 us instead of 3989 with 16 of 512.
        vectors = 128 // best if schedule.hardware.register_limit(threads, min_blocks) > 128 else 0
        found.append(choose(Reduce.CLUSTER, vectors=vectors, loads=Loads.CACHED))
    return found


def _worth_prefetching(schedule: CudaSchedule, simple: Nest, prefetched: RowSettings) -> Sequence[RowSettings]:
    """Clusters that stay, where one has so much of a row that an SM has room for no other; else none."""
    if not passes.element_stores(simple):
        return []
    team = team_of(schedule.hardware, simple, prefetched)
    large = team.holds_row and team.ring_bytes(simple) >= _LARGE_SLICE_BYTES
    return [prefetched] if large and simple.row_count >= 4 * team.teams(simple.row_count, prefetched.min_blocks) else []


def _may_stay(simple: Nest) -> bool:
    """Whether rows are long, and wanted again to be stored, so that blocks on their SM gain by what they keep."""
    return bool(passes.element_stores(simple)) and simple.column_count > _LONG_BLOCK_ROW


_staying = partial(made, stages=1, stores=Stores.STREAMING)
"""Settings of blocks that stay on their SM."""


def _pipelined(schedule: CudaSchedule, simple: Nest) -> list[RowSettings]:
    """Blocks that take at least four rows each, slices of at most 8K elements, two blocks an SM.

    Four warps a block: with eight, whose exchanges take longer, 4096x393216 takes 3569 us instead of 3495.
    """
    if not _may_stay(simple):
        return []
    card, ctas = schedule.hardware, geometry.power_of_two_at_least(-(-simple.column_count // _PIPELINED_SLICE))
    draft = _staying(schedule, simple, Reduce.PIPELINED, threads=128, ctas=ctas, min_blocks=2)
    team = team_of(card, simple, draft)
    if simple.row_count < 4 * team.teams(simple.row_count, 2):
        return []
    stages = min(4, (card.shared_bytes // 2 - card.reserved_shared_bytes) // max(1, team.ring_bytes(simple)))
    found = replace(draft, stages=stages, lag=max(1, stages - 2))
    return [found] if stages >= 3 else []


def resident(
    schedule: CudaSchedule, simple: Nest, *, threads: int, vectors: int, min_blocks: int, most_reread: float = 1.0
) -> list[RowSettings]:
    """Blocks that keep a row, or nearly all of it."""
    if not _may_stay(simple):
        return []
    draft = _staying(schedule, simple, Reduce.RESIDENT, threads=threads, vectors=vectors, min_blocks=min_blocks)
    return resident_rows.residents(schedule.hardware, simple, draft, most_reread)


def ring(schedule: CudaSchedule, simple: Nest, *, threads: int, vectors: int) -> list[RowSettings]:
    """Blocks through whose shared memory at least four rows pass, one after the other.

    Layer norm of 16x4194304: 158 us instead of 217 in two kernels.
    """
    if not _may_stay(simple):
        return []
    card, rows = schedule.hardware, simple.row_count
    draft = _staying(schedule, simple, Reduce.RING, threads=threads, vectors=vectors, ctas=2)
    found = ring_rows.rings(card, simple, draft)
    return [p for p in found if rows >= 4 * team_of(card, simple, p).teams(rows, 1)]
