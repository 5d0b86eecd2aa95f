"""CUDA schedule of batch norms by the batch's own statistics, of a matrix product: `ws_product_columns.cuh`.

The one idea: the tiles of `cuda_product` leave a state of each column beside what they store, so that nothing is read
for the statistics; a small kernel joins a column's states and makes what it has one of, and a pointwise one the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.pointwise import CudaPointwise
from agent_synthesis.emit.cuda.products import tensor_core_product
from agent_synthesis.emit.cuda.products.converted_product import CudaConvertedProduct
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, NEEDS, Engine
from agent_synthesis.emit.cuda.products.product_text import ProductText, address
from agent_synthesis.emit.cuda.products.product_tiling import TILE_ROWS, ProductSettings, Tiling, shared_bytes
from agent_synthesis.emit.cuda.products.streamed_product import CudaStreamedProduct
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.normalized_product import NormalizedProduct, normalized_product
from agent_synthesis.nests.analysis.product_end import EVERYWHERE, band_of, end_of, three_axes
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2

JOIN_THREADS, JOINED_COLUMNS = 256, 32
"""Of the kernel that joins states, as `ws_column_states.cuh` has them."""
STATE_BYTES = 12
"""Of a column in a tile."""
WARP_STATES_BYTES = 8 * 8
"""Shared memory for a column of a tile: a mean and squares of each warp."""
_MEMBERS = ("states", "stored", "repaired")
"""What an end has besides buffers."""


class CudaNormalizedProduct(CudaSchedule):
    """Norms of the columns of products; the depth is in one slice."""

    name = "cuda_product_columns"
    settings = ProductSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """A norm of a product's columns that `cuda_product` takes and no schedule of few tiles would rather make."""
        found = normalized_product(nest)
        if found is None:
            return False
        end, _ = end_of(three_axes(iteration_space.simplified(found.elements), found.product), 8)
        if band_of(end) != EVERYWHERE:
            return False
        if any(
            schedule.accepts(found.elements)
            for schedule in (CudaStreamedProduct(self.hardware), CudaConvertedProduct(self.hardware))
        ):
            return False
        return CudaProduct(self.hardware).accepts(found.elements) and CudaPointwise(self.hardware).accepts(
            found.normalized
        )

    def defaults(self, nest: Nest) -> ProductSettings:
        """Those of the product, in one slice."""
        given = CudaProduct(self.hardware).defaults(_found(nest).elements)
        return replace(given, end=None, slices=1, warpgroups=2)

    def alternatives(self, nest: Nest, current: ProductSettings) -> Sequence[ProductSettings]:
        """The product's, without slices, and with a warpgroup to 64 rows."""
        found = CudaProduct(self.hardware).alternatives(_found(nest).elements, current)
        return geometry.legal(found, lambda settings: require_fits(self.hardware, nest, settings))

    def footprint(self, nest: Nest, settings: ProductSettings) -> Footprint:
        """Halves as those of the product; states and what is between the kernels are written and read once."""
        found = _found(nest)
        product = CudaProduct(self.hardware).footprint(found.elements, settings)
        _, m, n, _ = found.product.extents
        between = STATE_BYTES * -(-m // TILE_ROWS) * n
        between += sum(space.element_count * space.type.size_bytes for space in found.spaces)
        read_again = 0 if found.elements.stores[0].buffer in {space.name for space in found.spaces} else m * n * 4
        return replace(
            product, extra_bytes=product.extra_bytes + 2 * between + read_again, launch_count=product.launch_count + 2
        )

    def emit(self, nest: Nest, settings: ProductSettings) -> Emission:
        """The product's kernels, one that joins the states of columns, and one that normalises."""
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} is no batch norm of a product that tiles of tensor cores make")
        require_fits(self.hardware, nest, settings)
        found, engine = _found(nest), ENGINES[settings.engine]
        made = NormalizedText(self.hardware, found, engine, settings.tiling)
        pieces, launches, headers = made.kernels()
        last = CudaPointwise(self.hardware).emit(
            found.normalized, CudaPointwise(self.hardware).defaults(found.normalized)
        )
        pieces += [made.columns(), [last.text.rstrip()]]
        launches += [made.columns_launch(), *last.launches]
        headers += ["ws_column_states.cuh", "ws_product_columns.cuh", *last.headers]
        heading = "\n".join(function_text.header(nest, self.name, settings))
        text = "\n\n".join("\n".join(piece) for piece in pieces)
        return Emission(f"{heading}\n{text}\n", tuple(dict.fromkeys(headers)), tuple(launches), made.workspaces())


