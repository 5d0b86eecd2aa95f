"""CUDA schedule of products of few rows with a weight that is computed where it is used: `ws_product_decoded.cuh`.

The one idea: with few rows, reading the weight is the work. A quantised one is half or a quarter of what the library
multiplies, which another kernel would write for it first; so it is read as it lies, once, and becomes numbers of 16
bits in the registers of the tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import generated_struct, geometry, kernel_text
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel
from agent_synthesis.emit.cuda.products import product_tiling
from agent_synthesis.emit.cuda.products.product_text import ProductText
from agent_synthesis.emit.cuda.products.product_tiling import Tiling
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.decoded_product import WEIGHT, DecodedProduct, Read, decoded_product
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove

MOST_ROWS = 64
"""Of the left: above, the weight is used so often that computing it for each tile of the left is the work."""
_WHOLE_COLUMNS = 8
"""Of the left's rows, in a product of tensor cores."""
_ROW_LANES = 8
"""Lanes of a warp that have rows of their own."""
_MOST_LOADED_ACROSS = 2
"""Steps of a weight across the depth whose loads are under way: with four, NVRTC spills 464 bytes for 16 rows."""
_MOST_SUMS = 64
"""Of a thread."""
_MOST_SHARED = 48 << 10
"""Bytes of a kernel's declared shared memory."""
_HEADERS = (
    "ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_split.cuh", "ws_vectors.cuh", "ws_product_shape.cuh",
    "ws_product_decoded.cuh",
)  # fmt: skip
_MEMBERS = ("Loads", "kAcross", "load", "decode", "at", "made")
"""What the struct calls things of its own."""


@dataclass(frozen=True)
class DecodedSettings(Settings):
    """Of `cuda_product_decoded`."""

    rows: int = setting(16, "rows of the weight that a block multiplies", (16, 32, 64))
    warps: int = setting(8, "of a block, which share the depth", (4, 8, 16))
    loaded: int = setting(1, "steps of a warp whose loads are under way", (1, 2, 4))
    """With one, more blocks share an SM: 42 us instead of 69 with four (16 rows times an int8 weight of 8192x8192)."""
    split_k: int = setting(1, "slices of the depth, which a kernel of their own adds up", (1, 2, 4, 8))


