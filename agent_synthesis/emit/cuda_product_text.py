"""The text and launches of a matrix product on tensor cores: shape, end, and the kernels that use them.

The one idea: everything that is the same for all products is in `ws_product.cuh` and its kin; a nest adds its extents,
its strides and one function, which gets two neighbouring sums and makes the stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit import cuda_shape, cuda_text, shape
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import CUDA
from agent_synthesis.ir import Axis, Index, Nest, Type
from agent_synthesis.product import MatrixProduct, Operand
from agent_synthesis.schedule import Emission, Parameters
from warpsmith.v1 import candidate_pb2, tensor_pb2

TILE_ROWS = 128
TILE_DEPTH = 64
PRODUCT_THREADS = 384
SPLIT_THREADS = 256
REPAIR_THREADS = 256
MOST_HELD = 8
"""Packs of four floats that a splitting thread keeps in registers; longer rows are read twice."""
COLUMN_ROWS = 32
"""Rows of a block that splits an operand whose rows are neighbours in memory."""

_HEADERS = (
    "ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_barrier.cuh", "ws_tensor_copy.cuh", "ws_wgmma.cuh", "ws_split.cuh",
    "ws_product.cuh",
)  # fmt: skip
_DTYPES = {Type.F16: tensor_pb2.DTYPE_FLOAT16, Type.BF16: tensor_pb2.DTYPE_BFLOAT16, Type.F32: tensor_pb2.DTYPE_FLOAT32}


@dataclass(frozen=True)
class Tiling:
    """Tiles of a product; see `CudaProduct`."""

    columns: int
    stages: int
    cluster: int
    group: int
    promote: int


def shared_bytes(tiling: Tiling, parts: int) -> int:
    """Dynamic shared memory of a block: the stages, a kilobyte of barriers, and one to begin at a multiple of it."""
    return tiling.stages * parts * (TILE_ROWS + tiling.columns) * TILE_DEPTH * 2 + 2048


def emission(simple: Nest, product: MatrixProduct, parts: int, tiling: Tiling, parameters: Parameters) -> Emission:
    """The whole source of a product in the form that `shape.simplified` gives."""
    made = _Product(simple, product, parts, tiling)
    heading = shape.header(simple, "cuda_product", parameters)
    if parts == 1:
        lines = [*heading, *made.shape(), "", *made.end(), "", *made.product()]
        return Emission("\n".join([*lines, ""]), _HEADERS, (made.product_launch(),))
    lines = [*heading, *made.shape(), "", *made.end(), "", *made.split(), "", *made.product(), "", *made.repair()]
    return Emission(
        "\n".join([*lines, ""]),
        (*_HEADERS, "ws_product_simt.cuh"),
        (made.split_launch(), made.product_launch(), made.repair_launch()),
        made.workspaces(),
    )


class _Product:
    """One product's pieces of text. `left` and `right` name operands in the text and in workspaces alike."""

    def __init__(self, nest: Nest, product: MatrixProduct, parts: int, tiling: Tiling) -> None:
        self._product = product
        self._parts = parts
        self._tiling = tiling
        self._nest = _three_axes(nest, product)
        self._end, self._pack = _end_of(self._nest)
        self._text = cuda_text.KernelText(self._end, "n", self._pack, CUDA, once=False, streaming=False)
        self._entry = shape.entry_name(nest)
        self._names = self._text.function.names
        self._batch, self._m, self._n, self._k = product.extents
        self._padded = cuda_shape.round_up(self._k, 8)
        self._sides = (("left", product.left, self._m), ("right", product.right, self._n))
        element = {Type.F32: "half", Type.F16: "half", Type.BF16: "bfloat16"}[product.left.type]
        self._element = f"ws::{element}"

    # -- text

    def shape(self) -> list[str]:
        extents = f"ws::Extents{{.batch = {self._batch}, .m = {self._m}, .n = {self._n}, .k = {self._k}}}"
        t = self._tiling
        tiling = (
            f"ws::Tiling{{.columns = {t.columns}, .stages = {t.stages}, .cluster = {t.cluster}, "
            f".group = {t.group}, .promote = {t.promote}}}"
        )
        return [
            f"using {self._entry}_shape = ws::MatrixProduct<{self._element}, {self._parts}, {extents},",
            f"    {tiling}>;",
        ]

    def end(self) -> list[str]:
        """The function that takes two neighbouring sums to the stores."""
        text, function = self._text, self._text.function
        sums = self._names.take("sums")
        function.reductions[self._product.reduction] = f"{sums}[{text.e}]"
        given = [function.axes.get(name, name) for name in ("batch", "m")]
        if self._pack == 2:
            column, body = text.begin, Scope(function, None, known=["batch", "m"], depth=2)
            text.stores(body, self._end.stores, define=lambda inner: inner.learn([f"%{self._product.reduction}"]))
            lines = body.lines
        else:
            column, body = self._names.take("first"), Scope(function, None, known=["batch", "m"], depth=3)
            body.line(f"const {text.offset} {text.begin} = {column} + {text.e};")
            if self._n % 2:
                body.line(f"if ({text.begin} >= {self._n}) break;")
            text.stores(body, self._end.stores, define=lambda inner: inner.learn([f"%{self._product.reduction}"]))
            lines = [f"    {cuda_text.UNROLL}", f"    for (int {text.e} = 0; {text.e} < 2; ++{text.e}) {{", *body.lines]
            lines.append("    }")
        members = []
        for buffer in self._end.buffers:
            kind = f"{function.dialect.storage[buffer.type]}*"
            name = function.buffers[buffer.name]
            members.append(f"  {kind if buffer.written else f'const {kind}'} __restrict__ {name};")
        axes = f"{text.offset} {given[0]}, {text.offset} {given[1]}, {text.offset} {column}"
        return [
            f"struct {self._entry}_end {{",
            *members,
            f"  WS_INLINE void operator()({axes}, ws::Pack<float, 2> {sums}) const {{",
            *lines,
            "  }",
            "};",
        ]

    def split(self) -> list[str]:
        lines = [
            f'extern "C" __global__ void __launch_bounds__({SPLIT_THREADS}) {self._entry}_split(',
            "    const float* __restrict__ left, const float* __restrict__ right,",
            "    ws::half* __restrict__ left_halves, ws::half* __restrict__ right_halves,",
            "    float* __restrict__ left_roots, float* __restrict__ right_roots) {",
            f"  constexpr int kDepth = {self._k}, kPadded = {self._padded};",
        ]
        first = 0
        for position, (side, operand, rows) in enumerate(self._sides):
            blocks = self._split_blocks(operand, rows)
            inner = [f"    {line}" for line in self._split_side(side, operand, rows, first)]
            lines += [f"  if (blockIdx.x < {blocks}) {{" if position == 0 else "  } else {", *inner]
            first = blocks
        return [*lines, "  }", "}"]

    def _split_blocks(self, operand: Operand, rows: int) -> int:
        return self._batch * (rows if operand.depth_stride == 1 else -(-rows // COLUMN_ROWS))

    def _split_side(self, side: str, operand: Operand, rows: int, first: int) -> list[str]:
        block = f"blockIdx.x - {first}" if first else "blockIdx.x"
        start = f"{side} + {operand.offset}" if operand.offset else side
        if operand.depth_stride == 1:
            held = -(-self._k // (4 * SPLIT_THREADS))
            aligned = all(size % 4 == 0 for size in (self._k, operand.row_stride, operand.batch_stride, operand.offset))
            settings = f"{SPLIT_THREADS}, {held if held <= MOST_HELD else 0}, {str(aligned).lower()}"
            if self._batch > 1:
                parts = f"row / {rows} * {2 * rows} + row % {rows}"
                place = f"row / {rows} * {operand.batch_stride} + row % {rows} * {operand.row_stride}"
            else:
                parts, place = "row", f"row * {operand.row_stride}"
            at = f"({parts})" if " " in parts else parts
            return [
                f"const ws::int64 row = {block};",
                f"ws::half* high = {side}_halves + {at} * kPadded;",
                f"ws::split_row<{settings}>({start} + {place}, kDepth, kPadded, high, high + {rows}LL * kPadded,",
                f"    {side}_roots + row);",
            ]
        groups = -(-rows // COLUMN_ROWS)
        return [
            f"const ws::int64 group = {block};",
            f"const int batch = group / {groups}, first = group % {groups} * {COLUMN_ROWS};",
            f"ws::half* high = {side}_halves + (batch * {2 * rows}LL + first) * kPadded;",
            f"ws::split_columns<{SPLIT_THREADS}>({start} + batch * {operand.batch_stride}LL, {operand.depth_stride},",
            f"    first, {rows}, kDepth, kPadded, high, high + {rows}LL * kPadded, {side}_roots + batch * {rows});",
        ]

    def product(self) -> list[str]:
        roots = "left_roots, right_roots" if self._parts > 1 else "nullptr, nullptr"
        arguments = ["const __grid_constant__ ws::TensorMap left", "const __grid_constant__ ws::TensorMap right"]
        arguments += self._roots()
        return [
            *self._signature(f"__launch_bounds__(ws::kProductThreads, 1) {self._entry}_product", arguments),
            f"  ws::multiply<{self._entry}_shape>(left, right, {roots}, {self._end_value()});",
            "}",
        ]

    def repair(self) -> list[str]:
        arguments = ["const float* __restrict__ left", "const float* __restrict__ right", *self._roots()]
        strides, starts = [], []
        for side, operand, _ in self._sides:
            starts.append(f"{side} + {operand.offset}" if operand.offset else side)
            values = f".batch = {operand.batch_stride}, .row = {operand.row_stride}, .depth = {operand.depth_stride}"
            strides.append(f"ws::Strides{{{values}}}")
        return [
            *self._signature(f"__launch_bounds__(ws::kRepairThreads) {self._entry}_repair", arguments),
            f"  ws::repair<{self._entry}_shape, {strides[0]},",
            f"             {strides[1]}>({', '.join(starts)}, left_roots, right_roots,",
            f"             {self._end_value()});",
            "}",
        ]

    def _roots(self) -> list[str]:
        sides = ("left", "right") if self._parts > 1 else ()
        return [f"const float* __restrict__ {side}_roots" for side in sides]

    def _signature(self, name: str, arguments: list[str]) -> list[str]:
        function = self._text.function
        for buffer in self._end.buffers:
            kind = f"{function.dialect.storage[buffer.type]}*"
            arguments.append(f"{kind if buffer.written else f'const {kind}'} __restrict__ {self._passed(buffer.name)}")
        return [f'extern "C" __global__ void {name}(', *cuda_text.wrapped(arguments)]

    def _passed(self, buffer: str) -> str:
        """A buffer's name among a kernel's parameters, some of which are called left and right."""
        name = self._text.function.buffers[buffer]
        return f"{name}_" if name in ("left", "right", "left_roots", "right_roots") else name

    def _end_value(self) -> str:
        return f"{self._entry}_end{{{', '.join(self._passed(buffer.name) for buffer in self._end.buffers)}}}"

    # -- records

    def workspaces(self) -> tuple[candidate_pb2.Buffer, ...]:
        found = []
        for side, _, rows in self._sides:
            halves = [self._batch, self._parts, rows, self._padded]
            found.append(_workspace(f"{self._entry}_{side}_halves", tensor_pb2.DTYPE_FLOAT16, halves))
            found.append(_workspace(f"{self._entry}_{side}_roots", tensor_pb2.DTYPE_FLOAT32, [self._batch * rows]))
        return tuple(found)

    def split_launch(self) -> candidate_pb2.Launch:
        work = [f"{self._entry}_{side}_{what}" for what in ("halves", "roots") for side in ("left", "right")]
        blocks = sum(self._split_blocks(operand, rows) for _, operand, rows in self._sides)
        operands = [operand.buffer for _, operand, _ in self._sides]
        return self._launch("split", blocks, SPLIT_THREADS, [_address(n) for n in [*operands, *work]], work)

    def product_launch(self) -> candidate_pb2.Launch:
        maps = [self._map(side, operand, rows) for side, operand, rows in self._sides]
        tiling = self._tiling
        clusters = self._batch * -(-self._m // (TILE_ROWS * tiling.cluster)) * -(-self._n // tiling.columns)
        grid = min(clusters, cuda_shape.RESIDENT_CLUSTERS[tiling.cluster]) * tiling.cluster
        record = self._launch("product", grid, PRODUCT_THREADS, [*maps, *self._ending()], self._written())
        record.shared_bytes = shared_bytes(tiling, self._parts)
        if tiling.cluster > 1:
            record.cluster.CopyFrom(candidate_pb2.Extent3(x=tiling.cluster, y=1, z=1))
        return record

    def repair_launch(self) -> candidate_pb2.Launch:
        operands = [_address(operand.buffer) for _, operand, _ in self._sides]
        blocks = cuda_shape.SM_COUNT
        return self._launch("repair", blocks, REPAIR_THREADS, [*operands, *self._ending()], self._written())

    def _ending(self) -> list[candidate_pb2.LaunchArgument]:
        roots = [f"{self._entry}_{side}_roots" for side in ("left", "right")] if self._parts > 1 else []
        return [_address(name) for name in [*roots, *(buffer.name for buffer in self._end.buffers)]]

    def _written(self) -> list[str]:
        return [buffer.name for buffer in self._end.buffers if buffer.written]

    def _launch(
        self, name: str, grid: int, threads: int, arguments: Sequence[candidate_pb2.LaunchArgument], writes: list[str]
    ) -> candidate_pb2.Launch:
        return candidate_pb2.Launch(
            entry=f"{self._entry}_{name}",
            grid=candidate_pb2.Extent3(x=grid, y=1, z=1),
            block=candidate_pb2.Extent3(x=threads, y=1, z=1),
            arguments=arguments,
            writes=writes,
        )

    def _map(self, side: str, operand: Operand, rows: int) -> candidate_pb2.LaunchArgument:
        """The operand's parts as (depth, row, part, batch)."""
        if self._parts > 1:
            buffer, depth, row, part = f"{self._entry}_{side}_halves", self._padded, self._padded, rows * self._padded
            batch = self._parts * part
        else:
            buffer, depth, row = operand.buffer, self._k, operand.row_stride
            part = batch = operand.batch_stride or row
        shared = side == "right" and self._tiling.cluster > 1
        box_rows = TILE_ROWS if side == "left" else self._tiling.columns // self._tiling.cluster
        return candidate_pb2.LaunchArgument(
            tensor_map=candidate_pb2.TensorMap(
                buffer=buffer,
                dtype=_DTYPES[Type.BF16 if self._element == "ws::bfloat16" else Type.F16],
                extents=[depth, rows, self._parts, self._batch],
                byte_strides=[2 * row, 2 * part, 2 * batch],
                box=[TILE_DEPTH, box_rows, 1 if shared else self._parts, 1],
                swizzle_bytes=128,
            )
        )


def _address(buffer: str) -> candidate_pb2.LaunchArgument:
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


def _three_axes(nest: Nest, product: MatrixProduct) -> Nest:
    """The nest over axes `batch` (where there is one), `m` and `n`; what is not affine in them has quotients."""
    groups = [("batch", product.batch), ("m", product.rows), ("n", product.columns)]
    kept = [(Axis(name, _count(axes)), axes) for name, axes in groups if axes]
    extents = {axis.name: axis.extent for axis in (*(axis for axis, _ in kept), *nest.reduced)}
    parts: dict[str, Index] = {}
    for whole, axes in kept:
        inside = whole.extent
        for axis in axes:
            outside, inside = inside, inside // axis.extent
            part = Index.axis(whole.name).divided(inside, extents)
            parts[axis.name] = part if outside == whole.extent else part.modulo(axis.extent, extents)
    return shape.reindexed(
        nest, lambda index: index.substituted(parts, extents), [axis for axis, _ in kept], nest.reduced
    )


def _end_of(nest: Nest) -> tuple[Nest, int]:
    """The stores alone, with the buffers that they touch, and how many neighbours every access takes at once."""
    end = replace(nest, reduced=(), reductions=())
    used = {name for name, _ in cuda_shape.accesses(end)}
    end = replace(end, buffers=tuple(buffer for buffer in nest.buffers if buffer.name in used))
    columns = next(axis for axis in end.parallel if axis.name == "n")
    return end, min(2, cuda_shape.widest_pack(end, columns))


def _count(axes: Sequence[Axis]) -> int:
    count = 1
    for axis in axes:
        count *= axis.extent
    return count
