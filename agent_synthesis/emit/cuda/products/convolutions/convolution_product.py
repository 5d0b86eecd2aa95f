"""CUDA schedule of dense convolutions, as matrix products on Hopper's tensor cores: an implicit GEMM.

The one idea: a convolution is a product whose rows are positions of outputs; the copy engine finds what each element of
a window sees as a shifted box of the data, so that nothing is written out for each element. Floats are multiplied in
TF32, as PyTorch does while `torch.backends.cudnn.allow_tf32` is on; texts are in `convolution_product_text`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.products.convolutions.convolution_product_text import ConvolutionProductText
from agent_synthesis.emit.cuda.products.convolutions.window_boxes import Boxes, shared_bytes
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, NEEDS, EngineName
from agent_synthesis.emit.cuda.products.product_tiling import TILE_ROWS, Tiling
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.convolution_product import convolution_product, points
from agent_synthesis.nests.ir import Nest, Type, remembered
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove

ENGINE_OF = {Type.F32: EngineName.TF32, Type.F16: EngineName.FP16, Type.BF16: EngineName.BF16}
COLUMNS = (64, 128, 192, 256)
SLICES = (1, 2, 3, 4, 6, 8)
BOXES, STAGES = (2, 3, 4, 6), (2, 3, 4, 5, 6, 8)
ADDED_BYTES_A_CYCLE = 2000
"""Of slices' sums, written and read, by all SMs: a guess from what a copy reaches."""
LAUNCH_CYCLES = 4000
"""Of one kernel more: a guess, two microseconds."""
RATES = {64: 0.8, 128: 0.95, 192: 1.0, 256: 1.0}
"""Columns of a tile → share of an SM's rate."""
REGISTERS = {2: 224, 4: 120}
"""Multiplying warpgroups → registers of a thread, of a block alone on an SM."""
MOST_PARTS = 64
"""Of a window: the kernel has products for each."""
MOST_POSITIONS = 2**31 - 1
"""Of outputs, and of data of an image."""


@dataclass(frozen=True)
class ConvolutionProductSettings(Settings):
    """Of `cuda_convolution_product`."""

    resident: int = setting(1, "blocks of an SM: the end of one's tile is made while another multiplies", (1, 2))
    columns: int = setting(128, "channels of a tile, whose 128 rows are positions", COLUMNS)
    stages: int = setting(4, "steps of weights in shared memory, 128 bytes of depth each", STAGES)
    boxes: int = setting(2, "boxes of what is seen in shared memory", BOXES)
    cluster: int = setting(1, "blocks that share the copies of weights", (1, 2))
    raster: int = setting(8, "rows of tiles that are walked together", (4, 8, 16))
    warpgroups: int = setting(2, "warpgroups that multiply", (2, 4))
    split_k: int = setting(1, "slices of the depth, which a kernel of their own adds up", SLICES)

    @property
    def tiling(self) -> Tiling:
        """What they say of tiles."""
        slices = self.split_k
        return Tiling(self.columns, self.stages, self.cluster, self.raster, 1, slices, self.warpgroups, self.resident)


