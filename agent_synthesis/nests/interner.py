"""Equal expressions of a nest under one number, what each needs, and which of them cost much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from agent_synthesis.nests.ir import AxisValue, Call, Expression, Literal, Load, Reduced

EXPENSIVE = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
    "tanh", "erf", "erfc", "sigmoid", "pow", "atan2",
})  # fmt: skip
"""Operations that cost more than reading their result back from a cache would."""


class Interner:
    """Gives equal expressions one number, in time linear in the shared graph rather than in the tree."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._by_identity: dict[int, tuple[Expression, int]] = {}
        self._needs: dict[int, frozenset[str]] = {}

    def number(self, expression: Expression) -> int:
        """The number that all expressions equal to this one share."""
        known = self._by_identity.get(id(expression))
        if known is not None:
            return known[1]
        key: object
        match expression:
            case Call(operation, arguments, type_):
                key = ("call", operation, type_, *(self.number(argument) for argument in arguments))
            case Literal(value, type_):
                key = ("literal", type_, repr(value))
            case _:
                key = expression
        number = self._numbers.setdefault(key, len(self._numbers))
        self._by_identity[id(expression)] = (expression, number)
        return number

    def needs(self, expression: Expression) -> frozenset[str]:
        """What must be known to compute it: axes by name, reductions by name with a leading '%'."""
        number = self.number(expression)
        if number not in self._needs:
            match expression:
                case Call(_, arguments, _):
                    found = frozenset[str]().union(*(self.needs(argument) for argument in arguments))
                case Load(_, index, _) | AxisValue(index, _):
                    found = index.axes()
                case Reduced(reduction, _):
                    found = frozenset({f"%{reduction}"})
                case _:
                    found = frozenset()
            self._needs[number] = found
        return self._needs[number]

    def parts(self, roots: Iterable[Expression], without: Iterable[Expression] = ()) -> dict[int, Expression]:
        """Every distinct expression at or below the roots, by number; not what is `without`, or only below that."""
        found: dict[int, Expression] = {}
        pending, left_out = list(roots), {self.number(each) for each in without}
        while pending:
            expression = pending.pop()
            number = self.number(expression)
            if number not in found and number not in left_out:
                found[number] = expression
                if isinstance(expression, Call):
                    pending.extend(expression.arguments)
        return found

    def replaced(self, value: Expression, instead: Mapping[int, Expression]) -> Expression:
        """The value with other parts in the place of those of these numbers."""
        done: dict[int, Expression] = {}

        def renew(part: Expression) -> Expression:
            number = self.number(part)
            if number not in done:
                fresh = instead.get(number, part)
                if fresh is part and isinstance(part, Call):
                    fresh = replace(part, arguments=tuple(renew(argument) for argument in part.arguments))
                done[number] = fresh
            return done[number]

        return renew(value)

    def uses(self, roots: Iterable[Expression]) -> Counter[int]:
        """How many times each distinct expression is used by the others and as a root."""
        roots = list(roots)
        counts = Counter(self.number(root) for root in roots)
        for expression in self.parts(roots).values():
            if isinstance(expression, Call):
                counts.update(self.number(argument) for argument in expression.arguments)
        return counts
