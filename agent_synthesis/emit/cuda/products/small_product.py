"""CUDA schedule of small and odd matrix products, in plain floats: `ws_product_simt.cuh`.

The one idea: where tiles of tensor cores would be mostly empty, or no copy engine walks the operands, a block takes
a small tile in shared memory; what follows the product is the same function of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products import converted_product, product_tiling
from agent_synthesis.emit.cuda.products.converted_product import CudaConvertedProduct
from agent_synthesis.emit.cuda.products.product_text import ProductText, product_of
from agent_synthesis.emit.cuda.products.product_tiling import Tiling
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct, split_and_product_ns
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import MatrixProduct, matrix_product
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware

MOST_FLOPS = 1 << 30
"""Operations above which a library's tiles, larger than these, win (20 us at cuBLAS's rate in f32)."""
MOST_LAYER_FLOPS = 1 << 19
"""Operations of one matrix of a batch up to which a library's tiles are no larger: 64 by 64 by 64, say."""
ROWS = (4, 8, 16, 32, 64, 128)
COLUMNS = (16, 32, 64, 128, 256, 512)
THREADS = (64, 128, 256)
THREAD_SUMS = (2, 64)
"""Of a thread at least and at most."""
BUSY_SUMS = 16
"""Of a thread where there are blocks enough: so many are read from shared memory as fast as they are multiplied."""
SMALL_SIDE = 32
"""Of the smallest square tile that a search begins with."""
LEAST_BUSY_TILES = 8
"""For each multiprocessor: so many hide each other's beginnings and ends."""
LEAST_SLICE = 128
"""Depth below which a slice is not worth the sums that it adds."""
_TYPES = (Type.F32, Type.F16, Type.BF16)
_HEADERS = (
    "ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_split.cuh", "ws_product_shape.cuh", "ws_product_simt.cuh",
)  # fmt: skip


@dataclass(frozen=True)
class SmallSettings(Settings):
    """Of `cuda_product_simt`."""

    rows: int = setting(32, "rows of a block's tile", ROWS)
    columns: int = setting(32, "columns of a block's tile", COLUMNS)
    threads: int = setting(256, "of a block, which have 2 to 64 sums each", THREADS)
    split_k: int = setting(1, "slices of the depth, which a kernel of their own adds up")


