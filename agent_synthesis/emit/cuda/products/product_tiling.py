"""Tiles of a matrix product on tensor cores: their sizes, and what a block needs for them."""

from __future__ import annotations

from dataclasses import dataclass

from agent_synthesis.emit.cuda import geometry

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
    group: int
    promote: int
    slices: int
    warpgroups: int = 2
    holds: bool = False
    """Whether a tile's end is made during the next one: see `product_end.can_hold`."""


def shared_bytes(tiling: Tiling, parts: int) -> int:
    """Dynamic shared memory of a block: the stages, a kilobyte of barriers, and one to begin at a multiple of it."""
    return tiling.stages * parts * (TILE_ROWS + tiling.columns) * TILE_DEPTH * 2 + 2048


def slice_depth(depth: int, slices: int) -> int:
    """Depth of all slices but the last, as the kernels have it."""
    return depth if slices == 1 else geometry.round_up(-(-depth // slices), TILE_DEPTH)


def padded(count: int) -> int:
    """Halves from one row (or depth) to the next, as the kernels have it."""
    return 32 if count <= 32 else geometry.round_up(count, 64)
