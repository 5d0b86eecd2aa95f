"""CUDA schedule of matrix products with a pointwise end, on Hopper's tensor cores.

The one idea: f32 operands are split into two halves each (`ws_split.cuh`), whose three products give more than the
accuracy of f32 at four times a library's speed; 16-bit operands are multiplied as they are. The stores of the nest
become one function that the product's kernel and its repair both end with. Texts are in `cuda_product_text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import cuda_product_text, cuda_shape, shape
from agent_synthesis.emit.cuda_product_text import Tiling
from agent_synthesis.ir import Nest, Type
from agent_synthesis.product import MatrixProduct, Operand, matrix_product
from agent_synthesis.schedule import Emission, Footprint, Parameters
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

LEAST_ROWS = 64
"""Rows and columns below which most of a tile of 128 would be empty: the library has kernels for those."""
LEAST_DEPTH = 32
SHORT_DEPTH = 1024
"""Depth up to which sums are promoted every 64 elements instead of every 128."""
MULTIPLYING_REGISTERS = 240
"""Registers of a multiplying thread once the copying warpgroup has handed its own back."""


@dataclass(frozen=True)
class Engine:
    """How tensor cores make a product."""

    parts: int
    """Values that an operand's element becomes: two halves for f32."""
    products: int
    """16-bit products made for one of the nest."""
    sums: int
    """Sets of accumulators that a thread holds."""


ENGINES = {"fp16x3": Engine(2, 3, 3), "fp16": Engine(1, 1, 1), "bf16": Engine(1, 1, 1)}
_BY_TYPE = {Type.F32: "fp16x3", Type.F16: "fp16", Type.BF16: "bf16"}


class CudaProduct:
    """Choices: `engine`, given by the operands' type.

    Integers: `columns` of a tile (its rows are 128), `stages` of 64 elements of depth in shared memory, `cluster`
    (blocks that share the columns' copies), `group` (rows of tiles walked together), `promote` (stages between
    promotions of sums to f32 registers, for fp16x3).
    """

    name = "cuda_product"
    target = task_pb2.TARGET_CUDA

    def accepts(self, nest: Nest) -> bool:
        """A product of two matrices, each contiguous along its rows or its depth, and stores at every point of it."""
        product = matrix_product(shape.simplified(nest))
        if product is None or product.left.type is not product.right.type or product.left.type not in _BY_TYPE:
            return False
        _, m, n, k = product.extents
        if min(m, n) < LEAST_ROWS or k < LEAST_DEPTH or not shape.is_safe_in_place(nest):
            return False
        return all(_suits(operand) for operand in (product.left, product.right))

    def defaults(self, nest: Nest) -> Parameters:
        """The tiles that measured best at 4096 and 8192 of everything."""
        engine = _BY_TYPE[_product(nest).left.type]
        if engine == "fp16x3":
            # A library's own error is small where few terms are added, and tensor cores round towards zero.
            promote = 1 if _product(nest).extents[3] <= SHORT_DEPTH else 2
            tiles = {"columns": 128, "stages": 3, "cluster": 1, "group": 8, "promote": promote}
            return Parameters({"engine": engine}, tiles)
        return Parameters({"engine": engine}, {"columns": 256, "stages": 4, "cluster": 2, "group": 8})

    def alternatives(self, nest: Nest, current: Parameters) -> Sequence[Parameters]:
        """One change away."""
        changes = cuda_shape.domain_without(current, {
            "columns": (128, 192, 256),
            "stages": (2, 3, 4, 5, 6),
            "cluster": (1, 2),
            "group": (4, 8, 16),
            "promote": (1, 2, 4),
        })  # fmt: skip
        return cuda_shape.legal(changes, lambda parameters: require_fits(nest, parameters))

    def footprint(self, nest: Nest, parameters: Parameters) -> Footprint:
        """Halves are written and read once more than their floats."""
        product = _product(nest)
        batch, m, n, k = product.extents
        engine = ENGINES[parameters.choices["engine"]]
        tiles = batch * -(-m // cuda_product_text.TILE_ROWS) * -(-n // parameters.integers["columns"])
        split = engine.parts > 1
        return Footprint(
            extra_bytes=8 * batch * (m + n) * k if split else 0,
            parallel_count=tiles,
            launch_count=3 if split else 1,
            tensor_flop_count=engine.products * product.flop_count,
        )

    def emit(self, nest: Nest, parameters: Parameters) -> Emission:
        """The product's kernel; for f32 between one that splits operands and one that repairs what has no halves."""
        require_fits(nest, parameters)
        simple = shape.simplified(nest)
        engine = ENGINES[parameters.choices["engine"]]
        return cuda_product_text.emission(simple, _product(nest), engine.parts, _tiling(parameters), parameters)


def require_fits(nest: Nest, parameters: Parameters) -> None:
    """Checks a tiling against an SM's shared memory, a thread's registers and a copy's box.

    Raises:
        IllegalMove: names the limit.
    """
    engine, tiling = ENGINES[parameters.choices["engine"]], _tiling(parameters)
    needed = cuda_product_text.shared_bytes(tiling, engine.parts)
    if needed > cuda_shape.SHARED_BYTES:
        raise IllegalMove(
            f"{nest.name}: {needed} bytes of shared memory, of {cuda_shape.SHARED_BYTES} a block may have"
        )
    registers = engine.sums * tiling.columns // 2 + cuda_shape.KERNEL_OVERHEAD_REGISTERS
    if registers > MULTIPLYING_REGISTERS:
        raise IllegalMove(f"{nest.name}: about {registers} registers a thread, of {MULTIPLYING_REGISTERS}")
    if tiling.columns // tiling.cluster % 8:
        raise IllegalMove(f"{nest.name}: a cluster of {tiling.cluster} shares no {tiling.columns} columns in eights")


def _tiling(parameters: Parameters) -> Tiling:
    given = {"promote": 1, **parameters.integers}
    return Tiling(**{key: given[key] for key in ("columns", "stages", "cluster", "group", "promote")})


def _product(nest: Nest) -> MatrixProduct:
    product = matrix_product(shape.simplified(nest))
    assert product is not None, nest
    return product


def _suits(operand: Operand) -> bool:
    """Whether the splitting kernel (f32) or the copy engine (16 bits) can walk the operand."""
    if operand.type is Type.F32:
        return 1 in (operand.depth_stride, operand.row_stride) and min(operand.depth_stride, operand.row_stride) > 0
    aligned = operand.row_stride % 8 == 0 and operand.batch_stride % 8 == 0 and operand.row_stride > 0
    return operand.depth_stride == 1 and operand.offset == 0 and aligned
