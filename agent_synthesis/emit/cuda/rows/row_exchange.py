"""How the blocks of one row agree on a stage's result inside one kernel: by lanes, a block, a cluster, or a grid.

The one idea: every exchange takes a thread's own state and gives every thread of the row the row's state. Blocks of a
grid write to each other's mailboxes in a workspace; who reads a slot clears it, so the workspace is zero between calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.reduction_stages import Stage, slot_words
from agent_synthesis.emit.cuda.rows.row_accumulate import accumulate, learn
from agent_synthesis.emit.cuda.rows.row_text import RowKernel, prologue, wait_for_previous
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Parameters
from warpsmith.hardware import Hardware


def emit(
    hardware: Hardware,
    nest: Nest,
    original: Nest,
    parameters: Parameters,
    stages: Sequence[Stage],
    header: Sequence[str],
) -> Emission:
    """One kernel that reads each row once where registers hold it."""
    kernel = RowKernel(hardware, nest, parameters, stages)
    team, root, names = kernel.team, kernel.root, kernel.function.names
    grid = team.reduce == "grid"
    slots = names.take("mailboxes") if grid else ""
    overlap = parameters.choices["overlap"] == "yes"
    prologue(kernel)
    if overlap:
        wait_for_previous(kernel)
    if team.reduce == "cluster":
        root.line("ws::cluster_arrive();  // every block runs before another writes to it")
    kernel.hold_row()
    offset = 0
    for number, stage in enumerate(stages):
        own = accumulate(kernel, number)
        if overlap and number == len(stages) - 1:
            root.line("ws::launch_dependents();")
        if team.reduce == "cluster" and number == 0:
            root.line("ws::cluster_wait();")
        learn(kernel, number, _exchange(kernel, stage, own, slots, offset))
        offset += slot_words(stage) * nest.row_count * team.splits**2
        root.line("")
    kernel.store()
    workspaces = [geometry.workspace(original, "mailboxes", offset, zero=True)] if grid else []
    types = {slots: "ws::uint64"} if grid else {}
    signature = kernel.text.signature(kernel.text.entry, team.threads, kernel.min_blocks, workspaces=types)
    record = geometry.launch(
        original,
        grid=-(-nest.row_count // team.rows_a_block) * team.splits,
        threads=team.threads,
        cluster=team.splits if team.reduce == "cluster" else 1,
        cooperative=grid,
        dependent=overlap,
        workspaces=[workspace.name for workspace in workspaces],
    )
    text = "\n".join([*header, *kernel.lines(signature)])
    return Emission(text, geometry.HEADERS, (record,), tuple(workspaces))


def _exchange(kernel: RowKernel, stage: Stage, own: str, slots: str, offset: int) -> str:
    """Adds the exchange; the name of the row's state."""
    team, root, names = kernel.team, kernel.root, kernel.function.names
    kind = stage.state_type(kernel.dialect)
    state = names.take(f"{stage.name}_state")
    if team.lanes < team.threads or (team.threads == 32 == team.lanes and team.splits == 1):
        root.line(f"const {kind} {state} = {kind}::over_lanes<{team.lanes}>({own});")
        return state
    box = names.take(f"{stage.name}_box")
    places = team.warps * (team.splits if team.reduce == "cluster" else 1)
    root.line(f"__shared__ {kind} {box}[{places}];")
    if team.reduce == "cluster":
        root.line(f"const {kind} {state} = ws::over_cluster<{team.warps}, kSplits>({own}, {box}, {kernel.rank});")
    elif team.reduce == "block":
        root.line(f"const {kind} {state} = ws::over_block<{team.warps}>({own}, {box});")
    else:
        block, shared = names.take(f"block_{stage.name}"), names.take(f"shared_{stage.name}")
        places_of = names.take(f"{stage.name}_mailboxes")
        root.line(f"const {kind} {block} = ws::over_block<{team.warps}>({own}, {box});")
        first = f"{slots} + {offset}" if offset else slots
        row = f"{kernel.row} * (kSplits * kSplits)"
        root.line(f"auto* {places_of} = reinterpret_cast<ws::Slot<{kind}>*>({first}) + {row};")
        root.line(f"__shared__ {kind} {shared};")
        root.line("if (threadIdx.x < 32) {")
        whole = names.take(f"whole_{stage.name}")
        root.line(f"  const {kind} {whole} = ws::over_blocks<kSplits>({block}, {places_of}, {kernel.rank});")
        root.line(f"  if (threadIdx.x == 0) {shared} = {whole};")
        root.line("}")
        root.line("__syncthreads();")
        root.line(f"const {kind} {state} = {shared};")
    return state
