"""How many passes over its elements a nest's reductions need, and what is worth keeping between them.

A reduction that uses another's value needs a later pass; those that do not depend on each other share one.
Nothing here knows how a pass is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.interner import EXPENSIVE, Interner
from agent_synthesis.nests.ir import (
    Axis,
    Call,
    Expression,
    Load,
    Nest,
    Reduced,
    Reduction,
    Scan,
    Store,
    Type,
    remembered,
)

Sweep = tuple[Reduction, ...]


@remembered
def levels(nest: Nest) -> Sequence[Sweep]:
    """The reductions by sweep, in order; what the nest does not reduce itself is known before."""
    interner = Interner()
    level: dict[str, int] = {}
    for reduction in nest.reductions:
        before = (level.get(need[1:], -1) for need in interner.needs(reduction.value) if need.startswith("%"))
        level[reduction.name] = 1 + max(before, default=-1)
    return [
        tuple(reduction for reduction in nest.reductions if level[reduction.name] == number)
        for number in range(1 + max(level.values(), default=-1))
    ]


def online_pair(nest: Nest) -> tuple[Reduction, Reduction] | None:
    """The maximum of a value and the sum of exp(value - maximum), when they are the first two sweeps."""
    planned = levels(nest)
    if len(planned) < 2 or len(planned[0]) != 1 or len(planned[1]) != 1:
        return None
    (top,), (total,) = planned[:2]
    if top.operation != "max" or total.operation != "sum" or top.type not in (Type.F32, Type.F64):
        return None
    match total.value:
        case Call("exp", (Call("sub", (value, Reduced(name, _)), _),), _) if name == top.name:
            interner = Interner()
            same = interner.number(value) == interner.number(top.value)
            return (top, total) if same and total.type is top.type else None
    return None


def with_reciprocal(nest: Nest) -> Nest:
    """Divisions by a softmax's sum become products with its reciprocal.

    That sum lies between 1 and the number of columns, so neither overflow nor a subnormal reciprocal can come of it,
    and the result is off by at most one more unit in the last place. Other divisors have no such bounds and stay.
    """
    pair = online_pair(nest)
    if pair is None:
        return nest
    total = pair[1]
    known: dict[int, tuple[Expression, Expression]] = {}
    reciprocal = Call("reciprocal", (Reduced(total.name, total.type),), total.type)

    def renew(expression: Expression) -> Expression:
        if id(expression) not in known:
            fresh = expression
            match expression:
                case Call("div", (dividend, Reduced(name, type_)), kind) if name == total.name and kind is type_:
                    fresh = Call("mul", (renew(dividend), reciprocal), kind)
                case Call(operation, arguments, kind):
                    fresh = Call(operation, tuple(renew(argument) for argument in arguments), kind)
            known[id(expression)] = (expression, fresh)
        return known[id(expression)][1]

    return replace(
        nest,
        reductions=tuple(replace(r, value=renew(r.value)) for r in nest.reductions),
        stores=tuple(replace(store, value=renew(store.value)) for store in nest.stores),
    )


def element_stores(nest: Nest) -> list[Expression]:
    """Values of the stores made at every element."""
    return [store.value for store in nest.stores if nest.is_element_store(store)]


def worth_keeping(nest: Nest) -> dict[int, list[Expression]]:
    """Sweep number → expensive parts of it that a later sweep or an element store needs again."""
    interner = Interner()
    planned = levels(nest)
    names = {axis.name for axis in nest.reduced}
    found: dict[int, list[Expression]] = {}
    kept: set[int] = set()
    for number, sweep in enumerate(planned):
        later = [reduction.value for after in planned[number + 1 :] for reduction in after] + element_stores(nest)
        needed = interner.parts(later)
        pending = [reduction.value for reduction in sweep]
        while pending:
            part = pending.pop(0)
            if not isinstance(part, Call) or not interner.needs(part) & names:
                continue
            same = interner.number(part)
            costly = any(isinstance(p, Call) and p.operation in EXPENSIVE for p in interner.parts([part]).values())
            if same in kept:
                continue
            if same in needed and costly:
                found.setdefault(number, []).append(part)
                kept.add(same)
            else:
                pending.extend(part.arguments)
    return found


def kept_bytes(nest: Nest) -> int:
    """Bytes of a row of what is worth keeping; 0 where a part is no float that registers have."""
    kept = [part for parts in worth_keeping(nest).values() for part in parts]
    if any(part.type not in (Type.F32, Type.F64) for part in kept):
        return 0
    return nest.column_count * sum(part.type.size_bytes for part in kept)


def output_that_keeps(nest: Nest) -> Store | None:
    """The store whose place may hold the one kept value of an element until the store itself is made."""
    kept = [part for parts in worth_keeping(nest).values() for part in parts]
    stores = [store for store in nest.stores if nest.is_element_store(store)]
    if len(kept) != 1 or len(stores) != 1:
        return None
    (store,) = stores
    target = nest.buffer(store.buffer)
    is_read = any(
        isinstance(p, Load) and p.buffer == target.name
        for p in Interner().parts([r.value for r in nest.reductions] + [s.value for s in nest.stores]).values()
    )
    is_shared = sum(other.buffer == target.name for other in nest.stores) > 1
    everywhere = all(store.index.coefficient(axis.name) for axis in nest.parallel + nest.reduced)
    fits = target.type is kept[0].type and target.element_count == nest.row_count * nest.column_count
    return store if fits and everywhere and not is_read and not is_shared else None


def per_column(nest: Nest, roots: Iterable[Expression], interner: Interner) -> list[Expression]:
    """The largest parts below the roots that use a reduction's value and no reduced axis: worth computing once."""
    names = {axis.name for axis in nest.reduced}
    found: dict[int, Expression] = {}
    pending, seen = list(roots), set[int]()
    while pending:
        part = pending.pop(0)
        number = interner.number(part)
        if number in seen or not isinstance(part, Call):
            continue
        seen.add(number)
        needs = interner.needs(part)
        if not needs & names and any(need.startswith("%") for need in needs):
            found[number] = part
        else:
            pending.extend(part.arguments)
    return list(found.values())


