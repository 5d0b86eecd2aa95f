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
from agent_synthesis.emit.cuda.products import product_text, product_tiling
from agent_synthesis.emit.cuda.products.product_text import ProductText, product_of
from agent_synthesis.emit.cuda.products.product_tiling import Tiling
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
SIDES = (32, 64, 128)
"""Rows and columns of a tile: each of 256 threads has 4, 16 or 64 sums of a square one."""
LEAST_SLICE = 128
"""Depth below which a slice is not worth the sums that it adds."""
_TYPES = (Type.F32, Type.F16, Type.BF16)
_HEADERS = (
    "ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_split.cuh", "ws_product_shape.cuh", "ws_product_simt.cuh",
)  # fmt: skip


@dataclass(frozen=True)
class SmallSettings(Settings):
    """Of `cuda_product_simt`."""

    rows: int = setting(SIDES[0], "rows of a block's tile", SIDES)
    columns: int = setting(SIDES[0], "columns of a block's tile", SIDES)
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

    def defaults(self, nest: Nest) -> SmallSettings:
        """The largest tile, but for empty halves, that still gives every other multiprocessor one; else slices."""
        product = product_of(nest)
        for side in reversed(SIDES):
            rows, columns = (min([side, *(s for s in SIDES if s >= extent)]) for extent in product.extents[1:3])
            if 2 * product.tile_count(rows, columns) >= self.hardware.sm_count:
                return SmallSettings(rows=rows, columns=columns)
        return SmallSettings(split_k=_slice_counts(self.hardware, product, SIDES[0], SIDES[0])[-1])

    def alternatives(self, nest: Nest, current: SmallSettings) -> Sequence[SmallSettings]:
        """One change away."""
        counts = _slice_counts(self.hardware, product_of(nest), current.rows, current.columns)
        return geometry.legal(current.one_change_away(split_k=counts), lambda settings: _require_slices(nest, settings))

    def footprint(self, nest: Nest, settings: SmallSettings) -> Footprint:
        """Slices' sums are written and read."""
        product, slices = product_of(nest), settings.split_k
        tiles = product.tile_count(settings.rows, settings.columns)
        extra = 8 * product.sum_count * slices if slices > 1 else 0
        return Footprint(extra_bytes=extra, parallel_count=tiles * slices, launch_count=1 + (slices > 1))

    def emit(self, nest: Nest, settings: SmallSettings) -> Emission:
        """One kernel, and one that adds slices."""
        _require_slices(nest, settings)
        simple, product = iteration_space.simplified(nest), product_of(nest)
        tiling = Tiling(settings.columns, stages=1, cluster=1, raster=1, promote=1, split_k=settings.split_k)
        made = ProductText(self.hardware, simple, product, None, tiling, widest=settings.columns // 16)
        blocks = product.tile_count(settings.rows, settings.columns) * settings.split_k
        kernel = _kernel(made, settings.rows, blocks)
        return made.emission(function_text.header(simple, self.name, settings), [kernel], _HEADERS)


def _kernel(made: ProductText, rows: int, blocks: int) -> Kernel:
    sides = made.operands.sides
    arguments = [f"const {made.operands.element}* __restrict__ {side.name}" for side in sides]
    operands, starts = ", ".join(map(made.operands.name, sides)), ", ".join(side.start for side in sides)
    text = [
        *made.signature(f"__launch_bounds__(ws::kSimtThreads) {made.entry}_product", arguments),
        f"  ws::multiply_small<{made.entry}_shape, {operands}, {rows}>({starts},",
        f"             {made.end_value()});",
        "}",
    ]
    passed = [*(address(side.operand.buffer) for side in sides), *made.ending()]
    return Kernel(text, made.launch("product", blocks, product_text.SIMT_THREADS, passed, made.written()))


def _require_slices(nest: Nest, settings: SmallSettings) -> None:
    """Checks that no slice is empty.

    Raises:
        IllegalMove: one is.
    """
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
