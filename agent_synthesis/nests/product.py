"""Matrix products among nests: recognised, and put into rows, columns and depth.

The one idea: a nest that sums a product of two loads, each of which varies with parallel axes that the other does not
know, is a matrix product with a pointwise end; nothing else about it needs a name. Schedules that know no tiles of
both operands must not take one: they would read each operand once for every row of the other. A reduction whose
elements are a product is one nest too: `Multiplied` is among its reductions, perhaps again at the first element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.nests.ir import (
    Axis,
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


@dataclass(frozen=True)
class Operand:
    """One factor: element (batch, row, depth) lies at `offset + batch * batch_stride + …`, in elements."""

    buffer: str
    type: Type
    """Storage type."""
    offset: int
    batch_stride: int
    row_stride: int
    depth_stride: int


@dataclass(frozen=True)
class Multiplied(Reduction):
    """`name = Σ over d < depth of left · right` at every element of the nest; `value` has both loads at d = 0."""

    depth: int
    left_stride: int
    """From one d to the next, in elements; `right_stride` likewise."""
    right_stride: int


@dataclass(frozen=True)
class MatrixProduct:
    """sums[b, m, n] = Σ over k of left[b, m, k] · right[b, n, k], in f32; then the nest's stores at every (b, m, n)."""

    reduction: str
    """Name of the sum in the nest."""
    left: Operand
    right: Operand
    batch: tuple[Axis, ...]
    """Axes that both operands know, or that no one stride of the rows describes; rows and columns likewise."""
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    depth: tuple[Axis, ...]

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """(batch, m, n, k)."""
        batch, m, n, k = (_count(axes) for axes in (self.batch, self.rows, self.columns, self.depth))
        return batch, m, n, k

    @property
    def flop_count(self) -> int:
        """Floating-point operations, two for each multiply-add."""
        batch, m, n, k = self.extents
        return 2 * batch * m * n * k


def multiplies_matrices(nest: Nest) -> bool:
    """Whether some reduction sums products of factors that vary with different parallel axes; attention always does."""
    parallel = {axis.name for axis in nest.parallel}
    for reduction in nest.reductions:
        if reduction.operation == "attend" or isinstance(reduction, Multiplied):
            return True
        match reduction.value:
            case Call("mul", factors, _):
                left, right = (_axes(factor) & parallel for factor in factors)
                if left - right and right - left:
                    return True
    return False


def elements_and_rows(nest: Nest, *, by_columns: bool = False) -> tuple[Nest, Nest] | None:
    """A reduction of a product as two nests: the product, which stores its sums, and the reduction that reads them.

    None for a nest whose elements are no product. Nothing need store the sums: see `cuda_product_reduced`.
    `by_columns`: the elements of one reduction lie below each other, as columns of the sums do.
    """
    found = [reduction for reduction in nest.reductions if isinstance(reduction, Multiplied)]
    reduced = {axis.name for axis in nest.reduced}
    at_elements = [reduction for reduction in found if _axes(reduction.value) & reduced]
    if len(at_elements) != 1:
        return None
    (first,) = at_elements
    match first.value:
        case Call("mul", (Load() as left, Load() as right)):
            operands = ((left, first.left_stride), (right, first.right_stride))
        case _:
            raise AssertionError(f"{first.name} is no product: {first.value}")
    beginning = _at_first(first, nest)
    if any(replace(other, name=first.name) != beginning for other in found if other is not first):
        return None
    points = (*nest.reduced, *nest.parallel) if by_columns else (*nest.parallel, *nest.reduced)
    flat, step = Index(), 1
    for axis in reversed(points):
        flat, step = flat + Index.axis(axis.name, step), step * axis.extent
    name = f"{first.name}_sums"
    along = [replace(load, index=load.index + Index.axis("depth", stride)) for load, stride in operands]
    product = Reduction(first.name, "sum", Call("mul", tuple(along), first.type), first.type)
    read = tuple(buffer for buffer in nest.buffers if buffer.name in {left.buffer, right.buffer})
    elements = replace(
        nest,
        parallel=points,
        reduced=(Axis("depth", first.depth),),
        reductions=(product,),
        stores=(Store(name, flat, Reduced(first.name, first.type)),),
        buffers=(*read, BufferRef(name, first.type, step, written=True)),
    )
    places = {other.name: _first_of(flat, nest) for other in found} | {first.name: flat}
    done: dict[int, tuple[Expression, Expression]] = {}

    def reading(value: Expression) -> Expression:
        if id(value) not in done:
            fresh = value
            match value:
                case Reduced(reduction, _) if reduction in places:
                    fresh = Load(name, places[reduction], first.type)
                case Call(_, arguments, _):
                    fresh = replace(value, arguments=tuple(reading(argument) for argument in arguments))
            done[id(value)] = (value, fresh)
        return done[id(value)][1]

    rows = replace(
        nest,
        reductions=tuple(replace(r, value=reading(r.value)) for r in nest.reductions if r not in found),
        stores=tuple(replace(store, value=reading(store.value)) for store in nest.stores),
        buffers=(*nest.buffers, BufferRef(name, first.type, step)),
    )
    return elements, rows


