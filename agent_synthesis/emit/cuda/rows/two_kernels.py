"""Row reductions as one kernel a stage and one for the stores, each overlapping the start of the next.

Any row length and any number of CTAs; each kernel reads the row again, from the second-level cache where it fits. So
that this still has something of what it cannot hold, the stores walk backwards where that is much. With `stages`, a
block stores what it has in registers at once, of so many rows: blocks at work then are neighbours in memory, and rows
share what they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows.row_struct import ROW_HEADERS, RowProblem, RowStruct
from agent_synthesis.emit.cuda.rows.row_team import Team, asked_loads
from agent_synthesis.emit.cuda.stage_state import state_type
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.ir import BufferRef, Nest
from agent_synthesis.schedule import Emission

HEADERS = (*ROW_HEADERS, "ws_rows_two_kernels.cuh")
_LARGE_DATA = 16
"""Second-level caches of data from which on the order of reading makes no difference to what they still have."""


@dataclass(frozen=True)
class _Kernel:
    """One of the kernels."""

    entry: str
    team: Team
    grid: int
    call: str
    """The function of the skeleton."""
    shared: str = ""
    """What it declares in shared memory."""
    stage: int | None = None
    """Whose states it leaves; None: it stores."""


def emit(problem: RowProblem) -> Emission:
    """One kernel a stage that leaves partial states of slices, then one that merges them and stores."""
    nest, stages = problem.nest, problem.stages
    row = RowStruct(problem)
    team, depth, tiling = row.team, problem.settings.stages, f"{row.entry}_tiling"
    dependent_launch = problem.settings.dependent_launch
    words = [-(-stage.state_bytes() * nest.row_count * team.ctas // 8) for stage in stages]
    spaces = [
        geometry.workspace(problem.original, f"{stage.name}_partials", count)
        for stage, count in zip(stages, words, strict=True)
    ]
    asked = asked_loads(nest, team, row.min_blocks) if dependent_launch else []
    together = 1 if depth > 1 else memory_access.parts_together(nest, team.slice)
    kernels = [
        _Kernel(
            f"{row.entry}_{stage.name}", team, nest.row_count * team.ctas,
            f"leave_states<{tiling}, {together}, {number}>",
            f"  __shared__ ws::StateOf<{row.entry}_row, {number}> box[{team.warps}];", number,
        )
        for number, stage in enumerate(stages)
    ]  # fmt: skip
    kernels.append(_storing(nest, row, depth))
    lines = [*problem.header, *row.lines([("kAsked", asked)]), "", *row.tiling(tiling)]
    lines += ["", *row.tiling(f"{row.entry}_stores", kernels[-1].team)]
    partials = [row.function.names.take(f"{stage.name}_partials") for stage in stages]
    launches = []
    for kernel in kernels:
        stores, count = kernel.stage is None, len(stages) if kernel.stage is None else kernel.stage + 1
        used = [buffer for buffer in nest.buffers if stores or not buffer.written]
        extra = [space.name for space in spaces[:count]]
        lines += ["", *_lines(row, kernel, partials[:count], used)]
        launches.append(geometry.launch(
            problem.original, entry=kernel.entry, grid=kernel.grid, threads=kernel.team.threads, buffers=used,
            workspaces=extra, dependent=count > 1 or stores or dependent_launch,
            writes=[buffer.name for buffer in used if buffer.written] + ([] if stores else [extra[-1]]),
        ))  # fmt: skip
    return Emission("\n".join([*lines, ""]), HEADERS, tuple(launches), tuple(spaces))


def _lines(row: RowStruct, kernel: _Kernel, partials: Sequence[str], used: Sequence[BufferRef]) -> list[str]:
    """A kernel of these states, the last of which it leaves itself if it does not store."""
    kinds = [state_type(stage, row.dialect) for stage in row.stages]
    types = {
        name: kind if number == kernel.stage else f"const {kind}"
        for number, (name, kind) in enumerate(zip(partials, kinds, strict=False))
    }
    shared = [] if not kernel.shared else ["boxes" if kernel.stage is None else "box"]
    arguments = ", ".join([row.value(reads_only=kernel.stage is not None), *shared, *partials])
    signature = row.text.signature(kernel.entry, kernel.team.threads, row.min_blocks, used, types)
    declared = [kernel.shared] if kernel.shared else []
    return [*signature, *declared, f"  ws::{kernel.call}({arguments});", "}"]


def _storing(nest: Nest, row: RowStruct, depth: int) -> _Kernel:
    """The kernel that stores, a block a slice of a row, or only a chunk of it, or a chunk of several rows.

    Chunks follow each other as memory does: the blocks at work read and write one part of it.
    """
    states, team, tiling, rows = row.team.ctas, row.team, f"{row.entry}_stores", nest.row_count
    chunks = replace(team, ctas=team.chunks)
    if depth > 1:
        call, grid = f"store_several_rows<{tiling}, {depth}, {states}>", -(-rows // depth) * chunks.ctas
        return _Kernel(row.entry, chunks, grid, call, row.boxes(str(depth)))
    if not row.stores_elements:
        team = replace(team, ctas=1, threads=32, lanes=32)
        return _Kernel(row.entry, team, rows, f"store_slices<{tiling}, false, {states}>")
    # Of what is many times the second-level cache, nothing worth a thought is left there.
    backwards = str(memory_access.row_data_bytes(nest) <= _LARGE_DATA * team.hardware.l2_bytes).lower()
    if depth == 0:
        return _Kernel(row.entry, team, rows * team.ctas, f"store_slices<{tiling}, {backwards}, {states}>")
    call = f"store_rows<{tiling}, {memory_access.parts_together(nest, chunks.slice)}, {backwards}, {states}>"
    return _Kernel(row.entry, chunks, rows * chunks.ctas, call, row.boxes("1"))