class CudaDecodedProduct(CudaSchedule):
    """Few rows times a weight that is computed in registers."""

    name = "cuda_product_decoded"
    settings = DecodedSettings

    def accepts(self, nest: Nest) -> bool:
        """A product of 16 bits, of 2 to 64 rows, whose weight is read in vectors of the depth or of its rows."""
        found = decoded_product(nest)
        return (
            found is not None
            and 2 <= found.product.extents[1] <= MOST_ROWS
            and found.width > 0
            and not iteration_space.reads_what_it_writes(nest)
        )

    def defaults(self, nest: Nest) -> DecodedSettings:
        """More rows of the weight where blocks are many, each of which reads the left; slices where they are few."""
        _, m, n, _ = _decoded(nest).product.extents
        busy = 2 * self.hardware.sm_count
        possible = [rows for rows in _row_counts(nest) if _sums(rows, m) <= _MOST_SUMS]
        if _decoded(nest).is_across:  # vectors are as long as there are rows
            rows = max(possible, default=min(_row_counts(nest)))
        else:
            rows = max((rows for rows in possible if n // rows >= busy), default=16)
        slices = max((count for count in _slice_counts(nest) if count * -(-n // rows) <= busy), default=1)
        return DecodedSettings(rows=rows, split_k=slices)

    def alternatives(self, nest: Nest, current: DecodedSettings) -> Sequence[DecodedSettings]:
        """One change away."""
        changes = current.one_change_away(split_k=_slice_counts(nest), rows=_row_counts(nest))
        return geometry.legal(changes, lambda settings: self._require(nest, settings))

    def footprint(self, nest: Nest, settings: DecodedSettings) -> Footprint:
        """Slices' sums are written and read."""
        product, slices = _decoded(nest).product, settings.split_k
        tiles = product.tile_count(product.extents[1], settings.rows)
        return Footprint(
            extra_bytes=8 * product.sum_count * slices if slices > 1 else 0,
            parallel_count=tiles * slices,
            launch_count=1 + (slices > 1),
            tensor_flop_count=product.flop_count,
        )

    def emit(self, nest: Nest, settings: DecodedSettings) -> Emission:
        """One kernel, and one that adds slices."""
        self._require(nest, settings)
        found = _decoded(nest)
        tiling = Tiling(settings.rows, stages=1, cluster=1, raster=1, promote=1, split_k=settings.split_k)
        made = _DecodedText(self.hardware, found.nest, found.product, None, tiling, widest=8)
        made.operands.element = made.storage(found.nest.buffer(WEIGHT).type)
        heading = function_text.header(iteration_space.simplified(nest), self.name, settings)
        weight = _WeightText(made.entry, found, settings.rows // _ROW_LANES if found.is_across else 0)
        return made.emission(heading, [made.multiplied(weight, settings)], _HEADERS)

    def _require(self, nest: Nest, settings: DecodedSettings) -> None:
        """Checks what threads and their block hold, and that no slice is empty.

        Raises:
            IllegalMove: names the limit.
        """
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} is no product of 16 bits of few rows whose weight is read in vectors")
        _, m, _, _ = _decoded(nest).product.extents
        if settings.rows not in _row_counts(nest):
            raise IllegalMove(f"{nest.name}: its weight is not read in vectors of {settings.rows // _ROW_LANES} rows")
        if _decoded(nest).is_across and settings.loaded > _MOST_LOADED_ACROSS:
            raise IllegalMove(f"{nest.name}: vectors of {settings.loaded} steps across the depth spill")
        if settings.split_k not in _slice_counts(nest):
            raise IllegalMove(f"{nest.name}: {settings.split_k} slices leave one empty")
        sums = _sums(settings.rows, m)
        if sums > _MOST_SUMS:
            raise IllegalMove(f"{nest.name}: {sums} sums of a thread, of {_MOST_SUMS} at most")
        if (shared := _shared_bytes(settings, m)) > _MOST_SHARED:
            raise IllegalMove(f"{nest.name}: {shared} bytes of shared memory for sums, of {_MOST_SHARED} at most")
        width = _decoded(nest).width
        held = sums + settings.loaded * (width * settings.rows // 16 + 4 * _column_tiles(m))
        held += width * settings.rows // 16 if _decoded(nest).is_across else 0  # what becomes pairs of the depth
        threads = 32 * settings.warps
        geometry.require_block(self.hardware, nest, threads=threads, shared_bytes=shared, held_registers=held)


class _WeightText:
    """The struct that reads and computes a weight."""

    def __init__(self, entry: str, found: DecodedProduct, across: int) -> None:
        """`across`: rows of a vector, of a weight that lies across the depth; 0 of one that lies along it."""
        self.name, self.depth_width, self._across = f"{entry}_weight", found.width, across
        self._axis, self._width = ("n", across) if across else ("k", found.width)
        self._weight = found.weight
        self.buffers = [buffer for buffer in found.weight.buffers if not buffer.written]
        self._reads = found.reads(self._width, self._axis)

    def lines(self, element: str) -> list[str]:
        """The struct; `element`: the C++ type of what it gives."""
        weight = self._weight
        text = kernel_text.KernelText(weight, self._axis, self._width, reserved=_MEMBERS)
        function, (store,) = text.function, weight.stores
        outer = [axis.name for axis in weight.parallel if axis.name != self._axis]
        numbers = {"batch": 0, "n": 1, "k": 1}
        places = [f"    const {text.offset} {function.axes[name]} = at[{numbers[name]}];" for name in outer]
        kinds = [
            f"ws::Pack<{function.dialect.storage[text.storage(read.load.buffer)]}, {read.width}>"
            for read in self._reads
        ]
        names = [function.names.take(f"{function.buffers[read.load.buffer]}_pack") for read in self._reads]
        at = f"const int (&at)[2], int {text.begin}"
        lines = [
            f"  using Loads = ws::List<{', '.join(kinds)}>;",
            f"  static constexpr int kAcross = {self._across};",
            "",
        ]
        for k, (read, kind) in enumerate(zip(self._reads, kinds, strict=True)):
            address_of = text.address(read.load.buffer, read.load, text.begin)
            loaded = f"    return ws::load<{read.width}, ws::kShared>({address_of});"
            lines += generated_struct.function(f"{kind} load(ws::VectorLoad<{k}>, {at}) const", [*places, loaded])
        inner = generated_struct.body(text, outer)
        inner.line(f"ws::Pack<{element}, {self._width}> made;")
        settled = [(read.load, _element(text, read, name)) for read, name in zip(self._reads, names, strict=True)]
        text.elements(inner, [store.value], lambda each: each.store(store, f"made[{text.lane}]"), settled=settled)
        inner.line("return made;")
        given = [f"const {kind}& {name}" for kind, name in zip(kinds, names, strict=True)]
        head = f"ws::Pack<{element}, {self._width}> decode({', '.join([at, *given])}) const"
        lines += generated_struct.function(head, [*places, *inner.lines])
        pointers = [f"  {text.argument(buffer)};" for buffer in self.buffers]
        return [f"struct {self.name} {{", *pointers, *lines, "};"]


def _element(text: kernel_text.KernelText, read: Read, vector: str) -> str:
    """The element of a vector that belongs to the one of the weight that is computed."""
    found = text.element(read.load.buffer, vector)
    return found if read.share == 1 else found.replace(f"[{text.lane}]", f"[{text.lane} / {read.share}]")


class _DecodedText(ProductText):
    """A product's pieces of text, with a weight that is computed."""

    weight: list[str]

    def multiplied(self, weight: _WeightText, settings: DecodedSettings) -> Kernel:
        """The kernel."""
        left = self.operands.sides[0]
        self.weight = [
            *weight.lines(self.operands.element),
            "",
            f"using {self.entry}_decoded = ws::DecodedProduct<{self.entry}_shape, {weight.name}, "
            f"{self.storage(left.operand.type)}, {self.entry}_left,",
            f"    ws::DecodedTiling{{.rows = {settings.rows}, .warps = {settings.warps}, .ahead = {settings.loaded}, "
            f".width = {weight.depth_width}}}>;",
        ]
        kinds = [f"const {self._text.function.dialect.storage[buffer.type]}*" for buffer in weight.buffers]
        passed = [f"weight_{number}" for number in range(len(kinds))]
        arguments = [f"const {self.storage(left.operand.type)}* __restrict__ left"]
        arguments += [f"{kind} __restrict__ {name}" for kind, name in zip(kinds, passed, strict=True)]
        threads = 32 * settings.warps
        text = [
            *self.signature(f"__launch_bounds__({threads}) {self.entry}_product", arguments),
            f"  __shared__ typename {self.entry}_decoded::Sums shared[{settings.warps}];",
            f"  ws::multiply_decoded<{self.entry}_decoded, {self.entry}_shape>({left.start}, "
            f"{weight.name}{{{', '.join(passed)}}}, shared,",
            f"             {self.end_value()});",
            "}",
        ]
        operands = [address(name) for name in (left.operand.buffer, *(buffer.name for buffer in weight.buffers))]
        blocks = self.operands.layers * -(-self._n // settings.rows)
        return Kernel(text, self.launch("product", blocks, threads, [*operands, *self.ending()], self.written()))

    def storage(self, kind: Type) -> str:
        """C++ type of what has a type in memory."""
        return self._text.function.dialect.storage[kind]

    def shape(self) -> list[str]:
        """The product's type, how the left lies, and the weight."""
        lines = super().shape()
        first = next(i for i, line in enumerate(lines) if line.startswith(f"constexpr ws::Operand {self.entry}_right"))
        return [*lines[:first], "", *self.weight]


def _decoded(nest: Nest) -> DecodedProduct:
    found = decoded_product(nest)
    assert found is not None, nest
    return found


def _row_counts(nest: Nest) -> tuple[int, ...]:
    """Of a block's tile: any, or as many as lanes read in vectors of rows."""
    found = _decoded(nest)
    return tuple(_ROW_LANES * width for width in found.across) if found.is_across else (16, 32, 64)


def _column_tiles(m: int) -> int:
    return -(-m // _WHOLE_COLUMNS)


def _sums(rows: int, m: int) -> int:
    return rows // 16 * _column_tiles(m) * 4


def _shared_bytes(settings: DecodedSettings, m: int) -> int:
    return 4 * settings.warps * settings.rows * _WHOLE_COLUMNS * _column_tiles(m)


def _slice_counts(nest: Nest) -> tuple[int, ...]:
    depth = _decoded(nest).product.extents[3]
    return tuple(count for count in (1, 2, 4, 8) if product_tiling.without_empty(depth, count) == count)
