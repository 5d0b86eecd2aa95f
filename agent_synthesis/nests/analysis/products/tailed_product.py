"""Convolutions whose result is reduced where it is made: what is reduced of it, over the product's own axes.

The one idea: a convolution's result and what reads it walk the same memory, so an index of one is taken apart into
digits that are the axes of the other. Over those, what a reader loads is the value that the convolution would store.
Nothing here knows tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.analysis.products.convolution_product import ConvolutionProduct, convolution_product, points
from agent_synthesis.nests.analysis.products.product_end import over_axes
from agent_synthesis.nests.interner import EXPENSIVE, Interner
from agent_synthesis.nests.ir import (
    Axis,
    Call,
    Expression,
    Index,
    Load,
    Memory,
    Nest,
    Reduced,
    Store,
    Type,
    remembered,
)
from agent_synthesis.nests.tailed import Tailed

SUMS, FIRST = "sums", "first"
"""What the convolution's own reduction is called, and its result in a row's first column, about which moments are."""
CLASSES = (1, 2, 4, 8)
"""Channels that a row of sums may be taken apart into, each reduced by itself: every so many columns."""


@dataclass(frozen=True)
class ReducedChannels:
    """Reductions over the channels of each point of a convolution's result."""

    product: ConvolutionProduct
    rows: Nest
    """Over `batch`, `m` and, of several classes, `part`; reduced is `k`: column `k · classes + part`. What it
    reduces and stores is of `SUMS`."""
    first: Expression | None
    """What `FIRST` is, of the sum of that column; None where nothing is about it."""
    classes: int
    stored: Nest
    """The convolution as if it made the store of elements, or its own where there is none."""
    stores_elements: bool

    def carried(self) -> list[Expression]:
        """What is kept of an element from level to level in the place of its sum, and at last for its store: an
        expensive part, where nothing else of the sum is needed any more."""
        interner, levels = Interner(), passes.levels(self.rows)
        found: list[Expression] = [Reduced(SUMS, self.product.convolution.reduction.type)]
        for number, level in enumerate(levels):
            later = [r.value for after in levels[number + 1 :] for r in after] + passes.element_stores(self.rows)
            needed, here = interner.parts(later), interner.parts([r.value for r in level], found[-1:])
            shared = [
                part for each, part in here.items()
                if each in needed and isinstance(part, Call) and part.type is Type.F32 and _is_costly(part, interner)
                and interner.number(found[-1]) not in interner.parts(later, [part])
            ]  # fmt: skip
            found.append(max(shared, key=lambda part: len(interner.parts([part])), default=found[-1]))
        return found


@remembered
def reduced_channels(nest: Nest) -> ReducedChannels | None:
    """What is reduced over channels; None where the tail is anything else."""
    found = convolution_product(nest.convolution) if isinstance(nest, Tailed) else None
    if not isinstance(nest, Tailed) or found is None:
        return None
    tail = iteration_space.simplified(nest.tail)
    if tail.windows or tail.scans or tail.segments or tail.summed or not tail.reductions:
        return None
    if any(isinstance(part, Memory) for part in Interner().parts(iteration_space.roots(tail)).values()):
        return None
    tail, is_about_first = _about_first(nest, tail)
    index = index_of_result(nest, tail)
    digits = digits_of(nest, index, tail.parallel + tail.reduced)
    if index is None or digits is None:
        return None
    tail = replace(tail, stores=(*tail.stores, Store(FIRST, Index(), Load(nest.result.name, index, Type.F32))))
    whole = iteration_space.reindexed(tail, lambda index: index.substituted(digits, extents_of_result(nest)), (), ())
    reduced = {name for axis in tail.reduced for name in digits[axis.name].axes()}
    kept = {name for axis in tail.parallel for name in digits[axis.name].axes()}
    inner = tuple(itertools.dropwhile(lambda axis: axis.name in reduced, found.made))
    outer = found.made[: len(found.made) - len(inner)]
    if reduced != {axis.name for axis in outer} or reduced & kept or points(inner) not in CLASSES:
        return None
    joined = with_sums(alone(nest), whole)
    positions = (*found.images, *found.outputs)
    over = over_axes(
        replace(joined, parallel=axes_of_result(nest)),
        {"batch": found.groups, "m": positions, "part": inner, "k": outer}, (),
    )  # fmt: skip
    *parallel, k = over.parallel
    over = replace(over, parallel=tuple(parallel), reduced=(k,))
    rows, first = _without_first(over)
    elements = [store for store in rows.stores if rows.is_element_store(store)]
    if len(elements) > 1:
        return None
    if any(store.value.type is not Type.F32 for store in elements):
        return None
    stored = replace(alone(nest), name=nest.name)
    if elements:
        place = next(store.index for store in whole.stores if store.buffer == elements[0].buffer)
        target = nest.buffer(elements[0].buffer)
        value = Reduced(found.convolution.reduction.name, Type.F32)
        buffers = (*(each for each in stored.buffers if not each.written), target)
        stored = replace(stored, stores=(Store(target.name, place, value),), buffers=buffers)
    return ReducedChannels(found, rows, first if is_about_first else None, points(inner), stored, bool(elements))


