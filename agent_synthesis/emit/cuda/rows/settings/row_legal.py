"""Which settings can run a row reduction on CUDA.

The one idea: everything that a strategy asks of its team, of the card and of the nest is refused here, with the reason,
so that code that tries settings need not know a rule.
"""

from __future__ import annotations

from agent_synthesis.emit.cuda.rows import row_team
from agent_synthesis.emit.cuda.rows.settings.row_settings import Reduce, RowSettings
from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.ir import Nest
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Feature, Hardware


def require(hardware: Hardware, nest: Nest, settings: RowSettings) -> None:
    """Checks settings.

    Raises:
        IllegalMove: why they cannot run this nest.
    """
    simple = iteration_space.canonical(nest)
    reduce, pack, splits, min_blocks = settings.reduce, settings.pack, settings.splits, settings.min_blocks
    axis = simple.reduced[0]
    if pack < 1 or (memory_access.widest_pack(simple, axis) % pack and memory_access.best_pack(simple, axis, 0) % pack):
        raise IllegalMove(f"{nest.name}: {pack} elements do not lie together everywhere")
    _require_sharers(hardware, nest.name, settings)
    if reduce is Reduce.GRID and (simple.row_count * splits > hardware.resident_blocks(min_blocks)):
        raise IllegalMove(f"{nest.name}: {simple.row_count * splits} blocks wait for each other, more than fit the GPU")
    team = row_team.team_of(hardware, simple, settings)
    if (team.splits - 1) * team.slice >= team.columns:
        raise IllegalMove(f"{nest.name}: {splits} blocks are more than a row of {team.columns} can occupy")
    if team.packs < 1 or team.packs * pack > 128:
        raise IllegalMove(f"{nest.name}: a thread holds from 1 to 128 elements, not {team.packs * pack}")
    stages = row_team.stages_of(hardware, simple, settings)
    row_team.require(simple, team, stages, min_blocks, preload=settings.preload)


def _require_sharers(hardware: Hardware, name: str, settings: RowSettings) -> None:
    """Raises IllegalMove where so many threads or blocks cannot share a row that way."""
    reduce, splits, lanes, threads = settings.reduce, settings.splits, settings.lanes, settings.threads
    if reduce is Reduce.WARP and (lanes not in (1, 2, 4, 8, 16, 32) or threads % 32):
        raise IllegalMove(f"{name}: lanes = {lanes} is no part of a warp")
    if reduce is not Reduce.WARP and lanes != threads:
        raise IllegalMove(f"{name}: all threads of a block share a row, so lanes = threads")
    if reduce in (Reduce.WARP, Reduce.BLOCK) and splits != 1:
        raise IllegalMove(f"{name}: reduce = {reduce} has one block a row, so splits = 1")
    if reduce in (Reduce.CLUSTER, Reduce.AHEAD) and splits > 1 and not hardware.has(Feature.CLUSTERS):
        raise IllegalMove(f"{name}: reduce = {reduce} {hardware.refusal({Feature.CLUSTERS})}")
    if reduce is Reduce.CLUSTER and splits not in (2, 4, 8, 16):
        raise IllegalMove(f"{name}: a cluster has 2, 4, 8 or 16 blocks")
    if reduce in (Reduce.CLUSTER, Reduce.AHEAD) and splits in (2, 4, 8, 16) and not hardware.resident_clusters(splits):
        raise IllegalMove(f"{name}: {hardware.architecture} holds no clusters of {splits} blocks")
    if reduce in (Reduce.GRID, Reduce.TWO_PASS) and splits < 2:
        raise IllegalMove(f"{name}: reduce = {reduce} splits a row over at least 2 blocks")
