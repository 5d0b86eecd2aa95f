"""Row reductions by blocks or clusters that stay on their SM, each with a row in registers and the next on their way.

The one idea: a row arrives in shared memory by each thread's own copies, moves on to its registers, and leaves room for
another, which arrives while this one is agreed upon and stored. So memory always has something to do, and no barrier
guards what a thread copies for itself.
"""

from __future__ import annotations

from agent_synthesis.emit.cuda.rows.row_struct import ROW_HEADERS, RowProblem, RowStruct, Skeleton
from agent_synthesis.emit.cuda.rows.row_team import team_of
from agent_synthesis.nests.analysis.row_loads import early_values, prefetched_loads
from agent_synthesis.schedule import Emission

HEADERS = (*ROW_HEADERS, "ws_rows_prefetched.cuh")


def emit(problem: RowProblem) -> Emission:
    """One persistent kernel; a row has a block or a cluster."""
    nest = problem.nest
    keeps = team_of(problem.hardware, nest, problem.settings).holds_row
    row = RowStruct(problem, values=early_values(nest), keeps=keeps)
    team = row.team
    teams = team.teams(nest.row_count, row.min_blocks)
    sets = [("kAhead", prefetched_loads(nest, team.vector_width))]
    return row.emission(
        Skeleton("prefetched_rows", HEADERS, "prefetched_places", sets=sets),
        grid=teams * team.ctas, teams=teams, cluster=team.ctas, shared_bytes=team.ring_bytes(nest),
        depth=team.depth,
    )  # fmt: skip