def _about_first(nest: Tailed, tail: Nest) -> tuple[Nest, bool]:
    """The tail with `FIRST` in the place of the result at the first element of a row, and whether there is any."""
    interner, result = Interner(), nest.result.name
    reduced = {axis.name: Index() for axis in tail.reduced}
    loads = [
        part for part in interner.parts(iteration_space.roots(tail)).values()
        if isinstance(part, Load) and part.buffer == result
    ]  # fmt: skip
    firsts = {load.index.substituted(reduced, tail.extents) for load in loads if load.index.axes() & reduced.keys()}
    about = {interner.number(load): Reduced(FIRST, load.type) for load in loads if load.index in firsts}
    return _replaced(tail, interner, about), bool(about)


def _without_first(over: Nest) -> tuple[Nest, Expression]:
    """The nest without its last store, and the value of that at the first element of a row."""
    alone = replace(over, stores=over.stores[-1:], reductions=())
    begun = iteration_space.reindexed(
        alone, lambda index: index.substituted({"k": Index()}, over.extents), over.parallel, over.reduced
    )
    rows = replace(over, stores=over.stores[:-1])
    return rows, begun.stores[0].value


def _replaced(nest: Nest, interner: Interner, instead: Mapping[int, Expression]) -> Nest:
    return replace(
        nest,
        reductions=tuple(replace(r, value=interner.replaced(r.value, instead)) for r in nest.reductions),
        stores=tuple(replace(store, value=interner.replaced(store.value, instead)) for store in nest.stores),
    )


def _is_costly(part: Expression, interner: Interner) -> bool:
    return any(isinstance(each, Call) and each.operation in EXPENSIVE for each in interner.parts([part]).values())


def alone(nest: Tailed) -> Nest:
    """The convolution, its axes simplified."""
    return iteration_space.simplified(nest.convolution)


def axes_of_result(nest: Tailed) -> tuple[Axis, ...]:
    """Those of the convolution's outputs."""
    return alone(nest).parallel


def extents_of_result(nest: Tailed) -> dict[str, int]:
    """Theirs, by name."""
    return {axis.name: axis.extent for axis in axes_of_result(nest)}


def index_of_result(nest: Tailed, tail: Nest) -> Index | None:
    """Where the tail reads the convolution's result; None where it reads it at several places."""
    parts = Interner().parts(iteration_space.roots(tail)).values()
    found = {part.index for part in parts if isinstance(part, Load) and part.buffer == nest.result.name}
    return found.pop() if len(found) == 1 else None


def digits_of(nest: Tailed, index: Index | None, axes: Sequence[Axis]) -> Mapping[str, Index] | None:
    """Each axis that walks the convolution's result, by the axes that make it; None where one leaves some out."""
    store, count = alone(nest).stores[0].index, nest.result.element_count
    if (
        index is None
        or chain(store, axes_of_result(nest), count) is None
        or (steps := chain(index, axes, count)) is None
    ):
        return None
    extents, found = extents_of_result(nest), dict[str, Index]()
    for axis in axes:
        step = steps[axis.name]
        digit = store.divided(step, extents)
        found[axis.name] = digit if step * axis.extent == count else digit.modulo(axis.extent, extents)
    return found


def chain(index: Index, axes: Sequence[Axis], count: int) -> dict[str, int] | None:
    """The steps of axes that walk `count` neighbours, each element once; None where they do not."""
    steps = {axis.name: index.coefficient(axis.name) or 0 for axis in axes}
    if index.offset or index.axes() != steps.keys() or any(not isinstance(atom, str) for atom, _ in index.terms):
        return None
    reach = 1
    for axis in sorted(axes, key=lambda each: steps[each.name]):
        if steps[axis.name] != reach:
            return None
        reach *= axis.extent
    return steps if reach == count else None


def with_sums(simple: Nest, tail: Nest) -> Nest:
    """The tail, over the axes of a convolution's result, with what that stores in the place of loads of it."""
    (store,), interner = simple.stores, Interner()
    sums = {interner.number(Reduced(each.name, each.type)): Reduced(SUMS, each.type) for each in simple.reductions}
    made = interner.replaced(store.value, sums)
    loads = [
        part for part in interner.parts(iteration_space.roots(tail)).values()
        if isinstance(part, Load) and part.buffer == store.buffer
    ]  # fmt: skip
    instead: dict[int, Expression] = {interner.number(load): made for load in loads}
    buffers = {each.name: each for each in (*simple.buffers, *tail.buffers)}
    joined = replace(_replaced(tail, interner, instead), buffers=tuple(buffers.values()))
    return iteration_space.touching(joined)
