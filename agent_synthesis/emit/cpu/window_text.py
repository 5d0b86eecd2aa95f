"""The struct of sliding windows on the CPU, over which the skeletons in `ws_window.hpp` are instantiated.

See `cpu_window` for the strategies; this file only says how an element is joined and what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent_synthesis.emit import generated_struct, window_loops
from agent_synthesis.emit.accumulation import reductions_type
from agent_synthesis.emit.cpu.cpu_struct import CpuStruct
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests.ir import Axis, Nest, Windowed
from agent_synthesis.nests.sliding_window import Tiling
from agent_synthesis.schedule import Emission

_MEMBERS = (
    "kRow", "Deep", "Windows", "Window", "row", "join", "columns", "place", "is_outside", "learn", "store_output",
)  # fmt: skip


def by_columns(original: Nest, tiling: Tiling, header: Sequence[str], *, block: int, threads: int) -> Emission:
    """Rows of outputs: their rows of data are joined to one, along which the windows are joined."""
    nest, row = tiling.nest, tiling.row
    assert row.output is not None
    struct = _struct(nest, tiling.outputs, row.output, min(block, row.outputs), threads)
    function, places = struct.function, {axis.name: number for number, axis in enumerate(tiling.outputs)}
    struct.constant("ws::Slide", row.fields, "kRow")
    deep = ({**each.fields, "axis": places[each.output.name] if each.output else -1} for each in tiling.outer)
    struct.using("Deep", f"ws::Slides<{', '.join(generated_struct.value('ws::Slide', fields) for fields in deep)}>")
    struct.held.append("ws::WindowColumns<Windows, kRow, kTiling.block> columns;")
    positions = {slide.position: f"at[{number}]" for number, slide in enumerate(tiling.outer)}
    element = struct.level("void row(const long* at)", positions).child([row.position])
    element.expect(reduction.value for reduction in nest.reductions)
    for number, reduction in enumerate(nest.reductions):
        value = element.converted(reduction.value, reduction.type)
        element.line(f"held->columns.join<{number}>(e, {value});")
    struct.add(f"void join(long {function.axes[row.position]}, long e) const", element.lines)
    output = struct.located.child([row.output.name])
    for number, reduction in enumerate(nest.reductions):
        kind, name = CPP.compute(reduction.type), function.reductions[reduction.name]
        output.line(f"const {kind} {name} = held->columns.along<{number}, kRow>(e);")
        output.learn([f"%{reduction.name}"])
    output.store_all(nest.stores)
    struct.add(f"void store(long {function.axes[row.output.name]}, long e) const", output.lines)
    return struct.emission(original, header, "reduce_windows", "ws_window.hpp")


def by_outputs(original: Nest, nest: Nest, header: Sequence[str], *, block: int, threads: int) -> Emission:
    """Every output walks its own window, for one reduction after the other."""
    *outer, inner = nest.parallel or (Axis("one", 1),)
    struct = _struct(nest, outer, inner, min(block, inner.extent), threads)
    function, interner, elements = struct.function, struct.function.interner, {axis.name for axis in nest.reduced}
    window_loops.name_elements(function, nest.windows[0])
    struct.space("Window", nest.reduced)
    level = struct.level("void place(long i)", {inner.name: "i"} if nest.parallel else {})
    names, at = [function.axes[axis.name] for axis in nest.reduced], f"const long (&at)[{max(1, len(nest.reduced))}]"
    for number, reduction in enumerate(nest.reductions):
        if isinstance(reduction, Windowed):
            for depth, test in window_loops.left_out(function, reduction):
                head = f"bool is_outside(ws::Number<{number}>, ws::Number<{depth}>, {at}) const"
                moves = any(re.search(rf"\b{name}\b", test) for name in names)
                struct.add(head, [*(generated_struct.located(names, "at") if moves else []), f"    return {test};"])
        element = level.child(elements)
        element.expect([reduction.value])
        element.line(f"found.join<{number}>(0, {element.converted(reduction.value, reduction.type)});")
        found = "ws::WindowResults<Windows, 1>& found"
        located = generated_struct.located(names, "at") if interner.needs(reduction.value) & elements else []
        struct.add(f"void join(ws::Number<{number}>, {found}, {at}) const", [*located, *element.lines])
        level = struct.level(f"void learn(ws::Number<{number}>, const {found})", {}, [f"%{reduction.name}"])
        name = function.reductions[reduction.name]
        level.member(CPP.compute(reduction.type), name, f"found.get<{number}>()")
    output = level.child()
    output.store_all(nest.stores)
    struct.add("void store_output() const", output.lines)
    return struct.emission(original, header, "reduce_each_window", "ws_window.hpp")


def _struct(nest: Nest, outer: Sequence[Axis], inner: Axis, block: int, threads: int) -> CpuStruct:
    struct = CpuStruct(nest, "windows", outer, _MEMBERS)
    struct.constant("ws::WindowTiling", {"outputs": inner.extent, "block": block, "threads": threads})
    struct.space("Outer", outer)
    struct.using("Windows", reductions_type(struct.function, nest.reductions))
    return struct
