"""CUDA schedule of matrix products with a pointwise end, on Hopper's tensor cores.

The one idea: f32 operands are split into two parts each (`ws_split.cuh`), whose three products give more than the
accuracy of f32 at four times a library's speed; others are multiplied as they are. The stores of the nest become one
function that the product's kernel and its repair both end with. Texts are in `product_text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.products import product_text, product_tiling
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, NEEDS, EngineName, engines, is_walked
from agent_synthesis.emit.cuda.products.product_text import product_of
from agent_synthesis.emit.cuda.products.product_tiling import Epilogue, ProductSettings, Tiling
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.product_end import HELD_WIDTH, can_hold
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import MatrixProduct, Operand, matrix_product
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware

LEAST_ROWS = 64
"""Rows and columns below which most of a tile of 128 would be empty: the library has kernels for those."""
LEAST_DEPTH = 32
PROMOTED_DEPTH = 64
"""Elements of depth whose products are summed by the tensor cores, which round towards zero, before they are promoted
to f32 registers. 128 and 256 are no faster (`docs/results/product_landscapes.jsonl`)."""
LEAST_SLICE = 1024
"""Depth below which a slice is not worth the sums that it adds."""
MOST_SLICE = 8192
"""Depth of a row that the splitting block holds in registers, so that it reads it once."""
MULTIPLYING_REGISTERS = {2: 240, 4: 112}
"""Multiplying warpgroups → registers of their threads once the copying warpgroup has handed its own back."""

RATES = {256: 1.0, 192: 1.0, 128: 0.96}
"""Columns of a tile → share of an SM's rate: narrow tiles copy more for each product."""
HELD_REGISTERS = 64
"""Registers of a thread beside its sums where an end is made between products: a GELU of eight spills with fewer."""


_BEGINNINGS = {
    1: (
        ProductSettings(cluster=2),
        ProductSettings(columns=192, cluster=2),
        ProductSettings(columns=192),
        ProductSettings(),
        ProductSettings(columns=128, stages=6),
    ),
    2: (ProductSettings(columns=128, stages=3),),
}
"""Parts of an operand's element → tilings to begin with."""


class CudaProduct(CudaSchedule):
    """Tiles of 128 rows."""

    name = "cuda_product"
    settings = ProductSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """A product of two matrices, each contiguous along its rows or its depth, and stores at every point of it."""
        product = matrix_product(iteration_space.simplified(nest))
        if product is None or not engines(nest, product):
            return False
        if product.left.type is Type.F32 and iteration_space.reads_what_it_writes(nest):
            return False  # tiles whose rows no scale fits are computed again
        _, m, n, k = product.extents
        if min(m, n) < LEAST_ROWS or k < LEAST_DEPTH or not iteration_space.is_safe_in_place(nest):
            return False
        return _suits(product.left) and _suits(product.right)

    def defaults(self, nest: Nest) -> ProductSettings:
        """Of a few tilings that measured well at 4096 and 8192 of everything, the fastest by a model of waves."""
        return _fastest(self.hardware, nest, engines(nest, product_of(nest)))

    def alternatives(self, nest: Nest, current: ProductSettings) -> Sequence[ProductSettings]:
        """One change away; another engine comes with a tiling of its own."""
        product = product_of(nest)
        slices = (1, *_slice_counts(self.hardware, product, current.columns))
        changes = current.one_change_away(engine=(), split_k=slices)
        others = [engine for engine in engines(nest, product) if engine is not current.engine]
        same = geometry.legal(changes, lambda settings: require_fits(self.hardware, nest, settings))
        return (*same, *(_fastest(self.hardware, nest, [engine]) for engine in others))

    def footprint(self, nest: Nest, settings: ProductSettings) -> Footprint:
        """Parts are written and read once more than their floats."""
        product = product_of(nest)
        batch, m, n, k = product.extents
        engine, tiling = ENGINES[settings.engine], settings.tiling
        extra, launches = 0, 1
        if engine.parts > 1:
            across = [rows for rows, operand in ((m, product.left), (n, product.right)) if operand.depth_stride != 1]
            extra += batch * k * (4 * engine.element_bytes * (m + n) + 4 * sum(across))
            launches += 3 if across else 2
        if tiling.split_k > 1:
            extra += 8 * product.sum_count * tiling.split_k
            launches += 1
        return Footprint(
            extra_bytes=extra,
            parallel_count=_tile_count(product, tiling),
            launch_count=launches,
            tensor_flop_count=engine.cost * product.flop_count,
        )

    def emit(self, nest: Nest, settings: ProductSettings) -> Emission:
        """The product's kernel; for f32 between one that splits operands and one that repairs what has no halves."""
        require_fits(self.hardware, nest, settings)
        simple, tiling = iteration_space.simplified(nest), settings.tiling
        made = product_text.ProductText(self.hardware, simple, product_of(nest), ENGINES[settings.engine], tiling)
        kernels, headers = made.kernels()
        headers += ["ws_product_held.cuh"] if tiling.overlapped else []
        return made.emission(function_text.header(simple, self.name, settings), kernels, headers)


