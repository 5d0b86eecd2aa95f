"""The operands of a product as its kernels read them: as they lie in memory, or split into parts by kernels before it.

The one idea: operands whose rows' elements are neighbours are split at once; of the others a first kernel measures the
rows, which a second one splits. How, is in `ws_split.cuh`; what is multiplied then is in `product_text`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products.product_engine import Engine
from agent_synthesis.emit.cuda.products.product_tiling import (
    BLOCK_ROWS,
    TILE_DEPTH,
    TILE_ROWS,
    Tiling,
    padded,
    slice_depth,
)
from agent_synthesis.nests.ir import Type
from agent_synthesis.nests.product import MatrixProduct, Operand
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2, tensor_pb2

SPLIT_THREADS = 256
WARP_DEPTH = 1024
"""Depth up to which a warp splits a row, and not a block."""
_ELEMENTS = {
    Type.F32: "float", Type.F16: "ws::half", Type.BF16: "ws::bfloat16",
    Type.E4M3: "ws::bfloat16", Type.E5M2: "ws::bfloat16",
}  # fmt: skip
POINTERS = {
    "left": "const float* __restrict__ ", "right": "const float* __restrict__ ", "roots": "float* __restrict__ ",
    "ranges": "ws::Measured* __restrict__ ", "marks": "ws::Marks* ",
}  # fmt: skip
"""Last word of a splitting kernel's parameter, but for `halves` → its type."""


@dataclass(frozen=True)
class Side:
    """An operand: `name` stands in the text and in workspaces alike."""

    name: str
    operand: Operand
    rows: int

    @property
    def is_across(self) -> bool:
        """Whether rows are neighbours in memory."""
        return self.operand.depth_stride != 1

    @property
    def start(self) -> str:
        """Address of its first element."""
        return f"{self.name} + {self.operand.offset}" if self.operand.offset else self.name


