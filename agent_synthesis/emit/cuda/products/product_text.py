"""The text and launches of a matrix product on tensor cores: shape, end, and the kernels that use them.

The one idea: everything that is the same for all products is in `ws_product.cuh` and its kin; a nest adds its extents,
its strides and one function, which gets two neighbouring sums and makes the stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products.operands import POINTERS, Operands, workspace
from agent_synthesis.emit.cuda.products.product_engine import Engine
from agent_synthesis.emit.cuda.products.product_tiling import TILE_ROWS, Tiling, shared_bytes
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import CUDA, CUDA_SHORT_ERFC
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.product_end import EVERYWHERE, band_of, end_of, three_axes, with_erfc
from agent_synthesis.nests.ir import BufferRef, Nest
from agent_synthesis.nests.product import MatrixProduct, matrix_product
from agent_synthesis.schedule import Emission
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2, tensor_pb2

WARPGROUP_THREADS = 128
ADD_THREADS = 256
SIMT_THREADS = 256
PRODUCT_HEADERS = (
    "ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_barrier.cuh", "ws_tensor_copy.cuh", "ws_wgmma.cuh", "ws_split.cuh",
    "ws_product_shape.cuh", "ws_product.cuh",
)  # fmt: skip
_TAKEN = {"marks", "slices", "partials", "mask", "statistics"} | {
    f"{side}{what}"
    for side in ("left", "right", "queries", "keys", "values")
    for what in ("", "_halves", "_roots", "_ranges", "_map")
}
"""Parameters that kernels have of their own."""


class ProductText:
    """One product's pieces of text."""

    slice_end, add_slices = "SliceEnd", "add_slices"  # what stores the sums of a slice of the depth, and adds them up

    def __init__(
        self,
        hardware: Hardware,
        nest: Nest,
        product: MatrixProduct,
        engine: Engine | None,
        tiling: Tiling,
        *,
        widest: int = 8,
    ) -> None:
        """`widest`: most columns that the end may take at once; without an `engine` there are no tensor cores."""
        self.hardware = hardware
        self._product = product
        self._tiling = tiling
        self._nest = three_axes(nest, product)
        end, self._width = end_of(self._nest, widest)
        self._end = with_erfc(end)
        dialect = CUDA if self._end is end else CUDA_SHORT_ERFC
        self._text = kernel_text.KernelText(self._end, "n", self._width, dialect=dialect)
        self.entry = function_text.entry_name(nest)
        self._names = self._text.function.names
        self._batch, self._m, self._n, self._k = product.extents
        self.operands = Operands(hardware, self.entry, product, engine, tiling)

    def kernels(self) -> tuple[list[Kernel], list[str]]:
        """The kernels of the product itself, with operands split before and repaired after, and their headers."""
        if self.operands.parts == 1:
            return [self.product()], [*PRODUCT_HEADERS]
        return [*self.operands.kernels(), self.product(), self.repair()], [*PRODUCT_HEADERS, "ws_product_simt.cuh"]

    def emission(
        self, heading: Sequence[str], kernels: Sequence[Kernel], headers: Iterable[str], last: Emission | None = None
    ) -> Emission:
        """All pieces of text; `last`: what follows them. A kernel that adds slices comes where there are some."""
        kernels, headers = [*kernels], [*headers]
        if self._tiling.split_k > 1:
            kernels.append(self.add())
            headers.append("ws_product_slices.cuh")
        pieces = [self.shape(), self.end(), *(kernel.text for kernel in kernels)]
        launches = [kernel.launch for kernel in kernels]
        if last is not None:
            pieces.append([last.text.rstrip()])
            launches += last.launches
            headers += last.headers
        text = "\n\n".join("\n".join(piece) for piece in pieces)
        named = tuple(dict.fromkeys(headers))
        return Emission("\n".join([*heading, text, ""]), named, tuple(launches), self.workspaces())

    # -- text

    def shape(self) -> list[str]:
        """The product's type, and what is split."""
        t, wide = self._tiling, max(2, self._width)
        band = band_of(self._end)
        lines = [
            f"using {self.entry}_shape = ws::MatrixProduct<{self.operands.element}, {self.operands.parts},",
            f"    ws::Extents{{.batch = {self._batch}, .m = {self._m}, .n = {self._n}, .k = {self._k}, "
            f".slices = {t.split_k}, .pack = {wide}}},",
            f"    ws::Directions{{{self.operands.directions()}}},",
            f"    ws::Tiling{{.columns = {t.columns}, .stages = {t.stages}, .cluster = {t.cluster}, "
            f".group = {t.raster}, .promote = {t.promote}, .warpgroups = {t.warpgroups}}}",
        ]
        if band != EVERYWHERE:
            lines[-1] += ","
            lines.append(f"    ws::Band{{.first = {band[0]}, .last = {band[1]}}}")
        lines[-1] += ">;"
        return [*lines, *self.operands.lines()]

    def end(self) -> list[str]:
        """The function that takes two neighbouring sums to the stores."""
        sums = self.sums()
        column, lines = self.stored(lambda inner: inner.learn([f"%{self._product.reduction}"]))
        return self.end_struct([], "void operator()", (column, sums), lines)

    def sums(self) -> str:
        """A name for neighbouring sums, each of which is then known as the product's."""
        sums = self._names.take("sums")
        self._text.function.reductions[self._product.reduction] = f"{sums}[{self._text.e}]"
        return sums

    def stored(self, define: Callable[[Scope], None]) -> tuple[str, list[str]]:
        """The name of the first sum's column, and the statements that store; `define` makes values known to each."""
        text, is_packed = self._text, self._width > 1
        body = Scope(text.function, None, known=["batch", "m"], depth=2 if is_packed else 3)
        first = text.begin if is_packed else self._names.take("first")
        if not is_packed:
            body.line(f"const {text.offset} {text.begin} = {first} + {text.e};")
            if self._n % 2:
                body.line(f"if ({text.begin} >= {self._n}) break;")
        text.stores(body, self._end.stores, define)
        if is_packed:
            return first, body.lines
        loop = f"    for (int {text.e} = 0; {text.e} < 2; ++{text.e}) {{"
        return first, [f"    {kernel_text.UNROLL}", loop, *body.lines, "    }"]

    def end_struct(
        self, members: Sequence[str], head: str, given: tuple[str, str], lines: Sequence[str], more: Sequence[str] = ()
    ) -> list[str]:
        """The struct of an end: its buffers, and a function of sums, if it has a `head`; `given`: the first column, and
        the sums' name."""
        names, offset, (column, sums) = self._text.function, self._text.offset, given
        axes = [names.axes.get(name) or self._names.take(name) for name in ("batch", "m")]
        places = ", ".join(f"{offset} {axis}" for axis in (*axes, column))
        buffers = (f"  {self._pointer(each)} {names.buffers[each.name]};" for each in self._end.buffers)
        given_sums = f"ws::Pack<float, {max(2, self._width)}> {sums}"
        function = [f"  WS_INLINE {head}({places}, {given_sums}) const {{", *lines, "  }"] if head else []
        return [f"struct {self.entry}_end {{", *members, *buffers, *function, *more, "};"]

    def _pointer(self, buffer: BufferRef) -> str:
        kind = f"{self._text.function.dialect.storage[buffer.type]}*"
        return f"{kind if buffer.written else f'const {kind}'} __restrict__"

    # -- kernels

    def product(self) -> Kernel:
        """The product's kernel."""
        tiling, (parameters, passed, buffers) = self._tiling, self.given()
        call = self.multiply("multiply_holding" if tiling.overlapped else "multiply")
        arguments = [f"const __grid_constant__ ws::TensorMap {side.name}" for side in self.operands.sides]
        bounds = f"__launch_bounds__({self.entry}_shape::kThreads, {tiling.blocks})"
        text = [
            *self.signature(f"{bounds} {self.entry}_product", [*arguments, *parameters]),
            f"  ws::{call}<{self.entry}_shape>(left, right, {passed}{self.end_value()});",
            "}",
        ]
        maps = [self.operands.map(side) for side in self.operands.sides]
        resident = tiling.blocks * self.hardware.resident_clusters(tiling.cluster)
        grid = min(self.cluster_count(), resident) * tiling.cluster
        record = geometry.record(
            f"{self.entry}_product", grid, self.threads(), [*maps, *map(address, buffers), *self.ending()],
            self.written(), cluster=tiling.cluster, shared_bytes=self.shared_bytes(),
        )  # fmt: skip
        return Kernel(text, record)

    def multiply(self, call: str) -> str:
        """The function of `ws` that multiplies, where the usual one is `call`."""
        return call

    def given(self) -> tuple[list[str], str, list[str]]:
        """What is between the operands and the end: parameters, how they are passed on, and buffers beside roots."""
        passed = "left_roots, right_roots, " if self.operands.parts > 1 else "nullptr, nullptr, "
        return self._roots(), "" if self._tiling.overlapped else passed, []

    def threads(self) -> int:
        """Of a block of the product's kernel."""
        return WARPGROUP_THREADS * (1 + self._tiling.warpgroups)

    def shared_bytes(self) -> int:
        """Of a block of the product's kernel."""
        return shared_bytes(self._tiling, self.operands.parts)

    def cluster_count(self) -> int:
        """Tiles that clusters take."""
        rows = TILE_ROWS * self._tiling.cluster
        return self._tiling.split_k * self._product.tile_count(rows, self._tiling.columns)

    def repair(self) -> Kernel:
        """The kernel that makes the products of rows without a scale."""
        sides, across = self.operands.sides, self.operands.across
        arguments = [*(f"const float* __restrict__ {side.name}" for side in sides), *self._roots()]
        arguments += ["ws::Marks* marks", *(f"{POINTERS['ranges']}{side.name}_ranges" for side in across)]
        operands, starts = ", ".join(map(self.operands.name, sides)), ", ".join(side.start for side in sides)
        text = [
            *self.signature(f"__launch_bounds__(ws::kSimtThreads) {self.entry}_repair", arguments),
            *(f"  ws::forget<{self.operands.name(side)}>({side.name}_ranges);" for side in across),
            f"  ws::repair<{self.entry}_shape, {operands}>({starts}, left_roots, right_roots, marks,",
            f"             {self.end_value()});",
            "}",
        ]
        cleared = ["marks", *(f"{side.name}_ranges" for side in across)]
        passed = [*(address(side.operand.buffer) for side in sides), *self.ending(*cleared)]
        written = [*self.written(), *map(self.operands.workspace, cleared)]
        return Kernel(text, self.launch("repair", self.hardware.sm_count, SIMT_THREADS, passed, written))

    def add(self) -> Kernel:
        """The kernel that adds up the slices and makes the stores."""
        name = f"__launch_bounds__(ws::kAddThreads) {self.entry}_add"
        text = [
            *self.signature(name, ["const float* __restrict__ slices"], whole=True),
            f"  ws::{self.add_slices}<{self.entry}_shape>(slices, {self.end_value(whole=True)});",
            "}",
        ]
        vectors = self._batch * self._m * -(-self._n // max(2, self._width))
        blocks = min(-(-vectors // ADD_THREADS), 8 * self.hardware.sm_count)
        names = [self.operands.workspace("slices"), *(buffer.name for buffer in self._end.buffers)]
        written = [buffer.name for buffer in self._end.buffers if buffer.written]
        return Kernel(text, self.launch("add", blocks, ADD_THREADS, map(address, names), written))

    def _roots(self) -> list[str]:
        sides = ("left", "right") if self.operands.parts > 1 else ()
        return [f"const float* __restrict__ {side}_roots" for side in sides]

    def signature(self, name: str, arguments: list[str], *, whole: bool = False) -> list[str]:
        """The head of a kernel with these parameters, and then what its end needs."""
        ends = [f"{self._pointer(buffer)} {self._passed(buffer.name)}" for buffer in self._end.buffers]
        ends = ends if whole or self._tiling.split_k == 1 else ["float* __restrict__ slices"]
        return [f'extern "C" __global__ void {name}(', *kernel_text.wrapped([*arguments, *ends])]

    def _passed(self, buffer: str) -> str:
        """A buffer's name among a kernel's parameters, some of which have names of their own."""
        name = self._text.function.buffers[buffer]
        return f"{name}_" if name in _TAKEN else name

    def end_value(self, *, whole: bool = False) -> str:
        """What a kernel makes of sums: the nest's stores, or (unless `whole`) a slice's."""
        if not whole and self._tiling.split_k > 1:
            return f"ws::{self.slice_end}<{self.entry}_shape>{{slices}}"
        return f"{self.entry}_end{{{', '.join(self._passed(buffer.name) for buffer in self._end.buffers)}}}"

    # -- records

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        """Halves, what is known of their rows, and the sums of slices."""
        found = self.operands.workspaces()
        if self._tiling.split_k > 1:
            sums = [self.operands.layers, self._m, self._n]
            found.append(workspace(self.operands.workspace("slices"), tensor_pb2.DTYPE_FLOAT32, sums))
        return tuple(found)

    def ending(self, *more: str) -> list[candidate_pb2.LaunchArgument]:
        """What follows the operands among a kernel's arguments."""
        names = ["left_roots", "right_roots"] if self.operands.parts > 1 else []
        return [address(name) for name in (*map(self.operands.workspace, (*names, *more)), *self.ends())]

    def ends(self) -> list[str]:
        """Buffers that a kernel's end gets."""
        return [buffer.name for buffer in self._end.buffers] if self._tiling.split_k == 1 else self.written()

    def written(self) -> list[str]:
        """Buffers that a kernel's end writes."""
        if self._tiling.split_k > 1:
            return [self.operands.workspace("slices")]
        return [buffer.name for buffer in self._end.buffers if buffer.written]

    def launch(
        self, name: str, grid: int, threads: int, arguments: Iterable[candidate_pb2.LaunchArgument], writes: list[str]
    ) -> candidate_pb2.Launch:
        """A record of a grid and block of one dimension."""
        return geometry.record(f"{self.entry}_{name}", grid, threads, arguments, writes)


def product_of(nest: Nest) -> MatrixProduct:
    """The product that a nest which a schedule has accepted is."""
    product = matrix_product(iteration_space.simplified(nest))
    assert product is not None, nest
    return product