def require_fits(hardware: Hardware, nest: Nest, settings: ProductSettings) -> None:
    """Checks that a tile's columns are in one block, and that their states find room beside the stages.

    Raises:
        IllegalMove: names the limit.
    """
    elements = _found(nest).elements
    tensor_core_product.require_fits(hardware, elements, settings)
    if settings.slices != 1 or settings.warpgroups != 2:
        raise IllegalMove(f"{nest.name}: columns of a product are reduced in one slice, by two warpgroups")
    tiling = settings.tiling
    needed = shared_bytes(tiling, ENGINES[settings.engine].parts) + WARP_STATES_BYTES * tiling.columns
    if needed > hardware.shared_bytes:
        raise IllegalMove(f"{nest.name}: {needed} bytes of shared memory with states, of {hardware.shared_bytes}")


class NormalizedText(ProductText):
    """A product's pieces of text, with an end that gives back what it stores, and the kernel that joins states."""

    def __init__(self, hardware: Hardware, found: NormalizedProduct, engine: Engine, tiling: Tiling) -> None:
        super().__init__(hardware, iteration_space.simplified(found.elements), found.product, engine, tiling)
        self._found = found
        function = self._text.function
        for name, given in function.buffers.items():
            if given in _MEMBERS:
                function.buffers[name] = function.names.take(f"{given}_given")
        self._column_text = kernel_text.KernelText(found.columns, "", 1)

    def end(self) -> list[str]:
        """The function that takes neighbouring sums to the stores, and to the values that the norm is of."""
        text, function = self._text, self._text.function
        first = self._end.stores[0]
        sums, values = self._names.take("sums"), self._names.take("values")
        function.reductions[self._product.reduction] = f"{sums}[{text.e}]"
        given = [function.axes.get(name) or self._names.take(name) for name in ("batch", "m")]
        wide, single = max(2, self._pack), self._pack == 1
        body = Scope(function, None, known=["batch", "m"], depth=3 if single else 2)
        storage = self._end.buffer(first.buffer).type
        rounded = "" if storage is Type.F32 else f"ws::rounded_to<{function.dialect.storage[storage]}>"

        def value(inner: Scope) -> None:
            inner.learn([f"%{self._product.reduction}"])
            inner.expect([first.value])
            made = inner.value(first.value).text
            inner.line(f"{values}[{text.e}] = {f'{rounded}({made})' if rounded else made};")

        column = self._names.take("first") if single else text.begin
        if single:
            body.line(f"const {text.offset} {text.begin} = {column} + {text.e};")
            if self._n % 2:
                body.line(f"if ({text.begin} >= {self._n}) break;")
        text.stores(body, self._end.stores, define=value)
        lines = body.lines
        if single:
            lines = [
                f"    {kernel_text.UNROLL}",
                f"    for (int {text.e} = 0; {text.e} < 2; ++{text.e}) {{",
                *lines,
                "    }",
            ]
        members = []
        for buffer in self._end.buffers:
            kind = f"{function.dialect.storage[buffer.type]}*"
            kind = kind if buffer.written else f"const {kind}"
            members.append(f"  {kind} __restrict__ {function.buffers[buffer.name]};")
        m, n = function.axes["m"], function.axes["n"]
        return [
            f"struct {self.entry}_end {{",
            "  float* __restrict__ states;",
            *members,
            f"  WS_INLINE ws::Pack<float, {wide}> operator()({text.offset} {given[0]}, {text.offset} {given[1]}, "
            f"{text.offset} {column},",
            f"      ws::Pack<float, {wide}> {sums}) const {{",
            f"    ws::Pack<float, {wide}> {values} = {{}};",
            *lines,
            f"    return {values};",
            "  }",
            f"  WS_INLINE float stored({text.offset} {m}, {text.offset} {n}) const {{",
            f"    return {function.element(first.buffer, function.index(first.index))};",
            "  }",
            "  WS_INLINE void repaired(int row, int column, int columns) const {",
            f"    ws::states_of_stored<{self.entry}_shape>(*this, row, column, columns);",
            "  }",
            "};",
        ]

    def signature(self, name: str, arguments: list[str], *, whole: bool = False) -> list[str]:
        """As of every product, with the states before what the end needs."""
        return super().signature(name, [*arguments, "float* __restrict__ states"], whole=whole)

    def end_value(self, *, whole: bool = False) -> str:
        """What a kernel makes of sums."""
        del whole
        return f"{self.entry}_end{{{', '.join(['states', *(self._passed(each.name) for each in self._end.buffers)])}}}"

    def ending(self, *more: str) -> list[candidate_pb2.LaunchArgument]:
        """What follows the operands among a kernel's arguments."""
        found = super().ending(*more)
        place = len(found) - len(self._end.buffers)
        return [*found[:place], address(self._workspace("states")), *found[place:]]

    def written(self) -> list[str]:
        """What a kernel's end writes."""
        return [self._workspace("states"), *super().written()]

    def product(self) -> list[str]:
        """The product's kernel."""
        return [line.replace("ws::multiply<", "ws::multiply_columns<") for line in super().product()]

    def columns(self) -> list[str]:
        """The kernel that joins the states of each column, and makes what there is one of."""
        text, function, found = self._column_text, self._column_text.function, self._found
        names = function.names
        states, column, total = names.take("states"), names.take("column"), names.take("total")
        root = Scope(function, None)
        root.line(f"const int {column} = blockIdx.x * ws::kJoinedColumns + threadIdx.x % ws::kJoinedColumns;")
        root.line(f"const ws::ColumnTotal {total} = ws::joined_column<{self.entry}_shape>({states}, {column});")
        root.line(f"if (threadIdx.x >= ws::kJoinedColumns || {column} >= {self._n}) return;")
        for axis, place in geometry.row_axes(found.columns, column).items():
            root.line(f"const {text.offset} {function.axes[axis]} = {place};")
        root.learn(axis.name for axis in found.columns.parallel)
        root.expect([found.origin, *(store.value for store in found.columns.stores)])
        first, second = found.moments
        about, shifted = root.value(found.origin).operand, names.take("shifted")
        root.line(f"const double {shifted} = ({total}.mean - {about}) * {self._m};")
        for reduction, made in ((first, shifted), (second, f"{total}.squares")):
            narrow = reduction.type is Type.F32
            function.reductions[reduction.name] = f"static_cast<float>({made})" if narrow else made
        root.learn([f"%{first.name}", f"%{second.name}"])
        for store in found.columns.stores:
            root.store(store)
        head = text.signature(f"{self.entry}_columns", JOIN_THREADS, 1, found.columns.buffers, {states: "const float"})
        return [*head, *root.lines, "}"]

    def columns_launch(self) -> candidate_pb2.Launch:
        """Of `columns`."""
        buffers = self._found.columns.buffers
        names = [*(buffer.name for buffer in buffers), self._workspace("states")]
        written = [buffer.name for buffer in buffers if buffer.written]
        blocks = -(-self._n // JOINED_COLUMNS)
        return self.launch("columns", blocks, JOIN_THREADS, [address(name) for name in names], written)

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        """Those of every product, the states, and what lies between the kernels."""
        words = {"states": STATE_BYTES * -(-self._m // TILE_ROWS) * self._n}
        for space in self._found.spaces:
            words[space.name.removeprefix(f"{self._nest.name}_")] = space.element_count * space.type.size_bytes
        spaces = (geometry.workspace(self._nest, name, -(-size // 8)) for name, size in words.items())
        return (*super().workspaces(), *spaces)


def _found(nest: Nest) -> NormalizedProduct:
    found = normalized_product(nest)
    assert found is not None, nest
    return found
