"""Tiles of attention in one kernel: their sizes, and what a block needs for them."""

from __future__ import annotations

from dataclasses import dataclass

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.nests.attention import Attention
from agent_synthesis.nests.ir import Type
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware

OWN_ROWS, BLOCK = 64, 64
"""Queries of a warpgroup; 16-bit elements of a box's rows, 128 bytes."""
MOST_MASKED_COLUMNS = 192
"""Elements of a row of values beyond which warpgroups that take turns, and have a mask, would spill a few registers."""
MULTIPLYING_REGISTERS = {2: 240, 3: 160}
"""Multiplying warpgroups → registers of their threads, once the copying warpgroup has handed its own back."""
SPLIT_KEYS = 64
"""Keys of a tile of floats: with more, products of several kinds would not share their registers."""


@dataclass(frozen=True)
class AttentionSettings(Settings):
    """Of `cuda_attention`."""

    ping_pong: bool = setting(True, "whether consumer warpgroups take turns at the tensor cores", (False, True))
    keys: int = setting(128, "keys of a tile", (64, 128))
    stages: int = setting(2, "tiles of keys and of values in shared memory", (2, 3, 4))
    warpgroups: int = setting(2, "warpgroups that multiply, with 64 queries each", (2, 3))
    lag: int = setting(0, "binades by which a weight may exceed one before all sums are scaled anew", (0, 8))

    promote: int | None = setting(None, "of floats: keys whose products tensor cores add up, towards zero", (32, 64))

    @property
    def queries(self) -> int:
        """Of a block's tile."""
        return OWN_ROWS * self.warpgroups


def pieces(made: Attention) -> int:
    """Halves that stand for an element."""
    return 2 if made.type is Type.F32 else 1


def shared_bytes(made: Attention, settings: AttentionSettings) -> int:
    """Dynamic shared memory of a block: a tile of queries, the stages, barriers, and the way to a multiple of 1024."""
    depth, columns = (geometry.round_up(count, BLOCK) for count in (made.reduction.depth, made.columns.extent))
    elements = settings.queries * depth + settings.stages * settings.keys * (depth + columns)
    return 2 * pieces(made) * elements + 2048


def tile_count(made: Attention, settings: AttentionSettings) -> int:
    """Tiles of queries that blocks take."""
    return made.layers * -(-made.rows.extent // settings.queries)


def require_tiles(hardware: Hardware, name: str, made: Attention, settings: AttentionSettings) -> None:
    """Checks tiles against an SM's shared memory and a thread's registers.

    Raises:
        IllegalMove: names the limit.
    """
    needed = shared_bytes(made, settings)
    if needed > hardware.shared_bytes:
        raise IllegalMove(f"{name}: {needed} bytes of shared memory, of {hardware.shared_bytes} a block may have")
    held = _held_as_halves(made, settings) if pieces(made) == 2 else _held(made, settings)
    if made.mask is not None:
        if pieces(made) == 1 and settings.ping_pong and made.columns.extent > MOST_MASKED_COLUMNS:
            raise IllegalMove(f"{name}: a mask of so wide rows leaves no registers to take turns with")
        held += settings.keys // (2 if made.mask.type is Type.F32 else 4)
    if held + geometry.KERNEL_OVERHEAD_REGISTERS > (limit := MULTIPLYING_REGISTERS[settings.warpgroups]):
        raise IllegalMove(f"{name}: about {held} registers a thread for scores, mask, weights and sums, of {limit}")
    if (settings.promote is None) is (pieces(made) == 2):
        raise IllegalMove(f"{name}: sums of floats are promoted, and no others")
    if settings.promote == SPLIT_KEYS // 2 and max(made.columns.extent, made.reduction.depth) > BLOCK:
        raise IllegalMove(f"{name}: rows of more than {BLOCK} leave no registers for more promotions")
    if pieces(made) == 2 and (settings.keys != SPLIT_KEYS or settings.lag):
        raise IllegalMove(f"{name}: floats are taken {SPLIT_KEYS} keys at a time, with weights that do not exceed one")


def _held(made: Attention, settings: AttentionSettings) -> int:
    """Registers for scores and sums as floats, and weights by twos."""
    return settings.keys // 2 + settings.keys // 4 + geometry.round_up(made.columns.extent, BLOCK) // 2


def _held_as_halves(made: Attention, settings: AttentionSettings) -> int:
    """The same for sums, both halves of weights, and products under way: main and cross ones of scores, or of the sums
    of 64 columns; both at once where one tile holds whole rows (as `attend_split` has it)."""
    columns = made.columns.extent
    sums = 16 if columns <= 32 else geometry.round_up(columns, BLOCK) // 2
    products, of_sums = settings.keys, 32 if columns <= 32 else BLOCK
    is_wide = max(columns, made.reduction.depth) > BLOCK or settings.warpgroups == 3
    is_alone = is_wide or (made.mask is not None and made.mask.type is Type.F32)
    return sums + settings.keys // 2 + (products if is_alone else products + of_sums)
