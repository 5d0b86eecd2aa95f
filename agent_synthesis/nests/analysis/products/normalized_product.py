"""Batch norms by the batch's own statistics, of a matrix product: recognised among nests, and taken apart.

The one idea: values of the product are reduced to two moments of each column, the second about the first; so what is
stored of a nest is the product's own, or one of each column, or pointwise of those and of the stored values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.analysis import stages
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    BufferRef,
    Call,
    Expression,
    Index,
    Load,
    Nest,
    Reduced,
    Reduction,
    Store,
    Type,
)
from agent_synthesis.nests.product import MatrixProduct, Multiplied, elements_and_rows, matrix_product


@dataclass(frozen=True)
class NormalizedProduct:
    """A nest taken apart into a product, the statistics of its columns, and what becomes of both."""

    elements: Nest
    """The product and its own stores: first of the values that the statistics are of."""
    product: MatrixProduct
    moments: tuple[Reduction, Reduction]
    """The sum of the values less `origin`, and that of squares about their mean."""
    origin: Expression
    columns: Nest
    """Stores that there is one of for each column: the nest's, and of parts that `normalized` reads."""
    normalized: Nest
    """The nest's other stores, of stored values and those parts."""
    spaces: tuple[BufferRef, ...]
    """Memory between the kernels."""


def normalized_product(nest: Nest) -> NormalizedProduct | None:
    """The nest as a product and two moments of its columns; None where it is anything else."""
    moments, found = _moments(nest), _value_and_origin(nest)
    if moments is None or found is None or _reads_what_others_write(nest):
        return None
    value, origin = found
    interner = Interner()
    needed = {f"%{reduction.name}" for reduction in moments}
    late = [s for s in nest.stores if not nest.is_element_store(s) or interner.needs(s.value) & needed]
    early = [store for store in nest.stores if store not in late]
    if set[str]().union(*(interner.needs(store.value) for store in early)) & {f"%{name}" for name in _firsts(nest)}:
        return None
    last = nest.parallel[-1].name
    if any(store.index.coefficient(last) != 1 for store in late if nest.is_element_store(store)):
        return None
    values, type_ = _stored_values(nest, early, value, interner)
    count = nest.row_count * nest.column_count
    spaces = [] if values in early else [BufferRef(values.buffer, type_, count, written=True)]
    instead: dict[int, Expression] = {
        interner.number(value): Load(values.buffer, values.index, Type.F32),
        interner.number(_at_first(value, nest)): Load(values.buffer, _first(values.index, nest), Type.F32),
    }
    late = [replace(store, value=interner.replaced(store.value, instead)) for store in late]
    origin = interner.replaced(origin, instead)
    once = [store for store in late if not nest.is_element_store(store)]
    finals = [store for store in late if nest.is_element_store(store)]
    parts = []
    for number, part in enumerate(passes.per_column(nest, [store.value for store in finals], interner)):
        parts.append(Store(f"{nest.name}_part{number}", _row_major(nest.parallel), part))
        spaces.append(BufferRef(parts[-1].buffer, part.type, nest.row_count, written=True))
        instead[interner.number(part)] = Load(parts[-1].buffer, parts[-1].index, part.type)
    finals = [replace(store, value=interner.replaced(store.value, instead)) for store in finals]
    products = {f"%{reduction.name}" for reduction in nest.reductions if isinstance(reduction, Multiplied)}
    of_columns = set[str]().union(*(interner.needs(e) for e in (origin, *(s.value for s in (*once, *parts)))))
    of_elements = set[str]().union(*(interner.needs(store.value) for store in finals))
    real = all(space.type in (Type.F32, Type.F64, type_) for space in spaces)
    if not finals or not real or of_columns & products or of_elements & (products | needed):
        return None
    elements, _ = elements_and_rows(nest, by_columns=True) or (nest, nest)
    everything = (*nest.buffers, *spaces)
    others = tuple(store for store in early if store is not values)
    elements = replace(elements, stores=(values, *others), buffers=everything)
    product = matrix_product(iteration_space.simplified(elements))
    if product is None or product.extents[:3] != (1, nest.column_count, nest.row_count):
        return None
    rest = replace(nest, reduced=(), reductions=(), buffers=everything)
    points = (*nest.reduced, *nest.parallel)
    return NormalizedProduct(
        elements=elements,
        product=product,
        moments=moments,
        origin=origin,
        columns=iteration_space.touching(replace(rest, stores=(*once, *parts)), [origin]),
        normalized=iteration_space.touching(
            replace(rest, name=f"{nest.name}_normalized", parallel=points, stores=tuple(finals))
        ),
        spaces=tuple(spaces),
    )


