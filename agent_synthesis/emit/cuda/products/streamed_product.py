"""CUDA schedule of products of few rows with a long operand of floats: `ws_product_streamed.cuh`.

The one idea: with at most 128 rows, reading the other operand is the work, so it is read once and split into halves on
its way into registers, where `cuda_product` would write its halves and read them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, NEEDS, EngineName
from agent_synthesis.emit.cuda.products.product_text import PRODUCT_HEADERS, ProductText, product_of
from agent_synthesis.emit.cuda.products.product_tiling import TILE_DEPTH, Tiling
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.product_end import EVERYWHERE, band_of, end_of, three_axes
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import matrix_product
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove
from warpsmith.v1 import candidate_pb2, tensor_pb2

HELD_ROWS = (64, 128)
"""Least and most rows of the operand that is held."""
STREAMED_ROWS = 128
"""Rows of the streamed operand in a block's tile."""
LEAST_BUSY = 10 / 11
"""Share of the multiprocessors that must have a tile."""
CLUSTER, THREADS, HOLD_THREADS = 2, 384, 256


@dataclass(frozen=True)
class StreamedSettings(Settings):
    """Of `cuda_product_streamed`."""

    engine: EngineName = setting(EngineName.FP16X3, "how tensor cores make it", (EngineName.FP16X3,))
    held: int = setting(4, "steps of the held operand in shared memory")
    streamed: int = setting(3, "steps of the streamed operand in shared memory")


_MEMORY = (StreamedSettings(), StreamedSettings(held=3, streamed=4), StreamedSettings(held=5, streamed=2))
"""Steps that fit into shared memory together."""

_HEADERS = (*PRODUCT_HEADERS, "ws_product_rows.cuh", "ws_product_simt.cuh", "ws_product_streamed.cuh")


class CudaStreamedProduct(CudaSchedule):
    """Few rows, which are held, times a long operand."""

    name = "cuda_product_streamed"
    settings = StreamedSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """A product of floats, its few rows and many columns along the depth, all in whole vectors and stages."""
        simple = iteration_space.simplified(nest)
        product = matrix_product(simple)
        if product is None or product.batch or iteration_space.reads_what_it_writes(nest):
            return False
        _, m, n, k = product.extents
        if (
            not HELD_ROWS[0] <= m <= HELD_ROWS[1]
            or n < int(LEAST_BUSY * self.hardware.sm_count) * STREAMED_ROWS
            or k % TILE_DEPTH
        ):
            return False
        for operand in (product.left, product.right):
            if operand.type is not Type.F32 or operand.depth_stride != 1 or operand.row_stride < k:
                return False
            if operand.row_stride % 4 or operand.offset:
                return False
        return band_of(end_of(three_axes(simple, product), 2)[0]) == EVERYWHERE

    def defaults(self, nest: Nest) -> StreamedSettings:
        """What was fastest at 128 x 16384 x 16384 and 128 x 32768 x 32768."""
        del nest
        return _MEMORY[0]

    def alternatives(self, nest: Nest, current: StreamedSettings) -> Sequence[StreamedSettings]:
        """Memory shared out otherwise."""
        del nest
        return tuple(each for each in _MEMORY if each != current)

    def footprint(self, nest: Nest, settings: StreamedSettings) -> Footprint:
        """The held operand's halves are written and read once more than its floats."""
        del settings
        product = product_of(nest)
        _, m, n, k = product.extents
        return Footprint(
            extra_bytes=12 * m * k,
            parallel_count=-(-n // STREAMED_ROWS),
            launch_count=3,
            tensor_flop_count=3 * product.flop_count,
        )

    def emit(self, nest: Nest, settings: StreamedSettings) -> Emission:
        """Splits what is held, multiplies, and repairs rows that have no halves."""
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} is no product of few rows with a long operand")
        simple = iteration_space.simplified(nest)
        tiling = Tiling(STREAMED_ROWS, settings.held, cluster=CLUSTER, raster=1, promote=1, split_k=1)
        made = _StreamedText(self.hardware, simple, product_of(nest), ENGINES[settings.engine], tiling, widest=2)
        made.steps = settings.streamed
        heading = function_text.header(simple, self.name, settings)
        return made.emission(heading, [made.split(), made.product(), made.repair()], _HEADERS)


