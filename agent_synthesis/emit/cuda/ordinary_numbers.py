"""Logarithms and quotients by a row's value on CUDA, in few instructions where all numbers at hand are ordinary.

The one idea: what is special about zero, infinity, NaN and subnormal numbers costs about as much as the rest of a
logarithm or a division. So a thread works on its vectors as if none were there, while a flag remembers whether that was
so, and does them again with all care if not. Without this the instructions of some sums and norms take longer than
their memory: the divergence of 16384x16384 took 618 us and takes 515, the L1 norm of 32768x65535 4706 and 4277
(`docs/results/level1_h200.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.analysis.costly_parts import row_quotients
from agent_synthesis.nests.ir import Call, Store


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
