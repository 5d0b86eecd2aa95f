"""CUDA schedule of products of floats that are split on the way to the tensor cores: `ws_product_converted.cuh`.

The one idea: where few tiles use an operand, splitting it in memory moves more than multiplying does. So both are read
as they are, the left's rows into registers, the right's columns through a warpgroup that converts them; each 64 of
depth has scales of its own, and no pass looks for one. Where an operand is used often, `cuda_product` is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products import tensor_core_product
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, NEEDS, EngineName, is_walked
from agent_synthesis.emit.cuda.products.product_text import PRODUCT_HEADERS, ProductText, product_of
from agent_synthesis.emit.cuda.products.product_tiling import TILE_DEPTH, TILE_ROWS, Tiling, slice_depth, without_empty
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.product_end import EVERYWHERE, band_of, end_of, three_axes
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import MatrixProduct, matrix_product
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2, tensor_pb2

COLUMNS, THREADS = 128, 384
STEP_BYTES = 4 * TILE_DEPTH * COLUMNS
"""Of a step of the left's rows, of the right's columns, or of the columns' halves."""

_HEADERS = (*PRODUCT_HEADERS, "ws_product_rows.cuh", "ws_product_simt.cuh", "ws_product_converted.cuh")


@dataclass(frozen=True)
class ConvertedSettings(Settings):
    """Of `cuda_product_converted`."""

    engine: EngineName = setting(EngineName.FP16X3, "how tensor cores make it", (EngineName.FP16X3,))
    left: int = setting(3, "steps of the left in shared memory")
    right: int = setting(2, "steps of the right in shared memory")
    halves: int = setting(2, "steps of the right's halves in shared memory")
    split_k: int = setting(1, "slices of the depth, which a kernel of their own adds up")


_MEMORY = (
    ConvertedSettings(), ConvertedSettings(left=2, right=3), ConvertedSettings(right=1, halves=3),
)  # fmt: skip
"""Steps that fit into shared memory together."""


