"""CUDA schedule of rows whose elements are summed over the rows too: the backward of a norm with its weight's gradient.

The one idea: a block stays on its SM and takes row after row, so a thread has the same columns all the time, and adds
up what it has of them in registers while it makes the rows. Each block leaves its sums, and a second kernel adds those
of all blocks in order: one read of the rows makes both, without atomics.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.columns.column_reduction import CudaColumnReduction
from agent_synthesis.emit.cuda.rows import prefetched_rows
from agent_synthesis.emit.cuda.rows.row_struct import RowProblem
from agent_synthesis.emit.cuda.rows.row_team import stages_of, team_of
from agent_synthesis.emit.cuda.rows.settings import row_alternatives, row_defaults
from agent_synthesis.emit.cuda.rows.settings.row_legal import require
from agent_synthesis.emit.cuda.rows.settings.row_settings import Reduce, RowSettings
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space, memory_access, passes
from agent_synthesis.nests.analysis import costly_parts, row_loads
from agent_synthesis.nests.ir import Axis, BufferRef, Index, Load, Nest, Reduced, Reduction, Store, Summed
from agent_synthesis.nests.verifier import verify
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.v1 import candidate_pb2

_LANES, _ROWS_IN_FLIGHT = 32, 4
"""Of the second kernel: most threads of a block side by side, and rows that each has in flight."""
_SMALLEST_EXTENT = 16
"""Columns that the second kernel takes at least."""
_OF_A_VALUE = 8
"""Elements of a row in one thread for each value that is agreed upon: so agreeing takes no longer than the rest."""
_HELD_ELEMENTS, _PASSING_ELEMENTS = (16, 8, 32), (32, 16, 64, 128)
"""Of a row in one thread, which are as many running sums, where registers hold it and where it passes through them."""
_SM_THREADS = 512
"""Threads of an SM from which on memory has enough to do if rows are ahead."""
_AHEAD_BYTES = 48 << 10
"""Bytes on their way to an SM that keep memory busy (RMSNorm's backward of 65536x1024: 109 us; with 16 KB 147)."""


class CudaRowsAndColumns(CudaSchedule):
    """Blocks or clusters that stay, with running sums of columns in registers."""

    name = "cuda_rows_and_columns"
    settings = RowSettings

    def accepts(self, nest: Nest) -> bool:
        """Sums over rows of what registers hold, read nowhere but where it is overwritten."""
        is_plain = not (nest.windows or nest.scans) and iteration_space.is_safe_in_place(nest)
        if not is_plain or not nest.summed or nest.column_count > 1 << 20:
            return False
        simple = iteration_space.canonical(nest)
        is_wide = simple.column_count >= _SMALLEST_EXTENT and bool(simple.parallel)
        return is_wide and next(self._legal(simple), None) is not None

    def defaults(self, nest: Nest) -> RowSettings:
        """Few elements in each thread, and as many blocks on an SM as registers let: their copies overlap."""
        return next(self._legal(iteration_space.canonical(nest)))

    def alternatives(self, nest: Nest, current: RowSettings) -> Sequence[RowSettings]:
        """One change away: other caches, or a team of another size."""
        simple = iteration_space.canonical(nest)
        found = [
            *current.changes(
                min_blocks=..., loads=..., stores=..., stages=row_alternatives.ROWS_AHEAD,
                preload=(True, False) if row_loads.reads_later(simple) else (),
                exp=... if costly_parts.exponentials(simple) else (), dependent_launch=self.pdl,
            ),
            *row_alternatives.other_sizes(current),
        ]  # fmt: skip
        tight = dict.fromkeys(row_defaults.tight(self, simple, each) for each in found)
        return geometry.legal((each for each in tight if each != current), lambda each: self._require(simple, each))

    def footprint(self, nest: Nest, settings: RowSettings) -> Footprint:
        """Each block's sums are written, and read once."""
        simple = iteration_space.canonical(nest)
        teams, team = self._teams(simple, settings), team_of(self.hardware, simple, settings)
        sums = sum(store.type.size_bytes for store in simple.summed) * simple.column_count
        return Footprint(2 * teams * sums, teams * team.ctas, 2)

    def emit(self, nest: Nest, settings: RowSettings) -> Emission:
        """The kernel of the rows, then that of the sums."""
        simple = iteration_space.canonical(nest)
        self._require(simple, settings)
        rows, sums, spaces = _divided(simple, self._teams(simple, settings))
        second = self._columns(sums)
        stages, header = stages_of(self.hardware, rows, settings), function_text.header(nest, self.name, settings)
        problem = RowProblem(self.hardware, passes.with_reciprocal(rows), rows, settings, stages, header)
        first = prefetched_rows.emit(problem)
        return Emission(
            f"{first.text}\n{second.text}",
            tuple(dict.fromkeys([*first.headers, *second.headers])),
            (*first.launches, *second.launches),
            (*first.workspaces, *spaces, *second.workspaces),
        )

    def _columns(self, sums: Nest) -> Emission:
        """The kernel of the sums, which lie in the second-level cache: each SM has some columns, and all their rows."""
        columns = CudaColumnReduction(self.hardware)
        least = columns.defaults(sums)
        depth = min(1024 // _LANES, geometry.power_of_two_at_least(-(-sums.column_count // _ROWS_IN_FLIGHT)))
        for width, lanes in ((4, 32), (2, 32), (1, 32), (1, 16), (1, 8)):
            settings = replace(
                least, vector_width=width, lanes=lanes, threads=max(_LANES, lanes * depth), ctas=1, min_blocks=1,
                unroll=_ROWS_IN_FLIGHT,
            )  # fmt: skip
            if 2 * sums.row_count >= self.hardware.sm_count * width * lanes:
                with contextlib.suppress(IllegalMove):
                    return columns.emit(sums, settings)
        return columns.emit(sums, least)

    def _legal(self, simple: Nest) -> Iterator[RowSettings]:
        """Settings that can run it, preferred first: the smallest team, whose registers hold a row if they can.

        RMSNorm's backward of 4096x16384 in bf16: 117 us where a block's row stays in shared memory, 166 where two
        blocks hold it.
        """
        width = memory_access.widest_vector(simple, simple.reduced[0])
        agreed = min(16, _OF_A_VALUE * max(1, len(simple.reductions)))
        for ctas in (1, 2, 4, 8):
            for elements in dict.fromkeys((agreed, *_HELD_ELEMENTS)):
                yield from self._of_a_team(simple, ctas, max(elements, width), width, max(1, elements // width))
            for elements, vectors in itertools.product(_PASSING_ELEMENTS, (2, 1)):
                if elements > vectors * width:
                    yield from self._of_a_team(simple, ctas, elements, width, vectors)

    def _of_a_team(self, simple: Nest, ctas: int, elements: int, width: int, vectors: int) -> Iterator[RowSettings]:
        """Those of so many elements in a thread: as few blocks as keep an SM busy, then fewer, with rows ahead."""
        threads = geometry.round_up(-(-simple.column_count // (ctas * elements)), _LANES)
        for blocks in range(max(1, _SM_THREADS // threads), 0, -1):
            draft = row_defaults.made(
                self, simple, Reduce.PREFETCHED, threads=threads, ctas=ctas, min_blocks=blocks, vectors=vectors,
                width=width, stages=1,
            )  # fmt: skip
            team = team_of(self.hardware, simple, draft)
            ahead = -(-_AHEAD_BYTES // (blocks * max(1, team.ring_bytes(simple)))) + (not team.holds_row)
            depths = range(min(ahead, max(row_alternatives.ROWS_AHEAD)), 0, -1)
            drafts = [replace(draft, stages=depth) for depth in depths]
            yield from geometry.legal(drafts, lambda each: self._require(simple, each))

    def _teams(self, simple: Nest, settings: RowSettings) -> int:
        return team_of(self.hardware, simple, settings).teams(simple.row_count, settings.min_blocks)

    def _require(self, simple: Nest, settings: RowSettings) -> None:
        if settings.reduce is not Reduce.PREFETCHED:
            raise IllegalMove(f"{simple.name}: blocks that sum over rows stay, so reduce = {Reduce.PREFETCHED}")
        require(self.hardware, simple, settings)
        if team_of(self.hardware, simple, settings).unaligned:
            raise IllegalMove(f"{simple.name}: a thread has other columns of each row that begins anywhere")


def _divided(simple: Nest, teams: int) -> tuple[Nest, Nest, list[candidate_pb2.Buffer]]:
    """The nest that leaves the sums of each team's rows, the one that adds these up, and where they lie between."""
    axis, team = simple.reduced[0], Axis("team", teams)
    spaces, partial, reductions, finals = [], {}, [], []
    for number, store in enumerate(simple.summed):
        words = -(-teams * axis.extent * store.type.size_bytes // 8)
        spaces.append(geometry.workspace(simple, f"sums{number}", words))
        buffer = BufferRef(spaces[-1].name, store.type, teams * axis.extent, written=True)
        partial[store] = replace(store, buffer=buffer.name, index=Index.axis(axis.name)), buffer
        place = Index.axis(team.name, axis.extent) + Index.axis(axis.name)
        reductions.append(Reduction(f"sum{number}", "sum", Load(buffer.name, place, store.type), store.type))
        finals.append(Store(store.buffer, store.index, Reduced(f"sum{number}", store.type)))
    gone = {store.buffer for store in simple.summed}
    rows = replace(
        simple,
        stores=tuple(partial[s][0] if isinstance(s, Summed) else s for s in simple.stores),
        buffers=(*(b for b in simple.buffers if b.name not in gone), *(buffer for _, buffer in partial.values())),
    )
    between = [replace(buffer, written=False) for _, buffer in partial.values()]
    sums = Nest(
        f"{simple.name}_columns", (axis,), (team,), tuple(reductions), tuple(finals),
        (*between, *(b for b in simple.buffers if b.name in gone)), "the sums of all blocks",
    )  # fmt: skip
    return verify(rows), verify(sums), spaces
