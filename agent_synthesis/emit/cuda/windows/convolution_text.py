"""What convolutions add to `ws_convolution.cuh`: the sizes of a strip, and how values are loaded, weighted and stored.

The one idea: the skeleton walks strips and windows; it sees the nest as a struct of three functions. Which settings are
good is in `convolution`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit import window_loops
from agent_synthesis.emit.cuda import generated_struct, geometry
from agent_synthesis.emit.cuda.kernel_text import KernelText
from agent_synthesis.emit.cuda.schedule import DEPENDENT_LAUNCH
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.analysis.convolution import Convolution
from agent_synthesis.nests.ir import Axis, Nest, Store, Windowed
from agent_synthesis.nests.sliding_window import STILL, Slide
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove

_MEMBERS = (
    "Offset", "Value", "kTiling", "kRow", "kDown", "Deep", "Channels", "Outer", "load", "weight", "store", "at",
    "channel", "place", "element", "values", "sums",
)  # fmt: skip
"""What the struct calls things of its own."""


@dataclass(frozen=True)
class ConvolutionSettings(Settings):
    """Of `cuda_convolution`."""

    shared: bool = setting(False, "whether a block brings data to shared memory, for all its threads")
    dependent_launch: bool = setting(True, DEPENDENT_LAUNCH)
    threads: int = setting(128, "threads of a block", (64, 128, 256))
    rows: int = setting(1, "rows of outputs of a thread", (1, 2, 4, 8, 16))
    outputs: int = setting(1, "outputs of such a row", (1, 2, 4, 8))
    vector_width: int = setting(1, "elements of a row of data that are read at once", (1, 2, 4, 8))
    min_blocks: int = setting(1, "blocks of an SM, for which registers suffice", (1, 2, 3, 4, 6, 8))


@dataclass(frozen=True)
class Strips:
    """Which outputs a thread and a block make."""

    convolution: Convolution
    settings: ConvolutionSettings

    @staticmethod
    def widest_vector(convolution: Convolution) -> int:
        """The most neighbours of the data that every access can move at once, between starts of strips."""
        row = convolution.row
        seen = replace(convolution.reduction, value=convolution.seen)
        return memory_access.widest_vector(
            replace(convolution.nest, reductions=(seen,), stores=()), Axis(row.position, row.data)
        )

    @property
    def row(self) -> Slide:
        """The row's slide."""
        return self.convolution.row

    @property
    def down(self) -> Slide:
        """The slide along which a strip has several rows."""
        return self.convolution.down or STILL

    @property
    def store_width(self) -> int:
        """Outputs that every store can move at once; they divide a strip and the row."""
        width, axis = self.settings.outputs, self.row.output
        assert axis is not None
        stores = self.convolution.nest.stores
        while width > 1 and (axis.extent % width or not all(_is_wide(store, axis, width) for store in stores)):
            width //= 2
        return width

    @property
    def across(self) -> int:
        """Threads of a block along the row; 0 where it shares nothing."""
        if not self.settings.shared:
            return 0
        return min(self.settings.threads, geometry.power_of_two_at_least(self._row_strips), 32)

    @property
    def _row_strips(self) -> int:
        return -(-self.row.outputs // self.settings.outputs)

    @property
    def _down_strips(self) -> int:
        return -(-self.down.outputs // self.settings.rows)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        outer = math.prod(axis.extent for axis in self.convolution.others)
        if not self.across:
            return -(-outer * self._row_strips * self._down_strips // self.settings.threads)
        along = self.settings.threads // self.across
        return outer * -(-self._row_strips // self.across) * -(-self._down_strips // along)

    @property
    def vectors(self) -> int:
        """Vectors of a row of data that a strip needs."""
        width = self.settings.vector_width
        first = geometry.round_up(max(0, self.row.padding), width) - self.row.padding
        return -(-(first + self.row.span(self.settings.outputs)) // width)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        if not self.across:
            return 0
        rows = self.down.span(self.settings.threads // self.across * self.settings.rows)
        step = self.row.stride * self.settings.outputs // self.settings.vector_width
        vectors = step * (self.across - 1) + self.vectors
        return rows * vectors * self.settings.vector_width * self.convolution.reduction.type.compute.size_bytes

    @property
    def held_registers(self) -> int:
        """Registers of sums, a row of data and weights."""
        settings, (row, down) = self.settings, (self.row, self.down)
        weights = row.size * (settings.outputs if self.convolution.weight_varies_along_row else 1)
        if weights * down.size <= MOST_HELD_WEIGHTS:
            weights *= down.size
        values = settings.rows * settings.outputs + self.vectors * settings.vector_width + weights
        return values * self.convolution.reduction.type.compute.size_bytes // 4

    def require(self, name: str) -> None:
        """Raises IllegalMove where they do not fit the data."""
        width, rows, outputs = self.settings.vector_width, self.settings.rows, self.settings.outputs
        if width < 1 or self.widest_vector(self.convolution) % width or self.row.stride * outputs % width:
            raise IllegalMove(f"{name}: {width} elements do not lie together where strips begin")
        if rows >= 2 * max(1, self.down.outputs) or outputs >= 2 * max(1, self.row.outputs):
            raise IllegalMove(f"{name}: it has no {rows} rows of {outputs} outputs to make at once")


MOST_HELD_WEIGHTS = 32
"""Of a window, up to which a thread holds all of them: see `kIsShort` of the skeleton."""


def _is_wide(store: Store, axis: Axis, width: int) -> bool:
    return memory_access.access(store.index, axis.name, width) == "vector"


def kernel(strips: Strips, window: Windowed) -> list[str]:
    """The struct and the kernel."""
    convolution, settings = strips.convolution, strips.settings
    text = _text(convolution.nest, strips.row.position, settings.vector_width, window)
    name = f"{text.entry}_convolution"
    functions = [*_load(strips, text), *_weight(strips, text), *_store(strips, window)]
    lines = generated_struct.struct(name, text, [""], _sizes(strips, text), functions)
    shared = {"tile": "ws::ConvolutionShape<%>::Tile"} if strips.across else {}
    skeleton = "convolve_tile" if strips.across else "convolve"
    return lines + generated_struct.kernel(name, text, skeleton, settings.threads, settings.min_blocks, shared=shared)


def _text(nest: Nest, axis: str, width: int, window: Windowed) -> KernelText:
    text = KernelText(nest, axis, width, reserved=_MEMBERS)
    window_loops.name_elements(text.function, window)
    return text


def _sizes(strips: Strips, text: KernelText) -> list[str]:
    convolution, settings = strips.convolution, strips.settings
    places = {axis.name: place for place, axis in enumerate(convolution.others)}
    sizes = {
        "threads": settings.threads, "rows": settings.rows, "outputs": settings.outputs,
        "vector_width": settings.vector_width, "store_width": strips.store_width, "across": strips.across,
        "weights_differ": convolution.weight_varies_along_row, "overlap": settings.dependent_launch,
    }  # fmt: skip
    deep = (
        generated_struct.value("ws::Slide", {**each.fields, "axis": places[each.output.name] if each.output else -1})
        for each in convolution.outer[:-1]
    )
    return [
        f"  using Offset = {text.offset};",
        f"  using Value = {text.function.dialect.compute(convolution.reduction.type)};",
        *generated_struct.constant("ws::ConvolutionTiling", "kTiling", sizes),
        *generated_struct.constant("ws::Slide", "kRow", strips.row.fields),
        *generated_struct.constant("ws::Slide", "kDown", strips.down.fields),
        *generated_struct.wrapped(f"using Deep = ws::Slides<{', '.join(deep)}>;"),
        f"  using Outer = {_axes(convolution.others)};",
        f"  using Channels = {_axes(convolution.channels)};",
        "",
    ]


def _axes(axes: Sequence[Axis]) -> str:
    return f"ws::Axes<{', '.join(str(axis.extent) for axis in axes) or 1}>"


def _arrays(text: KernelText, **named: Sequence[str]) -> tuple[str, list[str]]:
    """Parameters that hold coordinates, and the statements that name them."""
    names = {array: [text.function.axes[axis] for axis in axes] for array, axes in named.items()}
    parameters = [f"const {text.offset} (&{array})[{max(1, len(held))}]" for array, held in names.items()]
    return ", ".join(parameters), [
        line for array, held in names.items() for line in generated_struct.located(held, array)
    ]


def _load(strips: Strips, text: KernelText) -> list[str]:
    """Neighbours of the data."""
    convolution, value = strips.convolution, strips.convolution.seen
    others, channels = ([axis.name for axis in axes] for axes in (convolution.others, convolution.channels))
    deep = [slide.position for slide in convolution.outer[:-1]]
    down = [strips.down.position] if convolution.down else []
    arrays, located = _arrays(text, at=others, channel=channels, place=deep)
    inner = generated_struct.body(text, [*others, *channels, *deep, *down])
    kind = f"ws::Pack<Value, {strips.settings.vector_width}>"
    inner.line(f"{kind} values;")

    def element(scope: Scope) -> None:
        scope.line(f"values[{text.lane}] = {scope.converted(value, convolution.reduction.type)};")

    text.elements(inner, [value], element)
    inner.line("return values;")
    line = text.function.axes[down[0]] if down else text.function.names.take("only")
    head = f"{kind} load({arrays}, {text.offset} {line}, {text.offset} {text.begin}) const"
    return generated_struct.function(head, located + inner.lines)


def _weight(strips: Strips, text: KernelText) -> list[str]:
    """The weight of an element."""
    convolution, value, function = strips.convolution, strips.convolution.weight, text.function
    others, channels = ([axis.name for axis in axes] for axes in (convolution.others, convolution.channels))
    output = strips.row.output
    assert output is not None
    deep = [slide.element.name if slide.element else "" for slide in convolution.outer[:-1]]
    near = [strips.down.element, strips.row.element]
    names = [
        function.axes[axis.name] if axis else function.names.take(stem) for axis, stem in zip(near, "mk", strict=True)
    ]
    arrays, located = _arrays(text, at=others, channel=channels)
    located += [f"    const {text.offset} {function.axes[name]} = element[{n}];" for n, name in enumerate(deep) if name]
    known = [*filter(None, deep), *(axis.name for axis in (*near, output) if axis)]
    inner = generated_struct.body(text, [*others, *channels, *known])
    inner.expect([value])
    inner.line(f"return {inner.converted(value, convolution.reduction.type)};")
    arrays += f", const {text.offset} (&element)[{max(1, len(deep))}]"
    head = f"Value weight({arrays}, int {names[0]}, int {names[1]}, {text.offset} {function.axes[output.name]}) const"
    return generated_struct.function(head, located + inner.lines)


def _store(strips: Strips, window: Windowed) -> list[str]:
    """Neighbouring outputs, from their sums."""
    convolution, width, output = strips.convolution, strips.store_width, strips.row.output
    assert output is not None
    text = _text(convolution.nest, output.name, width, window)
    down = strips.down.output
    others = [axis.name for axis in convolution.others]
    arrays, located = _arrays(text, at=others)
    text.function.reductions[convolution.reduction.name] = f"sums[{text.lane}]"
    inner = generated_struct.body(text, [*others, *([down.name] if down else [])])
    text.stores(inner, convolution.nest.stores, lambda scope: scope.learn([f"%{convolution.reduction.name}"]))
    line = text.function.axes[down.name] if down else text.function.names.take("only")
    head = f"void store({arrays}, {text.offset} {line}, {text.offset} {text.begin}, const Value (&sums)[{width}]) const"
    return generated_struct.function(head, located + inner.lines)
