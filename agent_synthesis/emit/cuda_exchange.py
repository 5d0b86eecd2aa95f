"""How the blocks of one row agree on a stage's result inside one kernel: by lanes, a block, a cluster, or a grid.

The one idea: every exchange takes a thread's own state and gives every thread of the row the row's state. Slots between the
blocks of a grid are zero when a kernel begins; the last block to leave a row clears them, behind its own stores.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import cuda_shape
from agent_synthesis.emit.cuda_row_text import RowKernel
from agent_synthesis.emit.cuda_stages import Stage
from agent_synthesis.ir import Nest
from agent_synthesis.schedule import Emission, Parameters


def emit(nest: Nest, original: Nest, parameters: Parameters, stages: Sequence[Stage], header: Sequence[str]) -> Emission:
    """One kernel that reads each row once where registers hold it."""
    kernel = RowKernel(nest, parameters, stages)
    team, root, names = kernel.team, kernel.root, kernel.function.names
    grid = team.reduce == "grid"
    slots = names.take("slots") if grid else ""
    overlap = parameters.choices["overlap"] == "yes"
    if overlap:
        root.line("ws::launch_dependents();")
        root.line("ws::wait_for_previous();")
    kernel.prologue()
    if team.reduce == "cluster":
        root.line("ws::cluster_arrive();  // every block runs before another writes to it")
    kernel.hold_row()
    offset = 0
    for number, stage in enumerate(stages):
        own = kernel.accumulate(number)
        if team.reduce == "cluster" and number == 0:
            root.line("ws::cluster_wait();")
        kernel.learn(number, _exchange(kernel, stage, own, slots, offset))
        offset += _slot_words(stage) * nest.row_count * team.splits
        root.line("")
    words = offset
    if grid:
        _count_leavers(kernel, slots, words)
    kernel.store_row()
    kernel.store_elements()
    if grid:
        _clear(kernel, stages, slots, words)
    workspaces = [cuda_shape.workspace(original, "slots", words + nest.row_count, zero=True)] if grid else []
    types = {slots: "ws::uint64"} if grid else {}
    signature = kernel.text.signature(kernel.text.entry, team.threads, kernel.min_blocks, workspaces=types)
    record = cuda_shape.launch(
        original,
        grid=-(-nest.row_count // team.rows_a_block) * team.splits,
        threads=team.threads,
        cluster=team.splits if team.reduce == "cluster" else 1,
        cooperative=grid,
        dependent=overlap,
        workspaces=[workspace.name for workspace in workspaces],
    )
    text = "\n".join([*header, *kernel.lines(signature)])
    return Emission(text, cuda_shape.HEADERS, (record,), tuple(workspaces))


def _exchange(kernel: RowKernel, stage: Stage, own: str, slots: str, offset: int) -> str:
    """Adds the exchange; the name of the row's state."""
    team, root, names = kernel.team, kernel.root, kernel.function.names
    kind = stage.state_type(kernel.dialect)
    state = names.take(f"{stage.name}_state")
    if team.lanes < team.threads or team.threads == 32 == team.lanes and team.splits == 1:
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
        places_of = names.take(f"{stage.name}_slots")
        root.line(f"const {kind} {block} = ws::over_block<{team.warps}>({own}, {box});")
        first = f"{slots} + {offset}" if offset else slots
        root.line(f"auto* {places_of} = reinterpret_cast<ws::Slot<{kind}>*>({first}) + {kernel.row} * kSplits;")
        root.line(f"__shared__ {kind} {shared};")
        root.line("if (threadIdx.x < 32) {")
        root.line(f"  if (threadIdx.x == 0) ws::publish({places_of} + {kernel.rank}, {block});")
        whole = names.take(f"whole_{stage.name}")
        root.line(f"  const {kind} {whole} = ws::over_slots<kSplits>({places_of});")
        root.line(f"  if (threadIdx.x == 0) {shared} = {whole};")
        root.line("}")
        root.line("__syncthreads();")
        root.line(f"const {kind} {state} = {shared};")
    return state


def _slot_words(stage: Stage) -> int:
    """64-bit words of one state's slot: one for each 32-bit word, in pairs."""
    return cuda_shape.round_up(stage.state_bytes() // 4, 2)


def _count_leavers(kernel: RowKernel, slots: str, words: int) -> None:
    root, names = kernel.root, kernel.function.names
    kernel.leavers = names.take("left_before")
    root.line(f"unsigned {kernel.leavers} = 0;")
    root.line(f"if (threadIdx.x == {kernel.team.threads - 32})")
    root.line(f"  {kernel.leavers} = ws::arrive(reinterpret_cast<unsigned*>({slots} + {words} + {kernel.row}));")


def _clear(kernel: RowKernel, stages: Sequence[Stage], slots: str, words: int) -> None:
    """The last block to leave a row zeroes its slots and the counter: nobody reads them any more."""
    root, team = kernel.root, kernel.team
    root.line(f"if (threadIdx.x >= {team.threads - 32} &&")
    root.line(f"    __shfl_sync(ws::kAllLanes, {kernel.leavers}, 0) == kSplits - 1) {{")
    offset = 0
    for stage in stages:
        each = _slot_words(stage) * team.splits
        start = f"{slots} + {offset} + {kernel.row} * {each}" if offset else f"{slots} + {kernel.row} * {each}"
        root.line(f"  for (int i = threadIdx.x % 32; i < {each}; i += 32) ({start})[i] = 0;")
        offset += each * kernel.nest.row_count
    root.line(f"  if (threadIdx.x % 32 == 0) {slots}[{words} + {kernel.row}] = 0;")
    root.line("}")

