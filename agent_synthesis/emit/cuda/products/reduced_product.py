"""CUDA schedule of row reductions whose elements are a matrix product: `ws_product_partials.cuh`.

The one idea: the product of `cuda_product` ends by reducing each row of a tile to one state where it would store the
sums; a kernel of its own joins a row's states, in order, and makes the stores. So nothing of the product is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.products import tensor_core_product
from agent_synthesis.emit.cuda.products.converted_product import CudaConvertedProduct
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, NEEDS, Engine
from agent_synthesis.emit.cuda.products.product_text import ProductText, address
from agent_synthesis.emit.cuda.products.product_tiling import ProductSettings, Tiling
from agent_synthesis.emit.cuda.products.streamed_product import CudaStreamedProduct
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.stage_state import results, state_of, state_type
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import CUDA
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.product_end import end_of, three_axes
from agent_synthesis.nests.analysis.reduced_product import ReducedProduct, product_alone, reduced_product
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2

ROW_THREADS = 256
"""Of the kernel that joins states: a warp to a row."""
REPAIRED_COLUMNS = 128
"""Of a tile of the repair: the product's own must be as wide, since each leaves one state of a row."""
_MEMBERS = ("partials", "State", "of")
"""What an end has besides buffers."""


class CudaReducedProduct(CudaSchedule):
    """Rows of products, reduced; the depth is in one slice."""

    name = "cuda_product_reduced"
    settings = ProductSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """Rows of a product that `cuda_product` takes and no schedule of few tiles would rather make."""
        reduced = reduced_product(nest)
        if reduced is None or iteration_space.reads_what_it_writes(nest):
            return False
        product = product_alone(nest)
        if any(
            schedule.accepts(product)
            for schedule in (CudaStreamedProduct(self.hardware), CudaConvertedProduct(self.hardware))
        ):
            return False
        values = replace(iteration_space.simplified(reduced.elements), stores=reduced.values)
        return CudaProduct(self.hardware).accepts(product) and end_of(three_axes(values, reduced.product), 8)[1] > 1

    def defaults(self, nest: Nest) -> ProductSettings:
        """Those of the product, in one slice."""
        given = CudaProduct(self.hardware).defaults(product_alone(nest))
        return replace(given, end=None, slices=1, warpgroups=2)

    def alternatives(self, nest: Nest, current: ProductSettings) -> Sequence[ProductSettings]:
        """The product's, without slices, and with a warpgroup to 64 rows."""
        found = CudaProduct(self.hardware).alternatives(product_alone(nest), current)
        return geometry.legal(found, lambda settings: require_fits(self.hardware, nest, settings))

    def footprint(self, nest: Nest, settings: ProductSettings) -> Footprint:
        """Halves as those of the product, and states."""
        product, reduced = CudaProduct(self.hardware).footprint(product_alone(nest), settings), _reduced(nest)
        batch, m, n, _ = reduced.product.extents
        states = batch * m * -(-n // settings.columns)
        return replace(
            product,
            extra_bytes=product.extra_bytes + 2 * states * reduced.stage.state_bytes(),
            launch_count=product.launch_count + 1,
        )

    def emit(self, nest: Nest, settings: ProductSettings) -> Emission:
        """The product's kernels, and one that joins the states of a row."""
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} reduces no rows of a product that tiles of tensor cores make")
        require_fits(self.hardware, nest, settings)
        engine = ENGINES[settings.engine]
        made = ReducedText(self.hardware, _reduced(nest), engine, settings.tiling)
        pieces, launches, headers = made.kernels()
        headers += ["ws_reduce.cuh", "ws_product_partials.cuh"]
        pieces.append(made.rows())
        launches.append(made.rows_launch())
        heading = "\n".join(function_text.header(nest, self.name, settings))
        text = "\n\n".join("\n".join(piece) for piece in pieces)
        return Emission(f"{heading}\n{text}\n", tuple(headers), tuple(launches), made.workspaces())


def require_fits(hardware: Hardware, nest: Nest, settings: ProductSettings) -> None:
    """Checks that each row of a tile is left by one thread of one kernel, as one state.

    Raises:
        IllegalMove: names the limit.
    """
    tensor_core_product.require_fits(hardware, product_alone(nest), settings)
    if settings.slices != 1 or settings.warpgroups != 2:
        raise IllegalMove(f"{nest.name}: rows of a product are reduced in one slice, by two warpgroups")
    if ENGINES[settings.engine].parts > 1 and settings.columns != REPAIRED_COLUMNS:
        raise IllegalMove(f"{nest.name}: what repairs tiles leaves states of {REPAIRED_COLUMNS} columns")


