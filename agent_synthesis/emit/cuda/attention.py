"""CUDA schedule of attention of 16-bit operands in one kernel, on Hopper's tensor cores: `ws_attention.cuh`.

The one idea: scores and weights never leave registers, so a query's row costs its two products and nothing else. A mask
is read where the scores are, and heads that share keys walk the same ones. What follows the sum is the end of a
product, with the same text (`product_text`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, NEEDS, EngineName
from agent_synthesis.emit.cuda.products.product_text import PRODUCT_HEADERS, ProductText
from agent_synthesis.emit.cuda.products.product_tiling import Tiling
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.attention import Attention, Factor, attention_of
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import MatrixProduct, Operand
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2

OWN_ROWS, BLOCK, WARPGROUP_THREADS = 64, 64, 128
"""Queries of a warpgroup; elements of a box's rows, 128 bytes; threads."""
LEAST_ROWS = 64
"""Queries below which most of a tile would be empty."""
MOST_COLUMNS = 256
"""Elements of a row of queries, keys or values: what one instruction of tensor cores adds up."""
MOST_MASKED_COLUMNS = 192
"""Elements of a row of values beyond which warpgroups that take turns, and have a mask, would spill a few registers."""
MULTIPLYING_REGISTERS = {2: 240, 3: 160}
"""Multiplying warpgroups → registers of their threads, once the copying warpgroup has handed its own back."""

RATES = {(2, 128): 1.0, (3, 128): 1.16, (2, 64): 0.8}
"""Multiplying warpgroups and keys of a tile → speed, relative (H200, 16384 keys; of 64 elements for three)."""
_HEADERS = (*PRODUCT_HEADERS, "ws_attention.cuh")
_ENGINES = {Type.F16: ENGINES[EngineName.FP16], Type.BF16: ENGINES[EngineName.BF16]}
_MASKS = {Type.BOOL: "bool", Type.F16: "ws::half", Type.BF16: "ws::bfloat16", Type.F32: "float"}


@dataclass(frozen=True)
class AttentionSettings(Settings):
    """Of `cuda_attention`."""

    ping_pong: bool = setting(True, "whether consumer warpgroups take turns at the tensor cores", (False, True))
    keys: int = setting(128, "keys of a tile", (64, 128))
    stages: int = setting(2, "tiles of keys and of values in shared memory", (2, 3, 4))
    warpgroups: int = setting(2, "warpgroups that multiply, with 64 queries each", (2, 3))
    lag: int = setting(0, "binades by which a weight may exceed one before all sums are scaled anew", (0, 8))

    @property
    def queries(self) -> int:
        """Of a block's tile."""
        return OWN_ROWS * self.warpgroups


_BEGINNINGS = (
    AttentionSettings(),
    AttentionSettings(ping_pong=False, stages=3, warpgroups=3),
    AttentionSettings(keys=64),
    AttentionSettings(ping_pong=False, keys=64),
)


class CudaAttention(CudaSchedule):
    """Tiles of queries, which walk the keys."""

    name = "cuda_attention"
    settings = AttentionSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """Attention whose operands are rows of neighbours, up to 256 of them, that the copy engine can walk."""
        made = attention_of(iteration_space.simplified(nest))
        if made is None or made.type not in _ENGINES or iteration_space.reads_what_it_writes(nest):
            return False
        if made.rows.extent < LEAST_ROWS or max(made.reduction.depth, made.columns.extent) > MOST_COLUMNS:
            return False
        if made.mask is not None and (made.mask.type not in _MASKS or made.keys.extent < 2):
            return False
        return all(_suits(made, factor) for factor in (made.query, made.key, made.value))

    def defaults(self, nest: Nest) -> AttentionSettings:
        """Of a few settings that measured well at 512 to 16384 keys, the fastest by a model of waves.

        No lag: it is 5 % faster at 16384 keys of 128 elements, but weights are then rounded otherwise than a library's.
        """
        possible = geometry.legal(_BEGINNINGS, lambda settings: require_fits(self.hardware, nest, settings))
        return min(possible, key=lambda settings: _predicted(self.hardware, _attention(nest), settings))

    def alternatives(self, nest: Nest, current: AttentionSettings) -> Sequence[AttentionSettings]:
        """One change away."""
        return geometry.legal(current.one_change_away(), lambda settings: require_fits(self.hardware, nest, settings))

    def footprint(self, nest: Nest, settings: AttentionSettings) -> Footprint:
        """Queries and keys are whole rows, of which the nest names the first element."""
        made = _attention(nest)
        rows = made.layers * made.rows.extent + made.layers // made.key.group * made.keys.extent
        return Footprint(
            extra_bytes=rows * (made.reduction.depth - 1) * made.type.size_bytes,
            parallel_count=_tile_count(made, settings),
            launch_count=1,
            tensor_flop_count=made.flop_count,
        )

    def emit(self, nest: Nest, settings: AttentionSettings) -> Emission:
        """One kernel; its grid's blocks stay and take tile after tile."""
        require_fits(self.hardware, nest, settings)
        simple, made = iteration_space.simplified(nest), _attention(nest)
        text = _AttentionText(self.hardware, simple, made, settings)
        return text.emission(function_text.header(simple, self.name, settings), [text.product()], _HEADERS)