def require_fits(hardware: Hardware, nest: Nest, settings: ProductSettings) -> None:
    """Checks a tiling against an SM's shared memory, a thread's registers and a copy's box.

    Raises:
        IllegalMove: names the limit.
    """
    engine, tiling = ENGINES[settings.engine], settings.tiling
    needed = product_tiling.shared_bytes(tiling, engine.parts)
    if needed > hardware.shared_bytes:
        raise IllegalMove(f"{nest.name}: {needed} bytes of shared memory, of {hardware.shared_bytes} a block may have")
    product = product_of(nest)
    depth = product_tiling.slice_depth(product.extents[3], tiling.split_k)
    sets = min(engine.sums, 2) if engine.stages(depth) == 1 else engine.sums  # one stage promotes nothing
    if tiling.overlapped and not _holds(nest, tiling):
        raise IllegalMove(
            f"{nest.name}: its epilogue reads memory, or is not made of vectors, or a tile is too short to overlap one"
        )
    values = sets * tiling.columns + tiling.columns // 2 * tiling.overlapped
    others = HELD_REGISTERS if tiling.overlapped else geometry.KERNEL_OVERHEAD_REGISTERS
    registers = values // tiling.warpgroups + others
    if registers > (limit := MULTIPLYING_REGISTERS[tiling.warpgroups]):
        raise IllegalMove(f"{nest.name}: about {registers} registers a thread, of {limit}")
    if engine.parts == 1 and tiling.promote > 1:
        raise IllegalMove(f"{nest.name}: sums of whole elements are not promoted")
    if 2 * tiling.columns // tiling.warpgroups % 64:
        raise IllegalMove(f"{nest.name}: {tiling.warpgroups} warpgroups share no {tiling.columns} columns by 64")
    shared_rows = product_tiling.BLOCK_ROWS if product.right.depth_stride != 1 else 8
    if tiling.columns // tiling.cluster % shared_rows:
        raise IllegalMove(
            f"{nest.name}: a cluster of {tiling.cluster} does not share {tiling.columns} columns by {shared_rows}"
        )
    if tiling.split_k > 1:
        _require_slices(nest.name, product, tiling.split_k, is_split=engine.parts > 1)


def _require_slices(name: str, product: MatrixProduct, slices: int, *, is_split: bool) -> None:
    """Checks that no slice is empty, and that the copy engine finds slices of what is not split."""
    batch, _, _, k = product.extents
    if product_tiling.without_empty(k, slices) < slices:
        raise IllegalMove(f"{name}: {slices} slices of a depth of {k} leave one empty")
    if not is_split and (batch > 1 or k % (slices * product_tiling.TILE_DEPTH)):
        raise IllegalMove(f"{name}: operands that are not split are sliced without a batch, and into whole stages")


