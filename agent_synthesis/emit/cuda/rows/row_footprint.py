"""What a row reduction on CUDA costs beside reading and writing everything once: bytes again, blocks, launches.

The one idea: waiting is put in bytes too, those that memory could have moved meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit.cuda.rows.row_team import Team
from agent_synthesis.emit.cuda.rows.settings.row_settings import Reduce
from agent_synthesis.nests import memory_access, passes
from agent_synthesis.nests.analysis.stages import Stage
from agent_synthesis.nests.analysis.transposition import SECTOR_BYTES, across_bytes
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Footprint


def footprint(simple: Nest, team: Team, stages: Sequence[Stage], min_blocks: int) -> Footprint:
    """Visits after the first cost their bytes again where the rows in flight exceed the second-level cache; what does
    not lie along rows costs a sector an element."""
    found = _of_visits(simple, team, stages, min_blocks)
    return replace(found, extra_bytes=found.extra_bytes + across_bytes(simple, simple.reduced[-1], SECTOR_BYTES))


def _of_visits(simple: Nest, team: Team, stages: Sequence[Stage], min_blocks: int) -> Footprint:
    launches = len(stages) + 1 if team.reduce is Reduce.TWO_KERNELS else 1
    visits = len(stages) + bool(passes.element_stores(simple))
    rereads = 0 if team.holds_row and launches == 1 else visits - 1
    read, rows = memory_access.row_data_bytes(simple), simple.row_count
    if team.reduce in (Reduce.RESIDENT, Reduce.RING, Reduce.PREFETCHED, Reduce.PIPELINED):
        blocks = team.teams(rows, min_blocks) * team.ctas
        extra = 0
        if team.reduce is Reduce.RESIDENT:
            beyond = max(0, 1 - team.on_chip / team.parts)
            again = int(read * beyond) if read / rows * beyond > team.hardware.l2_bytes // 2 else 0
            agreeing = team.hardware.costs.agreement_bytes * team.ctas // team.hardware.sm_count // min_blocks
            extra = again + 16 * blocks + rows * agreeing * (team.ctas > 1)
        elif team.reduce is Reduce.RING:
            agreeing = team.hardware.costs.overlapped_agreement_bytes * team.ctas
            extra = 16 * blocks + rows * (agreeing // team.hardware.sm_count // min_blocks)
        elif team.reduce is Reduce.PIPELINED:
            extra = 8 * blocks * team.ctas * sum(stage.state_bytes() for stage in stages)
        return Footprint(extra, blocks, 1)
    blocks = -(-rows // team.rows_a_block) * team.ctas
    busy = team.hardware.resident_blocks(min_blocks)
    in_flight = read if launches > 1 else read * min(1.0, busy / blocks)
    again = rereads * read if in_flight > team.hardware.l2_bytes // 2 else 0
    slots = sum(s.state_bytes() for s in stages) * rows * team.ctas * 2 if team.reduce is not Reduce.CLUSTER else 0
    return Footprint(again + (slots if team.ctas > 1 else 0), blocks, launches)
