"""How tensor cores make a product: the engines, and which of them may make one.

The one idea: an engine is the type that tensor cores read, and how many of its values stand for an element. What a
stage of shared memory holds, how a copy's box is cut and what a product costs all follow from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent_synthesis.emit.spelling import CUDA
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import MatrixProduct, Operand
from warpsmith.hardware import TENSOR_MAP_DIMENSIONS, Feature
from warpsmith.v1 import tensor_pb2

NEEDS = frozenset({Feature.BULK_COPIES, Feature.WARPGROUP_PRODUCTS, Feature.CLUSTERS})
"""What a card must have for any of them."""
_ROW_BYTES = 128
"""Bytes of an operand's row in a stage: the swizzle's width."""


EngineName = StrEnum("EngineName", "FP16X3 TF32X3 TF32 FP16 BF16")
"""What an engine is called."""


@dataclass(frozen=True)
class Engine:
    """How tensor cores make a product."""

    element: str
    """C++ type of what they read."""
    dtype: tensor_pb2.Dtype.ValueType
    """The same, as memory has it."""
    element_bytes: int
    parts: int
    """Values that an operand's element becomes."""
    cost: int
    """Products of 16-bit operands that would take as long; TF32 runs at half their rate."""
    sums: int
    """Sets of accumulators that a thread holds."""

    @property
    def stage_depth(self) -> int:
        """Elements of depth in a stage."""
        return _ROW_BYTES // self.element_bytes

    def stages(self, depth: int) -> int:
        """Stages of so many elements of depth."""
        return -(-depth // self.stage_depth)


ENGINES = {
    EngineName.FP16X3: Engine("ws::half", tensor_pb2.DTYPE_FLOAT16, 2, parts=2, cost=3, sums=3),
    EngineName.TF32X3: Engine("ws::tf32", tensor_pb2.DTYPE_FLOAT32, 4, parts=2, cost=6, sums=3),
    EngineName.TF32: Engine("ws::tf32", tensor_pb2.DTYPE_FLOAT32, 4, parts=1, cost=2, sums=1),
    EngineName.FP16: Engine("ws::half", tensor_pb2.DTYPE_FLOAT16, 2, parts=1, cost=1, sums=1),
    EngineName.BF16: Engine("ws::bfloat16", tensor_pb2.DTYPE_BFLOAT16, 2, parts=1, cost=1, sums=1),
}
"""`fp16x3` and `tf32x3` multiply floats to more than a float's accuracy (see `ws_split.cuh`): the second keeps it for
rows whose elements are 2^115 apart, which the first leaves to a repair, and takes twice as long. `tf32` is for users
who allow PyTorch the same."""

OF_8_BITS = {
    kind: Engine(CUDA.storage[kind], tensor_pb2.DTYPE_UINT8, 1, parts=1, cost=1, sums=2)
    for kind in (Type.E4M3, Type.E5M2)
}
"""Of floats of 8 bits, whose sums are promoted: see `ws_product_promoted.cuh`."""


def engines(nest: Nest, product: MatrixProduct) -> Sequence[EngineName]:
    """Engines that may make the product, the usual one first; none for a type that tensor cores do not take.

    TF32 operands lie along their depth: what lies otherwise would have to be turned first.
    """
    if product.left.type is not product.right.type:
        return ()
    match product.left.type:
        case Type.F16:
            return (EngineName.FP16,)
        case Type.BF16:
            return (EngineName.BF16,)
        case Type.F32:
            sides = (product.left, product.right)
            is_along = all(side.depth_stride == 1 for side in sides)
            is_copied = is_along and all(is_walked(side, side.row_stride, 4) for side in sides)
            plain = (EngineName.TF32,) if nest.allows_tf32 and is_copied else ()
            return (*plain, EngineName.FP16X3, *((EngineName.TF32X3,) if is_along else ()))
    return ()


def is_walked(operand: Operand, outer: int, whole: int) -> bool:
    """Whether the copy engine walks the operand itself: `outer` apart, and by so many elements that have 16 bytes."""
    steps = (outer, *operand.layer_strides)
    is_shallow = len(steps) < TENSOR_MAP_DIMENSIONS and operand.offset == 0
    return is_shallow and all(step > 0 and step % whole == 0 for step in steps)
