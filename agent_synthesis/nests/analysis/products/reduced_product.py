"""Row reductions whose elements are a matrix product: recognised among nests, and taken apart.

The one idea: a row's elements are values of the product's sums, which stores say as if they were kept; what is reduced
of them is one stage, so that parts of a row merge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.analysis.stages import Stage
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import BufferRef, Call, Literal, Nest, Reduced, Store, Type
from agent_synthesis.nests.product import MatrixProduct, elements_and_rows, matrix_product

_FOLDS = ("sum", "max", "min", "prod")


@dataclass(frozen=True)
class ReducedProduct:
    """A nest taken apart into its product, with what is reduced of it for stores, and what becomes of the results."""

    elements: Nest
    """The product; its first stores are the values that are reduced, those of rows follow."""
    product: MatrixProduct
    stage: Stage
    """All reductions. `shifted` is logsumexp's: a maximum, and exponentials below it, an infinite one taken for 0."""

    @property
    def value_count(self) -> int:
        """Stores of values."""
        return 1 if self.stage.kind == "shifted" else len(self.stage.reductions)

    @property
    def values(self) -> tuple[Store, ...]:
        """Those stores, over simplified axes."""
        return iteration_space.simplified(self.elements).stores[: self.value_count]


def reduced_product(nest: Nest) -> ReducedProduct | None:
    """The nest as a product and one visit of its rows; None where it is anything else."""
    parts = elements_and_rows(nest)
    if parts is None or any(nest.is_element_store(store) for store in nest.stores):
        return None
    if len(parts[1].reductions) != len(nest.reductions) - 1:
        return None  # the product at the first element too, which moments are about
    elements, rows = parts
    if _is_logsumexp(rows):
        stage = Stage("shifted", rows.reductions)
    elif len(passes.levels(rows)) == 1:
        stage = Stage("folds", rows.reductions)
    else:
        return None
    wanted = nest.reductions[1:2] if stage.kind == "shifted" else nest.reductions[1:]
    if any(r.type is not Type.F32 or r.value.type is not Type.F32 or r.operation not in _FOLDS for r in wanted):
        return None
    (sums,) = elements.stores
    count = elements.buffer(sums.buffer).element_count
    stores = [Store(f"{reduction.name}_values", sums.index, reduction.value) for reduction in wanted]
    buffers = [BufferRef(store.buffer, Type.F32, count, written=True) for store in stores]
    made = replace(elements, stores=(*stores, *nest.stores), buffers=(*nest.buffers, *buffers))
    product = matrix_product(iteration_space.simplified(made))
    return None if product is None else ReducedProduct(made, product, stage)


def _is_logsumexp(rows: Nest) -> bool:
    if len(rows.reductions) != 2:
        return False
    top, total = rows.reductions
    greatest = Reduced(top.name, top.type)
    about = Call("where", (Call("isinf", (greatest,), Type.BOOL), Literal(0.0, Type.F32), greatest), Type.F32)
    wanted = Call("exp", (Call("sub", (top.value, about), Type.F32),), Type.F32)
    interner = Interner()
    is_pair = (top.operation, top.type, total.operation, total.type) == ("max", Type.F32, "sum", Type.F32)
    return is_pair and interner.number(total.value) == interner.number(wanted)


def product_alone(nest: Nest) -> Nest:
    """The product of such a nest, as if its sums were stored."""
    parts = elements_and_rows(nest)
    assert parts is not None, nest
    return parts[0]