def _shared_bytes(made: Attention, settings: AttentionSettings) -> int:
    """Dynamic shared memory of a block: a tile of queries, the stages, barriers, and the way to a multiple of 1024."""
    depth, columns = (geometry.round_up(count, BLOCK) for count in (made.reduction.depth, made.columns.extent))
    return 2 * (settings.queries * depth + settings.stages * settings.keys * (depth + columns)) + 2048


def require_fits(hardware: Hardware, nest: Nest, settings: AttentionSettings) -> None:
    """Checks tiles against an SM's shared memory and a thread's registers.

    Raises:
        IllegalMove: names the limit.
    """
    made = _attention(nest)
    needed = _shared_bytes(made, settings)
    if needed > hardware.shared_bytes:
        raise IllegalMove(f"{nest.name}: {needed} bytes of shared memory, of {hardware.shared_bytes} a block may have")
    # Scores and sums as floats, weights by twos, and a mask by twos or as floats.
    held = settings.keys // 2 + settings.keys // 4 + geometry.round_up(made.columns.extent, BLOCK) // 2
    if made.mask is not None:
        if settings.ping_pong and made.columns.extent > MOST_MASKED_COLUMNS:
            raise IllegalMove(f"{nest.name}: a mask of so wide rows leaves no registers to take turns with")
        held += settings.keys // (2 if made.mask.type is Type.F32 else 4)
    if held + geometry.KERNEL_OVERHEAD_REGISTERS > (limit := MULTIPLYING_REGISTERS[settings.warpgroups]):
        raise IllegalMove(
            f"{nest.name}: about {held} registers a thread for scores, mask, weights and sums, of {limit}"
        )


def _attention(nest: Nest) -> Attention:
    made = attention_of(iteration_space.simplified(nest))
    assert made is not None, nest
    return made