class _StreamedText(ProductText):
    """A product's pieces of text, with a split of one operand alone and a kernel of its own."""

    steps = 0
    """Of the streamed operand in shared memory."""

    def shape(self) -> list[str]:
        """The repair's view of the product, and the streaming kernel's."""
        stride = self.operands.sides[1].operand.row_stride
        return [
            *super().shape(),
            f"using {self.entry}_streamed = ws::StreamedProduct<",
            f"    ws::StreamedExtents{{.m = {self._m}, .n = {self._n}, .k = {self._k}, .row_stride = {stride}, "
            f".held = {self._tiling.stages}, .streamed = {self.steps}}}>;",
        ]

    def split(self) -> Kernel:
        """A block for each row of the held operand."""
        held = self.operands.sides[0]
        text = [
            f'extern "C" __global__ void __launch_bounds__(ws::kHoldThreads) {self.entry}_split(',
            "    const float* __restrict__ left, ws::half* __restrict__ left_halves, float* __restrict__ left_roots,",
            "    ws::Marks* marks) {",
            f"  constexpr int kDepth = {self._k}, kRows = {held.rows};",
            "  const int row = blockIdx.x;",
            "  ws::half* high = left_halves + row * kDepth;",
            f"  ws::split_held<kDepth>({held.start} + row * {held.operand.row_stride}LL, high, high + kRows * kDepth,",
            "                         left_roots + row, marks);",
            "}",
        ]
        work = [self.operands.workspace(name) for name in ("left_halves", "left_roots", "marks")]
        passed = map(address, (held.operand.buffer, *work))
        return Kernel(text, self.launch("split", self._m, HOLD_THREADS, passed, work))

    def product(self) -> Kernel:
        """The kernel that reads the streamed operand."""
        arguments = [
            "const __grid_constant__ ws::TensorMap left", "const float* __restrict__ right",
            "const float* __restrict__ left_roots", "float* __restrict__ right_roots", "ws::Marks* marks",
        ]  # fmt: skip
        text = [
            *self.signature(f"__launch_bounds__(ws::kStreamThreads, 1) {self.entry}_product", arguments),
            f"  ws::multiply_streamed<{self.entry}_streamed>(left, right, left_roots, right_roots, marks,",
            f"                        {self.end_value()});",
            "}",
        ]
        part = 2 * self._m * self._k
        held = candidate_pb2.TensorMap(
            buffer=self.operands.workspace("left_halves"),
            dtype=tensor_pb2.DTYPE_FLOAT16,
            extents=[self._k, self._m, 2, 1],
            byte_strides=[2 * self._k, part, 2 * part],
            box=[TILE_DEPTH, HELD_ROWS[1] // CLUSTER, 1, 1],
            swizzle_bytes=128,
        )
        work = [self.operands.workspace(name) for name in ("left_roots", "right_roots", "marks")]
        streamed = self.operands.sides[1].operand.buffer
        passed = [candidate_pb2.LaunchArgument(tensor_map=held), *map(address, (streamed, *work, *self.ends()))]
        clusters = -(-self._n // (STREAMED_ROWS * CLUSTER))
        record = geometry.record(
            f"{self.entry}_product", min(clusters, self.hardware.resident_clusters(CLUSTER)) * CLUSTER, THREADS, passed,
            [*self.written(), *work[1:]], cluster=CLUSTER,
            shared_bytes=4 * TILE_DEPTH * (self._tiling.stages * HELD_ROWS[1] + self.steps * STREAMED_ROWS) + 2048,
        )  # fmt: skip
        return Kernel(text, record)

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        """All but the streamed operand's halves, which are not used here."""
        return tuple(each for each in super().workspaces() if each.name != self.operands.workspace("right_halves"))
