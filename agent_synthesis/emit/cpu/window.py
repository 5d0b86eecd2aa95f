"""CPU schedule of sliding windows: columns of the data first, then along the row; or each output's window by itself.

The one idea: a row of outputs needs a few rows of data. Joined column by column they are one row that stays in the
first-level cache, already with the padding around it, and every output joins a few neighbours there: both loops
vectorise. Where indices do not allow that (positions of a maximum), each output walks its window.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text, window_loops
from agent_synthesis.emit.cpu import cpu_function
from agent_synthesis.emit.cpu.cpu_settings import WindowSettings
from agent_synthesis.emit.expression import Function, Scope
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.emit.window_loops import Loops, Reuse
from agent_synthesis.nests import iteration_space, sliding_window
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.sliding_window import Tiling
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Stores
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

_LONGEST_JOIN = 64
"""Elements of a window along the row that are joined in one expression."""
_COLUMNS = 16
"""Joined rows have a multiple of so many columns: whole vectors."""
_ROW_BUFFER_BYTES = 256 << 10
"""What the rows that a thread keeps may take: a part of its second-level cache."""


class CpuWindow:
    """Windows joined by columns, or each by itself."""

    name = "cpu_window"
    settings = WindowSettings
    target = task_pb2.TARGET_CPU

    def accepts(self, nest: Nest) -> bool:
        """Reductions over sliding windows, stored once for each output."""
        return sliding_window.is_window(iteration_space.simplified(nest))

    def defaults(self, nest: Nest) -> WindowSettings:
        """Columns where the indices allow it, a whole row at once where its buffer stays in the cache."""
        tiling = _tiling(nest)
        block = min(4096, _longest_block(tiling)) if tiling else 1
        return WindowSettings(Reuse.COLUMNS if tiling else Reuse.NONE, block, cpu_function.default_threads(nest))

    def alternatives(self, nest: Nest, current: WindowSettings) -> Sequence[WindowSettings]:
        """One change away."""
        tiling = _tiling(nest)
        longest = _longest_block(tiling) if tiling else 1
        blocks = [block for block in (512, 1024, 2048, 4096, 8192) if block <= longest]
        return current.one_change_away(
            reuse=... if tiling else (Reuse.NONE,), block=blocks if current.reuse is Reuse.COLUMNS else ()
        )

    def footprint(self, nest: Nest, settings: WindowSettings) -> Footprint:
        """Plain stores read each line of an output before they write it."""
        return Footprint(
            cpu_function.fill_bytes(nest, Stores.PLAIN), cpu_function.thread_count(nest, settings.threads), 1
        )

    def emit(self, nest: Nest, settings: WindowSettings) -> Emission:
        """One function."""
        tiling = _tiling(nest)
        if settings.reuse is Reuse.COLUMNS:
            block = settings.block
            if tiling is None:
                raise IllegalMove(f"{nest.name}: its windows cannot be joined by columns")
            if not 1 <= block <= _longest_block(tiling):
                raise IllegalMove(f"{nest.name}: block = {block}, of {_longest_block(tiling)} outputs that fit")
            function = Function(CPP, tiling.nest)
        else:
            tiling, function = None, Function(CPP, iteration_space.simplified(nest))
        entry = function_text.name_everything(function)
        window_loops.name_elements(function, nest.windows[0])
        lines = function_text.header(nest, self.name, settings) + cpu_function.prologue(function, entry)
        lines += _by_columns(function, tiling, settings) if tiling else _by_outputs(function, settings)
        return Emission("\n".join([*lines, "}", ""]), ("ws_window.hpp",), (cpu_function.launch(nest),))


def _tiling(nest: Nest) -> Tiling | None:
    tiling = sliding_window.tiling(iteration_space.simplified(nest))
    return tiling if tiling and tiling.row.size <= _LONGEST_JOIN else None


def _longest_block(tiling: Tiling) -> int:
    """Outputs whose rows fit the buffer; at least one."""
    bytes_each = sum(r.type.compute.size_bytes for r in tiling.nest.reductions)
    longest = (_ROW_BUFFER_BYTES // bytes_each - tiling.row.reach - 1) // tiling.row.stride + 1
    return max(1, min(longest, tiling.row.outputs))


def _by_outputs(function: Function, settings: WindowSettings) -> list[str]:
    """Every output walks its own window."""
    nest = function.nest
    loops = [cpu_function.loop_over(function, axis) for axis in nest.parallel]
    root = Scope(function, None)
    point = Scope(function, root, [axis.name for axis in nest.parallel], 1 + len(loops))
    window_loops.walk_windows(point, unroll="", kind="long")
    point.expect(store.value for store in nest.stores)
    for store in nest.stores:
        point.store(store)
    if settings.threads != 1 and loops:
        collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
        root.line(cpu_function.parallel_pragma(settings.threads, f"for schedule(static){collapse}"))
    root.enclose(loops, point)
    return root.lines


def _by_columns(function: Function, tiling: Tiling, settings: WindowSettings) -> list[str]:
    """Rows of outputs: their rows of data are joined to one, along which the windows are joined."""
    row, threads = tiling.row, settings.threads
    block = min(settings.block, row.outputs)
    span = row.span(block)
    blocks = -(-row.outputs // block)
    names = function.names
    assert row.output is not None
    i = function.axes[row.output.name]
    begin, first = names.take(f"{i}_begin") if blocks > 1 else "", names.take("first_column")
    columns = {r.name: names.take(f"{function.reductions[r.name]}_columns") for r in function.nest.reductions}
    outputs = tiling.outputs
    loops = [cpu_function.loop_over(function, axis) for axis in outputs]
    if begin:
        loops.append(f"for (long {begin} = 0; {begin} < {row.outputs}; {begin} += {block})")
    region = threads != 1 and bool(loops)
    root = Scope(function, None)
    around = root.child(deeper=int(region))
    body = Scope(function, root, [axis.name for axis in outputs], 1 + region + len(loops))
    left = f"{row.stride} * {begin}" if row.stride > 1 else begin
    left = f"{left} - {row.padding}" if row.padding else left
    edges = begin or row.padding or span > row.data
    if begin:
        body.line(f"const long {first} = {left};")
    joins = window_loops.joins(function)
    for each in joins:
        kept = -(-span // _COLUMNS) * _COLUMNS
        around.line(f"alignas(64) {each.kind} {columns[each.reduction.name]}[{kept}];")
        body.line(f"ws::fill({columns[each.reduction.name]}, {each.neutral});")
    low, high = "0", str(min(row.data, span - row.padding))
    if begin and edges:
        low, high = names.take("from"), names.take("to")
        body.line(f"const long {low} = {first} > 0 ? {first} : 0;")
        body.line(f"const long {high} = {first} + {span} < {row.data} ? {first} + {span} : {row.data};")
    place = f" - {first}" if begin else f" + {row.padding}" if row.padding else ""
    _join_columns(function, tiling, body, columns, low, high, place)
    _join_rows(function, tiling, body, columns, begin, block)
    if region:
        collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
        around.line(f"#pragma omp for schedule(static){collapse}")
    around.enclose(loops, body)
    if region:
        root.line(cpu_function.parallel_pragma(threads))
        root.line("{")
        root.absorb(around)
        root.line("}")
    else:
        root.absorb(around)
    return root.lines


def _join_columns(
    function: Function, tiling: Tiling, body: Scope, columns: dict[str, str], low: str, high: str, place: str
) -> None:
    """Joins the rows of data, as far as they are inside, into one."""
    loops = Loops(body)
    for slide in tiling.outer:
        loops.slide(slide, "long", "long")
    column = function.axes[tiling.row.position]
    element = loops.inner.child([tiling.row.position])
    element.expect(reduction.value for reduction in function.nest.reductions)
    for each in window_loops.joins(function):
        value = element.converted(each.reduction.value, each.reduction.type)
        element.line(each.step(f"{columns[each.reduction.name]}[{column}{place}]", value))
    loops.inner.line("#pragma omp simd")
    loops.inner.enclose([f"for (long {column} = {low}; {column} < {high}; ++{column})"], element)
    loops.close()


def _join_rows(
    function: Function, tiling: Tiling, body: Scope, columns: dict[str, str], begin: str, block: int
) -> None:
    """Joins the windows along the row, and stores."""
    row = tiling.row
    assert row.output is not None
    i = function.axes[row.output.name]
    inner = body.child([row.output.name])
    offset = f"({i} - {begin})" if begin else i
    start = f"{row.stride} * {offset}" if row.stride > 1 else offset
    for each in window_loops.joins(function):
        name, joined = function.reductions[each.reduction.name], columns[each.reduction.name]
        call = f"ws::join_steps<ws::{each.operation}, {row.size}, {row.dilation}>({joined} + {start})"
        inner.line(f"const {each.kind} {name} = {call};")
        inner.learn([f"%{each.reduction.name}"])
    inner.expect(store.value for store in function.nest.stores)
    for store in function.nest.stores:
        inner.store(store)
    end = str(row.outputs)
    if begin:
        end = function.names.take(f"{i}_end")
        last = f"{begin} + {block}"
        last = f"{last} < {row.outputs} ? {last} : {row.outputs}" if row.outputs % block else last
        body.line(f"const long {end} = {last};")
    body.line("#pragma omp simd")
    body.enclose([f"for (long {i} = {begin or 0}; {i} < {end}; ++{i})"], inner)
