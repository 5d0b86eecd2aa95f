"""Tiles of a matrix product on tensor cores: their sizes, and what a block needs for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.products.product_engine import EngineName
from agent_synthesis.settings import Settings, setting

TILE_ROWS = 128
TILE_DEPTH = 64
"""16-bit elements of depth in a stage; slices are whole multiples of it for every engine."""
BLOCK_ROWS = 64
"""Rows of a box where they are neighbours in memory: 128 bytes, the swizzle's width."""


@dataclass(frozen=True)
class Tiling:
    """Tiles of a product; see `CudaProduct`."""

    columns: int
    stages: int
    cluster: int
    raster: int
    promote: int
    split_k: int
    warpgroups: int = 2
    blocks: int = 1
    """Of an SM."""
    overlapped: bool = False
    """Whether a tile's epilogue is made during the next one: see `product_end.can_hold`."""


Epilogue = StrEnum("Epilogue", "OVERLAPPED DIRECT")
"""When a tile's epilogue is made: during the next tile, or at once."""


@dataclass(frozen=True)
class ProductSettings(Settings):
    """Of `cuda_product`, and of the schedules that have its tiles."""

    engine: EngineName = setting(EngineName.FP16X3, "how tensor cores make it: see `product_engine`")
    epilogue: Epilogue | None = setting(None, "of 16-bit operands: when it is made, see `Epilogue`", tuple(Epilogue))
    columns: int = setting(256, "columns of a tile, whose rows are 128", (128, 192, 256))
    stages: int = setting(4, "steps of 128 bytes of depth in shared memory", (2, 3, 4, 5, 6))
    cluster: int = setting(1, "blocks that share the columns' copies", (1, 2))
    raster: int = setting(8, "rows of tiles that are walked together", (4, 8, 16))
    promote: int | None = setting(None, "of floats: stages between promotions of sums to f32 registers", (1, 2, 4))
    warpgroups: int = setting(2, "warpgroups that multiply", (2, 4))
    split_k: int = setting(1, "slices of the depth, which a kernel of their own adds up")

    @property
    def tiling(self) -> Tiling:
        """What they say of tiles."""
        return Tiling(
            self.columns, self.stages, self.cluster, self.raster, self.promote or 1, self.split_k, self.warpgroups,
            overlapped=self.epilogue is Epilogue.OVERLAPPED,
        )  # fmt: skip


def shared_bytes(tiling: Tiling, parts: int) -> int:
    """Dynamic shared memory of a block: the stages, a kilobyte of barriers, and one to begin at a multiple of it."""
    return tiling.stages * parts * (TILE_ROWS + tiling.columns) * TILE_DEPTH * 2 + 2048


def slice_depth(depth: int, slices: int) -> int:
    """Depth of all slices but the last, as the kernels have it."""
    return depth if slices == 1 else geometry.round_up(-(-depth // slices), TILE_DEPTH)


def without_empty(depth: int, slices: int) -> int:
    """As many slices, or fewer where the last would be empty; at least one."""
    while slices > 1 and (slices - 1) * slice_depth(depth, slices) >= depth:
        slices -= 1
    return max(1, slices)


def padded(count: int) -> int:
    """Halves from one row (or depth) to the next, as the kernels have it."""
    return 32 if count <= 32 else geometry.round_up(count, 64)
