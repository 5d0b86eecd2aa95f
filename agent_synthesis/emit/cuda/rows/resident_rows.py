"""Row reductions by blocks that stay on their SM and keep as much of a long row in shared memory as fits there.

The one idea: a row is shared by as many blocks as keep all of it, up to all of the GPU, and comes in parts. What is
kept arrives by a thread's own copies while the row before is stored, so no barrier guards it; registers hold some more
vectors, likewise. The parts beyond are visited last before the blocks agree and first, backwards, after it, when the
second-level cache still has them.
"""

from __future__ import annotations

from dataclasses import replace

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows.row_struct import ROW_HEADERS, RowProblem, RowStruct, Skeleton
from agent_synthesis.emit.cuda.rows.row_team import Team, team_of
from agent_synthesis.emit.cuda.rows.settings.row_settings import RowSettings
from agent_synthesis.emit.cuda.stage_state import slot_words
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.analysis.row_loads import early_values, kept_loads
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission
from agent_synthesis.settings import Loads
from warpsmith.hardware import Hardware

HEADERS = (*ROW_HEADERS, "ws_rows_resident.cuh")

_OTHER_SHARED_BYTES = 2 << 10
"""What a block that keeps its row needs of shared memory besides: the states of its warps."""
_HELD_VECTORS, _HELD_OF_A_REST = 8, 12
"""Vectors of a thread in registers beside shared memory; in the second case the L2 has to keep what is left."""
_EVEN_SHARE = 0.96
"""Blocks that may work on rows, of those that the GPU has room for, so that all have equally much of one."""


def residents(hardware: Hardware, nest: Nest, draft: RowSettings, most_reread: float) -> list[RowSettings]:
    """As many blocks a row as keep all of it, or all blocks of the GPU where not even they can, if the share of a row
    that is read twice stays below `most_reread`; with and without vectors in registers.

    `draft` says how large blocks and parts are, and how many blocks share an SM.
    """
    team, min_blocks = team_of(hardware, nest, draft), draft.min_blocks
    without = replace(team, depth=0).ring_bytes(nest)
    part_bytes = replace(team, depth=1).ring_bytes(nest) - without
    room = hardware.shared_bytes // min_blocks - hardware.reserved_shared_bytes - _OTHER_SHARED_BYTES - without
    depth = room // max(1, part_bytes)
    if not part_bytes or depth < 1:
        return []
    resident = hardware.resident_blocks(min_blocks)
    found = []
    for held in (_HELD_OF_A_REST, _HELD_VECTORS, 0):
        kept = depth + held // team.vectors
        teams = max(1, min(nest.row_count, resident // -(-nest.column_count // (kept * team.part))))
        ctas = _even_ctas(nest, replace(team, ctas=resident // teams))
        parts = replace(team, ctas=ctas).parts
        rest = max(0, parts - kept)
        if rest > most_reread * parts or (held == _HELD_OF_A_REST and not rest):
            continue
        found.append(replace(
            draft, loads=Loads.CACHED if rest else draft.loads, ctas=ctas, stages=min(depth, parts),
            lag=0 if rest else min(2, parts), held=held,
        ))  # fmt: skip
    return found


def _even_ctas(nest: Nest, most: Team) -> int:
    """Blocks of a row, as many as there may be or a few less that all have equally much of it."""
    for ctas in range(most.ctas, int(most.ctas * _EVEN_SHARE), -1):
        if replace(most, ctas=ctas).is_even:
            return ctas
    return -(-nest.column_count // most.slice)


def emit(problem: RowProblem) -> Emission:
    """One persistent kernel of a nest with one stage; it is cooperative where blocks share a row."""
    nest, stages = problem.nest, problem.stages
    row = RowStruct(problem, values=early_values(nest))
    team, axis, kept = row.team, nest.reduced[0].name, kept_loads(nest, row.team.vector_width)
    wide = 32 * team.vector_width  # a warp's vectors
    together = [
        load for load in kept if memory_access.access(load.index, axis, wide) == "vector" and team.columns % wide == 0
    ]
    teams = team.teams(nest.row_count, row.min_blocks)
    spaces = [
        geometry.workspace(problem.original, "slots", 2 * teams * team.ctas * slot_words(stages[0]), zero=True),
        geometry.workspace(problem.original, "arrivals", teams, zero=True),
    ] if team.ctas > 1 else []  # fmt: skip
    sets = [("kResident", kept), ("kTogether", together)]
    return row.emission(
        Skeleton("smem_resident_rows", HEADERS, "resident_places", sets=sets, workspaces=spaces),
        grid=teams * team.ctas, cooperative=team.ctas > 1, shared_bytes=team.ring_bytes(nest),
        teams=teams, depth=team.depth, lag=team.lag, held=team.held,
    )  # fmt: skip
