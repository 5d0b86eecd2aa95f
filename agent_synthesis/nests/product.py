"""Matrix products among nests: recognised, and put into rows, columns and depth.

The one idea: a nest that sums a product of two loads, each of which varies with parallel axes that the other does not
know, is a matrix product with a pointwise end; nothing else about it needs a name. Schedules that know no tiles of
both operands must not take one: they would read each operand once for every row of the other. A reduction whose
elements are a product is one nest too: `Multiplied` is among its reductions, perhaps again at the first element.
"""

from __future__ import annotations

import math
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
    Windowed,
)
from agent_synthesis.nests.symbolic import Fold, Ref, Refused, unflatten

MOST_LAYER_AXES = 8
"""That a kernel takes the number of a layer apart into."""
_DEPTH = "depth"
"""The axis that a product's own sum runs along while its strides are found."""


@dataclass(frozen=True)
class LayerAxis:
    """An axis along which an operand's layers lie: layer b of the batch is at `b // inside % extent * stride` of it."""

    inside: int
    """Layers of the batch between one step and the next."""
    extent: int
    stride: int
    """In elements; not 0 where there are several."""


@dataclass(frozen=True)
class Operand:
    """One factor: element (batch, row, depth) lies at `offset + layer_at(batch) + row * row_stride + …`."""

    buffer: str
    type: Type
    """Storage type."""
    offset: int
    layers: tuple[LayerAxis, ...]
    """Axes of the batch that it knows, fastest first; neighbours that one stride describes are one."""
    row_stride: int
    depth_stride: int

    def layer_at(self, batch: int) -> int:
        """Where a layer begins, from the first."""
        return sum(batch // axis.inside % axis.extent * axis.stride for axis in self.layers)

    def walk(self) -> tuple[LayerAxis, ...]:
        """The axes, and others of one layer where there are fewer than two."""
        return (*self.layers, LayerAxis(1, 1, 0), LayerAxis(1, 1, 0))[: max(2, len(self.layers))]

    @property
    def layer_strides(self) -> tuple[int, ...]:
        """Those of all axes."""
        return tuple(axis.stride for axis in self.layers)

    @property
    def layer_count(self) -> int:
        """Layers that differ: one where the batch shares a matrix."""
        return math.prod(axis.extent for axis in self.layers)


@dataclass(frozen=True)
class Multiplied(Reduction):
    """`name = Σ over d < depth of left · right` at every element of the nest; `value` has both loads at d = 0."""

    depth: int
    left_stride: int
    """From one d to the next, in elements; `right_stride` likewise."""
    right_stride: int


def multiplied(ref: Ref, extents: dict[str, int]) -> Multiplied:
    """What is reduced over other dimensions at every element that is reduced here: a product of two loads' rows.

    Raises:
        Refused: it is anything else.
    """
    extents[_DEPTH] = math.prod(ref.fold.extents)
    body = ref.fold.body(ref.indices, unflatten(Index.axis(_DEPTH), ref.fold.extents, extents))
    match body:
        case Call("mul", (Load() as left, Load() as right), Type.F32) if type(ref.fold) is Fold:
            strides = [load.index.coefficient(_DEPTH) for load in (left, right)]
            first = [replace(load, index=load.index.substituted({_DEPTH: Index()}, extents)) for load in (left, right)]
            if ref.fold.operation == "sum" and all(strides):
                value = Call("mul", tuple(first), Type.F32)
                return Multiplied("", "sum", value, Type.F32, extents[_DEPTH], strides[0] or 0, strides[1] or 0)
    raise Refused("it reduces what was reduced over other dimensions")


@dataclass(frozen=True)
class MatrixProduct:
    """sums[b, m, n] = Σ over k of left[b, m, k] · right[b, n, k], in f32; then the nest's stores at every (b, m, n)."""

    reduction: str
    """Name of the sum in the nest."""
    left: Operand
    right: Operand
    batch: tuple[Axis, ...]
    """Axes that both operands know, or that no one stride of the rows or columns describes; in the nest's order."""
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    depth: tuple[Axis, ...]

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """(batch, m, n, k)."""
        axes = (self.batch, self.rows, self.columns, self.depth)
        batch, m, n, k = (math.prod(axis.extent for axis in group) for group in axes)
        return batch, m, n, k

    @property
    def sum_count(self) -> int:
        """Sums of all layers."""
        return self.tile_count(1, 1)

    @property
    def flop_count(self) -> int:
        """Floating-point operations, two for each multiply-add."""
        return 2 * self.sum_count * self.extents[3]

    def tile_count(self, rows: int, columns: int) -> int:
        """Tiles of that size that cover all layers, each by tiles of its own."""
        batch, m, n, _ = self.extents
        return batch * -(-m // rows) * -(-n // columns)


def multiplies_matrices(nest: Nest) -> bool:
    """Whether some reduction sums products of factors that vary with different parallel axes; attention always does.

    A convolution does not: its windows overlap, so that its data is no matrix in memory.
    """
    parallel = {axis.name for axis in nest.parallel}
    for reduction in nest.reductions:
        if reduction.operation == "attend" or isinstance(reduction, Multiplied):
            return True
        match reduction.value:
            case Call("mul", factors, _) if not isinstance(reduction, Windowed):
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
    rows = tuple(axis for axis in nest.parallel if axis.name in left_axes - right_axes)
    columns = tuple(axis for axis in nest.parallel if axis.name in right_axes - left_axes)
    if not rows or not columns or innermost not in right_axes - left_axes:
        return None
    # Rows (or columns) that no one stride describes are a batch of which the other operand knows nothing.
    rows, columns = _described(left.index, rows), _described(right.index, columns)
    batch = tuple(axis for axis in nest.parallel if axis not in (*rows, *columns))
    operands = []
    for factor, own in ((left, rows), (right, columns)):
        layers = _layers(factor.index, batch)
        row, depth = (_stride(factor.index, axes) for axes in (own, nest.reduced))
        if layers is None or row is None or depth is None or len(layers) > MOST_LAYER_AXES:
            return None
        storage = nest.buffer(factor.buffer).type
        operands.append(Operand(factor.buffer, storage, factor.index.offset, layers, row, depth))
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


def _described(index: Index, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The innermost of the axes, as many as one stride describes; one at least."""
    while len(axes) > 1 and _stride(index, axes) is None:
        axes = axes[1:]
    return axes


def _layers(index: Index, batch: Sequence[Axis]) -> tuple[LayerAxis, ...] | None:
    """The batch's axes as the index walks them; None where it has a quotient or a remainder of one."""
    found: list[LayerAxis] = []
    inside = 1
    for axis in reversed(batch):
        stride = index.coefficient(axis.name)
        if stride is None:
            return None
        last = found[-1] if found else None
        if last and inside == last.inside * last.extent and stride == last.extent * last.stride:
            found[-1] = replace(last, extent=last.extent * axis.extent)
        elif stride and axis.extent > 1:
            found.append(LayerAxis(inside, axis.extent, stride))
        inside *= axis.extent
    return tuple(found)
