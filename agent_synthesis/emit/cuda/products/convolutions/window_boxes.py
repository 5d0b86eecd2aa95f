"""How a convolution's operands are laid out for tensor cores, and what the tiles of its product copy.

The one idea: a stride is a matter of channels. With the positions between two outputs as channels, every window slides
by one, so that neighbouring outputs see a box of neighbours, once for all elements of their windows. Elements that have
fewer neighbours are a part of their own: so nothing is multiplied that lies beside a window. Texts are in
`convolution_product_text`, the kernels in `ws_product_windows.cuh`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.products.convolutions.as_it_lies import (
    Lying,
    rows_as_they_lie,
    seen_as_it_lies,
    weight_as_it_lies,
)
from agent_synthesis.emit.cuda.products.product_engine import Engine
from agent_synthesis.emit.cuda.products.product_tiling import TILE_ROWS, Tiling
from agent_synthesis.nests.analysis.products.convolution_product import ConvolutionProduct, points
from agent_synthesis.nests.analysis.products.phases import Phases
from agent_synthesis.nests.analysis.products.pooled_product import Pool
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
Pools = tuple[Pool | None, Pool | None, Pool | None]
WHOLE: Pools = (None, None, None)
"""No windows over outputs."""
LEAST_STEP_CYCLES = 160
"""Of a step that multiplies little."""
SECTOR_BYTES = 32
"""That memory writes at once."""
PARTIAL = 4.0
"""Sectors that would be written in the time that an end of a row of a tile takes which fills none."""
STORED_BYTES_A_CYCLE = 17
"""Of an SM, when all store."""


@dataclass(frozen=True)
class Run:
    """Elements of a window along a dimension that neighbours of what is laid out stand for."""

    first: int
    """Positions from an output's own to the one that its first element sees."""
    size: int
    element: int
    """The first one of the window's own."""
    residues: int
    """Further ones that see the same positions, in channels of their own."""
    shift: int
    """From `at` times the phases to the output that is made."""


