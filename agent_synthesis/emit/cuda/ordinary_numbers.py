"""Logarithms and quotients by a row's value on CUDA, in few instructions where all numbers at hand are ordinary.

The one idea: what is special about zero, infinity, NaN and subnormal numbers costs about as much as the rest of a
logarithm or a division. So a thread works on its packs as if none were there, while a flag remembers whether that was
so, and does them again with all care if not. Without this the instructions of some sums and norms take longer than
their memory: the divergence of 16384x16384 took 618 us and takes 515, the L1 norm of 32768x65535 4706 and 4277
(`docs/results/level1_h200.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import Call, Expression, Literal, Store, Type


def logarithms(roots: Sequence[Expression], axis: str) -> list[Call]:
    """Every distinct logarithm in float32 of something that changes along the axis; those of others after these."""
    interner = Interner()
    parts = [part for _, part in sorted(interner.parts(roots).items())]
    found = [part for part in parts if isinstance(part, Call) and part.operation == "log" and part.type is Type.F32]
    found = [part for part in found if part.arguments[0].type is Type.F32 and axis in interner.needs(part)]
    return sorted(found, key=lambda part: len(interner.parts([part])))


def row_quotients(roots: Sequence[Expression], axis: str) -> list[Call]:
    """Every distinct quotient in float32 of something that changes along the axis by something that does not."""
    interner = Interner()
    parts = [part for _, part in sorted(interner.parts(roots).items())]
    found = [part for part in parts if isinstance(part, Call) and part.operation == "div" and part.type is Type.F32]
    found = [part for part in found if all(argument.type is Type.F32 for argument in part.arguments)]
    found = [p for p in found if axis in interner.needs(p.arguments[0]) and axis not in interner.needs(p.arguments[1])]
    constant = [part for part in found if isinstance(part.arguments[1], Literal)]
    found = [part for part in found if part not in constant]
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


def know_logarithms(inner: Scope, logarithms: Sequence[Call], ordinary: str) -> None:
    """Computes them in the scope of an element; `ordinary` becomes false where one is not of an ordinary number."""
    for logarithm in logarithms:
        argument = inner.value(logarithm.arguments[0]).text
        inner.define(logarithm, inner.declare("float", "logarithm", f"ws::ordinary_log({argument}, {ordinary})"))


def quick_quotients(root: Scope, stores: Sequence[Store], axis: str) -> Callable[[Scope, str], None] | None:
    """What computes quotients by values of the row, in the scope of an element that is stored; None without any.

    What depends on the divisor alone is computed in `root`.
    """
    found = row_quotients([store.value for store in stores], axis)
    if not found:
        return None
    divisors: dict[int, str] = {}
    number = root.function.interner.number
    for quotient in found:
        divisor = quotient.arguments[1]
        if number(divisor) not in divisors:
            root.expect([divisor, divisor])
            divisors[number(divisor)] = root.declare(
                "ws::Divisor", "divisor", f"ws::divisor({root.value(divisor).text})"
            )

    def know(inner: Scope, ordinary: str) -> None:
        for quotient in found:
            dividend, divisor = quotient.arguments
            arguments = f"{inner.value(dividend).text}, {divisors[number(divisor)]}, {ordinary}"
            inner.define(quotient, inner.declare("float", "quotient", f"ws::quotient({arguments})"))

    return know