class CudaConvertedProduct(CudaSchedule):
    """Both operands as they are in memory."""

    name = "cuda_product_converted"
    settings = ConvertedSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """A product of floats, the left along the depth and the right across, where a split in memory costs more."""
        simple = iteration_space.simplified(nest)
        product = matrix_product(simple)
        if product is None or iteration_space.reads_what_it_writes(nest) or not _is_laid_out(product):
            return False
        if band_of(end_of(three_axes(simple, product), 2)[0]) != EVERYWHERE:
            return False
        return predicted_ns(
            self.hardware, product, _slices(self.hardware, product)
        ) < tensor_core_product.split_and_product_ns(self.hardware, nest, product)

    def defaults(self, nest: Nest) -> ConvertedSettings:
        """Slices that fill the multiprocessors."""
        return ConvertedSettings(split_k=_slices(self.hardware, product_of(nest)))

    def alternatives(self, nest: Nest, current: ConvertedSettings) -> Sequence[ConvertedSettings]:
        """Memory shared out otherwise, or half or twice the slices."""
        slices, k = current.split_k, product_of(nest).extents[3]
        found = [replace(each, split_k=slices) for each in _MEMORY]
        found += [replace(current, split_k=without_empty(k, count)) for count in (slices // 2, 2 * slices)]
        return tuple(each for each in found if each != current)

    def footprint(self, nest: Nest, settings: ConvertedSettings) -> Footprint:
        """Sums of slices are written and read; nothing else moves twice."""
        product, slices = product_of(nest), settings.split_k
        return Footprint(
            extra_bytes=8 * product.sum_count * slices if slices > 1 else 0,
            parallel_count=slices * product.tile_count(TILE_ROWS, COLUMNS),
            launch_count=3 if slices > 1 else 2,
            tensor_flop_count=3 * product.flop_count,
        )

    def emit(self, nest: Nest, settings: ConvertedSettings) -> Emission:
        """Multiplies, repairs rows and columns that have no halves, and adds slices."""
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} is no product of floats by rows with floats by columns that gains by it")
        simple = iteration_space.simplified(nest)
        tiling = Tiling(COLUMNS, settings.halves, cluster=1, raster=8, promote=1, split_k=settings.split_k)
        made = _ConvertedText(self.hardware, simple, product_of(nest), ENGINES[settings.engine], tiling)
        made.operands.across = ()  # nothing is measured
        made.operands.copied = made.operands.sides[1:]
        made.left_steps, made.right_steps = settings.left, settings.right
        heading = function_text.header(simple, self.name, settings)
        return made.emission(heading, [made.product(), made.repair()], _HEADERS)


class _ConvertedText(ProductText):
    """A product's pieces of text, without halves in memory, and with a kernel of its own."""

    left_steps, right_steps = 0, 0
    """Steps of the operands in shared memory."""

    def shape(self) -> list[str]:
        """The repair's view of the product, and the converting kernel's."""
        return [
            *super().shape(),
            f"using {self.entry}_converted = ws::ConvertedProduct<{self.entry}_shape, {self.entry}_left,",
            f"    ws::ConvertedStages{{.left = {self.left_steps}, .right = {self.right_steps}, "
            f".halves = {self._tiling.stages}}}>;",
        ]

    def product(self) -> Kernel:
        """The kernel that reads both operands."""
        left, right = self.operands.sides
        arguments = [
            "const __grid_constant__ ws::TensorMap right", "const float* __restrict__ left",
            "float* __restrict__ left_roots", "float* __restrict__ right_roots", "ws::Marks* marks",
        ]  # fmt: skip
        text = [
            *self.signature(f"__launch_bounds__({THREADS}, 1) {self.entry}_product", arguments),
            f"  ws::multiply_converted<{self.entry}_converted>({left.start}, right, left_roots, right_roots,",
            f"                         marks, {self.end_value()});",
            "}",
        ]
        o = right.operand
        steps = [(self._k, o.depth_stride), *((axis.extent, axis.stride or o.depth_stride) for axis in o.walk())]
        columns = candidate_pb2.TensorMap(
            buffer=o.buffer,
            dtype=tensor_pb2.DTYPE_FLOAT32,
            extents=[self._n, *(extent for extent, _ in steps)],
            byte_strides=[4 * stride for _, stride in steps],
            box=[COLUMNS, TILE_DEPTH, *(1 for _ in steps[1:])],
        )
        work = [self.operands.workspace(name) for name in ("left_roots", "right_roots", "marks")]
        passed = [
            candidate_pb2.LaunchArgument(tensor_map=columns),
            *map(address, (left.operand.buffer, *work, *self.ends())),
        ]
        grid = min(self._tiling.split_k * self._product.tile_count(TILE_ROWS, COLUMNS), self.hardware.sm_count)
        halves = self._tiling.stages
        # The scales of its columns, and barriers and what alignment takes.
        shared = STEP_BYTES * (self.left_steps + self.right_steps + halves) + 4 * COLUMNS * halves + 1280
        written = [*self.written(), *work]
        record = geometry.record(f"{self.entry}_product", grid, THREADS, passed, written, shared_bytes=shared)
        return Kernel(text, record)

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        """All but halves and ranges, which are not used here."""
        return tuple(each for each in super().workspaces() if not each.name.endswith(("_halves", "_ranges")))


def predicted_ns(hardware: Hardware, product: MatrixProduct, slices: int) -> float:
    """Time of the product's kernel and of adding slices, by waves of tiles."""
    k = product.extents[3]
    waves = -(-slices * product.tile_count(TILE_ROWS, COLUMNS) // hardware.sm_count)
    steps = -(-slice_depth(k, slices) // TILE_DEPTH)
    costs = hardware.costs
    tile_ns = steps * costs.converted_step_ns + costs.tile_end_ns
    return waves * tile_ns + tensor_core_product.adding_ns(hardware, product, slices)


def _is_laid_out(product: MatrixProduct) -> bool:
    """Whether copies of 16 bytes and the copy engine find whole steps of both operands."""
    _, m, n, k = product.extents
    left, right = product.left, product.right
    if left.type is not Type.F32 or right.type is not Type.F32 or k % TILE_DEPTH:
        return False
    if min(m, n) < tensor_core_product.LEAST_ROWS or left.depth_stride != 1 or left.row_stride < k:
        return False
    if right.row_stride != 1 or right.depth_stride < n or not is_walked(right, right.depth_stride, 4):
        return False
    return all(step >= 0 and step % 4 == 0 for step in (left.row_stride, left.offset, *left.layer_strides))


def _slices(hardware: Hardware, product: MatrixProduct) -> int:
    """Slices that fill the multiprocessors."""
    k, tiles = product.extents[3], product.tile_count(TILE_ROWS, COLUMNS)
    return without_empty(k, min(hardware.sm_count // tiles, k // tensor_core_product.LEAST_SLICE))
