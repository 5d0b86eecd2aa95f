"""What can be set of a row reduction on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent_synthesis.emit.cuda.schedule import OVERLAP
from agent_synthesis.settings import Exp, Loads, Settings, Stores, setting

Reduce = StrEnum("Reduce", "WARP BLOCK CLUSTER GRID TWO_PASS STREAM HOLD ROLL AHEAD")
"""Who shares a row, and where its elements stay."""


@dataclass(frozen=True)
class RowSettings(Settings):
    """Of `cuda_row_reduction`."""

    reduce: Reduce = setting(Reduce.BLOCK, "who shares a row: the strategy")
    merge: bool = setting(False, "whether pairs of reductions share an exchange")
    loads: Loads = setting(Loads.ONCE, "whether what is read is kept for others")
    stores: Stores = setting(Stores.PLAIN, "whether results pass the caches")
    preload: bool = setting(False, "whether what only stores read is loaded before the exchange")
    overlap: bool = setting(True, OVERLAP)
    exp: Exp = setting(Exp.ACCURATE, "the exponential")
    threads: int = setting(256, "threads of a block")
    lanes: int = setting(256, "threads of a row, for warp")
    splits: int = setting(1, "blocks of a row, for cluster, grid, two_pass, stream, hold, roll and ahead")
    pack: int = setting(
        1, "elements of a pack; where more than lie aligned together, packs begin before the row", (1, 2, 4, 8)
    )
    packs: int = setting(1, "packs of a thread in registers at once; for hold and roll, of a part", (16, 8, 4, 2, 1))
    min_blocks: int = setting(1, "blocks that share an SM", (1, 2, 3, 4))
    depth: int = setting(
        0, "for stream, rows of a block in shared memory; for hold, parts of its row; for roll, parts of rows;"
        " for two_pass, rows of which a block stores a chunk, 0 for a slice of one"
    )  # fmt: skip
    lag: int = setting(
        0, "for stream, rows that a block goes on to while others answer; for hold, parts of the next row that are"
        " asked for meanwhile; for roll, parts that are added up before they are stored"
    )  # fmt: skip
    held: int = setting(
        0, "packs of a thread in registers: for hold, beside those in shared memory; for roll, of what rows share"
    )  # fmt: skip
