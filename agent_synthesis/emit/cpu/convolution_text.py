"""The struct of a convolution on the CPU, over which the skeleton in `ws_convolution.hpp` is instantiated."""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import generated_struct, window_loops
from agent_synthesis.emit.cpu.cpu_settings import ConvolutionSettings
from agent_synthesis.emit.cpu.cpu_struct import CpuStruct
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests.analysis.convolution import Convolution
from agent_synthesis.nests.ir import Expression, Nest
from agent_synthesis.nests.sliding_window import STILL
from agent_synthesis.schedule import Emission

_MEMBERS = (
    "Value", "kRow", "kDown", "Deep", "Channels", "rows", "channel", "deep", "see", "seen", "weight", "make",
    "down", "element", "position", "output",
)  # fmt: skip


def emission(
    original: Nest, convolution: Convolution, header: Sequence[str], settings: ConvolutionSettings
) -> Emission:
    """The kernel."""
    row, down, deep = convolution.row, convolution.down or STILL, convolution.outer[:-1]
    assert row.output is not None
    made = convolution.made
    others = [axis for axis in convolution.others if axis != made]
    struct = CpuStruct(convolution.nest, "convolution", others, _MEMBERS)
    function, reduction = struct.function, convolution.reduction
    window_loops.name_elements(function, original.windows[0])
    places = {axis.name: number for number, axis in enumerate(others)}
    rows, block = min(settings.rows, down.outputs), min(settings.block, row.outputs)
    differ = convolution.weight_varies_along_row
    tiling = {
        "made": min(settings.made, made.extent) if made else 1, "all_made": made.extent if made else 1,
        "rows": rows, "block": block, "weights_differ": differ, "threads": settings.threads,
    }  # fmt: skip
    struct.constant("ws::ConvolutionTiling", tiling)
    struct.constant("ws::Slide", row.fields, "kRow")
    struct.constant("ws::Slide", down.fields, "kDown")
    slides = ({**each.fields, "axis": places[each.output.name] if each.output else -1} for each in deep)
    struct.using("Deep", f"ws::Slides<{', '.join(generated_struct.value('ws::Slide', fields) for fields in slides)}>")
    struct.space("Outer", others)
    struct.space("Channels", convolution.channels)
    struct.using("Value", CPP.compute(reduction.type))
    struct.held.append("ws::ConvolutionRows<Value, kRow, kDown, kTiling> rows;")
    _functions(struct, convolution)
    return struct.emission(original, header, "convolve", "ws_convolution.hpp")


def _functions(struct: CpuStruct, convolution: Convolution) -> None:
    """What the skeleton calls, from the outermost level on."""
    function, row, down, reduction = struct.function, convolution.row, convolution.down, convolution.reduction
    names, deep = function.axes, convolution.outer[:-1]
    assert row.output is not None
    struct.level("void channel(const long* c)", {axis.name: f"c[{n}]" for n, axis in enumerate(convolution.channels)})
    elements = {each.element.name: f"k[{number}]" for number, each in enumerate(deep) if each.element}
    positions = {each.position: f"p[{number}]" for number, each in enumerate(deep)}
    struct.level("void deep(const long* k, const long* p)", {**elements, **positions})
    inside = struct.level("void see(long position)", {down.position: "position"} if down else {})
    _value(struct, inside.child([row.position]), "seen", convolution.seen, [names[row.position]])
    made = struct.level("void make(long m)", {convolution.made.name: "m"} if convolution.made else {})
    near = [down.element if down else None, row.element]
    arguments = [names[axis.name] if axis else stem for axis, stem in zip(near, ("m", "k"), strict=True)]
    known = [axis.name for axis in (*near, row.output) if axis]
    _value(struct, made.child(known), "weight", convolution.weight, [*arguments, names[row.output.name]])
    below = struct.level("void down(long o)", {down.output.name: "o"} if down and down.output else {})
    output = below.child([row.output.name])
    function.reductions[reduction.name] = "held->rows.sums(e)"
    output.store_all(convolution.nest.stores)
    struct.add(f"void store(long {names[row.output.name]}, long e) const", output.lines)


def _value(struct: CpuStruct, body: Scope, name: str, value: Expression, arguments: Sequence[str]) -> None:
    """The function of that name, whose arguments the body knows, which gives a value as it is summed."""
    body.expect([value])
    body.line(f"return {body.converted(value, value.type)};")
    head = f"{CPP.compute(value.type)} {name}({', '.join(f'long {each}' for each in arguments)}) const"
    struct.add(head, body.lines)