def _tile_count(made: Attention, settings: AttentionSettings) -> int:
    return made.layers * -(-made.rows.extent // settings.queries)


def _predicted(hardware: Hardware, made: Attention, settings: AttentionSettings) -> float:
    """Time by waves of tiles, for comparing settings of one nest with each other."""
    waves = -(-_tile_count(made, settings) // hardware.sm_count)
    return waves * settings.queries / RATES[settings.warpgroups, settings.keys]


def _suits(made: Attention, factor: Factor) -> bool:
    """Whether the copy engine can walk an operand: rows of neighbours, and steps of whole 16 bytes between them."""
    layers = ((factor.inner, made.inner // factor.group), (factor.outer, made.layers // made.inner))
    steps = [factor.row, *(step for step, count in layers if count > 1)]
    is_near = 0 <= factor.offset < 2**31 - MOST_COLUMNS  # a coordinate of boxes, of 32 bits
    return factor.column == 1 and is_near and all(step > 0 and step % 8 == 0 for step in steps)


class _AttentionText(ProductText):
    """The kernel's pieces: a product of weights, which are nowhere in memory, and values, with the nest's end."""

    def __init__(self, hardware: Hardware, nest: Nest, made: Attention, settings: AttentionSettings) -> None:
        value = made.value
        operand = Operand(value.buffer, made.type, value.offset, (), value.column, value.row)
        product = MatrixProduct(
            made.reduction.name, operand, operand, made.batch, (made.rows,), (made.columns,), (made.keys,)
        )
        tiling = Tiling(settings.queries, stages=settings.stages, cluster=1, raster=1, promote=1, split_k=1)
        super().__init__(hardware, nest, product, _ENGINES[made.type], tiling)
        self._made, self._settings = made, settings

    def shape(self) -> list[str]:
        """The kernel's type."""
        made, settings, reduction = self._made, self._settings, self._made.reduction
        group = f".group = {made.group}, .key_group = {made.key.group}, .value_group = {made.value.group}, "
        group = group if made.group > 1 else ""
        lines = [
            f"using {self.entry}_shape = ws::Attention<{self.operands.element},",
            f"    ws::AttentionExtents{{.layers = {made.layers}, .inner = {made.inner}, {group}"
            f".queries = {made.rows.extent}, .keys = {made.keys.extent}, .depth = {reduction.depth},",
            f"                         .columns = {made.columns.extent}, .pack = {max(2, self._width)}, "
            f".causal = {str(made.is_causal).lower()}}},",
            f"    ws::AttentionOffsets{{.queries = {made.query.offset}, .keys = {made.key.offset}, "
            f".values = {made.value.offset}}},",
            f"    ws::AttentionTiling{{.keys = {settings.keys}, .stages = {settings.stages}, "
            f".warpgroups = {settings.warpgroups}, .turns = {str(settings.ping_pong).lower()}, .lag = {settings.lag}}}",
        ]
        if (mask := made.mask) is not None:
            lines[-1] += ","
            lines += [
                f"    ws::Mask<{_MASKS[mask.type]}, ws::MaskSteps{{.offset = {mask.load.index.offset}, "
                f".outer = {mask.outer}, .inner = {mask.inner}, .member = {mask.member},",
                f"                                  .row = {mask.row}, .key = {mask.key}, "
                f".pairs = {str(mask.comes_in_pairs(made.keys.extent)).lower()}}}>",
            ]
        lines[-1] += ">;"
        return lines

    def product(self) -> Kernel:
        """The kernel itself."""
        arguments = [f"const __grid_constant__ ws::TensorMap {side}_map" for side in ("queries", "keys", "values")]
        scale, mask = self._made.reduction.scale, self._made.mask
        if mask is not None:
            arguments.append(f"const {_MASKS[mask.type]}* __restrict__ mask")
        if mask is not None and mask.type is not Type.BOOL:
            name, factor = "kScoreScale", f"  constexpr float kScoreScale = {scale!r}f;"
        else:
            name, factor = "kScoreToLog2", f"  constexpr float kScoreToLog2 = {scale * math.log2(math.e)!r}f;"
            factor += f"  // {scale!r} of the scores, base 2"
        text = [
            *self.signature(f"__launch_bounds__({self.entry}_shape::kThreads, 1) {self.entry}_attention", arguments),
            factor,
            f"  ws::attention<{self.entry}_shape>(queries_map, keys_map, values_map, {name},",
            f"                {'mask' if mask is not None else 'nullptr'}, {self.end_value()});",
            "}",
        ]
        return Kernel(text, self._record())

    def _record(self) -> candidate_pb2.Launch:
        made, depth, tile = self._made, self._made.reduction.depth, self._settings.keys
        arguments = [
            self._operand_map(made.query, depth, made.rows.extent, self._settings.queries),
            self._operand_map(made.key, depth, made.keys.extent, tile),
            self._operand_map(made.value, made.columns.extent, made.keys.extent, tile),
        ]
        if made.mask is not None:
            arguments.append(address(made.mask.load.buffer))
        grid = min(_tile_count(made, self._settings), self.hardware.sm_count)
        threads = WARPGROUP_THREADS * (1 + self._settings.warpgroups)
        return geometry.record(
            f"{self.entry}_attention", grid, threads, [*arguments, *self.ending()], self.written(),
            shared_bytes=_shared_bytes(made, self._settings),
        )  # fmt: skip

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
