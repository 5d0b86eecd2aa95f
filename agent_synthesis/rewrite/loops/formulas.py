"""What a step computes for one unit of a state, as a polynomial of what it reads: the same for all ways to write it.

The one idea: an element of a tensor is a sum of products of atoms: elements of states, of products with weights and of
other tensors, and functions of such sums. `(1 - z) * n + z * h`, `n + z * (h - n)` and `lerp(n, h, z)` are one formula.
Exact for real numbers. Which formulas a recurrent call has is not known here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agent_synthesis.rewrite.calls import Named, operation, shape
from agent_synthesis.rewrite.loops.products import product_of
from agent_synthesis.rewrite.loops.steps import Alike, Alikes, Differs, Lanes, Loop
from warpsmith.graphs import aten

_FUNCTIONS = frozenset({"exp", "relu", "sigmoid", "tanh"})
_VIEWS = frozenset({
    "chunk", "narrow", "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unsafe_chunk", "unsafe_split", "unsqueeze", "view",
})  # fmt: skip
_SAME = frozenset({"alias", "clone", "contiguous", "detach", "dropout", "to"})
"""What gives the same numbers, where it does not convert."""
_MOST_TERMS = 64


@dataclass(frozen=True)
class Columns:
    """Of a tensor [rows, columns] of each step those that units have: column `first + step * unit`."""

    of: Lanes
    first: int
    step: int


@dataclass(frozen=True)
class State(Columns):
    """Of a state, ahead of a step."""


@dataclass(frozen=True)
class Product(Columns):
    """Of tensors times a weight."""


@dataclass(frozen=True)
class Applied:
    """A function of a sum. `reciprocal` is one."""

    function: str
    argument: Formula


Atom = Columns | Applied
Monomial = tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class Formula:
    """A sum of monomials, each with its coefficient, which is never zero; equal in whatever order."""

    terms: tuple[tuple[Monomial, float], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> frozenset[tuple[Monomial, float]]:
        return frozenset(self.terms)

    @staticmethod
    def of(terms: Iterable[tuple[Monomial, float]]) -> Formula:
        """The sum of some, of which several may have the same monomial. Raises Differs where they are too many."""
        sums = dict[Monomial, float]()
        for monomial, coefficient in terms:
            ordered = tuple(sorted(monomial, key=hash))
            sums[ordered] = sums.get(ordered, 0.0) + coefficient
        if len(sums) > _MOST_TERMS:
            raise Differs
        return Formula(tuple((monomial, value) for monomial, value in sums.items() if value))

    @staticmethod
    def number(value: float) -> Formula:
        return Formula.of([((), float(value))])

    @staticmethod
    def atom(atom: Atom) -> Formula:
        return Formula((((atom,), 1.0),))

    def __add__(self, other: Formula) -> Formula:
        return Formula.of([*self.terms, *other.terms])

    def __sub__(self, other: Formula) -> Formula:
        return self + other.times(-1.0)

    def __mul__(self, other: Formula) -> Formula:
        return Formula.of([((*a, *b), x * y) for a, x in self.terms for b, y in other.terms])

    def times(self, value: float) -> Formula:
        return Formula.of([(monomial, value * coefficient) for monomial, coefficient in self.terms])

    @property
    def constant(self) -> float | None:
        """The number that it is, if it is one."""
        if any(monomial for monomial, _ in self.terms):
            return None
        return sum(coefficient for _, coefficient in self.terms)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """Those that it is a polynomial of, each once."""
        return tuple(dict.fromkeys(atom for monomial, _ in self.terms for atom in monomial))

    def factor_of(self, atom: Atom) -> Formula:
        """What an atom is multiplied by, where it stands once in a monomial."""
        found = [(tuple(each for each in m if each != atom), c) for m, c in self.terms if m.count(atom) == 1]
        return Formula.of(found)

    def without(self, *atoms: Atom) -> Formula:
        """The monomials that have none of some atoms."""
        return Formula(tuple((m, c) for m, c in self.terms if not any(atom in m for atom in atoms)))


ONE = Formula.number(1)


def applied(function: str, argument: Formula) -> Formula:
    """A function of a formula."""
    return Formula.atom(Applied(function, argument))


def gate_of(formula: Formula) -> Formula | None:
    """x where a formula is `sigmoid(x)`, as it is, as `1 - sigmoid(-x)` or as `tanh(x / 2) / 2 + 1 / 2`; else None."""
    half = Formula.number(0.5)
    for rest, function, scale in (
        (formula, "sigmoid", 1.0), (ONE - formula, "sigmoid", -1.0),
        ((formula - half).times(2), "tanh", 2.0), ((half - formula).times(2), "tanh", -2.0),
    ):  # fmt: skip
        (atom,) = rest.atoms if len(rest.atoms) == 1 else (None,)
        if isinstance(atom, Applied) and atom.function == function and rest == Formula.atom(atom):
            return atom.argument.times(scale)
    return None


def divided(above: Formula, below: Formula) -> Formula:
    """A quotient: with what `1 / (1 + exp(-x))` and `(exp(x) - exp(-x)) / (exp(x) + exp(-x))` are called."""
    if below.constant:
        return above.times(1 / below.constant)
    powers = [atom for atom in below.atoms if isinstance(atom, Applied) and atom.function == "exp"]
    for power in powers:
        one, other = Formula.atom(power), Formula.atom(Applied("exp", power.argument.times(-1)))
        if below == ONE + one:
            rest, times = above.without(power), above.factor_of(power)
            if above == rest + times * one:
                up, down = (applied("sigmoid", power.argument.times(sign)) for sign in (1.0, -1.0))
                return rest * down + times * up
        if below == one + other and above in (one - other, other - one):
            return applied("tanh", power.argument.times(1.0 if above == one - other else -1.0))
    return above * Formula.atom(Applied("reciprocal", below))


class Elements:
    """Formulas of the tensors of a loop's steps, for the element of one unit in one row."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._index = loop, loop.alikes.index
        self._rows, self.units = shape(self._index, Named(loop.states[0][0]))
        self._known = dict[tuple[Lanes, int, int], Formula]()

    def of_state(self, state: int) -> Formula:
        """What a state is after a step; of a last step that makes none, as of those before. Raises Differs."""
        lanes = self._loop.states[state]
        return self.of(lanes if lanes[-1] else lanes[:-1], 0, 1)

    def of(self, lanes: Lanes, first: int, step: int) -> Formula:
        """The formula of column `first + step * unit`. Raises Differs where it is no sum of such products."""
        key = (lanes, first, step)
        if key not in self._known:
            self._known[key] = self._found(lanes, first, step)
        return self._known[key]

    def _found(self, lanes: Lanes, first: int, step: int) -> Formula:
        for place in range(len(self._loop.states)):
            before = self._loop.before(place)
            if before[: len(lanes)] == lanes:
                return Formula.atom(State(before, first, step))
        made = self._loop.alikes.of(lanes)
        is_given = lanes not in self._loop.inner
        if made is None:
            return self._given(lanes, first, step)
        if product_of(self._index, self._loop.alikes.numbering, Named(lanes[0])) is not None:
            return Formula.atom(Product(lanes, first, step))
        kind = operation(made.first)
        if kind in _VIEWS:
            return self._seen(lanes, first, step)
        try:
            return self._computed(kind, made, lanes, first, step)
        except Differs:
            if not is_given:
                raise
            return self._given(lanes, first, step)

    def _given(self, lanes: Lanes, first: int, step: int) -> Formula:
        """What no step makes. Raises Differs where it has no such column."""
        extents = shape(self._index, Named(lanes[0]))
        if len(set(lanes)) == 1:
            value = self._index.constant_value(lanes[0])
            if value is not None:
                return Formula.number(value)
        if not extents or extents[-1] <= first + step * (self.units - 1) or extents[:-1] not in ([], [1], [self._rows]):
            raise Differs
        return Formula.atom(Columns(lanes, first, step))

    def _computed(self, kind: str, made: Alike, lanes: Lanes, first: int, step: int) -> Formula:
        spec, given = self._index.spec(lanes[0]), made.given

        def term(name: str) -> Formula:
            if name in made.lanes:
                of = made.lanes[name]
                assert not isinstance(of, list)
                if self._index.spec(of[0]).dtype != spec.dtype:
                    raise Differs
                if (
                    self._index.constant_value(of[0]) is None
                    and shape(self._index, Named(of[0]))[-1:] != [*spec.shape][-1:]
                ):
                    raise Differs  # one column for all
                return self.of(of, first, step)
            if isinstance(given[name], bool) or not isinstance(given[name], int | float):
                raise Differs
            return Formula.number(given[name])

        if kind in _SAME and not (kind == "dropout" and given["train"]):
            return term("input" if kind == "dropout" else "self")
        if kind in _FUNCTIONS:
            return Formula.atom(Applied(kind, term("self")))
        if kind not in _SUMS:
            raise Differs
        return _SUMS[kind](term, given)

    def _seen(self, lanes: Lanes, first: int, step: int) -> Formula:
        """Through views to columns of a tensor with the same rows: where its elements are, PyTorch says itself."""
        calls, at = list[tuple[Alike, Lanes]](), lanes
        while (made := self._loop.alikes.of(at)) is not None and operation(made.first) in _VIEWS:
            calls.append((made, at))
            at = self._loop.alikes.first_of(_source(self._loop.alikes, lane) for lane in at)
            place = self._place(calls, shape(self._index, Named(at[0])), first, step)
            if place is not None:
                return self.of(at, *place)
        return self._given(lanes, first, step)

    def _place(
        self, calls: list[tuple[Alike, Lanes]], extents: list[int], first: int, step: int
    ) -> tuple[int, int] | None:
        """Columns of a tensor that columns of a view of it are; None where they are no columns of as many rows."""
        if len(extents) != 2 or extents[0] != self._rows:
            return None
        places: torch.Tensor | None = torch.arange(extents[0] * extents[1]).view(extents)
        for made, _ in reversed(calls):
            source = {made.first.args[0].tensor: places}
            places = aten.call(made.first.target, made.first.args, made.first.kwargs, source.__getitem__)[made.result]  # type: ignore[arg-type]
        last = first + step * (self.units - 1)
        if places is None or places.dim() != 2 or places.shape[0] != self._rows or places.shape[1] <= last:
            return None
        wanted = places[:, first : last + 1 : step]
        begin, apart = int(wanted[0, 0]), int(wanted[0, 1] - wanted[0, 0]) if self.units > 1 else 1
        rows, units = torch.arange(self._rows)[:, None], torch.arange(self.units)[None]
        is_affine = apart > 0 and torch.equal(wanted, begin + rows * extents[1] + apart * units)
        return (begin, apart) if is_affine else None