def predicted_ns(hardware: Hardware, product: MatrixProduct, settings: ProductSettings) -> float:
    """Time of the product's kernel and of adding slices, by waves of tiles: for comparing tilings with each other."""
    engine, tiling = ENGINES[settings.engine], settings.tiling
    k = product.extents[3]
    resident = hardware.resident_clusters(tiling.cluster)
    waves = -(-_tile_count(product, tiling) // (resident * tiling.cluster))
    depth = geometry.round_up(product_tiling.slice_depth(k, tiling.split_k), 16)
    flops = 2 * product_tiling.TILE_ROWS * tiling.columns * depth * engine.cost
    costs = hardware.costs
    tile_ns = flops / (costs.tile_flops_per_ns * RATES[tiling.columns]) + costs.tile_end_ns
    return waves * tile_ns + adding_ns(hardware, product, tiling.split_k)


def adding_ns(hardware: Hardware, product: MatrixProduct, slices: int) -> float:
    """Time of writing and adding up slices' sums."""
    costs = hardware.costs
    return costs.slices_ns + 8 * product.sum_count * slices / costs.bytes_per_ns if slices > 1 else 0.0


def split_and_product_ns(hardware: Hardware, nest: Nest, product: MatrixProduct) -> float:
    """Time of this schedule's kernels for a product of floats: splitting, where it does, moves an operand two or three
    times."""
    batch, m, n, k = product.extents
    settings, moved = CudaProduct(hardware).defaults(nest), 0
    is_held = product_tiling.slice_depth(k, settings.split_k) <= MOST_SLICE
    sides = ((m, product.left), (n, product.right)) if ENGINES[settings.engine].parts > 1 else ()
    for rows, operand in sides:
        reads = 1 if is_held and operand.depth_stride == 1 else 2
        moved += 4 * rows * k * (operand.layer_count * reads + batch)
    return predicted_ns(hardware, product, settings) + moved / hardware.costs.bytes_per_ns


def _tile_count(product: MatrixProduct, tiling: Tiling) -> int:
    """Blocks' tiles, whole clusters of them."""
    clusters = product.tile_count(product_tiling.TILE_ROWS * tiling.cluster, tiling.columns)
    return tiling.split_k * tiling.cluster * clusters


def _fastest(hardware: Hardware, nest: Nest, names: Sequence[EngineName]) -> ProductSettings:
    """The fastest beginning of these engines."""
    product = product_of(nest)
    made = [each for engine in names for each in _beginnings(hardware, product, engine)]
    possible = geometry.legal(made, lambda settings: require_fits(hardware, nest, settings))
    return min(possible, key=lambda settings: predicted_ns(hardware, product, settings))


def _beginnings(hardware: Hardware, product: MatrixProduct, engine: EngineName) -> Iterator[ProductSettings]:
    """What a product by this engine may begin with."""
    given, k = ENGINES[engine], product.extents[3]
    promote = PROMOTED_DEPTH // given.stage_depth if given.parts > 1 else 1
    for tiles in _BEGINNINGS[given.parts]:
        # Overlapped epilogues compile for seconds: they are the first alternative.
        epilogue, promoted = (None, promote) if product.left.type is Type.F32 else (Epilogue.DIRECT, None)
        warpgroups = 4 if given.stages(k) == 1 else 2
        made = replace(tiles, engine=engine, epilogue=epilogue, promote=promoted, warpgroups=warpgroups)
        for slices in _slice_counts(hardware, product, tiles.columns):
            yield replace(made, split_k=slices)


def _slice_counts(hardware: Hardware, product: MatrixProduct, columns: int) -> tuple[int, ...]:
    """Slices that fill one, two … waves of multiprocessors, where one slice leaves most of them idle."""
    k = product.extents[3]
    tiles = product.tile_count(product_tiling.TILE_ROWS, columns)
    if 2 * tiles > hardware.sm_count:
        return (1,)
    whole = max(1, hardware.sm_count // tiles)
    whole *= max(1, -(-k // (MOST_SLICE * whole)))
    counts = {1, whole, *(2**i for i in range(1, 6) if 2**i * tiles <= hardware.sm_count)}
    return tuple(sorted(count for count in counts if count == 1 or k // count >= LEAST_SLICE))


def _holds(nest: Nest, tiling: Tiling) -> bool:
    """Whether a tile's end may be made during the next tile, two of whose steps belong to each vector of a thread."""
    product = product_of(nest)
    vectors = tiling.columns // (tiling.warpgroups * HELD_WIDTH)
    steps = -(-product.extents[3] // product_tiling.TILE_DEPTH)
    return tiling.split_k == 1 and 2 * vectors <= steps and can_hold(iteration_space.simplified(nest), product)


def _suits(operand: Operand) -> bool:
    """Whether the splitting kernel (f32) or the copy engine (16 bits) can walk the operand."""
    if 1 not in (operand.depth_stride, operand.row_stride) or min(operand.depth_stride, operand.row_stride) <= 0:
        return False
    if operand.type is Type.F32:
        return min(operand.layer_strides, default=0) >= 0
    return is_walked(operand, operand.row_stride if operand.depth_stride == 1 else operand.depth_stride, 8)
