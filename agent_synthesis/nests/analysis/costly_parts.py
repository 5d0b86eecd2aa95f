"""Exponentials, logarithms and quotients in what a nest computes: which there are, and what is known around them."""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import Call, Expression, Literal, Nest, Reduced, Type, remembered


@remembered
def exponentials(nest: Nest) -> Sequence[Call]:
    """Every distinct exponential."""
    roots = [r.value for r in nest.reductions] + [s.value for s in nest.stores]
    return [p for p in Interner().parts(roots).values() if isinstance(p, Call) and p.operation == "exp"]


def distance_exponentials_only(nest: Nest) -> bool:
    """Whether every exponential is of a distance from a maximum, where an approximate one weighs little."""
    maxima = {reduction.name for reduction in nest.reductions if reduction.operation == "max"}
    found = exponentials(nest)

    def is_distance(part: Call) -> bool:
        match part.arguments[0]:
            case Call("sub", (_, Reduced(name, _)), _):
                return name in maxima and part.type is Type.F32
        return False

    return bool(found) and all(is_distance(part) for part in found)


def is_stored_short(nest: Nest) -> bool:
    """Whether all that is stored has 16 bits, so that an approximate exponential's error, below 1e-5, is lost in it."""
    return all(nest.buffer(store.buffer).type in (Type.F16, Type.BF16) for store in nest.stores)


def logarithms(roots: Sequence[Expression], axis: str) -> list[Call]:
    """Every distinct logarithm in float32 of something that changes along the axis; those of others after these."""
    interner = Interner()
    return [part for part in _singles("log", roots, interner) if axis in interner.needs(part)]


def row_quotients(roots: Sequence[Expression], axis: str) -> list[Call]:
    """Every distinct quotient in float32 of something that changes along the axis by something that does not."""
    interner = Interner()
    found = []
    for part in _singles("div", roots, interner):
        dividend, divisor = part.arguments
        is_of_row = axis in interner.needs(dividend) and axis not in interner.needs(divisor)
        found += [part] if is_of_row and not isinstance(divisor, Literal) else []
    return found


def _singles(operation: str, roots: Sequence[Expression], interner: Interner) -> list[Call]:
    """Every distinct call of an operation in float32 on float32; those of others after these."""
    parts = [part for _, part in sorted(interner.parts(roots).items())]
    found = [part for part in parts if isinstance(part, Call) and part.operation == operation]
    found = [part for part in found if {part.type, *(argument.type for argument in part.arguments)} == {Type.F32}]
    return sorted(found, key=lambda part: len(interner.parts([part])))


def of_ordinary(value: Expression, logarithms: Sequence[Call]) -> Expression:
    """The value where all arguments of the logarithms are ordinary: the outcome of tests for 0 or NaN is known."""
    interner = Interner()
    arguments = {interner.number(logarithm.arguments[0]) for logarithm in logarithms}

    def fails(test: Expression) -> bool:
        match test:
            case Call("isnan" | "isinf", (tested,), _) | Call("eq", (tested, Literal(0, _)), _):
                return interner.number(tested) in arguments
        return False

    def renew(part: Expression) -> Expression:
        match part:
            case Call("where", (test, _, otherwise), kind) if fails(test) and otherwise.type is kind:
                return renew(otherwise)
            case Call(operation, operands, kind):
                return Call(operation, tuple(renew(operand) for operand in operands), kind)
        return part

    return renew(value)