def _first_of(index: Index, nest: Nest) -> Index:
    """The index at the first element of what the nest reduces."""
    return index.substituted({axis.name: Index() for axis in nest.reduced}, nest.extents)


def _at_first(product: Multiplied, nest: Nest) -> Multiplied:
    """The product at the first of the elements that it is made at."""
    assert isinstance(product.value, Call)
    loads = [
        replace(load, index=_first_of(load.index, nest)) for load in product.value.arguments if isinstance(load, Load)
    ]
    return replace(product, value=replace(product.value, arguments=tuple(loads)))


def matrix_product(nest: Nest) -> MatrixProduct | None:
    """The nest as one product; None where it has another form, or operands that no strides describe.

    Columns are the axes that the first store has its innermost one among.
    """
    factors = _factors(nest)
    if factors is None or any(nest.is_element_store(store) for store in nest.stores):
        return None
    reduction, first, second = factors
    known = [factor.index.axes() for factor in (first, second)]
    if any(axis.name not in known[0] | known[1] for axis in nest.parallel):
        return None
    innermost = nest.parallel[-1].name if nest.parallel else ""
    left, right = (second, first) if innermost in known[0] - known[1] else (first, second)
    left_axes, right_axes = left.index.axes(), right.index.axes()
    batch = tuple(axis for axis in nest.parallel if axis.name in left_axes & right_axes)
    rows = tuple(axis for axis in nest.parallel if axis.name in left_axes - right_axes)
    columns = tuple(axis for axis in nest.parallel if axis.name in right_axes - left_axes)
    if not rows or not columns or innermost not in right_axes - left_axes:
        return None
    # Rows (or columns) that no one stride describes are a batch of which the other operand knows nothing.
    while len(rows) > 1 and _stride(left.index, rows) is None:
        batch, rows = (*batch, rows[0]), rows[1:]
    while len(columns) > 1 and _stride(right.index, columns) is None:
        batch, columns = (*batch, columns[0]), columns[1:]
    operands = []
    for factor, own in ((left, rows), (right, columns)):
        strides = [_stride(factor.index, axes) for axes in (batch, own, nest.reduced)]
        if None in strides:
            return None
        storage = nest.buffer(factor.buffer).type
        operands.append(Operand(factor.buffer, storage, factor.index.offset, *(stride or 0 for stride in strides)))
    return MatrixProduct(reduction.name, operands[0], operands[1], batch, rows, columns, nest.reduced)


def _factors(nest: Nest) -> tuple[Reduction, Load, Load] | None:
    """The nest's only reduction and its two factors, where it is an f32 sum of products of two loads."""
    if len(nest.reductions) != 1:
        return None
    reduction = nest.reductions[0]
    if type(reduction) is not Reduction or reduction.operation != "sum" or reduction.type is not Type.F32:
        return None
    match reduction.value:
        case Call("mul", (Load() as first, Load() as second), Type.F32):
            return reduction, first, second
    return None


def _axes(expression: Expression) -> set[str]:
    """Axes of all loads at or below; shared parts are looked at once."""
    found, seen, pending = set[str](), set[int](), [expression]
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Load):
            found |= part.index.axes()
        elif isinstance(part, Call):
            pending += part.arguments
    return found


def _count(axes: Sequence[Axis]) -> int:
    count = 1
    for axis in axes:
        count *= axis.extent
    return count


def _stride(index: Index, axes: Sequence[Axis]) -> int | None:
    """How far one step of the axes' row-major number moves; None where steps differ. 0 for no axes."""
    stride: int | None = None
    reach = 0
    for axis in reversed(axes):
        coefficient = index.coefficient(axis.name)
        if coefficient is None or (stride is not None and coefficient != reach):
            return None
        stride = coefficient if stride is None else stride
        reach = coefficient * axis.extent
    return stride or 0
