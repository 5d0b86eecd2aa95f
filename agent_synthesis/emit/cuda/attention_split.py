"""The text and launches of attention of floats: kernels that split operands into halves, one that attends, a repair.

The one idea: a layer of queries, of keys and of values has one scale each, so that all that is left of it at a score is
a factor of the layer's. How operands are split, and what has no halves, is in `ws_attention_halves.cuh`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit.cuda import kernel_text
from agent_synthesis.emit.cuda.attention_text import AttentionText
from agent_synthesis.emit.cuda.attention_tiling import BLOCK
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products.operands import workspace
from agent_synthesis.emit.cuda.products.product_tiling import padded
from agent_synthesis.nests.attention import Attention, Factor
from warpsmith.v1 import candidate_pb2, tensor_pb2

THREADS, CHUNK_ROWS = 256, 256
"""Threads of a block that measures, splits or repairs, and rows that it measures or splits."""
LAUNCHES = 4
"""Kernels of a call."""


@dataclass(frozen=True)
class _Side:
    """An operand: `name` stands in the text and in workspaces alike."""

    name: str
    factor: Factor
    layers: int
    inner: int
    rows: int
    columns: int
    box_rows: int

    @property
    def wide(self) -> int:
        """Neighbours that every access can take at once."""
        f = self.factor
        steps = [f.offset, f.row, self.columns, f.inner if self.inner > 1 else 0]
        steps.append(f.outer if self.layers > self.inner else 0)
        return 1 if any(step % 4 for step in steps) else 4

    @property
    def words(self) -> int:
        """What measuring finds: each column's greatest, and one more, in each layer."""
        return self.layers * (self.columns + 1)

    @property
    def blocks(self) -> int:
        """That measure or split it."""
        return self.layers * -(-self.rows // CHUNK_ROWS)

    @property
    def start(self) -> str:
        """Address of its first element."""
        return f"{self.name} + {self.factor.offset}" if self.factor.offset else self.name


def extra_bytes(made: Attention) -> int:
    """What the splitting kernels move: operands read twice, their halves written and read."""
    rows = made.layers * made.rows.extent + made.layers // made.key.group * made.keys.extent
    values = made.layers // made.value.group * made.keys.extent
    return 12 * (rows * made.reduction.depth + values * made.columns.extent)


class SplitAttentionText(AttentionText):
    """The kernels' pieces."""

    def kernels(self) -> tuple[list[Kernel], list[str]]:
        """All kernels in order, and the headers that they need beside those of attention."""
        headers = ["ws_attention_split.cuh", "ws_attention_halves.cuh"]
        return [self._measure(), self._split(), self.product(), self.repair()], headers

    def _sides(self) -> tuple[_Side, ...]:
        made, depth, settings = self._made, self._made.reduction.depth, self._settings
        columns = {"queries": depth, "keys": depth, "values": made.columns.extent}
        rows = {"queries": made.rows.extent, "keys": made.keys.extent, "values": made.keys.extent}
        return tuple(
            _Side(
                name, factor, made.layers // factor.group, made.inner // factor.group, rows[name], columns[name],
                settings.queries if name == "queries" else settings.keys,
            )
            for name, factor in self._factors()
        )  # fmt: skip

    # -- text

    def shape(self) -> list[str]:
        """The kernel's type, and where operands lie."""
        lines = self._shape_of("ws::SplitAttention<", [])
        for side in self._sides():
            f = side.factor
            lines += [
                f"constexpr ws::Factor {self._name(side)}{{.layers = {side.layers}, .inner = {side.inner}, "
                f".rows = {side.rows}, .columns = {side.columns}, .wide = {side.wide},",
                f"    .outer_stride = {f.outer}, .inner_stride = {f.inner}, .row_stride = {f.row}}};",
            ]
        return lines

    def _measure(self) -> Kernel:
        calls = [f"ws::measure_rows<{self._name(s)}>(%, {s.start}, {s.name}_ranges);" for s in self._sides()]
        return self._of_rows("measure", ("ranges",), calls)

    def _split(self) -> Kernel:
        calls = [
            f"ws::split_rows<{self._name(s)}>(%, {s.start}, {s.name}_ranges, {s.name}_halves, {s.name}_roots);"
            for s in self._sides()
        ]
        return self._of_rows("split", ("ranges", "halves", "roots"), calls)

    def _of_rows(self, name: str, whats: Sequence[str], calls: Sequence[str]) -> Kernel:
        """A kernel whose first blocks have the queries, then the keys; `%` in a call is the number of a block."""
        types = {"ranges": "const unsigned*" if "halves" in whats else "unsigned*", "halves": "ws::half*",
                 "roots": "float*"}  # fmt: skip
        sides = self._sides()
        arguments = [f"const float* __restrict__ {side.name}" for side in sides]
        arguments += [f"{types[what]} __restrict__ {side.name}_{what}" for what in whats for side in sides]
        head = f'extern "C" __global__ void __launch_bounds__(ws::kHalvesThreads) {self.entry}_{name}('
        lines, first = [head, *kernel_text.wrapped(arguments)], 0
        for number, (side, call) in enumerate(zip(sides, calls, strict=True)):
            block = f"blockIdx.x - {first}" if first else "blockIdx.x"
            first += side.blocks
            condition = f"if (blockIdx.x < {first}) " if number + 1 < len(sides) else ""
            lines.append(f"  {'else ' if number else ''}{condition}{call.replace('%', block)}")
        names = [self._workspace(side, what) for what in whats for side in sides]
        written = [name for name in names if "halves" not in whats or not name.endswith("_ranges")]
        passed = [address(buffer) for buffer in (*(side.factor.buffer for side in sides), *names)]
        return Kernel([*lines, "}"], self.launch(name, first, THREADS, passed, written))

    def product(self) -> Kernel:
        """The kernel that attends."""
        arguments = [f"const __grid_constant__ ws::TensorMap {side.name}_map" for side in self._sides()]
        name, factor = self._scale()
        text = [
            *self.signature(
                f"__launch_bounds__({self.entry}_shape::kThreads, 1) {self.entry}_attention",
                [*arguments, *self._root_parameters(), *self._mask_parameter()],
            ),
            factor,
            f"  ws::attention_of_halves<{self.entry}_shape>(queries_map, keys_map, values_map, {self._roots_value()},",
            f"      {name}, {self._mask_value()}, {self.end_value()});",
            "}",
        ]
        return Kernel(text, self._record([*map(self._map, self._sides()), *self._root_addresses()]))

    def repair(self) -> Kernel:
        """The kernel that attends in plain floats where halves do not do."""
        sides = self._sides()
        arguments = [f"const float* __restrict__ {side.name}" for side in sides]
        arguments += [*self._root_parameters(), *(f"unsigned* __restrict__ {side.name}_ranges" for side in sides)]
        name, factor = self._scale()
        operands, starts = ", ".join(map(self._name, sides)), ", ".join(side.start for side in sides)
        text = [
            *self.signature(
                f"__launch_bounds__(ws::kHalvesThreads) {self.entry}_repair", [*arguments, *self._mask_parameter()]
            ),
            factor,
            *(f"  ws::forget_rows<{self._name(side)}>({side.name}_ranges);" for side in sides),
            f"  ws::repair_attention<{self.entry}_shape, {operands}>({starts},",
            f"      {self._roots_value()}, {name}, {self._mask_value()}, {self.end_value()});",
            "}",
        ]
        ranges = [self._workspace(side, "ranges") for side in sides]
        passed = [*(address(side.factor.buffer) for side in sides), *self._root_addresses(), *map(address, ranges)]
        passed += [*self._mask_address(), *self.ending()]
        return Kernel(text, self.launch("repair", self.hardware.sm_count, THREADS, passed, [*self.written(), *ranges]))

    def _name(self, side: _Side) -> str:
        return f"{self.entry}_{side.name}"

    def _workspace(self, side: _Side, what: str) -> str:
        return f"{self.entry}_{side.name}_{what}"

    def _root_parameters(self) -> list[str]:
        return [f"const float* __restrict__ {side.name}_roots" for side in self._sides()]

    def _root_addresses(self) -> list[candidate_pb2.LaunchArgument]:
        return [address(self._workspace(side, "roots")) for side in self._sides()]

    def _roots_value(self) -> str:
        return f"{{{', '.join(f'{side.name}_roots' for side in self._sides())}}}"

    # -- records

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        """Halves, their scales, and what is known of operands before."""
        found = []
        for side in self._sides():
            halves = [side.layers, 2, side.rows, padded(side.columns)]
            found.append(workspace(self._workspace(side, "halves"), tensor_pb2.DTYPE_FLOAT16, halves))
            found.append(workspace(self._workspace(side, "roots"), tensor_pb2.DTYPE_FLOAT32, [side.layers]))
            ranges = workspace(self._workspace(side, "ranges"), tensor_pb2.DTYPE_INT64, [-(-side.words // 2)])
            ranges.zero_between_calls = True
            found.append(ranges)
        return tuple(found)

    def _map(self, side: _Side) -> candidate_pb2.LaunchArgument:
        """Halves as (column, row, part, layer)."""
        row = 2 * padded(side.columns)
        return candidate_pb2.LaunchArgument(
            tensor_map=candidate_pb2.TensorMap(
                buffer=self._workspace(side, "halves"),
                dtype=tensor_pb2.DTYPE_FLOAT16,
                extents=[side.columns, side.rows, 2, side.layers],
                byte_strides=[row, side.rows * row, 2 * side.rows * row],
                box=[BLOCK, side.box_rows, 1, 1],
                swizzle_bytes=128,
            )
        )
