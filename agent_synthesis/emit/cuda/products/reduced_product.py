"""CUDA schedule of row reductions whose elements are a matrix product: `ws_product_partials.cuh`.

The one idea: the product of `cuda_product` ends by reducing each row of a tile to one state where it would store the
sums; a kernel of its own joins a row's states, in order, and makes the stores. So nothing of the product is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.products import tensor_core_product
from agent_synthesis.emit.cuda.products.converted_product import CudaConvertedProduct
from agent_synthesis.emit.cuda.products.product_end import end_of, three_axes
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, NEEDS, Engine
from agent_synthesis.emit.cuda.products.product_text import ProductText, address
from agent_synthesis.emit.cuda.products.product_tiling import ProductSettings, Tiling
from agent_synthesis.emit.cuda.products.streamed_product import CudaStreamedProduct
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.emit.cuda.reduction_stages import Stage
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import CUDA
from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import BufferRef, Call, Literal, Nest, Reduced, Store, Type
from agent_synthesis.nests.product import MatrixProduct, elements_and_rows, matrix_product
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2

ROW_THREADS = 256
"""Of the kernel that joins states: a warp to a row."""
REPAIRED_COLUMNS = 128
"""Of a tile of the repair: the product's own must be as wide, since each leaves one state of a row."""
_FOLDS = ("sum", "max", "min", "prod")
_MEMBERS = ("partials", "State", "of")
"""What an end has besides buffers."""


@dataclass(frozen=True)
class ReducedProduct:
    """A nest taken apart into its product, with what is reduced of it for stores, and what becomes of the results."""

    elements: Nest
    """The product; its first stores are the values that are reduced, those of rows follow."""
    product: MatrixProduct
    stage: Stage
    """All reductions. `shifted` is logsumexp's: a maximum, and exponentials below it, an infinite one taken for 0."""

    @property
    def value_count(self) -> int:
        """Stores of values."""
        return 1 if self.stage.kind == "shifted" else len(self.stage.reductions)


def reduced_product(nest: Nest) -> ReducedProduct | None:
    """The nest as a product and one visit of its rows; None where it is anything else."""
    parts = elements_and_rows(nest)
    if parts is None or any(nest.is_element_store(store) for store in nest.stores):
        return None
    if len(parts[1].reductions) != len(nest.reductions) - 1:
        return None  # the product at the first element too, which moments are about
    elements, rows = parts
    if _is_logsumexp(rows):
        stage = Stage("shifted", rows.reductions)
    elif len(passes.levels(rows)) == 1:
        stage = Stage("folds", rows.reductions)
    else:
        return None
    wanted = nest.reductions[1:2] if stage.kind == "shifted" else nest.reductions[1:]
    if any(r.type is not Type.F32 or r.value.type is not Type.F32 or r.operation not in _FOLDS for r in wanted):
        return None
    (sums,) = elements.stores
    count = elements.buffer(sums.buffer).element_count
    stores = [Store(f"{reduction.name}_values", sums.index, reduction.value) for reduction in wanted]
    buffers = [BufferRef(store.buffer, Type.F32, count, written=True) for store in stores]
    made = replace(elements, stores=(*stores, *nest.stores), buffers=(*nest.buffers, *buffers))
    product = matrix_product(iteration_space.simplified(made))
    return None if product is None else ReducedProduct(made, product, stage)


def _is_logsumexp(rows: Nest) -> bool:
    if len(rows.reductions) != 2:
        return False
    top, total = rows.reductions
    greatest = Reduced(top.name, top.type)
    about = Call("where", (Call("isinf", (greatest,), Type.BOOL), Literal(0.0, Type.F32), greatest), Type.F32)
    wanted = Call("exp", (Call("sub", (top.value, about), Type.F32),), Type.F32)
    interner = Interner()
    is_pair = (top.operation, top.type, total.operation, total.type) == ("max", Type.F32, "sum", Type.F32)
    return is_pair and interner.number(total.value) == interner.number(wanted)


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
        product = _alone(nest)
        if any(
            schedule.accepts(product)
            for schedule in (CudaStreamedProduct(self.hardware), CudaConvertedProduct(self.hardware))
        ):
            return False
        values = replace(iteration_space.simplified(reduced.elements), stores=_values(reduced))
        return CudaProduct(self.hardware).accepts(product) and end_of(three_axes(values, reduced.product), 8)[1] > 1

    def defaults(self, nest: Nest) -> ProductSettings:
        """Those of the product, in one slice."""
        given = CudaProduct(self.hardware).defaults(_alone(nest))
        return replace(given, end=None, slices=1, warpgroups=2)

    def alternatives(self, nest: Nest, current: ProductSettings) -> Sequence[ProductSettings]:
        """The product's, without slices, and with a warpgroup to 64 rows."""
        found = CudaProduct(self.hardware).alternatives(_alone(nest), current)
        return geometry.legal(found, lambda settings: require_fits(self.hardware, nest, settings))

    def footprint(self, nest: Nest, settings: ProductSettings) -> Footprint:
        """Halves as those of the product, and states."""
        product, reduced = CudaProduct(self.hardware).footprint(_alone(nest), settings), _reduced(nest)
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
    tensor_core_product.require_fits(hardware, _alone(nest), settings)
    if settings.slices != 1 or settings.warpgroups != 2:
        raise IllegalMove(f"{nest.name}: rows of a product are reduced in one slice, by two warpgroups")
    if ENGINES[settings.engine].parts > 1 and settings.columns != REPAIRED_COLUMNS:
        raise IllegalMove(f"{nest.name}: what repairs tiles leaves states of {REPAIRED_COLUMNS} columns")


class ReducedText(ProductText):
    """A product's pieces of text, with an end that reduces, and the kernel behind it."""

    def __init__(self, hardware: Hardware, reduced: ReducedProduct, engine: Engine, tiling: Tiling) -> None:
        simple = iteration_space.simplified(reduced.elements)
        values = simple.stores[: reduced.value_count]
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
        return self._stage.state_type(CUDA)

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
        state = self._stage.state_of([f"ws::folded<{self._stage.functor(r)}>({place})" for r, place in folds])
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
        results = self._stage.results(state)
        if self._stage.kind == "shifted":
            results[self._stage.reductions[1].name] = f"ws::sum_about_finite({state})"
        function.reductions.update(results)
        root.learn([*(axis.name for axis in self._joined.parallel), *(f"%{name}" for name in results)])
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


def _alone(nest: Nest) -> Nest:
    """The product alone, as if its sums were stored."""
    parts = elements_and_rows(nest)
    assert parts is not None, nest
    return parts[0]


def _reduced(nest: Nest) -> ReducedProduct:
    found = reduced_product(nest)
    assert found is not None, nest
    return found


def _values(reduced: ReducedProduct) -> tuple[Store, ...]:
    return iteration_space.simplified(reduced.elements).stores[: reduced.value_count]
