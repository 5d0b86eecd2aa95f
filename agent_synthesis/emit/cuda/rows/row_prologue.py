"""Where a thread of a row reduction on CUDA begins: its row, its first element, and what it asks for meanwhile.

The one idea: all strategies share a row alike, in slices or by turns; what follows works from the first element on.
"""

from __future__ import annotations

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows.row_text import RowKernel
from agent_synthesis.emit.expression import Scope


def prologue(kernel: RowKernel, *, backwards: bool = False, together: int = 0) -> None:
    """Constants, the row of this team, its axes, and the first element of this thread.

    `backwards`: the first blocks have the last rows; `together`: so many parts of a row come before the next row's
    parts, instead of all.
    """
    team, root, offset = kernel.team, kernel.root, kernel.text.offset
    root.line(f"constexpr int kColumns = {team.columns};")
    root.line(f"constexpr int kPacks = {team.packs};{'' if team.holds_row else '  // in registers at once'}")
    block = "blockIdx.x" if offset == "int" else "static_cast<ws::int64>(blockIdx.x)"
    if team.splits > 1 or team.reduce in ("cluster", "grid"):
        root.line(f"constexpr int kSplits = {team.splits};")
        rows, number = kernel.nest.row_count, block
        if backwards:
            number = kernel.function.names.take("number")
            root.line(f"const {offset} {number} = {rows * team.splits - 1} - {block};  // what was read last first")
        if together > 1:
            part = f"{number} / {rows * together} * {together} + {number} % {together}"
            root.line(f"const int {kernel.rank} = {f'static_cast<int>({part})' if offset != 'int' else part};")
            root.line(f"const {offset} {kernel.row} = {number} / {together} % {rows};")
        elif together:
            root.line(f"const int {kernel.rank} = {number if backwards else 'blockIdx.x'} / {rows};")
            root.line(f"const {offset} {kernel.row} = {number} % {rows};")
        else:
            root.line(f"const int {kernel.rank} = {number if backwards else 'blockIdx.x'} % kSplits;")
            root.line(f"const {offset} {kernel.row} = {number} / kSplits;")
    elif team.rows_a_block > 1:
        rows = kernel.nest.row_count
        root.line(f"constexpr int kLanes = {team.lanes};")
        place = f"{block} * {team.rows_a_block} + threadIdx.x / kLanes"
        if rows % team.rows_a_block:
            wanted = kernel.function.names.take("wanted_row")
            root.line(f"const {offset} {wanted} = {place};")
            root.line(f"const bool inside = {wanted} < {rows};")
            root.line(f"const {offset} {kernel.row} = inside ? {wanted} : {rows - 1};")
        else:
            root.line(f"const {offset} {kernel.row} = {place};")
    else:
        root.line(f"const {offset} {kernel.row} = {block};")
    declare_axes(kernel, root)
    declare_columns(kernel, root)
    root.learn(axis.name for axis in kernel.nest.parallel)


def declare_axes(kernel: RowKernel, scope: Scope) -> None:
    """The axes of the row."""
    for axis, value in geometry.row_axes(kernel.nest, kernel.row).items():
        scope.line(f"const {kernel.text.offset} {kernel.function.axes[axis]} = {value};")


def declare_columns(kernel: RowKernel, root: Scope) -> None:
    """The first element of this thread, and where those of its block end."""
    team = kernel.team
    thread = "threadIdx.x" if team.lanes == team.threads else "(threadIdx.x % kLanes)"
    scaled = f"{team.pack} * {thread}" if team.pack > 1 else thread.strip("()")
    start = f"{kernel.rank} * {team.begin} + " if team.splits > 1 else ""
    before = ""
    if kernel.skew is not None:
        shift = kernel.function.names.take("shift")
        place = kernel.function.index(kernel.skew)
        root.line(f"const int {shift} = ({place}) % {team.pack};  // the row's first pack begins so far before it")
        before = f" - {shift}"
    root.line(f"const int {kernel.first} = {start}{scaled}{before};")
    if not team.is_even:
        last = "kColumns"
        if team.splits > 1 and not team.interleaved:
            last = f"min(kColumns, ({kernel.rank} + 1) * {team.slice}{before})"
        root.line(f"const int {kernel.end} = {last};")


def wait_for_previous(kernel: RowKernel) -> None:
    """Waits for the previous kernel, having asked for this block's part of rows that fit a cache all at once."""
    team, axis, card = kernel.team, kernel.text.axis, kernel.team.hardware
    one_wave = team.lanes == team.threads and kernel.nest.row_count * team.splits <= card.sm_count * kernel.min_blocks
    if one_wave and geometry.row_data_bytes(kernel.nest) <= card.l2_bytes:
        for load in kernel.reduction_loads():
            size = kernel.text.storage(load.buffer).size_bytes
            rows = load.index.axes() - {axis}
            contiguous = load.index.coefficient(axis) == 1 and rows and kernel.text.access_of(load) == "pack"
            if contiguous and not team.skewed and team.columns % team.slice == 0 and team.pack * size % 16 == 0:
                start = f"{kernel.rank} * {team.slice}" if team.splits > 1 else "0"
                address = kernel.text.address(load.buffer, load, start)
                kernel.root.line(f"if (threadIdx.x == 0) ws::prefetch({address}, {team.slice * size});")
    kernel.root.line("ws::wait_for_previous();")
