"""The text and launches of a matrix product on tensor cores: shape, end, and the kernels that use them.

The one idea: everything that is the same for all products is in `ws_product.cuh` and its kin; a nest adds its extents,
its strides and one function, which gets two neighbouring sums and makes the stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.products.product_engine import Engine
from agent_synthesis.emit.cuda.products.product_tiling import (
    BLOCK_ROWS,
    TILE_DEPTH,
    TILE_ROWS,
    Tiling,
    padded,
    shared_bytes,
    slice_depth,
)
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import CUDA, CUDA_SHORT_ERFC
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.product_end import EVERYWHERE, band_of, end_of, three_axes, with_erfc
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import MatrixProduct, Operand, matrix_product
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2, tensor_pb2

WARPGROUP_THREADS = 128
SPLIT_THREADS = 256
ADD_THREADS = 256
SIMT_THREADS = 256
WARP_DEPTH = 1024
"""Depth up to which a warp splits a row, and not a block."""

PRODUCT_HEADERS = (
    "ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_barrier.cuh", "ws_tensor_copy.cuh", "ws_wgmma.cuh", "ws_split.cuh",
    "ws_product_shape.cuh", "ws_product.cuh",
)  # fmt: skip
_TAKEN = {"marks", "slices", "partials", "queries_map", "keys_map", "values_map", "mask"} | {
    f"{side}{what}" for side in ("left", "right") for what in ("", "_halves", "_roots", "_ranges", "_map")
}
"""Parameters that kernels have of their own."""


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


class ProductText:
    """One product's pieces of text."""

    def __init__(
        self,
        hardware: Hardware,
        nest: Nest,
        product: MatrixProduct,
        engine: Engine | None,
        tiling: Tiling,
        *,
        widest: int = 8,
    ) -> None:
        """`widest`: most columns that the end may take at once; without an `engine` there are no tensor cores."""
        self.hardware = hardware
        self._product = product
        self._engine = engine
        self._parts = engine.parts if engine else 1
        self._tiling = tiling
        self._nest = three_axes(nest, product)
        end, self._pack = end_of(self._nest, widest)
        self._end = with_erfc(end)
        dialect = CUDA if self._end is end else CUDA_SHORT_ERFC
        self._text = kernel_text.KernelText(self._end, "n", self._pack, dialect=dialect)
        self.entry = function_text.entry_name(nest)
        self._names = self._text.function.names
        self._batch, self._m, self._n, self._k = product.extents
        self._slice = slice_depth(self._k, tiling.slices)
        self.layers = self._batch * tiling.slices
        self._padded = padded(self._slice)
        self.sides = (Side("left", product.left, self._m), Side("right", product.right, self._n))
        self.across = tuple(side for side in self.sides if side.is_across)
        elements = {Type.F32: "float", Type.F16: "ws::half", Type.BF16: "ws::bfloat16"}
        self.element = engine.element if engine else elements[product.left.type]

    def kernels(self) -> tuple[list[list[str]], list[candidate_pb2.Launch], list[str]]:
        """Pieces of text, launches and headers of the product itself, with operands split before and repaired after."""
        pieces, launches, headers = [self.shape(), self.end()], [], [*PRODUCT_HEADERS]
        if self._parts > 1:
            pieces += [self.split(), *([self.split_across()] if self.across else [])]
            launches += [self.split_launch(), *([self.split_across_launch()] if self.across else [])]
        pieces.append(self.product())
        launches.append(self.product_launch())
        if self._parts > 1:
            headers.append("ws_product_simt.cuh")
            pieces.append(self.repair())
            launches.append(self.repair_launch())
        return pieces, launches, headers

    # -- text

    def shape(self) -> list[str]:
        """The product's type, and what is split."""
        t, wide = self._tiling, max(2, self._pack)
        directions = ", ".join(f"ws::{'kAcross' if side.is_across else 'kAlong'}" for side in self.sides)
        band = band_of(self._end)
        lines = [
            f"using {self.entry}_shape = ws::MatrixProduct<{self.element}, {self._parts},",
            f"    ws::Extents{{.batch = {self._batch}, .m = {self._m}, .n = {self._n}, .k = {self._k}, "
            f".slices = {t.slices}, .pack = {wide}}},",
            f"    ws::Directions{{{directions}}},",
            f"    ws::Tiling{{.columns = {t.columns}, .stages = {t.stages}, .cluster = {t.cluster}, "
            f".group = {t.group}, .promote = {t.promote}, .warpgroups = {t.warpgroups}}}",
        ]
        if band != EVERYWHERE:
            lines[-1] += ","
            lines.append(f"    ws::Band{{.first = {band[0]}, .last = {band[1]}}}")
        lines[-1] += ">;"
        for side in self.sides if self._parts > 1 or not self._engine else ():
            o = side.operand
            lines += [
                f"constexpr ws::Operand {self.operand(side)}{{.batch = {self._batch}, .rows = {side.rows}, "
                f".depth = {self._k}, .slices = {t.slices},",
                f"    .batch_stride = {o.batch_stride}, .row_stride = {o.row_stride}, "
                f".depth_stride = {o.depth_stride}, .wide = {self._wide(side)}, .chunk = {self._chunk(side)}}};",
            ]
        return lines

    def operand(self, side: Side) -> str:
        """The name of an operand's description."""
        return f"{self.entry}_{side.name}"

    def _wide(self, side: Side) -> int:
        """Neighbouring operands that every access can take at once."""
        o = side.operand
        inner, outer = (side.rows, o.depth_stride) if side.is_across else (self._k, o.row_stride)
        return 1 if any(size % 4 for size in (inner, outer, o.batch_stride, o.offset)) else 4

    def _groups(self, side: Side) -> int:
        wide = self._wide(side)
        aside = min(SPLIT_THREADS, max(32, geometry.power_of_two_at_least(-(-side.rows // wide))))
        return -(-side.rows // (aside * wide))

    def _chunk(self, side: Side) -> int:
        """Depth that a block splits across."""
        chunk = 512
        while (
            chunk > TILE_DEPTH
            and self.layers * self._groups(side) * -(-self._slice // chunk) < 2 * self.hardware.sm_count
        ):
            chunk //= 2
        return chunk

    def _chunks(self, side: Side) -> int:
        return -(-self._slice // self._chunk(side))

    def end(self) -> list[str]:
        """The function that takes two neighbouring sums to the stores."""
        text, function = self._text, self._text.function
        sums = self._names.take("sums")
        function.reductions[self._product.reduction] = f"{sums}[{text.e}]"
        given = [function.axes.get(name) or self._names.take(name) for name in ("batch", "m")]
        if self._pack > 1:
            column, body = text.begin, Scope(function, None, known=["batch", "m"], depth=2)
            text.stores(body, self._end.stores, define=lambda inner: inner.learn([f"%{self._product.reduction}"]))
            lines = body.lines
        else:
            column, body = self._names.take("first"), Scope(function, None, known=["batch", "m"], depth=3)
            body.line(f"const {text.offset} {text.begin} = {column} + {text.e};")
            if self._n % 2:
                body.line(f"if ({text.begin} >= {self._n}) break;")
            text.stores(body, self._end.stores, define=lambda inner: inner.learn([f"%{self._product.reduction}"]))
            lines = [
                f"    {kernel_text.UNROLL}",
                f"    for (int {text.e} = 0; {text.e} < 2; ++{text.e}) {{",
                *body.lines,
            ]
            lines.append("    }")
        members = []
        for buffer in self._end.buffers:
            kind = f"{function.dialect.storage[buffer.type]}*"
            name = function.buffers[buffer.name]
            members.append(f"  {kind if buffer.written else f'const {kind}'} __restrict__ {name};")
        axes = f"{text.offset} {given[0]}, {text.offset} {given[1]}, {text.offset} {column}"
        return [
            f"struct {self.entry}_end {{",
            *members,
            f"  WS_INLINE void operator()({axes}, ws::Pack<float, {max(2, self._pack)}> {sums}) const {{",
            *lines,
            "  }",
            "};",
        ]

    def split(self) -> list[str]:
        """Splits operands whose rows' elements are neighbours, and measures the others."""
        calls = {}
        for side in self.sides:
            n, operands = side.name, self.operand(side)
            if side.is_across:
                calls[n] = f"ws::measure_across<{operands}>(%, {side.start}, {n}_ranges);"
            else:
                calls[n] = f"ws::split_along<{operands}>(%, {side.start}, {n}_halves, {n}_roots, marks);"
        return self._splitting("split", self._split_arguments(), self.sides, calls)

    def split_across(self) -> list[str]:
        """Splits operands whose rows are neighbours."""
        calls = {}
        for side in self.across:
            n = side.name
            ranges = f"{side.start}, {n}_ranges, {n}_halves, {n}_roots, marks"
            calls[n] = f"ws::split_across<{self.operand(side)}>(%, {ranges});"
        return self._splitting("split_across", self._across_arguments(), self.across, calls)

    def _splitting(
        self, name: str, arguments: Sequence[str], sides: Sequence[Side], calls: Mapping[str, str]
    ) -> list[str]:
        lines = [
            f'extern "C" __global__ void __launch_bounds__(ws::kSplitThreads) {self.entry}_{name}(',
            *kernel_text.wrapped([self._pointer(argument.rpartition("_")[2]) + argument for argument in arguments]),
        ]
        if len(sides) == 1:
            return [*lines, f"  {calls[sides[0].name].replace('%', 'blockIdx.x')}", "}"]
        first = self._split_blocks(sides[0])
        lines += [
            f"  if (blockIdx.x < {first}) {calls['left'].replace('%', 'blockIdx.x')}",
            f"  else {calls['right'].replace('%', f'blockIdx.x - {first}')}",
        ]
        return [*lines, "}"]

    def _pointer(self, what: str) -> str:
        return f"{self.element}* __restrict__ " if what == "halves" else _POINTERS[what]

    def _split_arguments(self) -> list[str]:
        along = [side.name for side in self.sides if not side.is_across]
        halves = [f"{name}_{what}" for what in ("halves", "roots") for name in along]
        ranges = [f"{side.name}_ranges" for side in self.across]
        return ["left", "right", *halves, *ranges, *(["marks"] if along else [])]

    def _across_arguments(self) -> list[str]:
        whats = ("", "_ranges", "_halves", "_roots")
        return [*(f"{side.name}{what}" for what in whats for side in self.across), "marks"]

    def _split_blocks(self, side: Side) -> int:
        if side.is_across:
            return self.layers * self._groups(side) * self._chunks(side)
        rows = self.layers * side.rows
        return -(-rows // (SPLIT_THREADS // 32)) if self._slice <= WARP_DEPTH else rows

    def product(self) -> list[str]:
        """The product's kernel."""
        roots = "left_roots, right_roots" if self._parts > 1 else "nullptr, nullptr"
        call, passed = ("multiply_holding", "") if self._tiling.holds else ("multiply", f"{roots}, ")
        arguments = ["const __grid_constant__ ws::TensorMap left", "const __grid_constant__ ws::TensorMap right"]
        return [
            *self.signature(
                f"__launch_bounds__({self.entry}_shape::kThreads, 1) {self.entry}_product", [*arguments, *self._roots()]
            ),
            f"  ws::{call}<{self.entry}_shape>(left, right, {passed}{self.end_value()});",
            "}",
        ]

    def repair(self) -> list[str]:
        """The kernel that makes the products of rows without a scale."""
        arguments = ["const float* __restrict__ left", "const float* __restrict__ right", *self._roots()]
        operands = ", ".join(self.operand(side) for side in self.sides)
        starts = ", ".join(side.start for side in self.sides)
        arguments += ["ws::Marks* marks", *(f"{_POINTERS['ranges']}{side.name}_ranges" for side in self.across)]
        return [
            *self.signature(f"__launch_bounds__(ws::kSimtThreads) {self.entry}_repair", arguments),
            *(f"  ws::forget<{self.operand(side)}>({side.name}_ranges);" for side in self.across),
            f"  ws::repair<{self.entry}_shape, {operands}>({starts}, left_roots, right_roots, marks,",
            f"             {self.end_value()});",
            "}",
        ]

    def add(self) -> list[str]:
        """The kernel that adds up the slices and makes the stores."""
        return [
            *self.signature(
                f"__launch_bounds__(ws::kAddThreads) {self.entry}_add",
                ["const float* __restrict__ slices"],
                whole=True,
            ),
            f"  ws::add_slices<{self.entry}_shape>(slices, {self.end_value(whole=True)});",
            "}",
        ]

    def _roots(self) -> list[str]:
        sides = ("left", "right") if self._parts > 1 else ()
        return [f"const float* __restrict__ {side}_roots" for side in sides]

    def _is_end(self, whole: bool) -> bool:
        """Whether a kernel ends with the nest's stores, not with the sums of slices."""
        return whole or self._tiling.slices == 1

    def signature(self, name: str, arguments: list[str], *, whole: bool = False) -> list[str]:
        """The head of a kernel with these parameters, and then what its end needs."""
        function = self._text.function
        if not self._is_end(whole):
            arguments.append("float* __restrict__ slices")
        for buffer in self._end.buffers if self._is_end(whole) else ():
            kind = f"{function.dialect.storage[buffer.type]}*"
            arguments.append(f"{kind if buffer.written else f'const {kind}'} __restrict__ {self._passed(buffer.name)}")
        return [f'extern "C" __global__ void {name}(', *kernel_text.wrapped(arguments)]

    def _passed(self, buffer: str) -> str:
        """A buffer's name among a kernel's parameters, some of which have names of their own."""
        name = self._text.function.buffers[buffer]
        return f"{name}_" if name in _TAKEN else name

    def end_value(self, *, whole: bool = False) -> str:
        """What a kernel makes of sums: the nest's stores, or (unless `whole`) a slice's."""
        if not self._is_end(whole):
            return f"ws::SliceEnd<{self.entry}_shape>{{slices}}"
        return f"{self.entry}_end{{{', '.join(self._passed(buffer.name) for buffer in self._end.buffers)}}}"

    # -- records

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        """Halves, what is known of their rows, and the sums of slices."""
        found = []
        for side in self.sides if self._parts > 1 else ():
            assert self._engine
            pair = [self._slice, padded(side.rows)] if side.is_across else [side.rows, self._padded]
            halves = [self.layers, self._parts, *pair]
            found.append(_workspace(self._workspace(f"{side.name}_halves"), self._engine.dtype, halves))
            roots = [self.layers * side.rows]
            found.append(_workspace(self._workspace(f"{side.name}_roots"), tensor_pb2.DTYPE_FLOAT32, roots))
            if side.is_across:
                found.append(_cleared(self._workspace(f"{side.name}_ranges"), self.layers * side.rows))
        if self._parts > 1:
            found.append(_cleared(self._workspace("marks"), 1))
        if self._tiling.slices > 1:
            sums = [self.layers, self._m, self._n]
            found.append(_workspace(self._workspace("slices"), tensor_pb2.DTYPE_FLOAT32, sums))
        return tuple(found)

    def _workspace(self, name: str) -> str:
        return f"{self.entry}_{name}"

    def split_launch(self) -> candidate_pb2.Launch:
        """Of `split`."""
        blocks = sum(self._split_blocks(side) for side in self.sides)
        return self._split_record("split", blocks, self._split_arguments())

    def split_across_launch(self) -> candidate_pb2.Launch:
        """Of `split_across`."""
        blocks = sum(self._split_blocks(side) for side in self.across)
        return self._split_record("split_across", blocks, self._across_arguments())

    def _split_record(self, name: str, blocks: int, arguments: Sequence[str]) -> candidate_pb2.Launch:
        operands = {side.name: side.operand.buffer for side in self.sides}
        passed = [operands.get(argument) or self._workspace(argument) for argument in arguments]
        written = [self._workspace(argument) for argument in arguments if argument not in operands]
        return self.launch(name, blocks, SPLIT_THREADS, [address(each) for each in passed], written)

    def product_launch(self) -> candidate_pb2.Launch:
        """Of `product`."""
        maps = [self._map(side) for side in self.sides]
        tiling = self._tiling
        clusters = self.layers * -(-self._m // (TILE_ROWS * tiling.cluster)) * -(-self._n // tiling.columns)
        grid = min(clusters, self.hardware.resident_clusters(tiling.cluster)) * tiling.cluster
        threads = WARPGROUP_THREADS * (1 + tiling.warpgroups)
        record = self.launch("product", grid, threads, [*maps, *self.ending()], self.written())
        record.shared_bytes = shared_bytes(tiling, self._parts)
        if tiling.cluster > 1:
            record.cluster.CopyFrom(candidate_pb2.Extent3(x=tiling.cluster, y=1, z=1))
        return record

    def repair_launch(self) -> candidate_pb2.Launch:
        """Of `repair`."""
        operands = [address(side.operand.buffer) for side in self.sides]
        cleared = ["marks", *(f"{side.name}_ranges" for side in self.across)]
        written = [*self.written(), *map(self._workspace, cleared)]
        arguments = [*operands, *self.ending(*cleared)]
        return self.launch("repair", self.hardware.sm_count, SIMT_THREADS, arguments, written)

    def add_launch(self) -> candidate_pb2.Launch:
        """Of `add`."""
        packs = self._batch * self._m * -(-self._n // max(2, self._pack))
        blocks = min(-(-packs // ADD_THREADS), 8 * self.hardware.sm_count)
        names = [self._workspace("slices"), *(buffer.name for buffer in self._end.buffers)]
        written = [buffer.name for buffer in self._end.buffers if buffer.written]
        return self.launch("add", blocks, ADD_THREADS, [address(name) for name in names], written)

    def ending(self, *more: str) -> list[candidate_pb2.LaunchArgument]:
        """What follows the operands among a kernel's arguments."""
        names = ["left_roots", "right_roots"] if self._parts > 1 else []
        work = [self._workspace(name) for name in (*names, *more)]
        ends = [buffer.name for buffer in self._end.buffers] if self._is_end(False) else [self._workspace("slices")]
        return [address(name) for name in (*work, *ends)]

    def written(self) -> list[str]:
        """Buffers that a kernel's end writes."""
        if not self._is_end(False):
            return [self._workspace("slices")]
        return [buffer.name for buffer in self._end.buffers if buffer.written]

    def launch(
        self, name: str, grid: int, threads: int, arguments: Sequence[candidate_pb2.LaunchArgument], writes: list[str]
    ) -> candidate_pb2.Launch:
        """A record of a grid and block of one dimension."""
        return candidate_pb2.Launch(
            entry=f"{self.entry}_{name}",
            grid=candidate_pb2.Extent3(x=grid, y=1, z=1),
            block=candidate_pb2.Extent3(x=threads, y=1, z=1),
            arguments=arguments,
            writes=writes,
        )

    def _map(self, side: Side) -> candidate_pb2.LaunchArgument:
        """The operand's parts as (depth, row, part, layer); across as (row, depth, part, layer)."""
        assert self._engine
        o, wide = side.operand, self._engine.element_bytes
        if self._parts > 1:
            buffer = self._workspace(f"{side.name}_halves")
            inner = padded(side.rows) if side.is_across else self._padded
            part = (self._slice if side.is_across else side.rows) * inner
            layer = self._parts * part
        else:
            buffer, inner = o.buffer, o.depth_stride if side.is_across else o.row_stride
            layer = self._slice * o.depth_stride if self._tiling.slices > 1 else o.batch_stride
            part = layer = layer or inner
        rows = TILE_ROWS if side.name == "left" else self._tiling.columns // self._tiling.cluster
        depth = self._padded if self._parts > 1 else self._slice
        extents = [side.rows, self._slice] if side.is_across else [depth, side.rows]
        steps = self._engine.stage_depth
        box = [BLOCK_ROWS, steps] if side.is_across else [steps, rows]
        return candidate_pb2.LaunchArgument(
            tensor_map=candidate_pb2.TensorMap(
                buffer=buffer,
                dtype=self._engine.dtype,
                extents=[*extents, self._parts, self.layers],
                byte_strides=[wide * inner, wide * part, wide * layer],
                box=[*box, 1, 1],
                swizzle_bytes=128,
                rounds_to_tf32=self._parts == 1 and self._engine.dtype == tensor_pb2.DTYPE_FLOAT32,
            )
        )


_POINTERS = {
    "left": "const float* __restrict__ ", "right": "const float* __restrict__ ", "roots": "float* __restrict__ ",
    "ranges": "ws::Measured* __restrict__ ", "marks": "ws::Marks* ",
}  # fmt: skip
"""Last word of a splitting kernel's parameter, but for `halves` → its type."""


def address(buffer: str) -> candidate_pb2.LaunchArgument:
    """A buffer as a launch's argument."""
    return candidate_pb2.LaunchArgument(buffer=buffer)


def _workspace(name: str, dtype: tensor_pb2.Dtype.ValueType, extents: Sequence[int]) -> candidate_pb2.Buffer:
    strides = [1]
    for extent in reversed(extents[1:]):
        strides.insert(0, strides[0] * extent)
    return candidate_pb2.Buffer(
        name=name,
        role=candidate_pb2.ROLE_WORKSPACE,
        spec=tensor_pb2.TensorSpec(dtype=dtype, shape=extents, strides=strides),
        alignment_bytes=128,
    )


def _cleared(name: str, words: int) -> candidate_pb2.Buffer:
    """A workspace of 8-byte words that are zero between calls."""
    buffer = _workspace(name, tensor_pb2.DTYPE_INT64, [words])
    buffer.zero_between_calls = True
    return buffer


def product_of(nest: Nest) -> MatrixProduct:
    """The product that a nest which a schedule has accepted is."""
    product = matrix_product(iteration_space.simplified(nest))
    assert product is not None, nest
    return product
