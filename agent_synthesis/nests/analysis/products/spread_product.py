"""Convolutions whose result is reduced over space: what tiles leave of each channel, and what that becomes.

The one idea: a tile has a part of what is reduced, so it leaves a state of each of its channels; a row's states are
joined by a kernel of their own. A norm then needs the result once more, and reads it where the tiles have stored it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.analysis import stages
from agent_synthesis.nests.analysis.apart import apart
from agent_synthesis.nests.analysis.products.convolution_product import ConvolutionProduct, convolution_product
from agent_synthesis.nests.analysis.products.product_end import over_axes
from agent_synthesis.nests.analysis.products.tailed_product import alone, chain, with_sums
from agent_synthesis.nests.analysis.stages import Stage
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    Axis,
    BufferRef,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Memory,
    Nest,
    Reduction,
    Type,
    remembered,
)
from agent_synthesis.nests.tailed import Tailed

_FOLDS = ("sum", "max", "min")
COUNT = "each"
"""The axis of images, groups and channels that one row has."""


@dataclass(frozen=True)
class Columns:
    """Where the states of a row are: over the axes of rows and `COUNT`."""

    image: Index
    group: Index
    channel: Index
    count: int


@dataclass(frozen=True)
class SpreadProduct:
    """A convolution, a state of each channel of its tiles, and the nests behind them."""

    product: ConvolutionProduct
    stage: Stage
    """A fold; or `moments`: the sum of values less `origin`, and that of squares about their mean."""
    value: Nest
    """Over `batch`, `m` and `n`: its one reduction is of what states are of, a value of `SUMS`."""
    origin: Expression
    """What the first moment is about, over the axes of `rows`; 0 of a fold."""
    rows: Nest
    """What is stored once a row, of reductions; by the tail's own parallel axes."""
    columns: Columns
    elements: Nest | None
    """The stores of elements, which reduce nothing; None where there are none."""
    kept: tuple[BufferRef, ...]
    """What `rows` leaves for `elements`."""
    result: BufferRef | None
    """The convolution's own result, under another name, where those nests read it."""


@remembered
def spread_product(nest: Nest) -> SpreadProduct | None:
    """What is reduced over space; None where the tail is anything else."""
    found = convolution_product(nest.convolution) if isinstance(nest, Tailed) else None
    if not isinstance(nest, Tailed) or found is None:
        return None
    tail = replace(iteration_space.simplified(nest.tail), name=nest.name)
    parts = Interner().parts(iteration_space.roots(tail)).values()
    if (planned := _planned(tail)) is None or any(isinstance(part, Memory) for part in parts):
        return None
    stage, value, origin = planned
    reads = set[Index]().union(*(_reads(root, nest.result.name) for root in iteration_space.roots(tail)))
    index = next((each for each in reads if {axis.name for axis in tail.reduced} <= each.axes()), None)
    first = index.substituted({axis.name: Index() for axis in tail.reduced}, tail.extents) if index else None
    if index is None or not reads <= {index, first} or _reads(value, nest.result.name) != {index}:
        return None
    fine = _Fine.of(nest, found, tail, index)
    if fine is None or {axis.name for axis in found.outputs} & {axis.name for axis in fine.kept}:
        return None
    halves = apart(tail) if passes.element_stores(tail) else None
    if passes.element_stores(tail) and halves is None:
        return None
    rows, elements = (halves.reducing, halves.storing) if halves else (tail, None)
    rows = iteration_space.touching(replace(rows, reduced=(), reductions=()), [origin])
    result = replace(nest.result, name=f"{nest.name}_result", written=False) if elements or first in reads else None
    named = {nest.result.name: result.name} if result else {}
    return SpreadProduct(
        found, stage, fine.value(tail, value), _reading(origin, named), _renamed(rows, named), fine.columns(),
        _renamed(elements, named) if elements else None, halves.kept if halves else (), result,
    )  # fmt: skip


def _reads(value: Expression, result: str) -> set[Index]:
    """Where a value reads the convolution's result."""
    parts = Interner().parts([value]).values()
    return {part.index for part in parts if isinstance(part, Load) and part.buffer == result}


def _planned(tail: Nest) -> tuple[Stage, Expression, Expression] | None:
    """The only stage of a nest, the value of which it is, and what the first moment is about."""
    if tail.windows or tail.scans or tail.segments or tail.summed or not tail.reductions:
        return None
    planned = stages.plan(tail, merge=True)
    if len(planned) != 1 or any(r.type not in (Type.F32, Type.F64) for r in tail.reductions):
        return None
    (stage,), nothing = planned, Literal(0.0, Type.F32)
    value = stages.narrowed(stage.reductions[0].value, Type.F32)
    if value.type is not Type.F32:
        return None
    if stage.kind == "folds":
        is_one = len(stage.reductions) == 1 and stage.reductions[0].operation in _FOLDS
        return (stage, value, nothing) if is_one else None
    if stage.kind != "moments":
        return None
    match value:
        case Call("sub", (element, origin), Type.F32):
            if not Interner().needs(origin) & {axis.name for axis in tail.reduced}:
                return stage, element, origin
    return stage, value, nothing


