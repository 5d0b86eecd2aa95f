"""Row reductions as one kernel a stage and one for the stores, each overlapping the start of the next.

Any row length and any number of splits; each kernel reads the row again, from the second-level cache where it fits. So
that this still has something of what it cannot hold, the stores walk backwards where that is much. With `depth`, a
block stores what it has in registers at once, of so many rows: blocks at work then are neighbours in memory, and rows
share what they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.reduction_stages import Stage
from agent_synthesis.emit.cuda.rows.row_accumulate import accumulate, learn
from agent_synthesis.emit.cuda.rows.row_text import (
    RowKernel,
    declare_axes,
    declare_columns,
    prologue,
    wait_for_previous,
)
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Parameters
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2

_LARGE_DATA = 16
"""Second-level caches of data from which on the order of reading makes no difference to what they still have."""


def emit(
    hardware: Hardware,
    nest: Nest,
    original: Nest,
    parameters: Parameters,
    stages: Sequence[Stage],
    header: Sequence[str],
) -> Emission:
    """One kernel a stage that leaves partial states of slices, then one that merges them and stores."""
    lines = list(header)
    launches: list[candidate_pb2.Launch] = []
    splits, overlap = parameters.integers["splits"], parameters.choices["overlap"] == "yes"
    depth = parameters.integers["depth"]
    words = [-(-stage.state_bytes() * nest.row_count * splits // 8) for stage in stages]
    spaces = [
        geometry.workspace(original, f"{stage.name}_partials", count)
        for stage, count in zip(stages, words, strict=True)
    ]
    for number in range(len(stages) + 1):
        last = number == len(stages)
        kernel = RowKernel(hardware, nest, parameters, stages)
        names = kernel.function.names
        base = kernel.text.entry
        entry = base if last else f"{base}_{stages[number].name}"
        partials = [names.take(f"{stage.name}_partials") for stage in stages[: number + (not last)]]
        grid = nest.row_count * splits
        if last and depth > 1:
            grid = _store_several(kernel, partials, depth, overlap=overlap)
        elif last:
            grid = _store(kernel, partials, chunkwise=depth == 1, overlap=overlap)
        else:
            _leave_partial(kernel, partials, overlap=overlap, columns_first=depth > 1)
        used = list(nest.buffers) if last else [buffer for buffer in nest.buffers if not buffer.written]
        types = {
            name: stage.state_type(kernel.dialect) if index == number else f"const {stage.state_type(kernel.dialect)}"
            for index, (name, stage) in enumerate(zip(partials, stages, strict=False))
        }
        signature = kernel.text.signature(entry, kernel.team.threads, kernel.min_blocks, used, types)
        lines += kernel.lines(signature)
        extra = [space.name for space in spaces[: len(partials)]]
        writes = [b.name for b in used if b.written] + ([] if last else [extra[number]])
        launches.append(
            geometry.launch(
                original,
                entry=entry,
                grid=grid,
                threads=kernel.team.threads,
                buffers=used,
                workspaces=extra,
                dependent=number > 0 or overlap,
                writes=writes,
            )
        )
    return Emission("\n".join(lines), geometry.HEADERS, tuple(launches), tuple(spaces))


def _leave_partial(kernel: RowKernel, partials: Sequence[str], *, overlap: bool, columns_first: bool) -> None:
    """The kernel of a stage: the state of each block's slice goes to the workspace, the last of the partials."""
    number, root, names = len(partials) - 1, kernel.root, kernel.function.names
    stage = kernel.stages[number]
    prologue(kernel, together=1 if columns_first else _together(kernel))
    if number > 0:
        root.line("ws::wait_for_previous();")
    elif overlap:
        wait_for_previous(kernel)
    _learn(kernel, partials[:-1], "kSplits")
    kernel.hold_row()
    own = accumulate(kernel, number)
    root.line("ws::launch_dependents();")
    kind = stage.state_type(kernel.dialect)
    box, block = names.take(f"{stage.name}_box"), names.take(f"block_{stage.name}")
    root.line(f"__shared__ {kind} {box}[{kernel.team.warps}];")
    root.line(f"const {kind} {block} = ws::over_block<{kernel.team.warps}>({own}, {box});")
    root.line(f"if (threadIdx.x == 0) {partials[number]}[{kernel.row} * kSplits + {kernel.rank}] = {block};")


def _learn(kernel: RowKernel, partials: Sequence[str], count: str, *, shared: bool = False) -> None:
    """Merges the states of the row, `count` of each stage: a warp for itself, or with `shared` the first for all."""
    root, names = kernel.root, kernel.function.names
    kinds = [stage.state_type(kernel.dialect) for stage in kernel.stages]
    states = [names.take(f"{stage.name}_state") for stage in kernel.stages[: len(partials)]]
    merged = [f"ws::over_array<{count}>({partial} + {kernel.row} * {count})" for partial in partials]
    if shared:
        boxes = [names.take(f"{stage.name}_merged") for stage in kernel.stages]
        for kind, box in zip(kinds, boxes, strict=True):
            root.line(f"__shared__ {kind} {box};")
        root.line("if (threadIdx.x < 32) {")
        for kind, box, text in zip(kinds, boxes, merged, strict=True):
            whole = names.take("whole")
            root.line(f"  const {kind} {whole} = {text};")
            root.line(f"  if (threadIdx.x == 0) {box} = {whole};")
        root.line("}")
        root.line("__syncthreads();")
        merged = boxes
    for number, (kind, state, text) in enumerate(zip(kinds, states, merged, strict=False)):
        root.line(f"const {kind} {state} = {text};")
        learn(kernel, number, state)


