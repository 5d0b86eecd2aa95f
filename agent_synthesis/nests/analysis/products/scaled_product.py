"""Products of two floats of 8 bits, which scales make larger or smaller on the way: with the scales where the sums are.

The one idea: what does not vary along the depth is a factor of the whole sum, and what varies from one 128 of depth to
the next is one of what each adds. In the module the scaled factors are rounded to 16 bits, so they may be; a sum of
products of floats of 8 bits, each of which is exact in fp32, is closer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.factors import along, taken_apart, varies, with_sums
from agent_synthesis.nests.analysis.products.product_end import over_axes
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    Axis,
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

SCALE = "%scale"
"""The buffer that stands for a scale; nothing stores it."""
STEP = 128
"""Of depth, in which a scale is one number."""


@dataclass(frozen=True)
class ScaledProduct:
    """`nest` loads both factors as they lie and scales its sums; it is the `product`.

    `left_scale` and `right_scale`: of each 128 of depth, as nests that store them over axes `batch`, `n` and `k`; None
    where there is none.
    """

    nest: Nest
    product: MatrixProduct
    left_scale: Nest | None
    right_scale: Nest | None


@remembered
def scaled_product(nest: Nest) -> ScaledProduct | None:
    """The nest with its scales at the sums; None where a factor is no float of 8 bits, or a scale varies on the way."""
    simple = iteration_space.simplified(nest)
    if len(simple.reductions) != 1 or type(simple.reductions[0]) is not Reduction:
        return None
    reduction = simple.reductions[0]
    match reduction.value:
        case Call("mul", (first, second), Type.F32) if reduction.operation == "sum":
            factors = [taken_apart(factor, simple) for factor in (first, second)]
        case _:
            return None
    loads, summed, varying = list[Load](), Reduced(reduction.name, Type.F32), dict[str, list[Expression]]()
    value: Expression = summed
    for factor in factors:
        if factor is None:
            return None
        loads.append(factor[0])
        varying[factor[0].buffer] = [scale for scale in factor[1] if varies(scale, simple.reduced)]
        for scale in factor[1]:
            value = value if varies(scale, simple.reduced) else Call("mul", (value, scale), Type.F32)
    stores = tuple(replace(store, value=with_sums(store.value, reduction.name, value)) for store in simple.stores)
    made = replace(simple, reductions=(replace(reduction, value=Call("mul", tuple(loads), Type.F32)),), stores=stores)
    product = matrix_product(made)
    if product is None or (any(varying.values()) and product.left.buffer == product.right.buffer):
        return None
    scales = list[Nest | None]()
    for operand, rows in ((product.left, product.rows), (product.right, product.columns)):
        found = _scale(simple, varying[operand.buffer], product, rows)
        if varying[operand.buffer] and found is None:
            return None
        scales.append(found)
    return ScaledProduct(made, product, *scales)


def is_shared(scale: Nest, columns: int) -> bool:
    """Whether a scale is the same in each so many rows of its operand, counted from the first."""
    return _is_constant(scale, "n", columns)


def _scale(nest: Nest, values: Sequence[Expression], product: MatrixProduct, rows: tuple[Axis, ...]) -> Nest | None:
    """The product of values as a nest of its own; None where they vary within a step of the depth."""
    if not values or product.extents[3] % STEP:
        return None
    value = values[0]
    for other in values[1:]:
        value = Call("mul", (value, other), Type.F32)
    axes = (*product.batch, *rows, *product.depth)
    place, count = Index(), 1
    for axis in reversed(axes):
        place, count = place + Index.axis(axis.name, count), count * axis.extent
    read = {part.buffer for part in Interner().parts([value]).values() if isinstance(part, Load | Memory)}
    buffers = (*(each for each in nest.buffers if each.name in read), BufferRef(SCALE, Type.F32, count, written=True))
    alone = replace(
        nest, parallel=axes, reduced=(), reductions=(), stores=(Store(SCALE, place, value),), buffers=buffers
    )
    made = over_axes(alone, {"batch": product.batch, "n": rows, "k": product.depth}, ())
    return made if _is_constant(made, "k", STEP) else None


def _is_constant(scale: Nest, axis: str, step: int) -> bool:
    """Whether all that a scale is made of is the same in each so many elements of an axis."""
    for part in Interner().parts([scale.stores[0].value]).values():
        if not isinstance(part, Load | AxisValue) or axis not in part.index.axes():
            continue
        found = along(part.index, axis, scale.extents[axis])
        if found is None or any(bool((each != each[0]).any()) for each in torch.split(found[0], step)):
            return False
    return True
