"""CUDA schedule of batch norms by the batch's own statistics, of a matrix product: `ws_product_columns.cuh`.

The one idea: the tiles of `cuda_product` leave a state of each column beside what they store, so that nothing is read
for the statistics; a small kernel joins a column's states and makes what it has one of, and a pointwise one the rest.
"""

from __future__ import annotations

from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.pointwise import CudaPointwise
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, Engine
from agent_synthesis.emit.cuda.products.product_states import CudaStatesProduct, StatesText
from agent_synthesis.emit.cuda.products.product_tiling import TILE_ROWS, ProductSettings, Tiling, shared_bytes
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.normalized_product import NormalizedProduct, normalized_product
from agent_synthesis.nests.analysis.products.product_end import EVERYWHERE, band_of, end_of, three_axes
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


class CudaNormalizedProduct(CudaStatesProduct):
    """Norms of the columns of products."""

    name = "cuda_product_columns"
    reduced = "columns"

    def product_of(self, nest: Nest) -> Nest:
        """The product and its own stores."""
        return _found(nest).elements

    def accepts(self, nest: Nest) -> bool:
        """A norm of a product's columns that `cuda_product` takes and no schedule of few tiles would rather make."""
        found = normalized_product(nest)
        if found is None:
            return False
        end, _ = end_of(three_axes(iteration_space.simplified(found.elements), found.product), 8)
        is_whole = band_of(end) == EVERYWHERE
        return is_whole and self.is_tiled(found.elements) and CudaPointwise(self.hardware).accepts(found.normalized)

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
        self.require(nest, settings)
        found = _found(nest)
        made = NormalizedText(self.hardware, found, ENGINES[settings.engine], settings.tiling)
        kernels, headers = made.kernels()
        pointwise = CudaPointwise(self.hardware)
        last = pointwise.emit(found.normalized, pointwise.defaults(found.normalized))
        heading = function_text.header(nest, self.name, settings)
        headers += ["ws_column_states.cuh", "ws_product_columns.cuh"]
        return made.emission(heading, [*kernels, made.columns()], headers, last)

    def require(self, nest: Nest, settings: ProductSettings) -> None:
        """Checks too that states find room beside the stages."""
        super().require(nest, settings)
        tiling = settings.tiling
        needed = shared_bytes(tiling, ENGINES[settings.engine].parts) + WARP_STATES_BYTES * tiling.columns
        if needed > (most := self.hardware.shared_bytes):
            raise IllegalMove(f"{nest.name}: {needed} bytes of shared memory with states, of {most}")


class NormalizedText(StatesText):
    """A product's pieces of text, with an end that gives back what it stores, and the kernel that joins states."""

    states = "states"
    members = ("states", "stored", "repaired")

    def __init__(self, hardware: Hardware, found: NormalizedProduct, engine: Engine, tiling: Tiling) -> None:
        simple = iteration_space.simplified(found.elements)
        super().__init__(hardware, simple, found.product, engine, tiling, found.columns)
        self._found = found

    def end(self) -> list[str]:
        """The function that takes neighbouring sums to the stores, and to the values that the norm is of."""
        text, function, first = self._text, self._text.function, self._end.stores[0]
        sums, values = self.sums(), self._names.take("values")
        storage, sums_type = self._end.buffer(first.buffer).type, f"ws::Pack<float, {max(2, self._width)}>"
        rounded = "" if storage is Type.F32 else f"ws::rounded_to<{function.dialect.storage[storage]}>"

        def value(inner: Scope) -> None:
            inner.learn([f"%{self._product.reduction}"])
            inner.expect([first.value])
            made = inner.value(first.value).text
            inner.line(f"{values}[{text.e}] = {f'{rounded}({made})' if rounded else made};")

        column, lines = self.stored(value)
        lines = [f"    {sums_type} {values} = {{}};", *lines, f"    return {values};"]
        element, place = function.element(first.buffer, function.index(first.index)), function.axes
        more = [
            f"  WS_INLINE float stored({text.offset} {place['m']}, {text.offset} {place['n']}) const {{",
            f"    return {element};",
            "  }",
            "  WS_INLINE void repaired(int row, int column, int columns) const {",
            f"    ws::states_of_stored<{self.entry}_shape>(*this, row, column, columns);",
            "  }",
        ]
        head = f"{sums_type} operator()"
        return self.end_struct(["  float* __restrict__ states;"], head, (column, sums), lines, more)

    def multiply(self, call: str) -> str:
        """The function of `ws` that multiplies."""
        return f"{call}_columns"

    def columns(self) -> Kernel:
        """The kernel that joins the states of each column, and makes what there is one of."""
        function, found = self._joined_text.function, self._found
        states, column, total = (function.names.take(name) for name in ("states", "column", "total"))
        root = Scope(function, None)
        root.line(f"const int {column} = blockIdx.x * ws::kJoinedColumns + threadIdx.x % ws::kJoinedColumns;")
        root.line(f"const ws::ColumnTotal {total} = ws::joined_column<{self.entry}_shape>({states}, {column});")
        root.line(f"if (threadIdx.x >= ws::kJoinedColumns || {column} >= {self._n}) return;")
        self.place(root, column)
        root.expect([found.origin, *(store.value for store in found.columns.stores)])
        about, shifted = root.value(found.origin).operand, function.names.take("shifted")
        root.line(f"const double {shifted} = ({total}.mean - {about}) * {self._m};")
        for reduction, made in zip(found.moments, (shifted, f"{total}.squares"), strict=True):
            narrow = reduction.type is Type.F32
            function.reductions[reduction.name] = f"static_cast<float>({made})" if narrow else made
            root.learn([f"%{reduction.name}"])
        return self.joining("columns", root, states, -(-self._n // JOINED_COLUMNS), JOIN_THREADS)

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
