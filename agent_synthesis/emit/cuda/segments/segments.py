"""CUDA schedule of reductions over parts of rows, such as embedding bags and gradients of lookups.

The one idea: neighbouring threads have neighbouring columns of a part, which is nothing, a few rows or all of them as
the data has it. So that a part of many rows does not wait for one block, pieces of equal size that lie within a part
are reduced ahead, by a kernel of their own. Nothing is added by atomics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.segments.segment_text import PIECES, SegmentSettings, SegmentTeam, emission
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.analysis.segments import Segments, segments_of
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Nest
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove

_LEAST_ROWS = 1024
"""From which on parts may be long enough for pieces to be reduced ahead."""
_IN_FLIGHT = 8
"""Vectors that a thread asks for before it uses the first."""


class CudaSegments(CudaSchedule):
    """Parts side by side, their columns along threads."""

    name = "cuda_segments"
    settings = SegmentSettings

    def accepts(self, nest: Nest) -> bool:
        """Reductions over parts of rows that all begin and end at the same places, of up to 2^31 rows."""
        problem = segments_of(nest)
        return (
            problem is not None
            and problem.nest.column_count < 1 << 31
            and not any(reduction.operation in ARG_REDUCTIONS for reduction in nest.reductions)
        )

    def defaults(self, nest: Nest) -> SegmentSettings:
        """A row as wide vectors of one block, where it fits; pieces of about the root of all rows."""
        problem = _problem(nest)
        width = memory_access.widest_vector(problem.nest, problem.axis)
        vectors, threads = -(-problem.axis.extent // width), 128

        def slots(each: tuple[int, int]) -> tuple[int, int, int]:
            lanes, count = each
            tiles = -(-vectors // (lanes * count))
            made = tiles * lanes * count
            return max(0, 3 * made - 4 * vectors), tiles, -count

        lanes, count = min(itertools.product((1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4)), key=slots)
        rows = problem.nest.column_count
        piece = min(PIECES[-1], max(PIECES[1], geometry.power_of_two_at_least(math.isqrt(rows))))
        draft = SegmentSettings(
            dependent_launch=self.pdl[0], threads=threads, lanes=lanes, vectors=count, vector_width=width,
            unroll=max(1, _IN_FLIGHT // count), piece=piece if rows >= _LEAST_ROWS and _has_order(problem) else 0,
        )  # fmt: skip
        drafts = (replace(draft, unroll=unroll) for unroll in (draft.unroll, 2, 1))
        least = replace(draft, lanes=1, vectors=1, vector_width=1, unroll=1)
        return geometry.first_legal(drafts, lambda settings: self._require(nest, settings), least)

    def alternatives(self, nest: Nest, current: SegmentSettings) -> Sequence[SegmentSettings]:
        """One change away."""
        changes = current.one_change_away(dependent_launch=self.pdl)
        return geometry.legal(changes, lambda settings: self._require(nest, settings))

    def footprint(self, nest: Nest, settings: SegmentSettings) -> Footprint:
        """What pieces come to is written and read, if each lies within a part."""
        team = SegmentTeam(_problem(nest), settings)
        words = team.pieces * team.problem.axis.extent
        pieces = sum(words * reduction.type.size_bytes for reduction in nest.reductions)
        return Footprint(2 * pieces, team.blocks, 2 if team.pieces else 1)

    def emit(self, nest: Nest, settings: SegmentSettings) -> Emission:
        """One kernel, or one for pieces and one that stores."""
        self._require(nest, settings)
        team = SegmentTeam(_problem(nest), settings)
        return emission(nest, team, function_text.header(nest, self.name, settings))

    def _require(self, nest: Nest, settings: SegmentSettings) -> None:
        problem = _problem(nest)
        width, lanes, threads = settings.vector_width, settings.lanes, settings.threads
        if width < 1 or memory_access.widest_vector(problem.nest, problem.axis) % width:
            raise IllegalMove(f"{nest.name}: {width} columns do not lie together everywhere")
        if lanes < 1 or threads % lanes:
            raise IllegalMove(f"{nest.name}: {threads} threads are no multiple of {lanes} lanes")
        if min(settings.vectors, settings.unroll) < 1:
            raise IllegalMove(f"{nest.name}: a thread has a vector and a row at least")
        if settings.piece and not (_has_order(problem) and settings.piece <= problem.nest.column_count):
            raise IllegalMove(f"{nest.name}: pieces of {settings.piece} rows do not lie in its parts")
        values = [reduction.value for reduction in problem.nest.reductions]
        both = {problem.nest.reduced[0].name, problem.axis.name}
        loads = [load.buffer for load in memory_access.loads_below(values) if both <= load.index.axes()]
        loads += [lookup.buffer for lookup in memory_access.lookups_below(values)]
        held = sum(max(1, width * nest.buffer(buffer).type.size_bytes // 4) for buffer in loads)
        found = sum(width * reduction.type.size_bytes // 4 for reduction in nest.reductions)
        registers = settings.vectors * (settings.unroll * held + 2 * found)
        geometry.require_block(self.hardware, nest, threads=threads, held_registers=registers)


def _problem(nest: Nest) -> Segments:
    problem = segments_of(nest)
    assert problem is not None  # accepts() requires it
    return problem


def _has_order(problem: Segments) -> bool:
    """Whether one axis alone decides where parts begin, so that the part of a row can be searched for."""
    interner = Interner()
    deciding = interner.needs(problem.begin) | interner.needs(problem.end)
    return len(problem.others) == 1 and problem.others[0].name in deciding
