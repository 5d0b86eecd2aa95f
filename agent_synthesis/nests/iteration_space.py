"""The iteration space of a nest in the forms that schedules want: axes merged, ordered, flattened, taken apart.

Axes of one iteration vanish, axes that lie one after the other in every index merge, and axes are ordered as the stores
lie in memory. What cannot merge stays apart (`simplified`), or becomes quotients and remainders of one axis: of the
reduced ones (`canonical`), or of all (`flattened`). Nothing here knows a target or a strategy.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from agent_synthesis.nests.interner import EXPENSIVE, Interner
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Memory,
    Nest,
    Quotient,
    Remainder,
    remembered,
    with_value,
)
from agent_synthesis.nests.symbolic import distinct


def roots(nest: Nest) -> list[Expression]:
    """All expressions that the nest evaluates: of reductions, then of stores."""
    return [reduction.value for reduction in nest.reductions] + [store.value for store in nest.stores]


@remembered
def indices(nest: Nest) -> Sequence[Index]:
    """Every index that the nest uses, stores first."""
    found = [store.index for store in nest.stores]
    for part in Interner().parts(roots(nest)).values():
        if isinstance(part, Load | AxisValue):
            found.append(part.index)
    return found + [position.index for window in nest.windows for position in window.positions]


def reindexed(nest: Nest, change: Callable[[Index], Index], parallel: Iterable[Axis], reduced: Iterable[Axis]) -> Nest:
    """The nest over other axes, with every index changed. Shared expressions stay shared."""
    done: dict[int, tuple[Expression, Expression]] = {}

    def renew(expression: Expression) -> Expression:
        if id(expression) in done:
            return done[id(expression)][1]
        match expression:
            case Load(_, index, _) | AxisValue(index, _):
                fresh: Expression = replace(expression, index=change(index))
            case Call(_, arguments, _):
                fresh = replace(expression, arguments=tuple(renew(argument) for argument in arguments))
            case _:
                fresh = expression
        done[id(expression)] = (expression, fresh)
        return fresh

    return replace(
        nest,
        parallel=tuple(parallel),
        reduced=tuple(reduced),
        reductions=tuple(with_value(r, renew(r.value), change) for r in nest.reductions),
        stores=tuple(replace(s, index=change(s.index), value=renew(s.value)) for s in nest.stores),
    )


def simplified(nest: Nest) -> Nest:
    """Without axes of one iteration, and with adjacent axes merged where every index allows it.

    Parallel axes come in the order of the first store's strides, so that the last one is written contiguously.
    """
    extents = nest.extents
    gone = {axis.name: Index() for axis in nest.parallel + nest.reduced if axis.extent == 1}
    kept = {name: extent for name, extent in extents.items() if name not in gone}
    if gone:
        parallel = [axis for axis in nest.parallel if axis.name in kept]
        reduced = [axis for axis in nest.reduced if axis.name in kept]
        if nest.reduced and not reduced:
            reduced = [nest.reduced[-1]]
            gone.pop(reduced[0].name)
            kept[reduced[0].name] = 1
        nest = reindexed(nest, lambda index: index.substituted(gone, kept | dict.fromkeys(gone, 1)), parallel, reduced)
    nest = replace(nest, parallel=_by_stride(nest))
    while (merged := _merged_pair(nest)) is not None:
        nest = merged
    return nest


def narrowed(nest: Nest) -> Nest:
    """The nest with quotients and remainders of no more axes than they depend on."""
    extents = nest.extents
    return reindexed(nest, lambda index: narrow(index, extents), nest.parallel, nest.reduced)


def narrow(index: Index, extents: Mapping[str, int]) -> Index:
    """The same index with quotients and remainders of fewer axes, where those that are left out never reach the next
    multiple: what of `100 i + j` over 300 matters is `i` over 3, for j below 100."""
    result = Index(index.offset)
    for atom, coefficient in index.terms:
        part = Index.axis(atom) if isinstance(atom, str) else _narrowed(atom, extents)
        result = result + part.scaled(coefficient)
    return result


def _narrowed(atom: Quotient | Remainder, extents: Mapping[str, int]) -> Index:
    value, divisor = narrow(atom.value, extents), atom.divisor
    for factor in sorted({math.gcd(c, divisor) for _, c in value.terms} - {1}, reverse=True):
        rest = Index(value.offset % factor, tuple(term for term in value.terms if term[1] % factor))
        low, high = rest.bounds(extents)
        if rest.terms and low >= 0 and high < factor:
            whole = (value + rest.scaled(-1)).divided(factor, extents)
            if isinstance(atom, Quotient):
                return whole.divided(divisor // factor, extents)
            return whole.modulo(divisor // factor, extents).scaled(factor) + rest
    return value.divided(divisor, extents) if isinstance(atom, Quotient) else value.modulo(divisor, extents)


def all_parallel(nest: Nest, axes: Sequence[Axis] = ()) -> Nest:
    """A nest without reductions with all its axes parallel, one at least; `axes`: in that order."""
    return reindexed(nest, lambda index: index, axes or nest.parallel + nest.reduced or (Axis("one", 1),), ())


def _by_stride(nest: Nest) -> tuple[Axis, ...]:
    strides = {axis.name: nest.stores[0].index.coefficient(axis.name) for axis in nest.parallel}
    if not all(strides.values()):  # inside a quotient, or not stored along: leave the order that was given
        return nest.parallel
    return tuple(sorted(nest.parallel, key=lambda axis: -abs(strides[axis.name] or 0)))


def _merged_pair(nest: Nest) -> Nest | None:
    found = indices(nest)
    for group in (nest.parallel, nest.reduced):
        for outer, inner in itertools.pairwise(group):
            if all(_lie_together(index, outer, inner) for index in found):
                both = Axis(inner.name, outer.extent * inner.extent)

                def renamed(axes: tuple[Axis, ...], outer: Axis = outer, both: Axis = both) -> list[Axis]:
                    return [both if a.name == both.name else a for a in axes if a.name != outer.name]

                def change(index: Index, outer: Axis = outer) -> Index:
                    return Index(index.offset, tuple(term for term in index.terms if term[0] != outer.name))

                return reindexed(nest, change, renamed(nest.parallel), renamed(nest.reduced))
    return None


def _lie_together(index: Index, outer: Axis, inner: Axis) -> bool:
    far, near = index.coefficient(outer.name), index.coefficient(inner.name)
    return far is not None and near is not None and far == near * inner.extent


def canonical(nest: Nest) -> Nest:
    """Simplified, with one reduced axis at most; what is not contiguous along it has quotients and remainders."""
    simple = simplified(nest)
    if not (simple.reductions or simple.summed) and (simple.parallel or simple.reduced):
        return simple
    if len(simple.reduced) <= 1:
        return simple
    flat = Axis(simple.reduced[-1].name, simple.column_count)
    singles, extents = split(simple.reduced, flat)
    extents.update({axis.name: axis.extent for axis in simple.parallel})
    return reindexed(simple, lambda index: recombined(index.substituted(singles, extents)), simple.parallel, [flat])


def recombined(index: Index) -> Index:
    """The index with quotients and remainders put together where they form the number that they were split from.

    `d (v / d) + v % d` is v, and `a ((v / a) % b) + v % a` is v % (a b): a tensor whose merged axes lie together is
    contiguous along them although others are not.
    """
    terms = dict(index.terms)
    for atom, coefficient in index.terms:
        if not isinstance(atom, Remainder):
            continue
        value, divisor = atom.value, atom.divisor
        for outer, step in index.terms:
            if step != coefficient * divisor or isinstance(outer, str):
                continue
            rest = Index(index.offset, tuple((a, c) for a, c in terms.items() if a not in (atom, outer)))
            if outer == Quotient(value, divisor):
                return recombined(rest + value.scaled(coefficient))
            if isinstance(outer, Remainder) and outer.value == Index(0, ((Quotient(value, divisor), 1),)):
                whole = Remainder(value, divisor * outer.divisor)
                return recombined(rest + Index(0, ((whole, coefficient),)))
    return index


def split(axes: Sequence[Axis], flat: Axis) -> tuple[dict[str, Index], dict[str, int]]:
    """Each axis as a part of their row-major number, and the extents to simplify with."""
    extents = {flat.name: flat.extent}
    parts = {}
    inside = flat.extent
    for axis in axes:
        outside, inside = inside, inside // axis.extent
        part = Index.axis(flat.name)
        part = part.divided(inside, extents)
        parts[axis.name] = part if outside == flat.extent else part.modulo(axis.extent, extents)
    return parts, extents


def flattened(nest: Nest) -> Nest:
    """A nest without reductions over one flat axis; what is not contiguous becomes quotients and remainders."""
    axes = nest.parallel + nest.reduced
    flat = Axis(axes[-1].name, math.prod(axis.extent for axis in axes))
    extents = {flat.name: flat.extent}
    whole = Index.axis(flat.name)

    def run(first: int, last: int) -> Index:
        """The row-major number formed by axes first … last."""
        inside = math.prod(axis.extent for axis in axes[last + 1 :])
        part = whole.divided(inside, extents)
        size = math.prod(axis.extent for axis in axes[first : last + 1])
        return part if first == 0 else part.modulo(size, extents)

    singles = {axis.name: run(number, number) for number, axis in enumerate(axes)}

    def change(index: Index) -> Index:
        coefficients = [index.coefficient(axis.name) for axis in axes]
        if None in coefficients:
            return index.substituted(singles, extents)
        result, last = Index(index.offset), len(axes) - 1
        while last >= 0:
            first, step = last, coefficients[last] or 0
            reach = step * axes[last].extent
            while first > 0 and coefficients[first - 1] == reach:
                first -= 1
                reach *= axes[first].extent
            if step:
                result = result + run(first, last).scaled(step)
            last = first - 1
        return result

    return reindexed(nest, change, [flat], [])


def taken_apart(nest: Nest) -> Nest:
    """The nest with axes split where an index has a quotient or a remainder of them: a view had merged two."""
    while (found := _merged_axis(nest)) is not None:
        axis, divisor = found
        name = f"{axis.name}_outer"
        while name in nest.extents:
            name += "_outer"
        outer = Axis(name, axis.extent // divisor)
        inner = Axis(axis.name, divisor)
        extents = {**nest.extents, axis.name: divisor, outer.name: outer.extent}
        instead = {axis.name: Index.axis(outer.name, divisor) + Index.axis(inner.name)}
        axes = [part for each in nest.parallel for part in ((outer, inner) if each == axis else (each,))]
        nest = reindexed(nest, lambda index, i=instead, e=extents: index.substituted(i, e), axes, ())  # type: ignore[misc]
    return nest


def _merged_axis(nest: Nest) -> tuple[Axis, int] | None:
    """An axis, and the divisor of it alone in some index, which divides its extent."""
    for index in indices(nest):
        atoms = [atom for atom, _ in index.terms]
        while atoms:
            atom = atoms.pop()
            if not isinstance(atom, Quotient | Remainder):
                continue
            atoms += [inner for inner, _ in atom.value.terms]
            for axis in nest.parallel:
                if atom.value == Index.axis(axis.name) and axis.extent % atom.divisor == 0 < axis.extent - atom.divisor:
                    return axis, atom.divisor
    return None


def is_safe_in_place(nest: Nest) -> bool:
    """Whether every buffer both read and written is read only at the one place that is written."""
    written: dict[str, set[Index]] = defaultdict(set)
    for store in nest.stores:
        written[store.buffer].add(store.index)
    loads = [part for part in Interner().parts(roots(nest)).values() if isinstance(part, Load)]
    return all(written[load.buffer] == {load.index} for load in loads if load.buffer in written)


def reads_what_it_writes(nest: Nest) -> bool:
    """Whether some buffer is both read and written, so that the nest must not run twice."""
    written = {store.buffer for store in nest.stores}
    return any(isinstance(part, Load) and part.buffer in written for part in Interner().parts(roots(nest)).values())


def work(nest: Nest) -> int:
    """Rough cost of the nest in simple element operations."""
    interner = Interner()
    costs = (
        16 if isinstance(part, Call) and part.operation in EXPENSIVE else 1
        for part in interner.parts(roots(nest)).values()
        if not isinstance(part, Literal)
    )
    return nest.row_count * nest.column_count * sum(costs)


def splits_of(indices: Iterable[Index], extents: Mapping[str, int]) -> dict[str, set[int]]:
    """Axes that a quotient or remainder divides, alone or as a digit of a number, with the steps at which to split
    them: that makes it affine."""
    wanted: dict[str, set[int]] = {}

    def visit(index: Index) -> None:
        for atom, _ in index.terms:
            if isinstance(atom, Quotient | Remainder):
                visit(atom.value)
                for axis, weight in _digits(atom.value, extents):
                    step = atom.divisor // weight
                    if atom.divisor % weight == 0 and step > 1 and extents[axis] % step == 0:
                        wanted.setdefault(axis, set()).add(step)

    for index in indices:
        visit(index)
    return wanted


def _digits(number: Index, extents: Mapping[str, int]) -> list[tuple[str, int]]:
    """Axes of a number with their weights, where each weighs more than all lighter ones make; else none."""
    found: list[tuple[str, int]] = []
    most = 0
    for atom, weight in sorted(number.terms, key=lambda term: term[1]):
        if not isinstance(atom, str) or number.offset or weight <= most:
            return []
        found.append((atom, weight))
        most += weight * (extents[atom] - 1)
    return found


# ---- as it was lowered: axes in the order of memory, as few as there can be ---------------------------


def ordered(nest: Nest) -> Nest:
    """Parallel axes by falling stride of the first store, reduced axes by falling stride of the first big
    load."""
    parallel = sorted(nest.parallel, key=lambda axis: -abs(nest.stores[0].index.coefficient(axis.name) or 0))
    reduced = list(nest.reduced)
    values = distinct(reduction.value for reduction in nest.reductions)
    across = {axis.name for axis in reduced}
    loads = [part.index for part in values if isinstance(part, Load) and part.index.axes() >= across]
    if not nest.scans and loads and all(loads[0].coefficient(axis.name) is not None for axis in reduced):
        reduced.sort(key=lambda axis: -abs(loads[0].coefficient(axis.name) or 0))
    return replace(nest, parallel=tuple(parallel), reduced=tuple(reduced))


def merged(nest: Nest) -> Nest:
    """Neighbouring axes become one wherever every index runs through them as through one; then all are
    renamed."""
    groups = []
    found = indices(nest)
    extents = dict(nest.extents)
    for axes in (list(nest.parallel), list(nest.reduced)):
        position = 0
        while position + 1 < len(axes):
            outer, inner = axes[position], axes[position + 1]
            if all(_runs_through(index, outer.name, inner) for index in found):
                drop = {outer.name: Index()}
                both = Axis(inner.name, outer.extent * inner.extent)
                axes[position : position + 2] = [both]
                extents[both.name] = both.extent
                del extents[outer.name]
                nest = _substituted(nest, drop, extents)
                found = indices(nest)
            else:
                position += 1
        groups.append(axes)
    names = {}
    for axes, letter in zip(groups, "ij", strict=True):
        for position, axis in enumerate(axes):
            names[axis.name] = letter if len(axes) == 1 else f"{letter}{position}"
    renamed_extents = {names[axis.name]: axis.extent for axes in groups for axis in axes}
    renamed = _substituted(nest, {old: Index.axis(new) for old, new in names.items()}, renamed_extents)
    parallel, reduced = (tuple(Axis(names[a.name], a.extent) for a in axes) for axes in groups)
    return replace(renamed, parallel=parallel, reduced=reduced)


def _runs_through(index: Index, outer: str, inner: Axis) -> bool:
    """Whether the index depends on the two axes only through `outer · extent(inner) + inner`, at every
    level."""
    steps = {outer: 0, inner.name: 0}
    for atom, coefficient in index.terms:
        if isinstance(atom, str):
            if atom in steps:
                steps[atom] = coefficient
        elif not _runs_through(atom.value, outer, inner):
            return False
    return steps[outer] == steps[inner.name] * inner.extent


def _substituted(nest: Nest, replacements: Mapping[str, Index], extents: Mapping[str, int]) -> Nest:
    """With axes replaced in every index; `extents` are those of the axes that remain."""
    return reindexed(nest, lambda index: index.substituted(replacements, extents), nest.parallel, nest.reduced)


def buffers_below(values: Iterable[Expression]) -> set[str]:
    """Names of what these values read."""
    return {part.buffer for part in Interner().parts(values).values() if isinstance(part, Load | Memory)}


def touching(nest: Nest, more: Sequence[Expression] = ()) -> Nest:
    """The nest with no buffers but those that it and some values touch, written where it stores."""
    written = {store.buffer for store in nest.stores}
    used = written | buffers_below([*roots(nest), *more])
    kept = [replace(buffer, written=buffer.name in written) for buffer in nest.buffers if buffer.name in used]
    return replace(nest, buffers=tuple(kept))