class CudaSmallProduct(CudaSchedule):
    """Small tiles in shared memory."""

    name = "cuda_product_simt"
    settings = SmallSettings

    def accepts(self, nest: Nest) -> bool:
        """A product with any strides, up to `MOST_FLOPS`, or a batch of matrices of `MOST_LAYER_FLOPS`."""
        product = matrix_product(iteration_space.simplified(nest))
        if product is None or product.left.type is not product.right.type or product.left.type not in _TYPES:
            return False
        most = max(MOST_FLOPS, MOST_LAYER_FLOPS * product.extents[0])
        return product.flop_count <= most and iteration_space.is_safe_in_place(nest)

    def leads(self, nest: Nest) -> bool:
        """Many small products of floats, which tensor cores' larger tiles and split operands would make slower."""
        product = product_of(nest)
        batch, m, n, k = product.extents
        settings = self.defaults(nest)
        tiles = product.tile_count(settings.rows, settings.columns)
        if product.left.type is not Type.F32 or tiles < LEAST_BUSY_TILES * self.hardware.sm_count:
            return False
        if self.hardware.refusal(CudaProduct.needs):
            return False  # no other takes it
        costs, others = self.hardware.costs, []
        if CudaProduct(self.hardware).accepts(nest):
            others.append(split_and_product_ns(self.hardware, nest, product))
        if CudaConvertedProduct(self.hardware).accepts(nest):
            others.append(converted_product.predicted_ns(self.hardware, product, 1))
        flops = 2 * tiles * settings.rows * settings.columns * k
        moved = 4 * (k * (m * product.left.layer_count + n * product.right.layer_count) + batch * m * n)
        ns = max(flops / costs.float_flops_per_ns / self.hardware.sm_count, moved / costs.bytes_per_ns)
        return bool(others) and ns < min(others)

    def defaults(self, nest: Nest) -> SmallSettings:
        """The largest tile, but for empty halves, that still gives every other multiprocessor one; else a small one and
        slices."""
        product = product_of(nest)
        for side in (128, 64, SMALL_SIDE):
            rows, columns = _tile(product, side)
            tiles = product.tile_count(rows, columns)
            if tiles >= LEAST_BUSY_TILES * self.hardware.sm_count:
                threads = min(THREADS[-1], max(THREADS[0], rows * columns // BUSY_SUMS))
                return SmallSettings(rows=rows, columns=columns, threads=threads)
            if 2 * tiles >= self.hardware.sm_count:
                return SmallSettings(rows=rows, columns=columns)
        columns = min(columns, SMALL_SIDE)  # blocks are scarcer than sums
        rows = max(rows, THREAD_SUMS[0] * THREADS[-1] // columns)
        slices = _slice_counts(self.hardware, product, rows, columns)[-1]
        return SmallSettings(rows=rows, columns=columns, split_k=slices)

    def alternatives(self, nest: Nest, current: SmallSettings) -> Sequence[SmallSettings]:
        """One change away."""
        counts = _slice_counts(self.hardware, product_of(nest), current.rows, current.columns)
        changes = current.one_change_away(split_k=counts)
        return geometry.legal(changes, lambda settings: _require_possible(nest, settings))

    def footprint(self, nest: Nest, settings: SmallSettings) -> Footprint:
        """Slices' sums are written and read."""
        product, slices = product_of(nest), settings.split_k
        tiles = product.tile_count(settings.rows, settings.columns)
        extra = 8 * product.sum_count * slices if slices > 1 else 0
        return Footprint(extra_bytes=extra, parallel_count=tiles * slices, launch_count=1 + (slices > 1))

    def emit(self, nest: Nest, settings: SmallSettings) -> Emission:
        """One kernel, and one that adds slices."""
        _require_possible(nest, settings)
        simple, product = iteration_space.simplified(nest), product_of(nest)
        widest = min(8, settings.rows * settings.columns // settings.threads)
        tiling = Tiling(settings.columns, stages=1, cluster=1, raster=1, promote=1, split_k=settings.split_k)
        made = ProductText(self.hardware, simple, product, None, tiling, widest=widest)
        blocks = product.tile_count(settings.rows, settings.columns) * settings.split_k
        kernel = _kernel(made, settings, blocks)
        return made.emission(function_text.header(simple, self.name, settings), [kernel], _HEADERS)


def _kernel(made: ProductText, settings: SmallSettings, blocks: int) -> Kernel:
    sides = made.operands.sides
    arguments = [f"const {made.operands.element}* __restrict__ {side.name}" for side in sides]
    operands, starts = ", ".join(map(made.operands.name, sides)), ", ".join(side.start for side in sides)
    text = [
        *made.signature(f"__launch_bounds__({settings.threads}) {made.entry}_product", arguments),
        f"  ws::multiply_small<{made.entry}_shape, {operands}, {settings.rows}, {settings.threads}>({starts},",
        f"             {made.end_value()});",
        "}",
    ]
    passed = [*(address(side.operand.buffer) for side in sides), *made.ending()]
    return Kernel(text, made.launch("product", blocks, settings.threads, passed, made.written()))


def _tile(product: MatrixProduct, side: int) -> tuple[int, int]:
    """Rows and columns of as many sums as `side` squared, or fewer where the product has fewer rows or columns, but two
    for each thread."""
    _, m, n, _ = product.extents
    columns = min(side, *(each for each in COLUMNS if each >= n), COLUMNS[-1])
    rows = min(side * side // columns, *(each for each in ROWS if each >= m), ROWS[-1])
    columns = min(side * side // rows, *(each for each in COLUMNS if each >= n), COLUMNS[-1])
    return max(rows, THREAD_SUMS[0] * THREADS[-1] // columns), columns


def _require_possible(nest: Nest, settings: SmallSettings) -> None:
    """Checks that each thread has sums, but not too many, and that no slice is empty.

    Raises:
        IllegalMove: names the tile or the slices.
    """
    least, most = THREAD_SUMS
    if not least <= settings.rows * settings.columns // settings.threads <= most:
        raise IllegalMove(f"{nest.name}: a tile of {settings.rows} x {settings.columns} by {settings.threads} threads")
    slices, depth = settings.split_k, product_of(nest).extents[3]
    if product_tiling.without_empty(depth, slices) < slices:
        raise IllegalMove(f"{nest.name}: {slices} slices of a depth of {depth} leave one empty")


def _slice_counts(hardware: Hardware, product: MatrixProduct, rows: int, columns: int) -> tuple[int, ...]:
    """Powers of two that leave slices deep enough and blocks few enough to run at once."""
    tiles, depth = product.tile_count(rows, columns), product.extents[3]
    counts = [1]
    while 2 * counts[-1] * tiles <= 2 * hardware.sm_count and depth // (2 * counts[-1]) >= LEAST_SLICE:
        counts.append(2 * counts[-1])
    return tuple(count for count in counts if product_tiling.without_empty(depth, count) == count)