@dataclass(frozen=True)
class Dimension:
    """A dimension that windows slide over, as it is laid out: by residues of the stride, with zeros around the data.

    Elements that lie at the same residue are a run; those of another one lie in other channels. Residues whose runs are
    as long and begin at the same position are one part, so that no part has an element without a weight: a weight of
    zero would make NaN of an infinity beside a window.
    """

    slide: Slide
    phases: Phases | None

    @property
    def every(self) -> int:
        """Elements of a window from one of a run to the next."""
        return self.slide.stride // math.gcd(self.slide.stride, self.slide.dilation)

    @property
    def dilation(self) -> int:
        """Positions from one element of a run to the next."""
        return self.slide.dilation * self.every // self.slide.stride

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """Of all residues, or of each phase."""
        if self.phases is not None:
            each, dilation = self.phases.each, self.slide.dilation
            first = min((p.first * dilation + p.shift for p in each if p.size), default=0)
            return tuple(
                Run(p.first * dilation + p.shift - first if p.size else 0, p.size, p.first, 1, at)
                for at, p in enumerate(each)
            )
        size, runs = self.slide.size, list[Run]()
        for element in range(min(self.every, size)):
            first, count = element * self.slide.dilation // self.slide.stride, -(-(size - element) // self.every)
            if runs and (runs[-1].first, runs[-1].size) == (first, count):
                runs[-1] = replace(runs[-1], residues=runs[-1].residues + 1)
            else:
                runs.append(Run(first, count, element, 1, 0))
        return tuple(runs)

    @property
    def padding(self) -> int:
        """Zeros before the data."""
        if self.phases is None:
            return self.slide.padding
        seen = [each.first * self.slide.dilation + each.shift for each in self.phases.each if each.size]
        return self.slide.padding - min(seen, default=0)

    @property
    def longest(self) -> int:
        """Elements of the longest run."""
        return max(run.size for run in self.runs)

    @property
    def reach(self) -> int:
        """Positions from its first element to its last."""
        return max(0, self.longest - 1) * self.dilation

    @property
    def outputs(self) -> int:
        """Number of outputs, of each phase."""
        return self.slide.outputs

    @property
    def extent(self) -> int:
        """Positions that all windows see."""
        return self.outputs + max(run.first + max(0, run.size - 1) * self.dilation for run in self.runs)

    @property
    def fields(self) -> dict[str, int]:
        """Its numbers by name, as `ws::WindowDimension` has them."""
        return {
            "data": self.slide.data, "outputs": self.outputs, "stride": self.slide.stride, "padding": self.padding,
            "step": self.slide.dilation, "extent": self.extent, "dilation": self.dilation, "every": self.every,
            "reach": self.reach, "phases": self.phases.axis.extent if self.phases else 1,
            "results": self.phases.results if self.phases else self.outputs,
        }  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A run along each dimension, and the boxes of channels that its residues have."""

    runs: tuple[Run, Run, Run]
    channel_box: int
    channel_boxes: int

    def elements(self, shared: Sequence[bool], *, in_box: bool = True) -> int:
        """Of a window along the dimensions that are shared, or along the others."""
        return math.prod(run.size for run, each in zip(self.runs, shared, strict=True) if each is in_box)

    @property
    def fields(self) -> str:
        """Its numbers, as `ws::WindowPart` has them."""
        names = ("first", "size", "element", "residues", "shift")
        each = [f".{name} = {{{', '.join(str(getattr(run, name)) for run in self.runs)}}}" for name in names]
        return f"{{{', '.join(each)}, .channel_box = {self.channel_box}, .channel_boxes = {self.channel_boxes}}}"


@dataclass(frozen=True)
class Box:
    """What a tile of 128 positions copies at once; dimensions are the three of the data, and images (3).

    Rows are eight neighbours of the last dimension, eight of `eights` and two of `halves`; a box has what all elements
    of a window along its `shared` dimensions see.
    """

    dimensions: tuple[Dimension, Dimension, Dimension]
    parts: tuple[Part, ...]
    images: int
    eights: int
    halves: int
    shared: tuple[bool, bool, bool]
    row_bytes: int
    pools: Pools = WHOLE

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
    def windows(self) -> list[int]:
        """Outputs of a tile along each dimension, or whole windows of them."""
        return [
            pool.of_tile(outputs) if pool else outputs
            for outputs, pool in zip(self.tile, (*self.pools, None), strict=True)
        ]

    @property
    def tiles(self) -> int:
        """Tiles of all positions, or windows."""
        extents = [
            pool.outputs if pool else each.outputs for each, pool in zip(self.dimensions, self.pools, strict=True)
        ]
        pairs = zip((*extents, self.images), self.windows, strict=True)
        return math.prod(-(-extent // part) for extent, part in pairs)

    def steps(self, part: Part) -> int:
        """Steps that a box of a part is for."""
        return -(-part.elements(self.shared) // (STEP_BYTES // self.row_bytes))

    def units(self, part: Part) -> int:
        """Boxes of a part in a tile."""
        return part.elements(self.shared, in_box=False) * part.channel_boxes if self.steps(part) else 0

    def depth_steps(self, part: Part) -> int:
        """Steps of a part in a tile."""
        return self.units(part) * self.steps(part)

    def cycles(self, columns: int, size: int) -> float:
        """Of an SM, for all tiles of so many columns: what is multiplied or copied, then the stores of elements of
        `size` bytes, a row of which begins and ends inside of a sector unless it fits."""
        run, row = (outputs * size for outputs in (self.tile[2], self.dimensions[2].outputs))
        is_apart = self.dimensions[2].phases is not None
        whole = run % SECTOR_BYTES == 0 and row % SECTOR_BYTES == 0 and not is_apart
        sectors = 1.0 if whole else 1.0 + PARTIAL * SECTOR_BYTES / run
        stored = TILE_ROWS * columns * size * sectors / STORED_BYTES_A_CYCLE
        is_phased = any(each.phases is not None for each in self.dimensions)
        if any(self.pools):  # an output in so many
            stored *= math.prod(self.windows) / TILE_ROWS
        made = sum(self._multiplied(part, columns) for part in self.parts)
        return self.tiles * (made + stored * (len(self.parts) if is_phased else 1))

    def _multiplied(self, part: Part, columns: int) -> float:
        """Cycles of a part in a tile."""
        if not (steps := self.steps(part)):
            return 0.0
        multiplied = 4.0 * columns * min(part.elements(self.shared) * self.row_bytes, STEP_BYTES) / STEP_BYTES
        step = max(multiplied, (self.rows / steps + columns) * ROW_CYCLES, LEAST_STEP_CYCLES)
        return self.depth_steps(part) * step


@dataclass(frozen=True)
class Boxes:
    """What is laid out, of a type that tensor cores multiply."""

    product: ConvolutionProduct
    engine: Engine
    pools: Pools = WHOLE
    """Windows over its outputs, which a tile has whole."""
    of_images: bool = False
    """Whether a tile may be of one image alone."""

    @functools.cached_property
    def dimensions(self) -> tuple[Dimension, Dimension, Dimension]:
        """Those of the data."""
        outer, middle, row = map(Dimension, self.product.slides, self.product.phases)
        return outer, middle, row

    @property
    def phases(self) -> int:
        """Phases of outputs, each of which has one part; 1 where all parts are summed."""
        return math.prod(each.axis.extent for each in self.product.phases if each)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """Whose sums are added, or by phase."""
        return self._parts(self.row_bytes)

    def _parts(self, row_bytes: int) -> tuple[Part, ...]:
        depth, parts, taken = row_bytes // self.engine.element_bytes, list[Part](), 0
        for outer, middle, row in itertools.product(*(each.runs for each in self.dimensions)):
            boxes = -(-self.product.channels * math.prod(run.residues for run in (outer, middle, row)) // depth)
            parts.append(Part((outer, middle, row), taken, boxes))
            taken += 0 if self.phases > 1 else boxes
        return tuple(parts)

    @property
    def row_bytes(self) -> int:
        """Of channels of a position in a box: as many as those of the part that has most."""
        residues = max(math.prod(run.residues for run in part.runs) for part in self._parts(ROW_BYTES[-1]))
        own = self.product.channels * residues * self.engine.element_bytes
        return next((width for width in ROW_BYTES if own <= width), ROW_BYTES[-1])

    @property
    def row_depth(self) -> int:
        """Channels of a position in a box."""
        return self.row_bytes // self.engine.element_bytes

    @property
    def channels(self) -> int:
        """Of a group, with those of all residues, in whole boxes."""
        return max(part.channel_box + part.channel_boxes for part in self.parts) * self.row_depth

    @property
    def images(self) -> int:
        """Images."""
        return points(self.product.images)

    @functools.cached_property
    def possible(self) -> list[Box]:
        """What a tile may copy at once; nothing where windows over its outputs are larger than it."""
        may_share = [(False, True) if each.longest > 1 else (False,) for each in self.dimensions]
        long = [d for d in range(4) if d == 3 or self.dimensions[d].outputs > 1]
        all_ = (
            Box(self.dimensions, self.parts, self.images, eights, halves, (z, y, x), self.row_bytes, self.pools)
            for eights, halves in itertools.product(long, repeat=2)
            for z, y, x in itertools.product(*may_share)
        )
        return [
            box for box in all_
            if box.bytes <= MOST_BOX_BYTES and max(box.extents) <= TENSOR_MAP_BOX and min(box.windows) > 0
            and (box.tile[3] == 1 or not self.of_images)
        ]  # fmt: skip

    @functools.cached_property
    def box(self) -> Box:
        """What a tile copies at once: of all that fit, that by which it is thought to end first, the least of those."""
        columns, size = min(128, geometry.round_up(points(self.product.made), 64)), self.product.type.size_bytes
        return min(
            self.possible, key=lambda box: (box.cycles(columns, size), box.rows * sum(map(box.units, box.parts)))
        )

    @property
    def row_tiles(self) -> int:
        """Tiles of a group's rows, of all phases."""
        return self.box.tiles * self.phases

    @property
    def depth(self) -> int:
        """Of the product, in whole steps: of all parts, or of the phase that has most."""
        steps = [self.box.depth_steps(part) for part in self.parts]
        return max(1, max(steps) if self.phases > 1 else sum(steps)) * self.engine.stage_depth

    @property
    def most_slices(self) -> int:
        """That the depth may be cut into, each with a box of what is seen at least; of phases of the deepest."""
        units = [self.box.units(part) for part in self.parts]
        return max(1, max(units) if self.phases > 1 else sum(units))

    @property
    def weight_layers(self) -> int:
        """Layers of weights: of groups, of each phase."""
        return points(self.product.groups) * self.phases

    @property
    def flop_count(self) -> int:
        """Of the tensor cores, for all tiles."""
        steps = sum(map(self.box.depth_steps, self.parts)) * self.engine.stage_depth
        return 2 * points(self.product.groups) * self.box.tiles * TILE_ROWS * points(self.product.made) * steps

    @property
    def layout(self) -> list[int]:
        """Extents of what is laid out: images, three dimensions, groups and channels."""
        return [self.images, *(each.extent for each in self.dimensions), points(self.product.groups) * self.channels]

    @property
    def weight_layout(self) -> list[int]:
        """Extents of the weights as they are laid out: layers, made channels, depth."""
        return [self.weight_layers, points(self.product.made), self.depth]

    @functools.cached_property
    def seen(self) -> Lying | None:
        """What is seen, where it is copied as it lies."""
        return seen_as_it_lies(self.product, self.row_depth)

    @functools.cached_property
    def rows(self) -> Lying | None:
        """What is seen, where it is laid out row by row."""
        return rows_as_they_lie(self.product)

    @functools.cached_property
    def weights(self) -> Lying | None:
        """The weights, where they are."""
        return weight_as_it_lies(self.product)

    @property
    def laid_bytes(self) -> int:
        """Of what is laid out."""
        laid = [extents for lies, extents in ((self.seen, self.layout), (self.weights, self.weight_layout)) if not lies]
        return self.engine.element_bytes * sum(map(math.prod, laid))

    @property
    def lay_out_blocks(self) -> int:
        """Of the kernel that lays out: those of what is seen, and those of weights."""
        boxes = self.channels // self.row_depth * points(self.product.groups) * self.images
        positions = math.prod(self.layout[1:4])
        seen = 0 if self.seen else -(-positions // (LAY_OUT_BYTES // self.row_bytes)) * boxes
        return seen + (0 if self.weights else -(-math.prod(self.weight_layout) // LAY_OUT_THREADS))

    def matrix_product(self, entry: str) -> MatrixProduct:
        """The product of what is laid out."""
        made, depth = points(self.product.made), self.depth
        layers = (LayerAxis(1, groups, made * depth),) if (groups := points(self.product.groups)) > 1 else ()
        type_ = self.product.type
        return MatrixProduct(
            reduction=self.product.convolution.reduction.name,
            left=Operand(self.seen.buffer if self.seen else f"{entry}_seen", type_, 0, (), depth, 1),
            right=Operand(self.weights.buffer if self.weights else f"{entry}_weights", type_, 0, layers, depth, 1),
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
