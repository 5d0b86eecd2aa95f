"""Row reductions by blocks that stay on their SM while row after row rolls through their shared memory, part by part.

The one idea: the results of a row are wanted some parts after its last part has come, so the blocks of a row agree
while memory still brings the next row and takes the one before: each byte moves once, without a pause. What rows share
lies in registers as far as it fits there; the second-level cache keeps the rest, and gives it a part ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows.row_struct import ROW_HEADERS, RowProblem, RowStruct, Skeleton
from agent_synthesis.emit.cuda.rows.row_team import Team, team_of
from agent_synthesis.emit.cuda.rows.settings.row_settings import RowSettings
from agent_synthesis.emit.cuda.stage_state import slot_words
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.analysis.row_loads import kept_loads, shared_loads, shared_words
from agent_synthesis.nests.ir import Load, Nest
from agent_synthesis.schedule import Emission
from warpsmith.hardware import Hardware

HEADERS = (*ROW_HEADERS, "ws_rows_ring.cuh")

_OTHER_SHARED_BYTES = 2 << 10
"""What a block needs of shared memory beside its ring: the states of its warps."""
_ON_THE_WAY = 2
"""Parts between the last one that has come and the last one that was asked for."""
_SHARE_OF_RING = 4 / 7
"""Most of a ring that a row may take, so that the rest gives its blocks time to agree: some 4 us."""
_GUARD_REGISTERS = 8
"""What the ends of uneven rows take of a thread's registers, or offsets of 64 bits (-v output)."""
_EVEN_SHARE = 0.96
"""Blocks that may work on rows, of those that the GPU has room for, so that all have equally much of one, or are a
power of two (layer norm of 16x4000004 by 128 blocks 188 us, by 132 198)."""


def rings(hardware: Hardware, nest: Nest, draft: RowSettings) -> list[RowSettings]:
    """As many blocks a row as their rings want, where a row takes no more than its share of them; else none.

    `draft` says how large blocks and parts are, and how many blocks share an SM.
    """
    team, min_blocks = team_of(hardware, nest, draft), draft.min_blocks
    part_bytes = replace(team, depth=1).ring_bytes(nest)
    room = hardware.shared_bytes // min_blocks - hardware.reserved_shared_bytes - _OTHER_SHARED_BYTES
    depth = room // max(1, part_bytes)
    longest = int(depth * _SHARE_OF_RING)
    resident = hardware.resident_blocks(min_blocks)
    if not part_bytes or longest < 2 or longest * team.part * resident < nest.column_count:
        return []
    wanted = -(-nest.column_count // (longest * team.part))
    most = resident // min(nest.row_count, resident // wanted)
    nearly = range(most, max(1, int(most * _EVEN_SHARE)), -1)
    ctas = next((n for n in nearly if replace(team, ctas=n).is_even or n & (n - 1) == 0), max(2, most))
    parts = replace(team, ctas=ctas).parts
    lag = min(depth - _ON_THE_WAY, 2 * parts - 1)
    held = _most_held(nest, replace(team, ctas=ctas), hardware.register_limit(team.threads, min_blocks))
    made = replace(draft, ctas=ctas, stages=min(depth, lag + _ON_THE_WAY), lag=lag, held=held)
    return [made] if lag >= parts else []


def _most_held(nest: Nest, team: Team, registers: int) -> int:
    """Vectors of what rows share that a thread has registers for, beside a part of what it adds up and stores."""
    shared = shared_loads(nest, team.vector_width)
    wide = geometry.offset_type(nest) != "int"
    spare = registers - geometry.KERNEL_OVERHEAD_REGISTERS - ((not team.is_even) + wide) * _GUARD_REGISTERS
    for load in kept_loads(nest, team.vector_width):  # narrow elements lie there twice more, as they are and widened
        spare -= (2 if nest.buffer(load.buffer).type.size_bytes >= 4 else 4) * team.vectors * team.vector_width
    part = max(1, team.vectors * shared_words(nest, team.vector_width))
    return min(max(0, spare) // part, team.parts * len(shared)) * team.vectors


def others(current: RowSettings) -> Iterator[RowSettings]:
    """One change away: more or less that is added up ahead, is on its way, or is held."""
    lag, held = current.lag, current.held
    more = (held + current.vectors, held - current.vectors, 0)
    yield from current.changes(lag=(lag + 1, lag - 1), stages=(current.stages - 1,), held=more)


def emit(problem: RowProblem) -> Emission:
    """One cooperative kernel of a nest with one stage."""
    nest, stages = problem.nest, problem.stages
    row = RowStruct(problem)
    team, axis, wide = row.team, nest.reduced[0].name, 32 * row.team.vector_width
    ring = kept_loads(nest, team.vector_width)

    def lies_together(load: Load) -> bool:
        """Whether a warp's vectors do."""
        affine = all(isinstance(atom, str) for atom, _ in load.index.terms)
        return affine or memory_access.access(load.index, axis, wide) == "vector"

    teams = team.teams(nest.row_count, row.min_blocks)
    spaces = [
        geometry.workspace(problem.original, "slots", 2 * teams * team.ctas * slot_words(stages[0]), zero=True),
        geometry.workspace(problem.original, "arrivals", teams, zero=True),
    ]
    sets = [("kInRing", ring), ("kTogether", [load for load in ring if lies_together(load)]),
            ("kSharedByRows", shared_loads(nest, team.vector_width))]  # fmt: skip
    return row.emission(
        Skeleton("ring_rows", HEADERS, "ring_places", sets=sets, workspaces=spaces),
        grid=teams * team.ctas, cooperative=True, shared_bytes=team.ring_bytes(nest),
        teams=teams, depth=team.depth, lag=team.lag, held=team.held,
    )  # fmt: skip
