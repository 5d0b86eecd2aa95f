"""CUDA schedule of row reductions whose elements are a matrix product: `ws_product_partials.cuh`.

The one idea: the product of `cuda_product` ends by reducing each row of a tile to one state where it would store the
sums; a kernel of its own joins a row's states, in order, and makes the stores. So nothing of the product is written.
"""

from __future__ import annotations

from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, Engine
from agent_synthesis.emit.cuda.products.product_states import CudaStatesProduct, StatesText
from agent_synthesis.emit.cuda.products.product_tiling import ProductSettings, Tiling
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.emit.cuda.stage_state import results, state_of, state_type
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import CUDA
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.product_end import end_of, three_axes
from agent_synthesis.nests.analysis.products.reduced_product import ReducedProduct, product_alone, reduced_product
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2

ROW_THREADS = 256
"""Of the kernel that joins states: a warp to a row."""
REPAIRED_COLUMNS = 128
"""Of a tile of the repair: the product's own must be as wide, since each leaves one state of a row."""


class CudaReducedProduct(CudaStatesProduct):
    """Rows of products, reduced."""

    name = "cuda_product_reduced"
    reduced = "rows"

    def product_of(self, nest: Nest) -> Nest:
        """The product alone, as if its sums were stored."""
        return product_alone(nest)

    def accepts(self, nest: Nest) -> bool:
        """Rows of a product that `cuda_product` takes and no schedule of few tiles would rather make."""
        reduced = reduced_product(nest)
        if reduced is None or iteration_space.reads_what_it_writes(nest) or not self.is_tiled(product_alone(nest)):
            return False
        values = replace(iteration_space.simplified(reduced.elements), stores=reduced.values)
        return end_of(three_axes(values, reduced.product), 8)[1] > 1

    def footprint(self, nest: Nest, settings: ProductSettings) -> Footprint:
        """Halves as those of the product, and states."""
        product, reduced = CudaProduct(self.hardware).footprint(product_alone(nest), settings), _reduced(nest)
        states = reduced.product.tile_count(1, settings.columns)
        return replace(
            product,
            extra_bytes=product.extra_bytes + 2 * states * reduced.stage.state_bytes(),
            launch_count=product.launch_count + 1,
        )

    def emit(self, nest: Nest, settings: ProductSettings) -> Emission:
        """The product's kernels, and one that joins the states of a row."""
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} reduces no rows of a product that tiles of tensor cores make")
        self.require(nest, settings)
        made = ReducedText(self.hardware, _reduced(nest), ENGINES[settings.engine], settings.tiling)
        kernels, headers = made.kernels()
        heading = function_text.header(nest, self.name, settings)
        return made.emission(heading, [*kernels, made.rows()], [*headers, "ws_reduce.cuh", "ws_product_partials.cuh"])

    def require(self, nest: Nest, settings: ProductSettings) -> None:
        """Checks too that each row of a tile is left as one state by the repair."""
        super().require(nest, settings)
        if ENGINES[settings.engine].parts > 1 and settings.columns != REPAIRED_COLUMNS:
            raise IllegalMove(f"{nest.name}: what repairs tiles leaves states of {REPAIRED_COLUMNS} columns")


class ReducedText(StatesText):
    """A product's pieces of text, with an end that reduces, and the kernel behind it."""

    states = "partials"
    members = ("partials", "State", "of")

    def __init__(self, hardware: Hardware, reduced: ReducedProduct, engine: Engine, tiling: Tiling) -> None:
        simple, values = iteration_space.simplified(reduced.elements), reduced.values
        rows = three_axes(replace(simple, stores=simple.stores[len(values) :]), reduced.product)
        parallel = tuple(axis for axis in rows.parallel if axis.name != "n")
        joined = replace(end_of(rows, 1)[0], parallel=parallel)
        super().__init__(hardware, replace(simple, stores=values), reduced.product, engine, tiling, joined)
        self._stage = reduced.stage
        self._values = self._end.stores
        names = {store.buffer for store in self._values}
        self._end = replace(self._end, buffers=tuple(each for each in self._end.buffers if each.name not in names))

    @property
    def state(self) -> str:
        """C++ type of what the memory of states holds."""
        return f"{self.entry}_end::State"

    def end(self) -> list[str]:
        """The function that takes neighbouring sums to a state."""
        text, function, sums = self._text, self._text.function, self.sums()
        body = Scope(function, None, known=["batch", "m"], depth=2)
        places = [function.buffers[store.buffer] for store in self._values]
        for place in places:
            body.line(f"ws::Pack<float, {self._width}> {place};")

        def write(inner: Scope) -> None:
            inner.learn([f"%{self._product.reduction}"])
            for store, place in zip(self._values, places, strict=True):
                inner.store(store, f"{place}[{text.lane}]")

        text.elements(body, [store.value for store in self._values], write)
        folds = zip(self._stage.reductions, places, strict=False)
        state = state_of([f"ws::folded<{functor(r.operation)}>({place})" for r, place in folds])
        body.line(f"return {f'ws::shifted({places[0]})' if self._stage.kind == 'shifted' else state};")
        members = [f"  using State = {state_type(self._stage, CUDA)};", "  State* __restrict__ partials;"]
        return self.end_struct(members, "State of", (text.begin, sums), body.lines)

    def rows(self) -> Kernel:
        """The kernel that joins the states of each row and makes the stores."""
        function = self._joined_text.function
        row, state, partials = (function.names.take(name) for name in ("row", "state", "partials"))
        count = self._batch * self._m
        root = Scope(function, None)
        root.line(f"const int {row} = blockIdx.x * {ROW_THREADS // 32} + threadIdx.x / 32;")
        root.line(f"if ({row} >= {count}) return;")
        root.line(f"constexpr int kTiles = {self.entry}_shape::kColumnTiles;")
        root.line(f"const auto {state} = ws::over_array<kTiles>({partials} + {row} * kTiles);")
        root.line("if (threadIdx.x % 32 != 0) return;")
        self.place(root, row)
        found = results(self._stage, state)
        if self._stage.kind == "shifted":
            found[self._stage.reductions[1].name] = f"ws::sum_about_finite({state})"
        function.reductions.update(found)
        root.learn(f"%{name}" for name in found)
        root.expect(store.value for store in self._joined_text.nest.stores)
        return self.joining("rows", root, partials, -(-count // (ROW_THREADS // 32)), ROW_THREADS)

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        """Those of every product, and the states."""
        states = self._product.tile_count(1, self._tiling.columns)
        words = -(-states * self._stage.state_bytes() // 8)
        return (*super().workspaces(), geometry.workspace(self._nest, "partials", words))


def _reduced(nest: Nest) -> ReducedProduct:
    found = reduced_product(nest)
    assert found is not None, nest
    return found
