"""CUDA schedule of reductions along a strided axis, such as column sums: threads lie along the contiguous axis.

The one idea: neighbouring threads have neighbouring columns, so each row is read in wide pieces; the rows are shared
by the threads above each other in a block and by blocks, whose partial results the last block to finish adds in order.
Where rows are visited again, as for a batch norm of images whose channels lie side by side, each visit is a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.columns.column_text import ColumnKernel, ColumnSettings, ColumnTeam, found_bytes
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space, memory_access, passes
from agent_synthesis.nests.analysis import stages
from agent_synthesis.nests.analysis.transposition import SECTOR_BYTES
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Axis, Nest, Type
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Loads
from warpsmith.errors import IllegalMove
from warpsmith.hardware import STATIC_SHARED_BYTES

_SMALLEST_EXTENT = 16
GATHERED = 8
"""Threads above each other that gather what many have found: `kGathered` of ws_columns.cuh."""
_LEAST_LANES = 8
"""A row of a block is 32 bytes at least."""
_MOST_ALONE_BYTES = 128 << 10
"""That a block visits by itself where columns are few: what several kernels spare is less than their launches take."""
_LARGE_TENSOR = 128 << 20
"""Elements from which on four blocks share columns that are an access each; below, adding their results up takes longer
than the shorter wait saves (sum over dimension 1 of 39x513x511: 22.2 us instead of 19.9)."""


class CudaColumnReduction(CudaSchedule):
    """Threads along the contiguous axis, which is not the reduced one."""

    name = "cuda_column_reduction"
    settings = ColumnSettings

    def accepts(self, nest: Nest) -> bool:
        """A nest with reductions whose data is contiguous along a parallel axis more than along a reduced one."""
        simple = iteration_space.simplified(nest)
        return passes.is_reduction(nest) and passes.axis_across(simple, _SMALLEST_EXTENT) is not None

    def defaults(self, nest: Nest) -> ColumnSettings:
        """Two blocks an SM; wide pieces of rows where blocks can share the rows, narrow ones where they cannot."""
        simple, axis = _problem(nest)
        width = memory_access.widest_vector(simple, axis)
        rows = simple.column_count
        others = simple.row_count // axis.extent
        vectors = axis.extent // width
        single = passes.is_visited_once(simple)
        # Where every column is an access of its own, pieces of rows are twice as wide and blocks shorter: argmax over
        # dimension 1 of 128x4096x4095 takes 2144 us instead of 2361.
        thin = single and width == 1 and vectors >= 64 and simple.row_count * rows >= _LARGE_TENSOR
        # Sums have registers to spare for twice as many rows in flight: 2003 us instead of 2210 on that shape.
        deep = thin and vectors >= 512 and not any(r.operation in ARG_REDUCTIONS for r in nest.reductions)
        lanes = 128 if deep else 64 if thin else min(32, max(_LEAST_LANES, geometry.power_of_two_at_least(vectors)))
        shared = (
            not single and _can_be_shared(simple) and self._leaves_much(simple, others * -(-vectors // _LEAST_LANES))
        )
        if not (single or shared):  # what few blocks visit several times waits for them
            lanes, width = self._narrowed(simple, axis, lanes, width)
            vectors = axis.extent // width
        if shared:  # every block joins what all others with its columns have left: they are few, and rows 128 bytes
            lanes = max(_LEAST_LANES, 32 // width)
        tiles = others * -(-vectors // lanes)
        wanted = max((1 if shared else 2) * self.hardware.sm_count // tiles, 4 if thin else 1)
        few = not single and (shared or tiles < self.hardware.sm_count)
        threads = 512 if few or deep else 256
        if shared and _shared_bytes(simple, width, ctas=2, threads=threads, lanes=lanes) > STATIC_SHARED_BYTES:
            threads = 256  # of eight columns each
        # Blocks of several kernels take two rows a thread: batch norm of 1568 rows of 128 columns takes 5.0 and 6.1 us
        # instead of 7.2 and 9.9 with eight.
        fewest = 2 * threads // lanes if shared else 8 * 256 // lanes
        ctas = max(1, min(wanted, rows // fewest)) if single or shared else 1
        # Threads above each other with several rows each: RMS norm over 23 channels takes 26.9 us instead of 32.2, over
        # 8 of 32x8x96x97 9.1 instead of 12.4.
        groups = max(2, geometry.power_of_two_at_least(-(-rows // 8)))
        if groups * lanes < threads and tiles >= self.hardware.sm_count and not shared:
            threads, wide = 128, max(lanes, min(128 // groups, geometry.power_of_two_at_least(vectors)))
            lanes = wide if others * -(-vectors // wide) >= self.hardware.sm_count else lanes
        draft = ColumnSettings(
            loads=Loads.EVICT_FIRST if single else Loads.CACHED, dependent_launch=self.pdl[0], threads=threads,
            lanes=lanes, ctas=ctas, vector_width=width, min_blocks=1 if few or deep else 2,
        )  # fmt: skip
        drafts = (replace(draft, unroll=unroll) for unroll in ((16, 8, 4, 2, 1) if deep else (8, 4, 2, 1)))
        least = replace(draft, ctas=1, unroll=1, vector_width=1, min_blocks=1)
        return geometry.first_legal(drafts, lambda settings: self._require(nest, settings), least)

    def alternatives(self, nest: Nest, current: ColumnSettings) -> Sequence[ColumnSettings]:
        """One change away."""
        simple, axis = _problem(nest)
        widest = memory_access.widest_vector(simple, axis)
        ctas = current.ctas
        changes = current.one_change_away(
            dependent_launch=self.pdl,
            ctas=sorted({1, max(1, ctas // 2), ctas + 1, ctas * 2, ctas * 4}),
            vector_width=[width for width in (1, 2, 4, 8) if width <= widest],
        )
        return geometry.legal(changes, lambda settings: self._require(nest, settings))

    def footprint(self, nest: Nest, settings: ColumnSettings) -> Footprint:
        """Visits after the first cost their bytes again; partial results are written, and read once by the last block,
        or by every block of the kernel that follows."""
        simple, axis = _problem(nest)
        planned = _stages(simple, settings.ctas)
        visits = [[reduction.value for reduction in stage.reductions] for stage in planned]
        visits.append(list(passes.element_stores(simple)))
        read = memory_access.row_data_bytes(simple)
        team = self._team(simple, axis, settings)
        ctas = settings.ctas if settings.ctas > 1 else 0
        kernels = len(planned) + 1 if ctas and not passes.is_visited_once(simple) else 1
        partials = 8 * simple.row_count * ctas * len(simple.reductions) * (2 if kernels == 1 else 1 + ctas)
        again = (
            sum(memory_access.row_data_bytes(simple, roots) for roots in visits) - read
            if read > self.hardware.l2_bytes // 2
            else 0
        )
        return Footprint(again + partials, team.blocks, kernels)

    def emit(self, nest: Nest, settings: ColumnSettings) -> Emission:
        """One kernel, or one for each visit and one that stores."""
        self._require(nest, settings)
        simple, axis = _problem(nest)
        team, simple = self._team(simple, axis, settings), passes.with_reciprocal(simple)
        kernel = ColumnKernel(simple, team, _stages(simple, settings.ctas))
        header = function_text.header(nest, self.name, settings)
        return kernel.write(nest, header)

    def _narrowed(self, simple: Nest, axis: Axis, lanes: int, width: int) -> tuple[int, int]:
        """Lanes and vectors for as many blocks as there are multiprocessors, whose rows are whole sectors.

        Batch norm of 392 rows of 256 columns takes 6.9 us by single columns, 9.1 by vectors of four.
        """
        sizes = (simple.buffer(load.buffer).type.size_bytes for load in memory_access.loads(simple))
        size = min(sizes, default=SECTOR_BYTES)
        others = simple.row_count // axis.extent
        while others * -(-axis.extent // (width * lanes)) < self.hardware.sm_count:
            if lanes > _LEAST_LANES:
                lanes //= 2
            elif width > 1 and width * lanes * size > SECTOR_BYTES:
                width //= 2
            else:
                break
        return lanes, width

    def _leaves_much(self, simple: Nest, tiles: int) -> bool:
        """Whether blocks that share no columns are few and would each read more than is done in a launch's time."""
        return 2 * tiles <= self.hardware.sm_count and memory_access.row_data_bytes(simple) > _MOST_ALONE_BYTES * tiles

    @staticmethod
    def _team(simple: Nest, axis: Axis, settings: ColumnSettings) -> ColumnTeam:
        others = simple.row_count // axis.extent
        return ColumnTeam(axis, others, simple.column_count, settings)

    def _require(self, nest: Nest, settings: ColumnSettings) -> None:
        simple, axis = _problem(nest)
        width, ctas, lanes, threads = settings.vector_width, settings.ctas, settings.lanes, settings.threads
        if width < 1 or memory_access.widest_vector(simple, axis) % width:
            raise IllegalMove(f"{nest.name}: {width} columns do not lie together everywhere")
        if lanes < 1 or threads % lanes:
            raise IllegalMove(f"{nest.name}: {threads} threads are no multiple of {lanes} lanes")
        if ctas > 1 and threads // lanes > GATHERED and threads // lanes % GATHERED:
            raise IllegalMove(f"{nest.name}: {threads // lanes} threads above each other are no multiple of {GATHERED}")
        if ctas < 1 or ctas > simple.column_count:
            raise IllegalMove(f"{nest.name}: {ctas} blocks cannot share {simple.column_count} rows")
        if ctas > 1 and not passes.is_visited_once(simple) and not _can_be_shared(simple):
            raise IllegalMove(f"{nest.name}: a block would write what another reads")
        below = memory_access.loads_below(iteration_space.roots(simple))
        wide = [load for load in below if axis.name in load.index.axes()]
        rows = {each.name for each in simple.reduced}
        held = sum(
            max(1, width * simple.buffer(load.buffer).type.size_bytes // 4)
            * (settings.unroll if load.index.axes() & rows else 1)
            for load in wide
        )
        shared_bytes = _shared_bytes(simple, width, ctas=ctas, threads=threads, lanes=lanes)
        geometry.require_block(
            self.hardware, nest, threads=threads, min_blocks=settings.min_blocks,
            shared_bytes=shared_bytes, held_registers=held + _found_bytes(simple, width, ctas) // 4,
        )  # fmt: skip
        if shared_bytes > STATIC_SHARED_BYTES:
            raise IllegalMove(f"{nest.name}: partial results of {threads} threads exceed static shared memory")


def _can_be_shared(simple: Nest) -> bool:
    """Whether no block writes what another may still read: elements are read where they are written, by one block."""
    once = {store.buffer for store in simple.stores if not simple.is_element_store(store)}
    visited = memory_access.loads_below(reduction.value for reduction in simple.reductions)
    stored = memory_access.loads_below(passes.element_stores(simple))
    return not any(simple.buffer(load.buffer).written for load in visited) and all(
        load.buffer not in once for load in stored
    )


def _found_bytes(simple: Nest, width: int, ctas: int) -> int:
    """Bytes of what a thread finds of its columns."""
    return sum(width * max(4, size) for stage in _stages(simple, ctas) for size in found_bytes(stage))


def _shared_bytes(simple: Nest, width: int, *, ctas: int, threads: int, lanes: int) -> int:
    """Where threads leave that for each other; and again, where they are many, those that have gathered it."""
    two_steps = threads // lanes >= 4 * GATHERED
    return (threads + GATHERED * lanes * two_steps) * _found_bytes(simple, width, ctas)


def _is_widest(stage: stages.Stage) -> bool:
    return stage.kind == "moments" and stage.reductions[-1].type is Type.F64


def _stages(simple: Nest, ctas: int) -> list[stages.Stage]:
    """The visits: a mean and the squares about it are one where a visit is a kernel. Of float64 they stay apart, for
    their squares would be summed about zero in no wider type."""
    if ctas > 1:
        merged = stages.plan(simple, merge=True, apart=True)
        if not any(stage.kind == "shifted" or _is_widest(stage) for stage in merged):
            return merged
    return stages.plan(simple, merge=False)


def _problem(nest: Nest) -> tuple[Nest, Axis]:
    simple = iteration_space.canonical(nest)
    axis, _ = passes.vector_axis(iteration_space.simplified(nest))
    assert axis is not None  # accepts() requires it
    return simple, axis
