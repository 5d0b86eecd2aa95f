"""How a convolution's operands are laid out for tensor cores, and what the tiles of its product copy.

The one idea: a stride is a matter of channels. With the positions between two outputs as channels, every window slides
by one, so that neighbouring outputs see a box of neighbours, once for all elements of their windows. Texts are in
`convolution_product_text`, the kernels in `ws_product_windows.cuh`.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.products.product_engine import Engine
from agent_synthesis.emit.cuda.products.product_tiling import TILE_ROWS, Tiling
from agent_synthesis.nests.analysis.products.convolution_product import ConvolutionProduct, points
from agent_synthesis.nests.ir import Axis
from agent_synthesis.nests.product import LayerAxis, MatrixProduct, Operand
from agent_synthesis.nests.sliding_window import Slide
from warpsmith.hardware import TENSOR_MAP_BOX

STEP_BYTES = 128
"""Of depth that a step multiplies."""
ROW_BYTES = (32, 64, 128)
"""Of channels of a position in a box: the widths of a swizzle."""
TURNED_BYTES = 64 * 36 * 4
"""Of a warpgroup's sums on their way to other threads, 32 columns of them at once."""
LAY_OUT_THREADS = 256
LAY_OUT_BYTES = 64 * 128
"""Of what a block lays out at once."""
MOST_BOX_BYTES = 52 << 10
"""Of a box, so that two of them and a ring of weights fit an SM."""
ROW_CYCLES = 3.4
"""Of an SM's copy engine for a row of a box, short or not: a guess from times of KernelBench's convolutions."""
LEAST_STEP_CYCLES = 160
"""Of a step that multiplies little."""
SECTOR_BYTES = 32
"""That memory writes at once."""
PARTIAL = 4.0
"""Sectors that would be written in the time that an end of a row of a tile takes which fills none."""
STORED_BYTES_A_CYCLE = 17
"""Of an SM, when all store."""


@dataclass(frozen=True)
class Dimension:
    """A dimension that windows slide over, as it is laid out: by residues of the stride, with zeros around the data."""

    slide: Slide

    @property
    def apart(self) -> int:
        """Positions of the data from one residue to the next."""
        return 1 if self.slide.stride == 1 or self.slide.size == 1 else math.gcd(self.slide.stride, self.slide.dilation)

    @property
    def residues(self) -> int:
        """Residues whose channels are laid out."""
        if self.slide.dilation == 1 or self.slide.size == 1:
            return min(self.slide.size, self.slide.stride)
        return self.slide.stride // self.apart

    @property
    def size(self) -> int:
        """Elements of a window."""
        return self.slide.size if self.slide.stride == 1 else self.slide.reach // self.slide.stride + 1

    @property
    def dilation(self) -> int:
        """Positions from one element to the next."""
        return self.slide.dilation if self.slide.stride == 1 else 1

    @property
    def is_full(self) -> bool:
        """Whether every element has a weight in each residue: one of zero makes NaN of an infinity beside a window."""
        return self.size * self.residues == self.slide.size

    @property
    def reach(self) -> int:
        """Positions from a window's first element to its last."""
        return (self.size - 1) * self.dilation

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self.slide.outputs

    @property
    def extent(self) -> int:
        """Positions that all windows see."""
        return self.outputs + self.reach

    @property
    def fields(self) -> dict[str, int]:
        """Its numbers by name, as `ws::WindowDimension` has them."""
        of_slide = {name: getattr(self.slide, name) for name in ("data", "outputs", "stride", "padding")}
        own = {name: getattr(self, name) for name in ("residues", "apart", "size", "dilation")}
        return {**of_slide, **own, "elements": self.slide.size, "step": self.slide.dilation}