class Operands:
    """The left and the right of one product; without an engine they are read as they are, by no tensor cores."""

    def __init__(
        self, hardware: Hardware, entry: str, product: MatrixProduct, engine: Engine | None, tiling: Tiling
    ) -> None:
        self._hardware, self._entry, self._engine, self._tiling = hardware, entry, engine, tiling
        self._batch, m, n, self._k = product.extents
        self._slice = slice_depth(self._k, tiling.split_k)
        self.parts = engine.parts if engine else 1
        """Values that an element becomes."""
        self.element = engine.element if engine else _ELEMENTS[product.left.type]
        """C++ type of what is multiplied."""
        self.layers = self._batch * tiling.split_k
        self.sides = (Side("left", product.left, m), Side("right", product.right, n))
        self.across = tuple(side for side in self.sides if side.is_across)
        """Those that are measured."""
        self.copied: Sequence[Side] = self.sides if self.parts == 1 and engine else ()
        """Those that copies find as they lie in memory."""

    def name(self, side: Side) -> str:
        """The name of an operand's description."""
        return f"{self._entry}_{side.name}"

    def workspace(self, name: str) -> str:
        """The name of a workspace of this product."""
        return f"{self._entry}_{name}"

    def lines(self) -> list[str]:
        """Descriptions of what is split, or read without tensor cores."""
        lines = []
        for side in self.sides if self.parts > 1 or not self._engine else ():
            o = side.operand
            axes = ", ".join(f"{{{axis.inside}, {axis.extent}, {axis.stride}}}" for axis in o.layers)
            lines += [
                f"constexpr ws::Operand {self.name(side)}{{.batch = {self._batch}, .rows = {side.rows}, "
                f".depth = {self._k}, .slices = {self._tiling.split_k},",
                f"    .row_stride = {o.row_stride}, .depth_stride = {o.depth_stride}, .wide = {self._wide(side)}, "
                f".chunk = {self._chunk(side)}{f', .layers = {{{axes}}}' if axes else ''}}};",
            ]
        return lines

    def directions(self) -> str:
        """How kernels' copies find both, as `ws::Directions` has it."""
        found = [f"ws::{'kAcross' if side.is_across else 'kAlong'}" for side in self.sides]
        if self._batch > 1 and self.copied:
            walks = [side.operand.walk() if side in self.copied else () for side in self.sides]
            found += [f"{{{', '.join(f'{{{axis.inside}, {axis.extent}}}' for axis in walk)}}}" for walk in walks]
        return ", ".join(found)

    # -- kernels that split

    def kernels(self) -> list[Kernel]:
        """One that splits operands whose rows' elements are neighbours, and one for the others, where there are any."""
        return [] if self.parts == 1 else [self._split(), *([self._split_across()] if self.across else [])]

    def _split(self) -> Kernel:
        """Splits operands whose rows' elements are neighbours, and measures the others."""
        calls = {}
        for side in self.sides:
            n, operand = side.name, self.name(side)
            if side.is_across:
                calls[n] = f"ws::measure_across<{operand}>(%, {side.start}, {n}_ranges);"
            else:
                calls[n] = f"ws::split_along<{operand}>(%, {side.start}, {n}_halves, {n}_roots, marks);"
        along = [side.name for side in self.sides if not side.is_across]
        halves = [f"{name}_{what}" for what in ("halves", "roots") for name in along]
        ranges = [f"{side.name}_ranges" for side in self.across]
        arguments = ["left", "right", *halves, *ranges, *(["marks"] if along else [])]
        return self._kernel("split", arguments, self.sides, calls)

    def _split_across(self) -> Kernel:
        """Splits operands whose rows are neighbours."""
        calls = {}
        for side in self.across:
            n = side.name
            ranges = f"{side.start}, {n}_ranges, {n}_halves, {n}_roots, marks"
            calls[n] = f"ws::split_across<{self.name(side)}>(%, {ranges});"
        whats = ("", "_ranges", "_halves", "_roots")
        arguments = [*(f"{side.name}{what}" for what in whats for side in self.across), "marks"]
        return self._kernel("split_across", arguments, self.across, calls)

    def _kernel(self, name: str, arguments: Sequence[str], sides: Sequence[Side], calls: Mapping[str, str]) -> Kernel:
        """A kernel whose first blocks have the first operand; `%` in a call is the number of a block."""
        operands = {side.name: side.operand.buffer for side in self.sides}
        passed = [address(operands.get(argument) or self.workspace(argument)) for argument in arguments]
        written = [self.workspace(argument) for argument in arguments if argument not in operands]
        record = geometry.record(f"{self._entry}_{name}", self._blocks(sides), SPLIT_THREADS, passed, written)
        pointers = {**POINTERS, "halves": f"{self.element}* __restrict__ "}
        lines = [
            f'extern "C" __global__ void __launch_bounds__(ws::kSplitThreads) {self._entry}_{name}(',
            *kernel_text.wrapped([pointers[argument.rpartition("_")[2]] + argument for argument in arguments]),
        ]
        if len(sides) == 1:
            return Kernel([*lines, f"  {calls[sides[0].name].replace('%', 'blockIdx.x')}", "}"], record)
        first = self._blocks(sides[:1])
        lines += [
            f"  if (blockIdx.x < {first}) {calls['left'].replace('%', 'blockIdx.x')}",
            f"  else {calls['right'].replace('%', f'blockIdx.x - {first}')}",
            "}",
        ]
        return Kernel(lines, record)

    # -- who splits what

    def _wide(self, side: Side) -> int:
        """Neighbouring operands that every access can take at once."""
        o = side.operand
        inner, outer = (side.rows, o.depth_stride) if side.is_across else (self._k, o.row_stride)
        return 1 if any(size % 4 for size in (inner, outer, *o.layer_strides, o.offset)) else 4

    def _groups(self, side: Side) -> int:
        wide = self._wide(side)
        aside = min(SPLIT_THREADS, max(32, geometry.power_of_two_at_least(-(-side.rows // wide))))
        return -(-side.rows // (aside * wide))

    def _chunk(self, side: Side) -> int:
        """Depth that a block splits across."""
        chunk, columns = 512, self.layers * self._groups(side)
        while chunk > TILE_DEPTH and columns * -(-self._slice // chunk) < 2 * self._hardware.sm_count:
            chunk //= 2
        return chunk

    def _blocks(self, sides: Sequence[Side]) -> int:
        blocks = 0
        for side in sides:
            rows = self.layers * side.rows
            if side.is_across:
                blocks += self.layers * self._groups(side) * -(-self._slice // self._chunk(side))
            else:
                blocks += -(-rows // (SPLIT_THREADS // 32)) if self._slice <= WARP_DEPTH else rows
        return blocks

    # -- records

    def workspaces(self) -> list[candidate_pb2.Buffer]:
        """Halves, and what is known of their rows."""
        found: list[candidate_pb2.Buffer] = []
        if not self._engine or self.parts == 1:
            return found
        for side in self.sides:
            pair = [self._slice, padded(side.rows)] if side.is_across else [side.rows, padded(self._slice)]
            halves, rows = [self.layers, self.parts, *pair], [self.layers * side.rows]
            found.append(workspace(self.workspace(f"{side.name}_halves"), self._engine.dtype, halves))
            found.append(workspace(self.workspace(f"{side.name}_roots"), tensor_pb2.DTYPE_FLOAT32, rows))
            if side.is_across:
                found.append(_cleared(self.workspace(f"{side.name}_ranges"), rows))
        return [*found, _cleared(self.workspace("marks"), [1])]

    def map(self, side: Side) -> candidate_pb2.LaunchArgument:
        """The operand's parts as (depth, row, part, layer), across (row, depth, …); what is not split by its axes."""
        assert self._engine
        o, wide, depth = side.operand, self._engine.element_bytes, padded(self._slice)
        if self.parts > 1:
            buffer = self.workspace(f"{side.name}_halves")
            inner = padded(side.rows) if side.is_across else depth
            part = (self._slice if side.is_across else side.rows) * inner
            others = [(self.parts, part), (self.layers, self.parts * part)]
        else:
            buffer, depth, inner = o.buffer, self._slice, o.depth_stride if side.is_across else o.row_stride
            others = [(axis.extent, axis.stride or inner) for axis in o.walk()]
            if self._tiling.split_k > 1:
                others[1] = self.layers, self._slice * o.depth_stride
        rows = TILE_ROWS if side.name == "left" else self._tiling.columns // self._tiling.cluster
        extents = [side.rows, self._slice] if side.is_across else [depth, side.rows]
        steps = self._engine.stage_depth
        box = [BLOCK_ROWS, steps] if side.is_across else [steps, rows]
        return candidate_pb2.LaunchArgument(
            tensor_map=candidate_pb2.TensorMap(
                buffer=buffer,
                dtype=self._engine.dtype,
                extents=[*extents, *(extent for extent, _ in others)],
                byte_strides=[wide * inner, *(wide * stride for _, stride in others)],
                box=[*box, *(1 for _ in others)],
                swizzle_bytes=128,
                rounds_to_tf32=self.parts == 1 and self._engine.dtype == tensor_pb2.DTYPE_FLOAT32,
            )
        )


def workspace(name: str, dtype: tensor_pb2.Dtype.ValueType, extents: Sequence[int]) -> candidate_pb2.Buffer:
    """Memory of a product's kernels, row-major."""
    strides = [1]
    for extent in reversed(extents[1:]):
        strides.insert(0, strides[0] * extent)
    return candidate_pb2.Buffer(
        name=name,
        role=candidate_pb2.ROLE_WORKSPACE,
        spec=tensor_pb2.TensorSpec(dtype=dtype, shape=extents, strides=strides),
        alignment_bytes=128,
    )


def _cleared(name: str, words: Sequence[int]) -> candidate_pb2.Buffer:
    """A workspace of 8-byte words that are zero between calls."""
    buffer = workspace(name, tensor_pb2.DTYPE_INT64, words)
    buffer.zero_between_calls = True
    return buffer
