"""CUDA schedule of rows whose elements are summed over the rows too: the backward of a norm with its weight's gradient.

The one idea: a block stays on its SM and takes row after row, so a thread has the same columns all the time, and adds
up what it has of them in registers while it makes the rows. Each block leaves its sums, and a second kernel adds those
of all blocks in order: one read of the rows makes both, without atomics.
"""

from __future__ import annotations

import contextlib
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
_MOST_ELEMENTS = (16, 8, 32, 4, 64)
"""Of a row in one thread, which are as many running sums; those first that leave room for several blocks."""


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
                min_blocks=..., loads=..., stores=...,
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
        """Settings that can run it, preferred first."""
        width = memory_access.widest_vector(simple, simple.reduced[0])
        for elements in _MOST_ELEMENTS:
            for ctas in (1, 2, 4, 8):
                threads = geometry.round_up(-(-simple.column_count // (ctas * max(elements, width))), 32)
                for blocks in (4, 3, 2, 1):
                    draft = row_defaults.made(
                        self, simple, Reduce.PREFETCHED, threads=threads, ctas=ctas, min_blocks=blocks,
                        vectors=max(1, elements // width), width=width,
                    )  # fmt: skip
                    yield from geometry.legal([draft], lambda each: self._require(simple, each))

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
