"""Which settings of a row reduction on CUDA lie one change away from others, for a search that goes step by step.

The one idea: a change of the team's size keeps what the team holds, and another strategy comes with the settings that
suit it, so that one step shows what the change is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agent_synthesis.emit.cuda.rows import ring_rows
from agent_synthesis.emit.cuda.rows.settings import row_defaults
from agent_synthesis.emit.cuda.rows.settings.row_settings import Reduce, RowSettings
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import memory_access, passes
from agent_synthesis.nests.analysis import costly_parts, row_loads, stages
from agent_synthesis.nests.ir import Nest

_RESIDENTS = ((512, 4, 1), (512, 2, 1), (1024, 2, 1), (256, 4, 2), (512, 2, 2))
"""Threads of a block that keeps its part of a row, vectors of each that come together, and blocks of an SM."""
_RINGS = ((512, 2), (512, 1), (1024, 1), (256, 4))
"""Threads of a block through whose rings rows pass, and vectors of each that come together."""
ROWS_AHEAD = (1, 2, 3, 4)
"""Rows on their way to a block that prefetches."""


def alternatives(schedule: CudaSchedule, simple: Nest, current: RowSettings) -> list[RowSettings]:
    """Distinct settings of a canonical nest, those first that gave most on an H200; not all of them are legal."""
    found: list[RowSettings] = []
    for change in _changes(schedule, simple, current):
        candidate = row_defaults.tight(schedule, simple, change)
        if candidate != current and candidate not in found:
            found.append(candidate)
    return found


def _changes(schedule: CudaSchedule, simple: Nest, current: RowSettings) -> Iterator[RowSettings]:
    reduce = current.reduce
    is_pipelined, stays_in_parts = reduce is Reduce.PIPELINED, reduce in (Reduce.RESIDENT, Reduce.RING)
    preloads = row_loads.reads_later(simple) and reduce is not Reduce.TWO_KERNELS and not stays_in_parts
    others = (p for p in row_defaults.preferred(schedule, simple) if p.reduce is not reduce)
    yield from current.changes(
        loads=() if is_pipelined or reduce is Reduce.RING else ...,
        stores=... if passes.element_stores(simple) else (),
        preload=(True, False) if preloads else (),
        exp=... if costly_parts.exponentials(simple) else (),
    )
    if stays_in_parts:
        yield from (_other_residents if reduce is Reduce.RESIDENT else _other_rings)(schedule, simple, current)
        yield from others
        return
    yield from other_sizes(current)
    if reduce in (Reduce.CLUSTER, Reduce.BLOCK, Reduce.PREFETCHED):
        registers = Reduce.BLOCK if current.ctas == 1 else Reduce.CLUSTER
        yield (
            replace(current, reduce=registers, stages=0)
            if reduce is Reduce.PREFETCHED
            else replace(current, reduce=Reduce.PREFETCHED, stages=1)
        )
    if reduce is Reduce.PREFETCHED:
        yield from current.changes(stages=ROWS_AHEAD)
    if reduce is Reduce.TWO_KERNELS and passes.element_stores(simple):
        yield from current.changes(stages=(1, row_defaults.SHARED_ROWS, 0))
    if is_pipelined:
        depth, lags = current.stages, (1, 2, 3) if current.ctas > 1 else ()
        yield from current.changes(stages=(depth + 1, depth - 1, depth * 2), lag=lags)
    yield from current.changes(min_blocks=...)
    yield from others
    if reduce is not Reduce.CLUSTER:
        yield row_defaults.made(schedule, simple, Reduce.CLUSTER, threads=256, ctas=8)
    widest = memory_access.best_vector(simple, simple.reduced[0], 0)
    yield from (_resized(current, replace(current, vector_width=width)) for width in (1, 2, 4, 8) if width <= widest)
    yield from current.changes(
        merge=(True, False) if stages.can_merge(simple) else (),
        dependent_launch=schedule.pdl,
        vectors=() if is_pipelined else ...,
    )


def other_sizes(current: RowSettings) -> Iterator[RowSettings]:
    """Teams of more or fewer threads, lanes or blocks."""
    reduce, threads, ctas = current.reduce, current.threads, current.ctas
    for wanted in (threads * 2, threads // 2):
        blocks = {current.min_blocks, max(1, current.min_blocks * threads // max(32, wanted))}
        for min_blocks in sorted(blocks, reverse=True):
            yield _resized(current, replace(current, threads=wanted, min_blocks=min_blocks))
    if reduce is Reduce.WARP:
        yield from (_resized(current, replace(current, lanes=lanes)) for lanes in (4, 8, 16, 32))
    elif reduce is not Reduce.BLOCK:
        sizes = (2, 4, 8, 16) if reduce in (Reduce.CLUSTER, Reduce.PREFETCHED) else (ctas * 2, ctas // 2)
        yield from (_resized(current, replace(current, ctas=wanted)) for wanted in sizes if wanted >= 1)


def _resized(old: RowSettings, new: RowSettings) -> RowSettings:
    """A team of another size, whose threads hold as much of a row together as before."""
    if old.reduce is not Reduce.WARP:
        new = replace(new, lanes=new.threads)

    def width(team: RowSettings) -> int:
        return team.lanes * max(1, team.ctas) * max(1, team.vector_width)

    return replace(new, vectors=max(1, -(-old.vectors * width(old) // max(1, width(new)))))


def _other_residents(schedule: CudaSchedule, simple: Nest, current: RowSettings) -> Iterator[RowSettings]:
    """Blocks of other sizes that keep what fits them, and more or less of the next row asked for in time."""
    for threads, vectors, min_blocks in _RESIDENTS:
        for found in row_defaults.resident(schedule, simple, threads=threads, vectors=vectors, min_blocks=min_blocks):
            yield replace(
                found, merge=current.merge, stores=current.stores, preload=current.preload, exp=current.exp,
                dependent_launch=current.dependent_launch,
            )  # fmt: skip
    yield from current.changes(lag=(0, 2, 4, 8), held=(16, 12, 8, 4, 0))


def _other_rings(schedule: CudaSchedule, simple: Nest, current: RowSettings) -> Iterator[RowSettings]:
    for threads, vectors in _RINGS:
        yield from row_defaults.ring(schedule, simple, threads=threads, vectors=vectors)
    yield from ring_rows.others(current)