@dataclass(frozen=True)
class Box:
    """What a tile of 128 positions copies at once; dimensions are the three of the data, and images (3).

    Rows are eight neighbours of the last dimension, eight of `eights` and two of `halves`; a box has what all elements
    of a window along its `shared` dimensions see.
    """

    dimensions: tuple[Dimension, Dimension, Dimension]
    images: int
    eights: int
    halves: int
    shared: tuple[bool, bool, bool]
    row_bytes: int

    @property
    def tile(self) -> list[int]:
        """Outputs of a tile along each dimension."""
        return [8 ** ((d == 2) + (d == self.eights)) * 2 ** (d == self.halves) for d in range(4)]

    @property
    def extents(self) -> list[int]:
        """Positions of a box along each dimension."""
        over = [each.reach if shared else 0 for each, shared in zip(self.dimensions, self.shared, strict=True)]
        return [outputs + more for outputs, more in zip(self.tile, (*over, 0), strict=True)]

    @property
    def rows(self) -> int:
        """Positions of a box."""
        return math.prod(self.extents)

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return geometry.round_up(self.rows * self.row_bytes, 1024)

    @property
    def tiles(self) -> int:
        """Tiles of all positions."""
        extents = (*(each.outputs for each in self.dimensions), self.images)
        return math.prod(-(-extent // part) for extent, part in zip(extents, self.tile, strict=True))

    @property
    def elements(self) -> int:
        """Elements of a window that a box is for."""
        return math.prod(each.size for each, shared in zip(self.dimensions, self.shared, strict=True) if shared)

    @property
    def steps(self) -> int:
        """Steps that a box is for."""
        return -(-self.elements // (STEP_BYTES // self.row_bytes))

    @property
    def units(self) -> int:
        """Boxes of a tile, for each box of channels."""
        return math.prod(each.size for each in self.dimensions) // self.elements

    def cycles(self, columns: int, boxes: int, size: int) -> float:
        """Of an SM, for all tiles of so many columns and boxes of channels: what is multiplied or copied, then the
        stores of elements of `size` bytes, a row of which begins and ends inside of a sector unless it fits."""
        multiplied = 4.0 * columns * min(self.elements * self.row_bytes, STEP_BYTES) / STEP_BYTES
        step = max(multiplied, (self.rows / self.steps + columns) * ROW_CYCLES, LEAST_STEP_CYCLES)
        run, row = (outputs * size for outputs in (self.tile[2], self.dimensions[2].outputs))
        sectors = 1.0 if run % SECTOR_BYTES == 0 and row % SECTOR_BYTES == 0 else 1.0 + PARTIAL * SECTOR_BYTES / run
        stored = TILE_ROWS * columns * size * sectors / STORED_BYTES_A_CYCLE
        return self.tiles * (boxes * self.units * self.steps * step + stored)


@dataclass(frozen=True)
class Boxes:
    """What is laid out, of a type that tensor cores multiply."""

    product: ConvolutionProduct
    engine: Engine

    @functools.cached_property
    def dimensions(self) -> tuple[Dimension, Dimension, Dimension]:
        """Those of the data."""
        outer, middle, row = map(Dimension, self.product.slides)
        return outer, middle, row

    @property
    def _own_channels(self) -> int:
        return self.product.channels * math.prod(each.residues for each in self.dimensions)

    @property
    def row_bytes(self) -> int:
        """Of channels of a position in a box."""
        own = self._own_channels * self.engine.element_bytes
        return next((width for width in ROW_BYTES if own <= width), ROW_BYTES[-1])

    @property
    def row_depth(self) -> int:
        """Channels of a position in a box."""
        return self.row_bytes // self.engine.element_bytes

    @property
    def channels(self) -> int:
        """Of a group, with those of all residues, in whole boxes."""
        return geometry.round_up(self._own_channels, self.row_depth)

    @property
    def images(self) -> int:
        """Images."""
        return points(self.product.images)

    @functools.cached_property
    def box(self) -> Box:
        """What a tile copies at once: of all that fit, that by which it is thought to end first, the least of those."""
        columns = min(128, geometry.round_up(points(self.product.made), 64))
        boxes, size = self.channels // self.row_depth, self.product.type.size_bytes
        may_share = [(False, True) if each.size > 1 else (False,) for each in self.dimensions]
        long = [d for d in range(4) if d == 3 or self.dimensions[d].outputs > 1]
        all_ = (
            Box(self.dimensions, self.images, eights, halves, (z, y, x), self.row_bytes)
            for eights, halves in itertools.product(long, repeat=2)
            for z, y, x in itertools.product(*may_share)
        )
        possible = [box for box in all_ if box.bytes <= MOST_BOX_BYTES and max(box.extents) <= TENSOR_MAP_BOX]
        return min(possible, key=lambda box: (box.cycles(columns, boxes, size), box.rows * box.units))

    @property
    def row_tiles(self) -> int:
        """Tiles of a group's rows."""
        return self.box.tiles

    @property
    def depth(self) -> int:
        """Of the product, in whole steps."""
        return self.channels // self.row_depth * self.box.units * self.box.steps * self.engine.stage_depth

    @property
    def layout(self) -> list[int]:
        """Extents of what is laid out: images, three dimensions, groups and channels."""
        return [self.images, *(each.extent for each in self.dimensions), points(self.product.groups) * self.channels]

    @property
    def lay_out_blocks(self) -> int:
        """Of the kernel that lays out: those of what is seen, and those of weights."""
        boxes = self.channels // self.row_depth * points(self.product.groups) * self.images
        weights = points(self.product.groups) * points(self.product.made) * self.depth
        positions = math.prod(self.layout[1:4])
        return -(-positions // (LAY_OUT_BYTES // self.row_bytes)) * boxes + -(-weights // LAY_OUT_THREADS)

    def matrix_product(self, entry: str) -> MatrixProduct:
        """The product of what is laid out."""
        made, depth = points(self.product.made), self.depth
        layers = (LayerAxis(1, groups, made * depth),) if (groups := points(self.product.groups)) > 1 else ()
        type_ = self.product.type
        return MatrixProduct(
            reduction=self.product.convolution.reduction.name,
            left=Operand(f"{entry}_seen", type_, 0, (), depth, 1),
            right=Operand(f"{entry}_weights", type_, 0, layers, depth, 1),
            batch=self.product.groups,
            rows=(*self.product.images, *self.product.outputs),
            columns=self.product.made,
            depth=(Axis("depth", depth),),
        )


def shared_bytes(box: Box, tiling: Tiling, held: int) -> int:
    """Dynamic shared memory of a block: rings of weights and of boxes, sums on their way to other threads, a kilobyte
    of barriers, and one to begin at a multiple of it."""
    rings = tiling.stages * tiling.columns * STEP_BYTES + held * box.bytes
    return rings + tiling.warpgroups * TURNED_BYTES + 2048