def _together(kernel: RowKernel) -> int:
    """Parts of a row that lie together before the next row's do, so that blocks follow each other as memory does."""
    run, part = geometry.run(kernel.nest), kernel.team.slice
    return run // part if run % part == 0 else int(run > 0 and part % run == 0)


def _store(kernel: RowKernel, partials: Sequence[str], *, chunkwise: bool, overlap: bool) -> int:
    """The kernel that stores, a slice of a row or only a chunk of it in each block; the blocks of its grid.

    Chunks follow each other as memory does: the blocks at work read and write one part of it.
    """
    root, states, nest = kernel.root, kernel.team.splits, kernel.nest
    chunkwise = chunkwise and bool(kernel.element_stores)
    count = "kStates" if chunkwise or not kernel.element_stores else "kSplits"
    if not kernel.element_stores:
        kernel.team = replace(kernel.team, splits=1, threads=32, lanes=32)
        root.line(f"const {kernel.text.offset} {kernel.row} = blockIdx.x;")
        declare_axes(kernel, root)
        root.learn(axis.name for axis in nest.parallel)
    else:
        # Of what is many times the second-level cache, nothing worth a thought is left there.
        backwards = geometry.row_data_bytes(nest) <= _LARGE_DATA * kernel.team.hardware.l2_bytes
        if chunkwise:
            kernel.team = replace(kernel.team, splits=kernel.team.chunks)
        prologue(kernel, backwards=backwards, together=_together(kernel) if chunkwise else 0)
    if count == "kStates":
        root.line(f"constexpr int kStates = {states};  // of a row")
    root.line("ws::wait_for_previous();")
    if chunkwise:
        kernel.hold_stores()  # on its way while the states are merged
    _learn(kernel, partials, count, shared=chunkwise)
    if overlap:
        root.line("ws::launch_dependents();")
    if not chunkwise:
        kernel.hold_stores()
    kernel.store()
    return nest.row_count * kernel.team.splits


def _store_several(kernel: RowKernel, partials: Sequence[str], depth: int, *, overlap: bool) -> int:
    """The kernel that stores, whose blocks take their columns of `depth` rows; the blocks of its grid."""
    nest, outer, names, stages = kernel.nest, kernel.root, kernel.function.names, kernel.stages
    splits, rows = kernel.team.splits, nest.row_count
    kernel.team = team = replace(kernel.team, splits=kernel.team.chunks)
    groups = -(-rows // depth)
    first_row, number = names.take("first_row"), names.take("number")
    outer.line(f"constexpr int kColumns = {team.columns};")
    outer.line(f"constexpr int kPacks = {team.packs};")
    outer.line(f"constexpr int kRows = {depth};  // of a block, one after the other")
    outer.line(f"constexpr int kSplits = {splits};  // of a row, each with a state")
    part = f"blockIdx.x / {groups}" if groups > 1 else "blockIdx.x"
    outer.line(f"const int {kernel.rank} = {team.splits - 1} - {part};  // what was read last comes first")
    outer.line(f"const int {first_row} = {f'blockIdx.x % {groups} * kRows' if groups > 1 else '0'};")
    declare_columns(kernel, outer)
    outer.line("ws::wait_for_previous();")
    kinds = [stage.state_type(kernel.dialect) for stage in stages]
    states = [names.take(f"{stage.name}_states") for stage in stages]
    for kind, state in zip(kinds, states, strict=True):
        outer.line(f"__shared__ {kind} {state}[kRows];")
    inside = f" && {first_row} + {number} < {rows}" if rows % depth else ""
    outer.line(f"for (int {number} = threadIdx.x / 32; {number} < kRows{inside}; {number} += {team.warps}) {{")
    for kind, state, partial in zip(kinds, states, partials, strict=True):
        merged = names.take("merged")
        outer.line(
            f"  const {kind} {merged} = ws::over_array<kSplits>({partial} + ({first_row} + {number}) * kSplits);"
        )
        outer.line(f"  if (threadIdx.x % 32 == 0) {state}[{number}] = {merged};")
    outer.line("}")
    kernel.hold_stores((False,))
    outer.line("__syncthreads();")
    if overlap:
        outer.line("ws::launch_dependents();")
    loop = outer.child([axis.name for axis in nest.parallel])
    kernel.root = loop
    loop.line(f"const {kernel.text.offset} {kernel.row} = {first_row} + {number};")
    declare_axes(kernel, loop)
    kernel.hold_stores((True,))
    for index, (kind, state) in enumerate(zip(kinds, states, strict=True)):
        name = names.take(f"{stages[index].name}_state")
        loop.line(f"const {kind} {name} = {state}[{number}];")
        learn(kernel, index, name)
    kernel.store()
    outer.line(f"for (int {number} = 0; {number} < kRows{inside}; ++{number}) {{")
    outer.absorb(loop)
    outer.line("}")
    kernel.root = outer
    return team.splits * groups
