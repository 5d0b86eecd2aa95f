"""What can be set of a row reduction on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent_synthesis.emit.cuda.schedule import DEPENDENT_LAUNCH
from agent_synthesis.settings import Exp, Loads, Settings, Stores, setting

Reduce = StrEnum("Reduce", "WARP BLOCK CLUSTER GRID TWO_KERNELS PIPELINED RESIDENT RING PREFETCHED")
"""Who shares a row, and where its elements stay."""


@dataclass(frozen=True)
class RowSettings(Settings):
    """Of `cuda_row_reduction`."""

    reduce: Reduce = setting(Reduce.BLOCK, "who shares a row: the strategy")
    merge: bool = setting(False, "whether pairs of reductions share an exchange")
    loads: Loads = setting(Loads.EVICT_FIRST, "whether what is read is kept for others")
    stores: Stores = setting(Stores.PLAIN, "whether results pass the caches")
    preload: bool = setting(False, "whether what only stores read is loaded before the exchange")
    dependent_launch: bool = setting(True, DEPENDENT_LAUNCH)
    exp: Exp = setting(Exp.ACCURATE, "the exponential")
    threads: int = setting(256, "threads of a block")
    lanes: int = setting(256, "threads of a row, for warp")
    ctas: int = setting(1, "CTAs of a row, for cluster, grid, two_kernels, pipelined, resident, ring and prefetched")
    vector_width: int = setting(1, "elements of a vector access; of unaligned rows, vectors begin before", (1, 2, 4, 8))
    vectors: int = setting(1, "vectors of a thread in registers; for resident and ring, of a part", (16, 8, 4, 2, 1))
    min_blocks: int = setting(1, "blocks that share an SM", (1, 2, 3, 4))
    stages: int = setting(
        0, "for pipelined and prefetched, rows of a block in shared memory; for resident, parts of its row; for ring,"
        " parts of rows; for two_kernels, rows of which a block stores a chunk, 0 for a slice of one"
    )  # fmt: skip
    lag: int = setting(
        0, "for pipelined, rows that a block goes on to while others answer; for resident, parts of the next row that"
        " are asked for meanwhile; for ring, parts that are added up before they are stored"
    )  # fmt: skip
    held: int = setting(
        0, "vectors of a thread in registers: for resident, beside those in shared memory; for ring, of what rows share"
    )  # fmt: skip
