"""CUDA schedule of attention in one kernel, on Hopper's tensor cores: `ws_attention.cuh`, `ws_attention_split.cuh`.

The one idea: scores and weights never leave registers, so a query's row costs its two products and nothing else. A mask
is read where the scores are, and heads that share keys walk the same ones. What follows the sum is the end of a
product, with the same text (`product_text`). Floats become pairs of halves, as those of products do.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import attention_split, geometry
from agent_synthesis.emit.cuda.attention_split import SplitAttentionText
from agent_synthesis.emit.cuda.attention_text import MASKS, AttentionText
from agent_synthesis.emit.cuda.attention_tiling import (
    SPLIT_KEYS,
    AttentionSettings,
    pieces,
    require_tiles,
    tile_count,
)
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, NEEDS, EngineName
from agent_synthesis.emit.cuda.products.product_text import PRODUCT_HEADERS
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.attention import Attention, Factor, attention_of, without_statistics
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.hardware import Hardware

LEAST_ROWS = 64
"""Queries below which most of a tile would be empty."""
MOST_COLUMNS = {Type.F16: 256, Type.BF16: 256, Type.F32: 128}
"""Type of the operands → most elements of a row of queries, keys or values: what one instruction of tensor cores adds
up, or what a thread has registers for."""
MOST_MASKED = 64
"""The same of floats with a mask of floats, for which a thread of wider rows has no registers."""

RATES = {(2, 128): 1.0, (3, 128): 1.16, (2, 64): 0.8}
"""Multiplying warpgroups and keys of a tile → speed, relative (H200, 16384 keys; of 64 elements for three)."""
_HEADERS = (*PRODUCT_HEADERS, "ws_attention.cuh")


_BEGINNINGS = (
    AttentionSettings(),
    AttentionSettings(ping_pong=False, stages=3, warpgroups=3),
    AttentionSettings(keys=64),
    AttentionSettings(ping_pong=False, keys=64),
)
_SPLIT_BEGINNINGS = tuple(AttentionSettings(keys=SPLIT_KEYS, stages=stages, promote=SPLIT_KEYS) for stages in (4, 3, 2))
"""Of floats: as many stages as there is memory for."""


class CudaAttention(CudaSchedule):
    """Tiles of queries, which walk the keys."""

    name = "cuda_attention"
    settings = AttentionSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """Attention whose operands are rows of not too many neighbours; of 16 bits, that the copy engine can walk."""
        made = attention_of(iteration_space.simplified(nest))
        if made is None or made.type not in MOST_COLUMNS or iteration_space.reads_what_it_writes(nest):
            return False
        is_masked_by_floats = made.mask is not None and made.mask.type is Type.F32
        most = MOST_MASKED if pieces(made) > 1 and is_masked_by_floats else MOST_COLUMNS[made.type]
        if made.rows.extent < LEAST_ROWS or max(made.reduction.depth, made.columns.extent) > most:
            return False
        if pieces(made) > 1 and without_statistics(nest)[1] is not None:
            return False
        if made.mask is not None and (made.mask.type not in MASKS or made.keys.extent < 2):
            return False
        return all(_suits(made, factor) for factor in (made.query, made.key, made.value))

    def defaults(self, nest: Nest) -> AttentionSettings:
        """Of a few settings that measured well at 512 to 16384 keys, the fastest by a model of waves.

        No lag: it is 5 % faster at 16384 keys of 128 elements, but weights are then rounded otherwise than a library's.
        """
        made = _attention(nest)
        beginnings = _BEGINNINGS if pieces(made) == 1 else _SPLIT_BEGINNINGS
        possible = geometry.legal(beginnings, lambda settings: require_fits(self.hardware, nest, settings))
        return min(possible, key=lambda settings: _predicted(self.hardware, made, settings))

    def alternatives(self, nest: Nest, current: AttentionSettings) -> Sequence[AttentionSettings]:
        """One change away."""
        return geometry.legal(current.one_change_away(), lambda settings: require_fits(self.hardware, nest, settings))

    def footprint(self, nest: Nest, settings: AttentionSettings) -> Footprint:
        """Queries and keys are whole rows, of which the nest names the first element."""
        made = _attention(nest)
        rows = made.layers * made.rows.extent + made.layers // made.key.group * made.keys.extent
        extra, launches, cost = rows * (made.reduction.depth - 1) * made.type.size_bytes, 1, 1
        if pieces(made) > 1:
            extra, launches = extra + attention_split.extra_bytes(made), attention_split.LAUNCHES
            cost = ENGINES[EngineName.FP16X3].cost
        return Footprint(
            extra_bytes=extra,
            parallel_count=tile_count(made, settings),
            launch_count=launches,
            tensor_flop_count=cost * made.flop_count,
        )

    def emit(self, nest: Nest, settings: AttentionSettings) -> Emission:
        """One kernel, whose blocks stay and take tile after tile; of floats between two that split and a repair."""
        require_fits(self.hardware, nest, settings)
        made = _attention(nest)
        simple, statistics = without_statistics(iteration_space.simplified(nest))
        heading = function_text.header(simple, self.name, settings)
        if pieces(made) > 1:
            split = SplitAttentionText(self.hardware, simple, made, settings)
            kernels, headers = split.kernels()
            return split.emission(heading, kernels, [*_HEADERS, *headers])
        text = AttentionText(self.hardware, simple, made, settings, statistics)
        return text.emission(heading, [text.product()], _HEADERS)


def require_fits(hardware: Hardware, nest: Nest, settings: AttentionSettings) -> None:
    """Checks tiles against an SM's shared memory and a thread's registers.

    Raises:
        IllegalMove: names the limit.
    """
    require_tiles(hardware, nest.name, _attention(nest), settings)


def _attention(nest: Nest) -> Attention:
    made = attention_of(iteration_space.simplified(nest))
    assert made is not None, nest
    return made


def _predicted(hardware: Hardware, made: Attention, settings: AttentionSettings) -> float:
    """Time by waves of tiles, for comparing settings of one nest with each other."""
    waves = -(-tile_count(made, settings) // hardware.sm_count)
    return waves * settings.queries / RATES[settings.warpgroups, settings.keys]


def _suits(made: Attention, factor: Factor) -> bool:
    """Whether the copy engine can walk an operand: rows of neighbours, and steps of whole 16 bytes between them. Floats
    are read by threads: rows of neighbours will do."""
    layers = ((factor.inner, made.inner // factor.group), (factor.outer, made.layers // made.inner))
    steps = [factor.row, *(step for step, count in layers if count > 1)]
    if factor.column != 1:
        return False
    if pieces(made) > 1:
        return factor.offset >= 0 and all(step >= 0 for step in steps)
    is_near = 0 <= factor.offset < 2**31 - MOST_COLUMNS[made.type]  # a coordinate of boxes, of 32 bits
    return is_near and all(step > 0 and step % 8 == 0 for step in steps)
