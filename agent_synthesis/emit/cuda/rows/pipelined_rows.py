"""Row reductions by blocks that stay on their SM and take row after row through a ring in shared memory.

The one idea: a thread's asynchronous copies fill its own places, so no barrier guards them, and while the blocks of a
row agree on its result the next rows arrive. What no row changes is loaded once. Resident blocks of the whole GPU form
the teams, since clusters would leave SMs idle: at 4096x393216, 112 to 120 of 132.
"""

from __future__ import annotations

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows.row_struct import ROW_HEADERS, RowProblem, RowStruct, Skeleton
from agent_synthesis.emit.cuda.stage_state import slot_words
from agent_synthesis.nests.analysis.row_loads import own_loads, row_values
from agent_synthesis.schedule import Emission

HEADERS = (*ROW_HEADERS, "ws_rows_pipelined.cuh")


def emit(problem: RowProblem) -> Emission:
    """One persistent kernel of a nest with one stage; it is cooperative where blocks share a row."""
    nest, stages = problem.nest, problem.stages
    row = RowStruct(problem, values=row_values(nest))
    team = row.team
    teams = team.teams(nest.row_count, row.min_blocks)
    words = teams * team.mailboxes * slot_words(stages[0])
    spaces = [geometry.workspace(problem.original, "mailboxes", words, zero=True)] if team.ctas > 1 else []
    sets = [("kInRing", own_loads(nest))]
    return row.emission(
        Skeleton("pipelined_rows", HEADERS, "pipelined_places", sets=sets, workspaces=spaces),
        grid=teams * team.ctas, cooperative=team.ctas > 1, shared_bytes=team.ring_bytes(nest),
        teams=teams, depth=team.depth, lag=team.lag,
    )  # fmt: skip