def vector_axis(nest: Nest) -> tuple[Axis | None, bool]:
    """The parallel axis that most data is contiguous along, and whether that is more than along the reduced axes."""
    interner = Interner()
    parts = interner.parts([reduction.value for reduction in nest.reductions] + [store.value for store in nest.stores])
    reduced = {axis.name for axis in nest.reduced}
    loads = [p for p in parts.values() if isinstance(p, Load) and p.index.axes() & reduced]

    def contiguous(axis: str) -> int:
        return sum(nest.buffer(load.buffer).element_count for load in loads if load.index.coefficient(axis) == 1)

    best = max(nest.parallel, key=lambda axis: contiguous(axis.name), default=None)
    if best is None:
        return None, False
    along = max(contiguous(axis.name) for axis in nest.reduced)
    return best, contiguous(best.name) > along


def axis_across(nest: Nest, shortest: int) -> Axis | None:
    """The axis that data of a simplified nest lies along, where that is not a reduced one and is long enough."""
    axis, better = vector_axis(nest)
    return axis if better and axis is not None and axis.extent >= shortest else None


def is_reduction(nest: Nest) -> bool:
    """Whether it reduces over whole axes, and reads what it overwrites only in place."""
    return (
        bool(nest.reductions)
        and not (nest.windows or nest.scans or nest.segments)
        and iteration_space.is_safe_in_place(nest)
    )


def is_visited_once(nest: Nest) -> bool:
    """Whether one sweep is all: nothing is stored of single elements."""
    return len(levels(nest)) == 1 and not element_stores(nest)


def is_scan(nest: Nest) -> bool:
    """Whether all that a nest reduces are scans of one direction, and all that it stores are elements."""
    return (
        bool(nest.scans)
        and all(isinstance(reduction, Scan) for reduction in nest.reductions)
        and len({scan.reverse for scan in nest.scans}) == 1
        and all(nest.is_element_store(store) for store in nest.stores)
        and iteration_space.is_safe_in_place(nest)
    )


def multiplies(simple: Nest) -> bool:
    """Whether products of floats are scanned."""
    return any(scan.operation == "cumprod" and scan.type.is_float for scan in simple.scans)


def names_of(sweep: Sequence[Reduction]) -> set[str]:
    """What a scope knows after the sweep."""
    return {f"%{reduction.name}" for reduction in sweep}
