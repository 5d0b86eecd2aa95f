"""The text of a convolution whose tiles leave a state of each channel, and of what is behind: `ws_windows_spread.cuh`.

The one idea: where what is reduced goes beyond a tile, tiles leave states, and a kernel joins those of a row and makes
the stores of rows. A norm's elements are then made by a pointwise kernel, of the result that the tiles have stored.
"""

from __future__ import annotations

from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.cuda import generated_struct, geometry
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel, KernelText
from agent_synthesis.emit.cuda.products.convolutions.convolution_product_text import HEADERS, ConvolutionProductText
from agent_synthesis.emit.cuda.products.convolutions.window_boxes import Boxes
from agent_synthesis.emit.cuda.products.product_tiling import Tiling
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import index_text
from agent_synthesis.nests.analysis.products.convolution_product import points
from agent_synthesis.nests.analysis.products.spread_product import COUNT, SpreadProduct
from agent_synthesis.nests.analysis.products.tailed_product import SUMS, alone
from agent_synthesis.nests.ir import Type
from agent_synthesis.nests.tailed import Tailed
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2

THREADS = 256
"""Of the kernel that joins states, as `ws_windows_spread.cuh` has them."""
_MEMBERS = ("Spread", "kStores", "states", "value", "sum", "row", "total", "box", COUNT)
"""What the struct and the kernel call things of their own."""


def states_bytes(found: SpreadProduct, boxes: Boxes) -> int:
    """Of memory for states."""
    planes = 2 if found.stage.kind == "moments" else 1
    columns = points(found.product.groups) * points(found.product.made)
    return 4 * boxes.row_tiles * (planes * columns + (planes > 1))


