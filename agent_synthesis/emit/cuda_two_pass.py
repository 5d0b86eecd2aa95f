"""Row reductions as one kernel a stage and one for the stores, each overlapping the start of the next.

Any row length and any number of splits; each kernel reads the row again, from the second-level cache where it fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import cuda_shape
from agent_synthesis.emit.cuda_row_text import RowKernel
from agent_synthesis.emit.cuda_stages import Stage
from agent_synthesis.ir import Nest
from agent_synthesis.schedule import Emission, Parameters
from warpsmith.v1 import candidate_pb2


def emit(
    nest: Nest, original: Nest, parameters: Parameters, stages: Sequence[Stage], header: Sequence[str]
) -> Emission:
    """One kernel a stage that leaves partial states of slices, then one that merges them and stores."""
    lines = list(header)
    launches: list[candidate_pb2.Launch] = []
    splits, overlap = parameters.integers["splits"], parameters.choices["overlap"] == "yes"
    words = [-(-stage.state_bytes() * nest.row_count * splits // 8) for stage in stages]
    spaces = [
        cuda_shape.workspace(original, f"{stage.name}_partials", count)
        for stage, count in zip(stages, words, strict=True)
    ]
    for number in range(len(stages) + 1):
        last = number == len(stages)
        kernel = RowKernel(nest, parameters, stages)
        root, names = kernel.root, kernel.function.names
        base = kernel.text.entry
        entry = base if last else f"{base}_{stages[number].name}"
        kernel.prologue()
        if number > 0:
            root.line("ws::wait_for_previous();")
        elif overlap:
            kernel.wait_for_previous()
        partials = [names.take(f"{stage.name}_partials") for stage in stages[: number + (not last)]]
        for earlier in range(number):
            stage = stages[earlier]
            state = names.take(f"{stage.name}_state")
            kind = stage.state_type(kernel.dialect)
            place = f"{partials[earlier]} + {kernel.row} * kSplits"
            root.line(f"const {kind} {state} = ws::over_array<kSplits>({place});")
            kernel.learn(earlier, state)
        if last:
            if overlap:
                root.line("ws::launch_dependents();")
            kernel.hold_stores()
            kernel.store()
        else:
            stage = stages[number]
            kernel.hold_row()
            own = kernel.accumulate(number)
            root.line("ws::launch_dependents();")
            kind = stage.state_type(kernel.dialect)
            box, block = names.take(f"{stage.name}_box"), names.take(f"block_{stage.name}")
            root.line(f"__shared__ {kind} {box}[{kernel.team.warps}];")
            root.line(f"const {kind} {block} = ws::over_block<{kernel.team.warps}>({own}, {box});")
            root.line(f"if (threadIdx.x == 0) {partials[number]}[{kernel.row} * kSplits + {kernel.rank}] = {block};")
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
            cuda_shape.launch(
                original,
                entry=entry,
                grid=nest.row_count * splits,
                threads=kernel.team.threads,
                buffers=used,
                workspaces=extra,
                dependent=number > 0 or overlap,
                writes=writes,
            )
        )
    return Emission("\n".join(lines), cuda_shape.HEADERS, tuple(launches), tuple(spaces))
