"""How the blocks of one row agree on a stage's result inside one kernel: by lanes, a block, a cluster, or a grid.

The one idea: every exchange takes a thread's own state and gives every thread of the row the row's state. Blocks of a
grid write to each other's mailboxes in a workspace; who reads a slot clears it, so the workspace is zero between calls.
"""

from __future__ import annotations

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows.row_struct import ROW_HEADERS, RowProblem, RowStruct, Skeleton
from agent_synthesis.emit.cuda.rows.row_team import asked_loads, team_of
from agent_synthesis.emit.cuda.rows.settings.row_settings import Reduce
from agent_synthesis.emit.cuda.stage_state import slot_words
from agent_synthesis.schedule import Emission

HEADERS = (*ROW_HEADERS, "ws_rows_plain.cuh")
_EXCHANGES = {Reduce.BLOCK: "kOverCta", Reduce.CLUSTER: "kOverCluster", Reduce.GRID: "kOverGrid"}


def emit(problem: RowProblem) -> Emission:
    """One kernel that reads each row once where registers hold it."""
    nest, stages = problem.nest, problem.stages
    keeps = team_of(problem.hardware, nest, problem.settings).holds_row
    row = RowStruct(problem, keeps=keeps)
    team, grid = row.team, row.team.reduce is Reduce.GRID
    words = sum(slot_words(stage) for stage in stages) * nest.row_count * team.ctas**2
    in_a_warp = team.lanes < team.threads or (team.threads == 32 == team.lanes and team.ctas == 1)
    spaces = [geometry.workspace(problem.original, "mailboxes", words, zero=True)] if grid else []
    sets = [("kAsked", asked_loads(nest, team, row.min_blocks) if problem.settings.dependent_launch else [])]
    if in_a_warp:
        skeleton = Skeleton("lane_rows", HEADERS, sets=sets)
    else:
        skeleton = Skeleton("plain_rows", HEADERS, "plain_places", [f"ws::{_EXCHANGES[team.reduce]}"], sets, spaces)
    return row.emission(
        skeleton,
        grid=-(-nest.row_count // team.rows_a_block) * team.ctas,
        cluster=team.ctas if team.reduce is Reduce.CLUSTER else 1, cooperative=grid,
    )  # fmt: skip
