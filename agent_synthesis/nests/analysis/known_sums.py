"""Sums that need no loop: of what is the same for all elements, and of what is another value at one place. Of others,
what a maximum is in is added afterwards.

The one idea: the derivative of a loss is not zero at a row's target alone, and a softmax's backward sums it up. Such an
element has two values, here and elsewhere; with both known, so is the sum, with infinities and NaN as of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    AxisValue,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Memory,
    Nest,
    Reduced,
    Reduction,
    Scan,
    Type,
    with_value,
)
from agent_synthesis.nests.product import Multiplied
from agent_synthesis.nests.symbolic import cast, literal, op


def without_known_sums(nest: Nest) -> Nest:
    """The nest without the sums that are known; without any reduction that is left, all of its axes are parallel."""
    known: dict[str, Expression] = {}
    left: list[Reduction] = []

    def value_of(expression: Expression) -> Expression | None:
        return known.get(expression.reduction) if isinstance(expression, Reduced) else None

    for reduction in nest.reductions:
        value = _replaced(reduction.value, value_of) if known else reduction.value
        is_sum = type(reduction) is Reduction and reduction.operation == "sum" and reduction.type.is_float
        found = _total(value, nest) if is_sum else None
        tops = {each.name for each in left if each.operation == "max"}
        rest = _apart(reduction, value, nest, tops) if is_sum else None
        if found is not None:
            known[reduction.name] = found
        elif rest is not None:
            left.append(replace(reduction, value=rest[0]))
            known[reduction.name] = rest[1]
        else:
            left.append(with_value(reduction, value, lambda index: index))
    if not known:
        return nest
    stores = tuple(replace(store, value=_replaced(store.value, value_of)) for store in nest.stores)
    made = replace(nest, reductions=tuple(left), stores=stores)
    parts = Interner().parts(iteration_space.roots(made)).values()
    read = {part.buffer for part in parts if isinstance(part, Load | Memory)}
    made = replace(made, buffers=tuple(b for b in made.buffers if b.written or b.name in read))
    is_parallel = not left and not made.summed
    return replace(made, parallel=made.parallel + made.reduced, reduced=()) if is_parallel else made


def _of_elements(nest: Nest) -> set[str]:
    """What is another value for each element of a row: axes, and reductions that have one at each."""
    values = {f"%{each.name}" for each in nest.reductions if isinstance(each, Multiplied | Scan)}
    return {axis.name for axis in nest.reduced} | values


def _total(value: Expression, nest: Nest) -> Expression | None:
    """The sum of a value over the reduced axes; None where it takes a loop."""
    axes, count, interner = {axis.name: axis.extent for axis in nest.reduced}, nest.column_count, Interner()
    of_elements = _of_elements(nest)

    def varies(expression: Expression) -> bool:
        return not interner.needs(expression).isdisjoint(of_elements)

    if not varies(value):
        return op("mul", literal(count, value.type), value)
    places: dict[int, tuple[Expression, str, Expression]] = {}
    for number, part in interner.parts([value]).items():
        if isinstance(part, Call) and part.operation == "eq" and varies(part):
            here, there = part.arguments if varies(part.arguments[0]) else part.arguments[::-1]
            name = next((name for name in axes if here == AxisValue(Index.axis(name))), None)
            if name is None or varies(there):
                return None
            places[number] = part, name, there
    if len(places) != 1:
        return None
    ((number, (_, name, place)),) = places.items()

    def where_it_is(truth: bool) -> Callable[[Expression], Expression | None]:
        return lambda part: Literal(truth, Type.BOOL) if interner.number(part) == number else None

    here, elsewhere = (_replaced(value, where_it_is(truth)) for truth in (True, False))
    if varies(here) or varies(elsewhere):
        return None
    times = count // axes[name]

    def scaled(by: int, of: Expression) -> Expression:
        return of if by == 1 else op("mul", literal(by, of.type), of)

    inside, outside = scaled(times, here), elsewhere
    if not (isinstance(elsewhere, Literal) and elsewhere.value == 0):
        inside = op("add", inside, scaled(count - times, elsewhere))
        outside = scaled(count, elsewhere)
    at = cast(place, Type.I64)
    is_inside = op("and", op("ge", at, literal(0, Type.I64)), op("lt", at, literal(axes[name], Type.I64)))
    return op("where", is_inside, inside, outside)


def _apart(reduction: Reduction, value: Expression, nest: Nest, tops: Set[str]) -> tuple[Expression, Expression] | None:
    """What of a sum needs no other reduction, about the row's first element, and the whole in terms of that sum; None
    where it adds nothing that a maximum is in.

    The sum of logarithms of probabilities, x less the logarithm of a sum of exponentials, needs no second visit.
    """
    axes, interner, of_elements = {axis.name for axis in nest.reduced}, Interner(), _of_elements(nest)
    varying: list[tuple[str, Expression]] = []
    others: list[tuple[str, Expression]] = []

    def split(part: Expression, sign: str) -> bool:
        needed = interner.needs(part)
        if needed.isdisjoint(of_elements):
            others.append((sign, part))
            return True
        flipped = {"add": "sub", "sub": "add"}[sign]
        match part:
            case Call("neg", (one,)):
                return split(one, flipped)
            case Call("add" | "sub" as name, (one, other)):
                return split(one, sign) and split(other, sign if name == "add" else flipped)
            case Call("cast", (Call("cast", (inner,), Type.F16 | Type.BF16),), type_) if inner.type is type_:
                return split(inner, sign)  # what PyTorch rounds in between
        varying.append((sign, part))
        return not any(need.startswith("%") for need in needed)

    if not split(value, "add") or not varying or value.type is not reduction.type:
        return None
    if not any(f"%{top}" in interner.needs(part) for top in tops for _, part in others):
        return None

    def total(parts: Sequence[tuple[str, Expression]]) -> Expression:
        (sign, begin), *more = parts
        made = begin if sign == "add" else op("neg", begin)
        for sign, part in more:
            made = op(sign, made, part)
        return made

    def at_first(part: Expression) -> Expression | None:
        if isinstance(part, Load | AxisValue):
            return replace(part, index=part.index.substituted(dict.fromkeys(axes, Index()), nest.extents))
        return None

    own = total(varying)
    first = _replaced(own, at_first)
    first = op("where", op("isinf", first), literal(0, reduction.type), first)
    mean = op("add", first, total(others))
    whole = op("add", Reduced(reduction.name, reduction.type), op("mul", literal(nest.column_count, mean.type), mean))
    return op("sub", own, first), whole


def _replaced(root: Expression, found: Callable[[Expression], Expression | None]) -> Expression:
    """With parts put in place of others, and choices made that are known then."""
    done: dict[int, tuple[Expression, Expression]] = {}

    def visit(expression: Expression) -> Expression:
        if id(expression) not in done:
            fresh = found(expression)
            if fresh is None and isinstance(expression, Call):
                fresh = _folded(replace(expression, arguments=tuple(map(visit, expression.arguments))))
            done[id(expression)] = expression, expression if fresh is None else fresh
        return done[id(expression)][1]

    return visit(root)


def _folded(call: Call) -> Expression:
    """A choice whose test is known, or a test of which a part is."""
    match call:
        case Call("where", (Literal(truth), one, other)):
            return one if truth else other
        case Call("not", (Literal(truth, Type.BOOL),)):
            return Literal(not truth, Type.BOOL)
        case Call("and" | "or" as name, arguments):
            for number, argument in enumerate(arguments):
                if isinstance(argument, Literal) and argument.type is Type.BOOL:
                    return arguments[1 - number] if bool(argument.value) is (name == "and") else argument
        case Call("cast", (Literal() as value,), type_):
            return cast(value, type_)
        case Call("neg", (Literal(0.0, type_),)):
            return literal(0, type_)
    return call