def _moments(nest: Nest) -> tuple[Reduction, Reduction] | None:
    """The two reductions of a product's columns; None where there are others."""
    parts = elements_and_rows(nest, by_columns=True)
    planned = stages.plan(parts[1], merge=True) if parts else []
    if [stage.kind for stage in planned] != ["moments"]:
        return None
    first, second = planned[0].reductions
    return first, second


def _value_and_origin(nest: Nest) -> tuple[Expression, Expression] | None:
    """What the first moment sums: a value of every element, less one of the column."""
    for reduction in nest.reductions:
        if isinstance(reduction, Multiplied):
            continue
        match stages.narrowed(reduction.value, Type.F32):
            case Call("sub", (value, origin), Type.F32):
                is_fixed = not Interner().needs(origin) & {axis.name for axis in nest.reduced}
                at_elements = {r.name for r in nest.reductions if isinstance(r, Multiplied) and _varies(r, nest)}
                return (value, origin) if is_fixed and not _reduced_in(origin) & at_elements else None
        break
    return None


def _varies(product: Multiplied, nest: Nest) -> bool:
    return bool(Interner().needs(product.value) & {axis.name for axis in nest.reduced})


def _firsts(nest: Nest) -> list[str]:
    """The product at the first element, where something is taken about it."""
    return [r.name for r in nest.reductions if isinstance(r, Multiplied) and not _varies(r, nest)]


def _reduced_in(value: Expression) -> set[str]:
    return {need[1:] for need in Interner().needs(value) if need.startswith("%")}


def _reads_what_others_write(nest: Nest) -> bool:
    """Whether a buffer is read and written, but for what a column's own stores read and write."""
    once = [store for store in nest.stores if not nest.is_element_store(store)]
    others = [r.value for r in nest.reductions] + [s.value for s in nest.stores if nest.is_element_store(s)]
    read = iteration_space.buffers_below(others)
    if read & {store.buffer for store in nest.stores} or not iteration_space.is_safe_in_place(nest):
        return True
    written = {store.buffer for store in nest.stores if nest.is_element_store(store)}
    return bool(iteration_space.buffers_below(store.value for store in once) & written)


def _stored_values(nest: Nest, early: Sequence[Store], value: Expression, interner: Interner) -> tuple[Store, Type]:
    """The store of the values that the norm is of, in 16 bits where all are, perhaps the nest's own."""
    factors = iteration_space.buffers_below(r.value for r in nest.reductions if isinstance(r, Multiplied))
    operands = {nest.buffer(name).type for name in factors}
    stored = {nest.buffer(store.buffer).type for store in nest.stores if nest.is_element_store(store)}
    type_ = operands.pop() if operands == stored and len(operands) == 1 else Type.F32
    for store in early if len(nest.parallel) == 1 else ():  # several may lie in another order
        is_same = interner.number(store.value) == interner.number(value) and nest.buffer(store.buffer).type is type_
        if is_same and store.index.coefficient(nest.parallel[-1].name) == 1:
            return store, type_
    return Store(f"{nest.name}_values", _row_major((*nest.reduced, *nest.parallel)), value), type_


def _row_major(axes: Sequence[Axis]) -> Index:
    flat, step = Index(), 1
    for axis in reversed(axes):
        flat, step = flat + Index.axis(axis.name, step), step * axis.extent
    return flat


def _first(index: Index, nest: Nest) -> Index:
    return index.substituted({axis.name: Index() for axis in nest.reduced}, nest.extents)


def _at_first(value: Expression, nest: Nest) -> Expression:
    """The value at the first element of its column."""
    firsts = _firsts(nest)
    match value:
        case Reduced(_, type_) if firsts:
            return Reduced(firsts[0], type_)
        case Load(_, index, _) | AxisValue(index, _):
            return replace(value, index=_first(index, nest))
        case Call(_, arguments, _):
            return replace(value, arguments=tuple(_at_first(argument, nest) for argument in arguments))
    return value