class ReducedText(ProductText):
    """A product's pieces of text, with an end that reduces, and the kernel behind it."""

    def __init__(self, hardware: Hardware, reduced: ReducedProduct, engine: Engine, tiling: Tiling) -> None:
        simple = iteration_space.simplified(reduced.elements)
        values = reduced.values
        super().__init__(hardware, replace(simple, stores=values), reduced.product, engine, tiling)
        self._stage = reduced.stage
        self._values = self._end.stores
        names = {store.buffer for store in self._values}
        self._end = replace(self._end, buffers=tuple(each for each in self._end.buffers if each.name not in names))
        function = self._text.function
        for name, given in function.buffers.items():
            if given in _MEMBERS:
                function.buffers[name] = function.names.take(f"{given}_given")
        rows = three_axes(replace(simple, stores=simple.stores[reduced.value_count :]), reduced.product)
        parallel = tuple(axis for axis in rows.parallel if axis.name != "n")
        rows, _ = end_of(rows, 1)
        self._joined = replace(rows, parallel=parallel)
        self._row_text = kernel_text.KernelText(self._joined, "", 1)

    @property
    def _state(self) -> str:
        return state_type(self._stage, CUDA)

    def end(self) -> list[str]:
        """The function that takes neighbouring sums to a state."""
        text, function = self._text, self._text.function
        sums = self._names.take("sums")
        function.reductions[self._product.reduction] = f"{sums}[{text.e}]"
        given = [function.axes.get(name) or self._names.take(name) for name in ("batch", "m")]
        body = Scope(function, None, known=["batch", "m"], depth=2)
        places = [function.buffers[store.buffer] for store in self._values]
        for place in places:
            body.line(f"ws::Pack<float, {self._pack}> {place};")

        def write(inner: Scope) -> None:
            inner.learn([f"%{self._product.reduction}"])
            for store, place in zip(self._values, places, strict=True):
                inner.store(store, f"{place}[{text.lane}]")

        text.elements(body, [store.value for store in self._values], write)
        folds = zip(self._stage.reductions, places, strict=False)
        state = state_of([f"ws::folded<{functor(r.operation)}>({place})" for r, place in folds])
        if self._stage.kind == "shifted":
            state = f"ws::shifted({places[0]})"
        members = [
            f"  const {function.dialect.storage[buffer.type]}* __restrict__ {function.buffers[buffer.name]};"
            for buffer in self._end.buffers
        ]
        axes = f"{text.offset} {given[0]}, {text.offset} {given[1]}, {text.offset} {text.begin}"
        return [
            f"struct {self.entry}_end {{",
            f"  using State = {self._state};",
            "  State* __restrict__ partials;",
            *members,
            f"  WS_INLINE State of({axes}, ws::Pack<float, {self._pack}> {sums}) const {{",
            *body.lines,
            f"    return {state};",
            "  }",
            "};",
        ]

    def signature(self, name: str, arguments: list[str], *, whole: bool = False) -> list[str]:
        """As of every product, with the states before what the end reads."""
        return super().signature(name, [*arguments, f"{self.entry}_end::State* __restrict__ partials"], whole=whole)

    def end_value(self, *, whole: bool = False) -> str:
        """What a kernel makes of sums."""
        del whole
        return (
            f"{self.entry}_end{{{', '.join(['partials', *(self._passed(each.name) for each in self._end.buffers)])}}}"
        )

    def ending(self, *more: str) -> list[candidate_pb2.LaunchArgument]:
        """What follows the operands among a kernel's arguments."""
        found = super().ending(*more)
        place = len(found) - len(self._end.buffers)
        return [*found[:place], address(self._workspace("partials")), *found[place:]]

    def written(self) -> list[str]:
        """What a kernel's end writes."""
        return [self._workspace("partials")]

    def rows(self) -> list[str]:
        """The kernel that joins the states of each row and makes the stores."""
        text, function = self._row_text, self._row_text.function
        names = function.names
        row, state, partials = names.take("row"), names.take("state"), names.take("partials")
        count = self._batch * self._m
        root = Scope(function, None)
        root.line(f"const int {row} = blockIdx.x * {ROW_THREADS // 32} + threadIdx.x / 32;")
        root.line(f"if ({row} >= {count}) return;")
        root.line(f"constexpr int kTiles = {self.entry}_shape::kColumnTiles;")
        root.line(f"const auto {state} = ws::over_array<kTiles>({partials} + {row} * kTiles);")
        root.line("if (threadIdx.x % 32 != 0) return;")
        for axis, place in geometry.row_axes(self._joined, row).items():
            root.line(f"const {text.offset} {function.axes[axis]} = {place};")
        found = results(self._stage, state)
        if self._stage.kind == "shifted":
            found[self._stage.reductions[1].name] = f"ws::sum_about_finite({state})"
        function.reductions.update(found)
        root.learn([*(axis.name for axis in self._joined.parallel), *(f"%{name}" for name in found)])
        root.expect([store.value for store in self._joined.stores])
        for store in self._joined.stores:
            root.store(store)
        spaces = {partials: f"const {self.entry}_end::State"}
        head = text.signature(f"{self.entry}_rows", ROW_THREADS, 1, self._joined.buffers, spaces)
        return [*head, *root.lines, "}"]

    def rows_launch(self) -> candidate_pb2.Launch:
        """Of `rows`."""
        names = [*(buffer.name for buffer in self._joined.buffers), self._workspace("partials")]
        written = [buffer.name for buffer in self._joined.buffers if buffer.written]
        blocks = -(-self._batch * self._m // (ROW_THREADS // 32))
        return self.launch("rows", blocks, ROW_THREADS, [address(name) for name in names], written)

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        """Those of every product, and the states."""
        states = self._batch * self._m * -(-self._n // self._tiling.columns)
        words = -(-states * self._stage.state_bytes() // 8)
        return (*super().workspaces(), geometry.workspace(self._nest, "partials", words))


def _reduced(nest: Nest) -> ReducedProduct:
    found = reduced_product(nest)
    assert found is not None, nest
    return found