def _source(alikes: Alikes, lane: str) -> str:
    """What a view looks at."""
    maker = alikes.numbering.maker(Named(lane))
    assert maker is not None
    return maker.args[0].tensor


_Term = Callable[[str], Formula]


def _scaled(term: _Term, given: Mapping[str, Any], name: str, factor: str) -> Formula:
    """A term, times a number that the call has beside it."""
    return term(name).times(float(given.get(factor, 1)))


_SUMS: Mapping[str, Callable[[_Term, Mapping[str, Any]], Formula]] = {
    "add": lambda t, given: t("self") + _scaled(t, given, "other", "alpha"),
    "sub": lambda t, given: t("self") - _scaled(t, given, "other", "alpha"),
    "rsub": lambda t, given: t("other") - _scaled(t, given, "self", "alpha"),
    "mul": lambda t, _: t("self") * t("other"),
    "div": lambda t, given: divided(t("self"), t("other")) if given.get("rounding_mode") is None else _refused(),
    "neg": lambda t, _: t("self").times(-1),
    "reciprocal": lambda t, _: divided(ONE, t("self")),
    "square": lambda t, _: t("self") * t("self"),
    "lerp": lambda t, _: t("self") + t("weight") * (t("end") - t("self")),
    "addcmul": lambda t, given: t("self") + t("tensor1") * _scaled(t, given, "tensor2", "value"),
}
"""Operations that are sums of products, by their arguments."""


def _refused() -> Formula:
    raise Differs
