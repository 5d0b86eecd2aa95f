"""The text and launches of attention in one kernel: its shape, its arguments, and the maps of its operands.

The one idea: attention is a product of weights, which are nowhere in memory, and values; what follows the sum is the
end of a product, with the same text (`product_text`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.attention_tiling import BLOCK, AttentionSettings, shared_bytes, tile_count
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, EngineName
from agent_synthesis.emit.cuda.products.product_text import WARPGROUP_THREADS, ProductText
from agent_synthesis.emit.cuda.products.product_tiling import Tiling
from agent_synthesis.nests.analysis.products.product_end import three_axes
from agent_synthesis.nests.attention import Attention, Factor
from agent_synthesis.nests.ir import Nest, Store, Type
from agent_synthesis.nests.product import MatrixProduct, Operand
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2

_ENGINES = {Type.F16: ENGINES[EngineName.FP16], Type.BF16: ENGINES[EngineName.BF16], Type.F32: ENGINES[EngineName.FP16]}
"""Type of operands → how tensor cores multiply them, or what stands for them."""
MASKS = {Type.BOOL: "bool", Type.F16: "ws::half", Type.BF16: "ws::bfloat16", Type.F32: "float"}
"""Type of a mask → its elements'."""


class AttentionText(ProductText):
    """The kernel's pieces."""

    def __init__(
        self,
        hardware: Hardware,
        nest: Nest,
        made: Attention,
        settings: AttentionSettings,
        statistics: Store | None = None,
    ) -> None:
        """`nest`: without the store of its rows' `statistics`, if they are wanted."""
        value = made.value
        operand = Operand(value.buffer, made.type, value.offset, (), value.column, value.row)
        product = MatrixProduct(
            made.reduction.name, operand, operand, made.batch, (made.rows,), (made.columns,), (made.keys,)
        )
        tiling = Tiling(settings.queries, stages=settings.stages, cluster=1, raster=1, promote=1, split_k=1)
        super().__init__(hardware, nest, product, _ENGINES[made.type], tiling)
        self._made, self._settings = made, settings
        self._statistics: Store | None = None
        if statistics is not None:
            (self._statistics,) = three_axes(replace(nest, reductions=(), stores=(statistics,)), product).stores

    def type(self) -> list[str]:
        """The kernel's type."""
        offsets = ", ".join(f".{side} = {factor.offset}" for side, factor in self._factors())
        kind = f"ws::Attention<{self.operands.element},"
        return self._shape_of(kind, [f"    ws::AttentionOffsets{{{offsets}}},"])

    def _factors(self) -> tuple[tuple[str, Factor], ...]:
        """Name of an operand → where it lies."""
        return (("queries", self._made.query), ("keys", self._made.key), ("values", self._made.value))

    def _shape_of(self, kind: str, offsets: Sequence[str]) -> list[str]:
        made, settings, reduction = self._made, self._settings, self._made.reduction
        group = f".group = {made.group}, .key_group = {made.key.group}, .value_group = {made.value.group}, "
        group = group if made.group > 1 else ""
        promote = "" if settings.promote is None else f", .promote = {settings.promote}"
        lines = [
            f"using {self.entry}_shape = {kind}",
            f"    ws::AttentionExtents{{.layers = {made.layers}, .inner = {made.inner}, {group}"
            f".queries = {made.rows.extent}, .keys = {made.keys.extent}, .depth = {reduction.depth},",
            f"                         .columns = {made.columns.extent}, .pack = {max(2, self._width)}, "
            f".causal = {str(made.is_causal).lower()}}},",
            *offsets,
            f"    ws::AttentionTiling{{.keys = {settings.keys}, .stages = {settings.stages}, "
            f".warpgroups = {settings.warpgroups}, .turns = {str(settings.ping_pong).lower()}, "
            f".lag = {settings.lag}{promote}}}",
        ]
        if (mask := made.mask) is not None:
            lines[-1] += ","
            lines += [
                f"    ws::Mask<{MASKS[mask.type]}, ws::MaskSteps{{.offset = {mask.load.index.offset}, "
                f".outer = {mask.outer}, .inner = {mask.inner}, .member = {mask.member},",
                f"                                  .row = {mask.row}, .key = {mask.key}, "
                f".pairs = {str(mask.comes_in_pairs(made.keys.extent)).lower()}}}>",
            ]
        lines[-1] += ">;"
        return lines

    def shape(self) -> list[str]:
        """The kernel's type, and what keeps its rows' statistics."""
        lines = self.type()
        if self._statistics is None:
            return lines
        names = {axis: self._text.function.axes.get(axis, axis) for axis in ("batch", "m")}
        place = self._text.function.index(self._statistics.index, names)
        given = ", ".join(f"{self._text.offset} {name}" for name in names.values())
        return [
            *lines,
            f"struct {self.entry}_statistics {{",
            "  static constexpr bool kAreKept = true;",
            "  float* __restrict__ statistics;",
            f"  WS_INLINE void operator()({given}, float value) const {{",
            f"    statistics[{place}] = value;",
            "  }",
            "};",
        ]

    def product(self) -> Kernel:
        """The kernel itself."""
        arguments = [f"const __grid_constant__ ws::TensorMap {side}_map" for side, _ in self._factors()]
        keep = f", {self.entry}_statistics{{statistics}}" if self._statistics is not None else ""
        name, factor = self._scale()
        text = [
            *self.signature(
                f"__launch_bounds__({self.entry}_shape::kThreads, 1) {self.entry}_attention",
                [*arguments, *self._mask_parameter(), *self._statistics_parameter()],
            ),
            factor,
            f"  ws::attention<{self.entry}_shape>(queries_map, keys_map, values_map, {name},",
            f"                {self._mask_value()}, {self.end_value()}{keep});",
            "}",
        ]
        return Kernel(text, self._record(self._maps()))

    def _scale(self) -> tuple[str, str]:
        """The name of the scores' scale, and its definition."""
        scale, mask = self._made.reduction.scale, self._made.mask
        if mask is not None and mask.type is not Type.BOOL:
            return "kScoreScale", f"  constexpr float kScoreScale = {scale!r}f;"
        factor = f"  constexpr float kScoreToLog2 = {scale * math.log2(math.e)!r}f;"
        return "kScoreToLog2", f"{factor}  // {scale!r} of the scores, base 2"

    def _mask_parameter(self) -> list[str]:
        mask = self._made.mask
        return [] if mask is None else [f"const {MASKS[mask.type]}* __restrict__ mask"]

    def _mask_value(self) -> str:
        return "nullptr" if self._made.mask is None else "mask"

    def _mask_address(self) -> list[candidate_pb2.LaunchArgument]:
        return [] if self._made.mask is None else [address(self._made.mask.load.buffer)]

    def _statistics_parameter(self) -> list[str]:
        return [] if self._statistics is None else ["float* __restrict__ statistics"]

    def _record(self, arguments: Sequence[candidate_pb2.LaunchArgument]) -> candidate_pb2.Launch:
        grid = min(tile_count(self._made, self._settings), self.hardware.sm_count)
        threads = WARPGROUP_THREADS * (1 + self._settings.warpgroups)
        kept = [] if self._statistics is None else [self._statistics.buffer]
        passed = [*arguments, *self._mask_address(), *map(address, kept), *self.ending()]
        return geometry.record(
            f"{self.entry}_attention", grid, threads, passed, [*self.written(), *kept],
            shared_bytes=shared_bytes(self._made, self._settings),
        )  # fmt: skip

    def _maps(self) -> list[candidate_pb2.LaunchArgument]:
        made, depth, tile = self._made, self._made.reduction.depth, self._settings.keys
        return [
            self._operand_map(made.query, depth, made.rows.extent, self._settings.queries),
            self._operand_map(made.key, depth, made.keys.extent, tile),
            self._operand_map(made.value, made.columns.extent, made.keys.extent, tile),
        ]

    def _operand_map(self, factor: Factor, columns: int, rows: int, box_rows: int) -> candidate_pb2.LaunchArgument:
        """An operand as (column, row, inner layer, layer); what lies before it in memory counts as columns."""
        made = self._made
        strides = (factor.row, factor.inner or factor.row, factor.outer or factor.row)
        return candidate_pb2.LaunchArgument(
            tensor_map=candidate_pb2.TensorMap(
                buffer=factor.buffer,
                dtype=_ENGINES[made.type].dtype,
                extents=[factor.offset + columns, rows, made.inner // factor.group, made.layers // made.inner],
                byte_strides=[2 * stride for stride in strides],
                box=[BLOCK, box_rows, 1, 1],
                swizzle_bytes=128,
            )
        )
