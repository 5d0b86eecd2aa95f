"""Products of 16 bits whose weight is computed from what lies in memory: quantised, scaled, or of another type.

The one idea: with its computed factor replaced by a load, such a nest is a matrix product; the factor alone is a
pointwise nest over rows of the weight and the depth. In the module it is stored in the product's own 16 bits, so it may
be rounded to them, which the lowering says by a cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.analysis.products.factors import OF_8_BITS, along, taken_apart, varies, with_sums
from agent_synthesis.nests.analysis.products.product_end import over_axes
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    AxisValue,
    BufferRef,
    Call,
    Expression,
    Index,
    Load,
    Memory,
    Nest,
    Reduced,
    Reduction,
    Store,
    Type,
    remembered,
)
from agent_synthesis.nests.product import MatrixProduct, matrix_product
from agent_synthesis.nests.symbolic import EXACT_IN_16_BITS

WEIGHT = "%weight"
"""The buffer that stands for what is computed; nothing stores it."""
_WIDTHS = (8, 4)
"""Elements of a vector of the depth, preferred first."""


class Read(NamedTuple):
    """How a vector is read: so many neighbours `share` an element of a buffer, of which it loads `width`."""

    load: Load
    share: int
    width: int


@dataclass(frozen=True)
class DecodedProduct:
    """`nest` loads the weight, and is the `product`; `weight` stores it, over axes `batch`, `n` and `k`.

    The weight is read in vectors of the depth where it lies along it, and else in vectors of its rows.
    """

    nest: Nest
    product: MatrixProduct
    weight: Nest

    @property
    def width(self) -> int:
        """Elements of the depth that are read together of the left, and of what most of the weight is where it lies
        along it; 0 for none."""
        depth, left = self.product.extents[3], self.product.left
        steps = (left.row_stride, left.offset, *left.layer_strides)
        is_across = self.is_across and bool(self.across)
        for width in _WIDTHS:
            is_whole = depth % width == 0 and all(step % width == 0 for step in steps)
            if is_whole and (is_across or self._is_read(width, "k")):
                return width
        return 0

    @property
    def is_across(self) -> bool:
        """Whether no vectors of the depth are what most of the weight is."""
        return not any(self._is_read(width, "k") for width in _WIDTHS)

    @property
    def across(self) -> Sequence[int]:
        """How many rows of the weight may be read together."""
        rows = self.product.extents[2]
        return [width for width in _WIDTHS if rows % width == 0 and self._is_read(width, "n")]

    def reads(self, width: int, axis: str = "k") -> list[Read]:
        """What vectors of so many elements along an axis read together; all else goes element by element."""
        found = [load for load in _loads(self.weight, axis) if axis == "k" or "k" in load.index.axes()]
        return [read for load in found if (read := _read(self.weight, load, width, axis))]

    def _is_read(self, width: int, axis: str) -> bool:
        """Whether what most of the weight is is read in vectors of so many elements along an axis."""
        largest = max((self._bytes(load) for load in _loads(self.weight, "k")), default=0)
        return max((self._bytes(read.load) for read in self.reads(width, axis)), default=0) == largest

    def _bytes(self, load: Load) -> int:
        buffer = self.weight.buffer(load.buffer)
        return buffer.element_count * buffer.type.size_bytes


def _loads(weight: Nest, axis: str) -> list[Load]:
    return [load for load in memory_access.loads(weight) if axis in load.index.axes()]


def _read(weight: Nest, load: Load, width: int, axis: str) -> Read | None:
    """None where neighbours do not lie together, or not in whole vectors."""
    found = along(load.index, axis, weight.extents[axis])
    if found is None or weight.extents[axis] % width:
        return None
    places, others = found
    vectors = places.reshape(-1, width)
    apart = vectors - vectors[:, :1]
    for share in (1, 2, 4, 8):
        count = width // share
        if count and bool((apart == torch.arange(width) // share).all()):
            aligned = bool((vectors[:, 0] % count == 0).all()) and all(step % count == 0 for step in others)
            return Read(load, share, count) if aligned else None
    return None


@remembered
def decoded_product(nest: Nest) -> DecodedProduct | None:
    """The nest as a product of 16 bits with a computed weight, or with one that lies there; None for another."""
    simple = iteration_space.simplified(nest)
    if len(simple.reductions) != 1 or type(simple.reductions[0]) is not Reduction:
        return None
    reduction = simple.reductions[0]
    match reduction.value:
        case Call("mul", (one, other), Type.F32):
            found = (_left_and_weight(*pair, simple) for pair in ((one, other), (other, one)))
            made = (_decoded(simple, reduction, *each) for each in found if each is not None)
            return next((each for each in made if each is not None), None)
    return None


def _decoded(
    simple: Nest, reduction: Reduction, left: Load, rounded: Type, scales: Sequence[Expression], weight: Expression
) -> DecodedProduct | None:
    summed: Expression = Reduced(reduction.name, reduction.type)
    for scale in scales:
        summed = Call("mul", (summed, scale), Type.F32)
    if scales:
        stores = tuple(replace(store, value=with_sums(store.value, reduction.name, summed)) for store in simple.stores)
        simple = replace(simple, stores=stores)
    known = {axis for part in _parts([weight]) if isinstance(part, Load | AxisValue) for axis in part.index.axes()}
    axes = [axis for axis in (*simple.parallel, *simple.reduced) if axis.name in known or axis in simple.reduced]
    place, count = Index(), 1
    for axis in reversed(axes):
        place, count = place + Index.axis(axis.name, count), count * axis.extent
    loaded = Load(WEIGHT, place, Type.F32)
    made = replace(
        simple,
        reductions=(replace(reduction, value=Call("mul", (left, loaded), Type.F32)),),
        buffers=(*simple.buffers, BufferRef(WEIGHT, rounded, count)),
    )
    product = matrix_product(made)
    if (
        product is None
        or product.right.buffer != WEIGHT
        or product.left.depth_stride != 1
        or product.right.depth_stride != 1
    ):
        return None
    store = Store(WEIGHT, place, weight)
    alone = replace(
        simple, parallel=tuple(axes), reduced=(), reductions=(), stores=(store,),
        buffers=(*_used(simple, [weight]), BufferRef(WEIGHT, rounded, count, written=True)),
    )  # fmt: skip
    batch = tuple(axis for axis in product.batch if axis in axes)
    if batch not in ((), product.batch):
        return None
    return DecodedProduct(
        made, product, over_axes(alone, {"batch": batch, "n": product.columns, "k": product.depth}, ())
    )


def _left_and_weight(
    left: Expression, right: Expression, nest: Nest
) -> tuple[Load, Type, tuple[Expression, ...], Expression] | None:
    """The left as it lies, the 16 bits of the product, what scales the left's rows, and the weight as it is stored."""
    match left:
        case Load(buffer, _, _) if (short := nest.buffer(buffer).type) in (Type.F16, Type.BF16):
            weight = _stored(right, nest, short)
            return None if weight is None else (left, short, (), weight)
    taken = taken_apart(left, nest)
    weight = _stored(right, nest, Type.BF16)
    if taken is None or weight is None or any(varies(scale, nest.reduced) for scale in taken[1]):
        return None
    return taken[0], Type.BF16, taken[1], weight


def _stored(factor: Expression, nest: Nest, short: Type) -> Expression | None:
    """What is stored as the factor in the product's own 16 bits; None where it is no number of 16 bits."""
    match factor:
        case Load(buffer, _, _) if nest.buffer(buffer).type in (short, *OF_8_BITS):
            return factor
        case Call("cast", (Call("cast", (value,), rounded) as stored,), Type.F32) if rounded is short:
            return value if value.type is Type.F32 else stored  # the store rounds
        case Call("cast", (value,), Type.F32) if value.type in EXACT_IN_16_BITS:
            return factor
    return None


def _parts(values: Iterable[Expression]) -> Iterable[Expression]:
    return Interner().parts(values).values()


def _used(nest: Nest, values: Iterable[Expression]) -> tuple[BufferRef, ...]:
    """Buffers that the values read."""
    read = {part.buffer for part in _parts(values) if isinstance(part, Load | Memory)}
    return tuple(buffer for buffer in nest.buffers if buffer.name in read)