@dataclass(frozen=True)
class _Fine:
    """The axes of a convolution's result, its channels split where the tail's rows are."""

    found: ConvolutionProduct
    simple: Nest
    """The convolution over those."""
    made: tuple[Axis, ...]
    owner: Mapping[str, tuple[Axis, int]]
    """The tail's axis that each is a part of, and how many of them a step of it is."""
    kept: tuple[Axis, ...]
    """Those of rows."""
    extents: Mapping[str, int]
    """Of the tail's axes."""

    @staticmethod
    def of(nest: Tailed, found: ConvolutionProduct, tail: Nest, index: Index) -> _Fine | None:
        walked = tail.parallel + tail.reduced
        steps = chain(index, walked, nest.result.element_count)
        simple = alone(nest)
        if steps is None or chain(simple.stores[0].index, simple.parallel, nest.result.element_count) is None:
            return None
        made = list[Axis]()
        for axis in found.made:
            simple, parts = _split(simple, axis, sorted(steps.values()))
            made += parts
        own = {axis.name: simple.stores[0].index.coefficient(axis.name) or 0 for axis in simple.parallel}
        owner = dict[str, tuple[Axis, int]]()
        for part in simple.parallel:
            for axis in walked:
                if (
                    steps[axis.name] <= own[part.name]
                    and own[part.name] * part.extent <= steps[axis.name] * axis.extent
                ):
                    owner[part.name] = (axis, own[part.name] // steps[axis.name])
        if len(owner) < len(simple.parallel):
            return None
        kept = tuple(part for part in simple.parallel if owner[part.name][0] in tail.parallel)
        return _Fine(found, simple, tuple(made), owner, kept, tail.extents)

    def value(self, tail: Nest, value: Expression) -> Nest:
        """What states are of, over the product's axes."""
        digits: dict[str, Index] = {}
        for part in self.simple.parallel:
            axis, step = self.owner[part.name]
            digits[axis.name] = digits.get(axis.name, Index()) + Index.axis(part.name, step)
        extents = {axis.name: axis.extent for axis in self.simple.parallel}
        single = replace(tail, stores=(), reductions=(Reduction("value", "sum", value, Type.F32),))
        whole = iteration_space.reindexed(single, lambda index: index.substituted(digits, extents), (), ())
        groups = {"batch": self.found.groups, "m": (*self.found.images, *self.found.outputs), "n": self.made}
        joined = with_sums(self.simple, whole)
        over = over_axes(replace(joined, parallel=self.simple.parallel), groups, ())
        return iteration_space.reindexed(over, iteration_space.recombined, over.parallel, ())

    def columns(self) -> Columns:
        """Where a row's states are."""
        spread = [axis for axis in (*self.found.images, *self.found.groups, *self.made) if axis not in self.kept]
        count = inside = math.prod(axis.extent for axis in spread)
        extents, digits = {**self.extents, COUNT: count}, dict[str, Index]()
        for axis in spread:
            outside, inside = inside, inside // axis.extent
            digit = Index.axis(COUNT).divided(inside, extents)
            digits[axis.name] = digit if outside == count else digit.modulo(axis.extent, extents)
        for axis in self.kept:
            owner, step = self.owner[axis.name]
            digit = Index.axis(owner.name).divided(step, extents)
            digits[axis.name] = digit if step * axis.extent == owner.extent else digit.modulo(axis.extent, extents)

        def number(axes: Sequence[Axis]) -> Index:
            total, step = Index(), 1
            for axis in reversed(axes):
                total, step = total + digits[axis.name].scaled(step), step * axis.extent
            return total

        return Columns(number(self.found.images), number(self.found.groups), number(self.made), count)


def _split(simple: Nest, axis: Axis, steps: Sequence[int]) -> tuple[Nest, list[Axis]]:
    """The convolution with an axis of its result in parts that begin at some steps of memory, and those."""
    own = simple.stores[0].index.coefficient(axis.name) or 1
    cuts = [step // own for step in steps if own < step < own * axis.extent and step % own == 0]
    ends = [1, *dict.fromkeys(cuts), axis.extent]
    if any(outer % inner for inner, outer in itertools.pairwise(ends)) or len(ends) == 2:
        return simple, [axis]
    parts = [Axis(f"{axis.name}_by{inner}", outer // inner) for inner, outer in itertools.pairwise(ends)]
    number = Index()
    for part, step in zip(parts, ends, strict=False):
        number += Index.axis(part.name, step)
    parallel = [each for old in simple.parallel for each in (parts[::-1] if old == axis else [old])]
    extents = {each.name: each.extent for each in (*parallel, *simple.reduced)}
    split = iteration_space.reindexed(
        simple, lambda index: index.substituted({axis.name: number}, extents), parallel, simple.reduced
    )
    return split, parts[::-1]


def _renamed(nest: Nest, names: Mapping[str, str]) -> Nest:
    return replace(
        nest,
        stores=tuple(replace(store, value=_reading(store.value, names)) for store in nest.stores),
        buffers=tuple(replace(each, name=names.get(each.name, each.name)) for each in nest.buffers),
    )


def _reading(value: Expression, names: Mapping[str, str]) -> Expression:
    """The value with buffers called otherwise."""
    interner = Interner()
    loads = [part for part in interner.parts([value]).values() if isinstance(part, Load) and part.buffer in names]
    return interner.replaced(value, {interner.number(load): replace(load, buffer=names[load.buffer]) for load in loads})