class CudaConvolutionProduct(CudaSchedule):
    """Tiles of 128 positions."""

    name = "cuda_convolution_product"
    settings = ConvolutionProductSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """A convolution of floats that makes several channels and stores at every position."""
        found = convolution_product(nest)
        if found is None or found.type not in ENGINE_OF or not iteration_space.is_safe_in_place(nest):
            return False
        return self.fits(self.boxes(nest))

    def fits(self, boxes: Boxes) -> bool:
        """Whether a kernel counts its parts and positions."""
        if len(boxes.parts) > MOST_PARTS:
            return False
        return max(boxes.row_tiles * TILE_ROWS, math.prod(boxes.layout[1:4])) <= MOST_POSITIONS

    def defaults(self, nest: Nest) -> ConvolutionProductSettings:
        """Columns and slices by which waves of tiles are thought to end first; two blocks on an SM where there are
        tiles for more than one, and as much of its memory as there is."""
        boxes = self.boxes(nest)
        steps = max(map(boxes.box.steps, boxes.parts))
        held = [each for each in BOXES if each == BOXES[0] or steps <= 2]
        deep = sorted(itertools.product(held, STAGES), key=lambda each: (-min(each[0] * steps, each[1]), -sum(each)))
        cut = itertools.product(COLUMNS, SLICES)
        guesses = (
            ConvolutionProductSettings(resident=resident, columns=columns, stages=stages, boxes=boxes, split_k=slices)
            for columns, slices in sorted(cut, key=lambda each: self._cycles(nest, *each))
            for resident in ((2, 1) if self._tiles(nest, columns) * slices > self.hardware.sm_count else (1,))
            for boxes, stages in deep
        )
        return geometry.first_legal(
            guesses, lambda settings: self.require(nest, settings), ConvolutionProductSettings()
        )

    def boxes(self, nest: Nest) -> Boxes:
        """What a nest's tiles copy, and what is laid out for it."""
        return _boxes(nest)

    def _tiles(self, nest: Nest, columns: int) -> int:
        boxes = self.boxes(nest)
        return points(boxes.product.groups) * boxes.row_tiles * -(-points(boxes.product.made) // columns)

    def _cycles(self, nest: Nest, columns: int, slices: int) -> float:
        """Of tiles of so many columns, by whole waves of them; narrow tiles copy more for each product."""
        boxes = self.boxes(nest)
        steps = sum(map(boxes.box.depth_steps, boxes.parts)) / boxes.phases
        waves = -(-self._tiles(nest, columns) * slices // self.hardware.sm_count)
        sums = nest.row_count * 4
        added = LAUNCH_CYCLES + 2 * slices * sums / ADDED_BYTES_A_CYCLE if slices > 1 else 0.0
        return waves * 4.0 * steps / slices * columns / RATES[columns] + added

    def alternatives(self, nest: Nest, current: ConvolutionProductSettings) -> Sequence[ConvolutionProductSettings]:
        """One change away."""
        return geometry.legal(current.one_change_away(), lambda settings: self.require(nest, settings))

    def footprint(self, nest: Nest, settings: ConvolutionProductSettings) -> Footprint:
        """What is laid out is written and read once more."""
        boxes = self.boxes(nest)
        found = boxes.product
        tiles = self._tiles(nest, settings.columns)
        sums = points(found.groups) * boxes.row_tiles * TILE_ROWS * points(found.made)
        added = 4 * settings.split_k * sums if settings.split_k > 1 else 0
        return Footprint(
            extra_bytes=2 * (boxes.laid_bytes + added), parallel_count=tiles * settings.split_k,
            launch_count=1 + (boxes.lay_out_blocks > 0) + (settings.split_k > 1),
            tensor_flop_count=boxes.engine.cost * boxes.flop_count,
        )  # fmt: skip

    def emit(self, nest: Nest, settings: ConvolutionProductSettings) -> Emission:
        """The kernel that lays out, and the product's."""
        self.require(nest, settings)
        simple = iteration_space.simplified(nest)
        entry = function_text.entry_name(simple)
        made = ConvolutionProductText(self.hardware, simple, self.boxes(nest), settings.tiling, settings.boxes, entry)
        kernels, headers = made.kernels()
        return made.emission(function_text.header(simple, self.name, settings), kernels, headers)

    def require(self, nest: Nest, settings: ConvolutionProductSettings) -> None:
        """Checks that a block has registers and memory for its tiles. Raises IllegalMove."""
        boxes = self.boxes(nest)
        if settings.cluster > 1 and boxes.phases > 1:
            raise IllegalMove(f"{nest.name}: tiles one above the other are of different phases, and share no weights")
        if settings.split_k > boxes.most_slices:
            raise IllegalMove(f"{nest.name}: {settings.split_k} slices of a depth of fewer boxes")
        registers = settings.columns // settings.warpgroups + geometry.KERNEL_OVERHEAD_REGISTERS
        if registers > (limit := REGISTERS[settings.warpgroups] // settings.resident):
            raise IllegalMove(f"{nest.name}: about {registers} registers a thread, of {limit}")
        needed = shared_bytes(boxes.box, settings.tiling, settings.boxes)
        most = self.hardware.shared_bytes // settings.resident - 1024 * (settings.resident > 1)
        if needed > most:
            raise IllegalMove(f"{nest.name}: {needed} bytes of shared memory, of {most} a block may have")
        if 2 * settings.columns // settings.warpgroups % 64:
            raise IllegalMove(
                f"{nest.name}: {settings.warpgroups} warpgroups share no {settings.columns} columns by 64"
            )


@remembered
def _boxes(nest: Nest) -> Boxes:
    found = convolution_product(nest)
    assert found is not None, nest.name
    return Boxes(found, ENGINES[ENGINE_OF[found.type]])
