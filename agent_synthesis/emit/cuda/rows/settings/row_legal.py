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
    reduce, width, ctas, min_blocks = settings.reduce, settings.vector_width, settings.ctas, settings.min_blocks
    axis = simple.reduced[0]
    widest = (memory_access.widest_vector(simple, axis), memory_access.best_vector(simple, axis, 0))
    if width < 1 or all(most % width for most in widest):
        raise IllegalMove(f"{nest.name}: {width} elements do not lie together everywhere")
    _require_sharers(hardware, nest.name, settings)
    if reduce is Reduce.GRID and (simple.row_count * ctas > hardware.resident_blocks(min_blocks)):
        raise IllegalMove(f"{nest.name}: {simple.row_count * ctas} blocks wait for each other, more than fit the GPU")
    team = row_team.team_of(hardware, simple, settings)
    if (team.ctas - 1) * team.slice >= team.columns:
        raise IllegalMove(f"{nest.name}: {ctas} blocks are more than a row of {team.columns} can occupy")
    if team.vectors < 1 or team.vectors * width > 128:
        raise IllegalMove(f"{nest.name}: a thread holds from 1 to 128 elements, not {team.vectors * width}")
    stages = row_team.stages_of(hardware, simple, settings)
    row_team.require(simple, team, stages, min_blocks, preload=settings.preload)


def _require_sharers(hardware: Hardware, name: str, settings: RowSettings) -> None:
    """Raises IllegalMove where so many threads or blocks cannot share a row that way."""
    reduce, ctas, lanes, threads = settings.reduce, settings.ctas, settings.lanes, settings.threads
    if reduce is Reduce.WARP and (lanes not in (1, 2, 4, 8, 16, 32) or threads % 32):
        raise IllegalMove(f"{name}: lanes = {lanes} is no part of a warp")
    if reduce is not Reduce.WARP and lanes != threads:
        raise IllegalMove(f"{name}: all threads of a block share a row, so lanes = threads")
    if reduce in (Reduce.WARP, Reduce.BLOCK) and ctas != 1:
        raise IllegalMove(f"{name}: reduce = {reduce} has one block a row, so ctas = 1")
    if reduce in (Reduce.CLUSTER, Reduce.PREFETCHED) and ctas > 1 and not hardware.has(Feature.CLUSTERS):
        raise IllegalMove(f"{name}: reduce = {reduce} {hardware.refusal({Feature.CLUSTERS})}")
    if reduce is Reduce.CLUSTER and ctas not in (2, 4, 8, 16):
        raise IllegalMove(f"{name}: a cluster has 2, 4, 8 or 16 blocks")
    if reduce in (Reduce.CLUSTER, Reduce.PREFETCHED) and ctas in (2, 4, 8, 16) and not hardware.resident_clusters(ctas):
        raise IllegalMove(f"{name}: {hardware.architecture} holds no clusters of {ctas} blocks")
    if reduce in (Reduce.GRID, Reduce.TWO_KERNELS) and ctas < 2:
        raise IllegalMove(f"{name}: reduce = {reduce} splits a row over at least 2 blocks")
