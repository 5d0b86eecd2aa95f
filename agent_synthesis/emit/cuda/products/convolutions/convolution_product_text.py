"""The text and launches of a convolution as a matrix product: `ws_product_windows.cuh`.

The one idea: a kernel lays out what is seen, channels innermost, and the weights; the product's kernel is that of every
product, but for the boxes that its rows are copied from, and which output a row is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, replace

from agent_synthesis.emit import window_loops
from agent_synthesis.emit.cuda import generated_struct, geometry
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel, KernelText
from agent_synthesis.emit.cuda.products.convolutions.window_boxes import (
    LAY_OUT_THREADS,
    STEP_BYTES,
    Boxes,
    shared_bytes,
)
from agent_synthesis.emit.cuda.products.operands import Operands, Side, workspace
from agent_synthesis.emit.cuda.products.product_engine import Engine
from agent_synthesis.emit.cuda.products.product_text import PRODUCT_HEADERS, WARPGROUP_THREADS, ProductText
from agent_synthesis.emit.cuda.products.product_tiling import TILE_ROWS, Tiling
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.analysis.products.convolution_product import points
from agent_synthesis.nests.analysis.products.product_end import three_axes
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import Axis, Expression, Load, Nest
from agent_synthesis.nests.product import MatrixProduct
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2, tensor_pb2

NEXT = "\n            "
HEADERS = (*PRODUCT_HEADERS, "ws_axes.cuh", "ws_product_slices.cuh", "ws_product_windows.cuh", "ws_windows_laid.cuh")
_MEMBERS = (
    "Offset", "Images", "Groups", "Made", "Channels", "kCount", "kGroup", "kMade", "kAlongChannels", "kInRows", "kRows",
    "rows", "see", "weight", "at", "phase", "channel", "position", "element", "seen", "weights", "tile",
)  # fmt: skip
"""What the struct and the kernel that lays out call things of their own."""


class WindowOperands(Operands):
    """The operands of a convolution, which are laid out."""

    def __init__(
        self, hardware: Hardware, entry: str, product: MatrixProduct, engine: Engine, tiling: Tiling, boxes: Boxes
    ) -> None:
        super().__init__(hardware, entry, product, engine, tiling)
        self._boxes = boxes

    def map(self, side: Side) -> candidate_pb2.LaunchArgument:
        """What is seen as (channel, three dimensions, image); the weights as (depth, made channel, 1, layer)."""
        engine = self._boxes.engine
        if side.name == "right":
            layers, made, depth = self._boxes.weight_layout
            lies, extents, swizzle = self._boxes.weights, [depth, made, 1, layers], STEP_BYTES
            box = [engine.stage_depth, self._tiling.columns // self._tiling.cluster, 1, 1]
        else:
            lies, extents, swizzle = self._boxes.seen, self._boxes.layout[::-1], self._boxes.row_bytes
            *tile, images = self._boxes.box.extents
            box = [self._boxes.row_depth, *reversed(tile), images]
        steps = lies.strides if lies else [math.prod(extents[:count]) for count in range(1, len(extents))]
        strides = [step * engine.element_bytes for step in steps]
        extents = list(lies.extents) if lies else extents
        return candidate_pb2.LaunchArgument(
            tensor_map=candidate_pb2.TensorMap(
                buffer=side.operand.buffer, dtype=engine.dtype, extents=extents, byte_strides=strides,
                box=box, swizzle_bytes=swizzle, rounds_to_tf32=engine.dtype == tensor_pb2.DTYPE_FLOAT32,
            )
        )  # fmt: skip

    def workspaces(self) -> list[candidate_pb2.Buffer]:
        """What is laid out."""
        boxes, (left, right) = self._boxes, (side.operand.buffer for side in self.sides)
        both = ((boxes.seen, left, boxes.layout), (boxes.weights, right, boxes.weight_layout))
        return [workspace(name, boxes.engine.dtype, extents) for lies, name, extents in both if not lies]


class ConvolutionProductText(ProductText):
    """A convolution's pieces of text."""

    slice_end, add_slices = "WindowSliceEnd", "add_window_slices"

    def __init__(self, hardware: Hardware, nest: Nest, boxes: Boxes, tiling: Tiling, held: int, entry: str) -> None:
        """`held`: boxes in shared memory."""
        matrices = boxes.matrix_product(entry)
        # Pairs of channels go to threads whose positions are neighbours: for results whose channels are none, whatever
        # is read along channels, such as a bias.
        stores = three_axes(nest, matrices).stores
        widest = 8 if any(memory_access.is_contiguous(store.index, "n") for store in stores) else 2
        super().__init__(hardware, nest, matrices, boxes.engine, tiling, widest=widest)
        self._boxes, self._held = boxes, held
        self.operands = WindowOperands(hardware, self.entry, matrices, boxes.engine, tiling, boxes)
        self._m = boxes.row_tiles * TILE_ROWS

    def kernels(self) -> tuple[list[Kernel], list[str]]:
        """The kernel that lays out, if anything is, and the product's."""
        return [*([self.lay_out()] if self._boxes.lay_out_blocks else []), self.product()], [*HEADERS]

    def shape(self) -> list[str]:
        """The product's type, and how its rows lie."""
        boxes, box = self._boxes, self._boxes.box
        dimensions = (generated_struct.value("ws::WindowDimension", each.fields) for each in box.dimensions)
        shared = ", ".join(str(each).lower() for each in box.shared)
        before = [each.padding if boxes.seen else 0 for each in box.dimensions]
        lines = super().shape()
        lines[0] = lines[0].replace(f"{self.entry}_shape", f"{self.entry}_tiles")
        return [
            *lines,
            f"struct {self.entry}_window {{",
            f"  static WS_INLINE constexpr ws::WindowShape<{len(boxes.parts)}> shape() {{",
            "    return {",
            f"        .dimensions = {{{f',{NEXT}'.join(dimensions)}}},",
            f"        .parts = {{{f',{NEXT}'.join(part.fields for part in boxes.parts)}}},",
            f"        .shared = {{{shared}}}, .images = {boxes.images}, .groups = {points(boxes.product.groups)}, "
            f".channels = {boxes.channels}, .row_bytes = {boxes.row_bytes},",
            f"        .eights = {box.eights}, .halves = {box.halves}, .boxes = {self._held}, "
            f".before = {{{', '.join(map(str, before))}}}{self._pooled()}}};",
            "  }",
            "};",
            f"using {self.entry}_shape = ws::WindowProduct<{self.entry}_tiles, {self.entry}_window>;",
        ]

    def _pooled(self) -> str:
        """Windows over the outputs, where there are any."""
        if not any(self._boxes.pools):
            return ""
        each = (f"{{{', '.join(map(str, astuple(pool))) if pool else ''}}}" for pool in self._boxes.pools)
        return f",{NEXT[:9]}.pooled = {{{', '.join(each)}}}"

    def multiply(self, call: str) -> str:
        """That of windows."""
        del call
        return "multiply_windows"

    def threads(self) -> int:
        """Of a block: warpgroups that multiply, and a warp that copies."""
        return WARPGROUP_THREADS * self._tiling.warpgroups + 32

    def shared_bytes(self) -> int:
        """Of a block."""
        return shared_bytes(self._boxes.box, self._tiling, self._held)

    def cluster_count(self) -> int:
        """Tiles of whole clusters, or all phases of them that are pooled together; of several phases as many blocks as
        make each take all of them, one by one."""
        rows = -(-self._boxes.row_tiles // self._tiling.cluster)
        tiles = self._batch * rows * -(-self._n // self._tiling.columns)
        resident = self._tiling.blocks * self.hardware.resident_clusters(self._tiling.cluster)
        if any(self._boxes.pools):
            return tiles // self._boxes.phases
        if self._boxes.phases == 1 or tiles <= resident:
            return tiles
        return next(count for count in range(resident, 0, -1) if math.gcd(count, self._boxes.phases) == 1)

    def lay_out(self) -> Kernel:
        """The kernel that lays out what is seen and the weights."""
        product, convolution = self._boxes.product, self._boxes.product.convolution
        loaded = {
            part.buffer
            for part in Interner().parts([convolution.seen, convolution.weight]).values()
            if isinstance(part, Load)
        }
        buffers = tuple(buffer for buffer in convolution.nest.buffers if buffer.name in loaded)
        read = replace(convolution.nest, stores=(), buffers=buffers)
        text = KernelText(read, "", 1, reserved=_MEMBERS)
        window_loops.name_elements(text.function, product.window)
        at = (*product.images, *product.groups, *product.made)
        positions = [slide.position for slide in product.slides]
        elements = [slide.element.name if slide.element else "" for slide in product.slides]
        phases = [each.axis.name if each else "" for each in product.phases]
        see = _value(
            text, convolution.seen, "see", at=_names(at), channel=_names(convolution.channels), position=positions
        )
        weigh = _value(
            text, convolution.weight, "weight", at=_names(at), phase=phases, channel=_names(convolution.channels),
            element=elements,
        )  # fmt: skip
        sizes = [
            f"  using Offset = {text.offset};",
            *(f"  using {name} = ws::Axes<{', '.join(str(axis.extent) for axis in axes) or 1}>;" for name, axes in (
                ("Images", product.images), ("Groups", product.groups), ("Made", product.made),
                ("Channels", convolution.channels),
            )),
            f"  static constexpr int kCount = {len(at)}, kGroup = {len(product.images)}, "
            f"kMade = {len(product.images) + len(product.groups)};",
            f"  static constexpr bool kAlongChannels = {str(product.is_along_channels).lower()};",
            *self._rows(text),
            "",
        ]  # fmt: skip
        name, element = f"{self.entry}_windows", self._boxes.engine.element
        lines = generated_struct.struct(name, text, [""], sizes, see, weigh)
        left, right = (side.operand.buffer for side in self.operands.sides)
        laid = {"seen": left} if not self._boxes.seen else {}
        laid |= {"weights": right} if not self._boxes.weights else {}
        skeleton = "lay_out" if len(laid) > 1 else f"lay_out_{next(iter(laid))}"
        tile = {"tile": f"ws::LayOut<{self.entry}_shape, %>::Tile"} if "seen" in laid else {}
        lines += generated_struct.kernel(
            name, text, f"{skeleton}<{self.entry}_shape>", LAY_OUT_THREADS, 3, dict.fromkeys(laid, element),
            f"{self.entry}_lay_out", shared=tile,
        )  # fmt: skip
        made = list(laid.values())
        record = geometry.record(
            f"{self.entry}_lay_out", self._boxes.lay_out_blocks, LAY_OUT_THREADS,
            [address(name) for name in (*(buffer.name for buffer in buffers), *made)], made,
        )  # fmt: skip
        return Kernel(lines, record)

    def _rows(self, text: KernelText) -> list[str]:
        """Whether rows of what is seen are read in vectors, and where they lie."""
        rows = self._boxes.rows
        lines = [f"  static constexpr bool kInRows = {str(rows is not None).lower()};"]
        if rows is None:
            return lines
        steps = ", ".join(map(str, rows.strides))
        return [
            *lines,
            f"  static constexpr ws::WindowRows kRows{{{steps}}};",
            f"  WS_INLINE auto rows() const {{ return {text.function.buffers[rows.buffer]}; }}",
        ]


def _names(axes: Sequence[Axis]) -> list[str]:
    return [axis.name for axis in axes]


def _value(text: KernelText, value: Expression, name: str, **arrays: Sequence[str]) -> list[str]:
    """A function of coordinates, each array of which names axes; an empty name is of none."""
    function, located = text.function, []
    for array, axes in arrays.items():
        names = [function.axes[axis] if axis in function.axes else function.names.take("only") for axis in axes]
        located += generated_struct.located(names, array)
    inner = generated_struct.body(text, [axis for axes in arrays.values() for axis in axes if axis])
    inner.expect([value])
    inner.line(f"return {inner.converted(value, value.type.compute)};")
    given = (f"const {text.offset} (&{array})[{max(1, len(axes))}]" for array, axes in arrays.items())
    return generated_struct.function(f"float {name}({', '.join(given)}) const", located + inner.lines)