class SpreadText(ConvolutionProductText):
    """A convolution's pieces of text, with an end that leaves states, and the kernel that joins them."""

    def __init__(
        self, hardware: Hardware, nest: Tailed, found: SpreadProduct, boxes: Boxes, tiling: Tiling, held: int
    ) -> None:
        plain, spaces = replace(alone(nest), name=nest.name), [replace(each, written=True) for each in found.kept]
        if found.result is not None:
            target = replace(found.result, written=True)
            store = replace(plain.stores[0], buffer=target.name)
            plain = replace(plain, stores=(store,), buffers=(*(b for b in plain.buffers if not b.written), target))
            spaces.append(target)
        super().__init__(hardware, plain, boxes, tiling, held, function_text.entry_name(nest))
        self._tailed, self._found, self._spaces = nest, found, spaces
        own = [] if found.result is None else [plain.stores[0].buffer]
        stored = [each for each in plain.buffers if each.name in {*own, *(b.name for b in self._end.buffers)}]
        both = {each.name: each for each in (*found.value.buffers, *(stored if own else ()))}
        self._value = KernelText(
            replace(found.value, reductions=(), buffers=tuple(both.values())), "", 1, reserved=_MEMBERS
        )
        self._value.function.reductions[SUMS] = "sum"
        self._text.function.buffers |= self._value.function.buffers
        self._end = replace(self._end, buffers=tuple(both.values()))

    @property
    def _spread(self) -> str:
        """C++ type that says what states are."""
        stage = self._found.stage
        return (
            "ws::SpreadMoments"
            if stage.kind == "moments"
            else f"ws::SpreadFold<{functor(stage.reductions[0].operation)}>"
        )

    def kernels(self) -> tuple[list[Kernel], list[str]]:
        """Those of the convolution, and the one that joins."""
        kernels, _ = super().kernels()
        return [*kernels, self.rows()], [*HEADERS, "ws_reduce.cuh", "ws_windows_spread.cuh"]

    def end(self) -> list[str]:
        """The function that makes what states are of, and the one that stores sums."""
        text, (reduction,) = self._value, self._found.value.reductions
        names = [*(axis.name for axis in text.nest.parallel), f"%{SUMS}"]
        value = Scope(text.function, None, names, depth=2)
        value.expect([reduction.value])
        value.line(f"return {value.converted(reduction.value, Type.F32)};")
        axes = (text.function.axes.get(name, f"no_{name}") for name in ("batch", "m", "n"))
        places = ", ".join(f"{text.offset} {axis}" for axis in axes)
        functions = generated_struct.function(f"float value({places}, float sum) const", value.lines)
        stores = self._found.result is not None
        members = [
            f"  using Spread = {self._spread};",
            f"  static constexpr bool kStores = {str(stores).lower()};",
            "  float* __restrict__ states;",
        ]
        if not stores:
            return self.end_struct(members, "", ("", ""), [], functions)
        sums = self.sums()
        column, lines = self.stored(lambda inner: inner.learn([f"%{self._product.reduction}"]))
        return self.end_struct(members, "void operator()", (column, sums), lines, functions)

    def rows(self) -> Kernel:
        """The kernel that joins the states of each row, and makes the stores of rows."""
        found, nest = self._found, self._found.rows
        text = KernelText(nest, "", 1, reserved=_MEMBERS)
        function, columns = text.function, found.columns
        extents = {**nest.extents, COUNT: columns.count}
        root = Scope(function, None)
        root.line("__shared__ double box[ws::kSpreadThreads / 32];")
        root.line("const int row = blockIdx.x;")
        for axis, place in geometry.coordinates(nest.parallel, "row").items():
            root.line(f"const {text.offset} {function.axes[axis]} = {place};")
        root.learn(axis.name for axis in nest.parallel)
        own = ", ".join(
            f"static_cast<int>({index_text(index, {**function.axes, COUNT: COUNT}, extents)})"
            for index in (columns.image, columns.group, columns.channel)
        )
        root.line(f"const auto column = [&](int {COUNT}) {{ return ws::SpreadColumn{{{own}}}; }};")
        shape = f"{self.entry}_shape, {self._spread}"
        root.line(f"const ws::SpreadTotal total = ws::joined_row<{shape}>(box, states, {columns.count}, column);")
        root.line("if (threadIdx.x != 0) return;")
        root.expect([found.origin, *(store.value for store in nest.stores)])
        made = ["total.mean"]
        if found.stage.kind == "moments":
            about = root.value(found.origin).operand
            made = [f"((total.mean - {about}) * total.count)", "total.squares"]
        for reduction, value in zip(found.stage.reductions, made, strict=True):
            kind = function.dialect.compute(reduction.type)
            function.reductions[reduction.name] = f"static_cast<{kind}>({value})"
            root.learn([f"%{reduction.name}"])
        for store in nest.stores:
            root.store(store)
        states = self.operands.workspace("states")
        head = text.signature(f"{self.entry}_rows", THREADS, 1, nest.buffers, {"states": "const float"})
        names = [*(buffer.name for buffer in nest.buffers), states]
        written = [buffer.name for buffer in nest.buffers if buffer.written]
        return Kernel(
            [*head, *root.lines, "}"], self.launch("rows", nest.row_count, THREADS, map(address, names), written)
        )

    def signature(self, name: str, arguments: list[str], *, whole: bool = False) -> list[str]:
        """As of every product, with the states before what the end needs."""
        return super().signature(name, [*arguments, "float* __restrict__ states"], whole=whole)

    def end_value(self, *, whole: bool = False) -> str:
        """What a kernel makes of sums."""
        del whole
        return f"{self.entry}_end{{{', '.join(['states', *(self._passed(each.name) for each in self._end.buffers)])}}}"

    def ends(self) -> list[str]:
        """Buffers that a kernel's end gets."""
        return [self.operands.workspace("states"), *super().ends()]

    def written(self) -> list[str]:
        """Buffers that a kernel's end writes."""
        return [self.operands.workspace("states"), *super().written()]

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        """Those of every convolution, the states, and what lies between the kernels."""
        words = {"states": states_bytes(self._found, self._boxes)}
        for space in self._spaces:
            words[space.name.removeprefix(f"{self._tailed.name}_")] = space.element_count * space.type.size_bytes
        spaces = (geometry.workspace(self._tailed, name, -(-size // 8)) for name, size in words.items())
        return (*super().workspaces(), *spaces)
