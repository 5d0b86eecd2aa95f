"""What an einsum contracts, and in which order: letters and extents alone.

The one idea: a contraction of many operands is one of two, over and over; the order decides what lies between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Order = Sequence[tuple[int, int]]
"""Positions of the two operands that are contracted in each step; their result goes to the end of the list."""


MOST_OPERANDS = 6
"""Above this the orders are too many to compare."""


@dataclass(frozen=True)
class Step:
    """Two operands and what is made of them, by their letters."""

    first: str
    second: str
    made: str

    @property
    def united(self) -> str:
        """The letters of both, each once."""
        return "".join(dict.fromkeys(self.first + self.second))


@dataclass(frozen=True)
class Einsum:
    """Operands and result by their letters, a letter for each dimension."""

    terms: tuple[str, ...]
    output: str
    extents: Mapping[str, int]

    @staticmethod
    def of(equation: str, shapes: Sequence[Sequence[int]]) -> Einsum | None:
        """None where letters do not say it all: an ellipsis, a letter twice, an extent of one that stands for others, a
        result that is not written out."""
        inputs, arrow, output = equation.replace(" ", "").partition("->")
        terms = tuple(inputs.split(","))
        if not arrow or "." in equation or any(len({*term}) != len(term) for term in (*terms, output)):
            return None
        if [len(term) for term in terms] != [len(shape) for shape in shapes]:
            return None
        pairs = {pair for each in zip(terms, shapes, strict=True) for pair in zip(*each, strict=True)}
        extents = dict(pairs)
        return Einsum(terms, output, extents) if len(extents) == len(pairs) else None

    def size(self, letters: str) -> int:
        """Elements of a tensor with these letters."""
        return math.prod(self.extents[letter] for letter in letters)

    def best_order(self) -> Order:
        """That with the fewest elements between, then with the fewest operations: all are compared."""

        @functools.cache
        def best(left: tuple[str, ...]) -> tuple[int, int, tuple[tuple[int, int], ...]]:
            if len(left) == 1:
                return 0, 0, ()
            found = []
            for first in range(len(left)):
                for second in range(first + 1, len(left)):
                    rest, step = self._contracted(left, first, second)
                    elements, operations, order = best((*rest, step.made))
                    elements += self.size(step.made) if rest else 0
                    found.append((elements, operations + self.size(step.united), ((first, second), *order)))
            return min(found)

        return best(self.terms)[2]

    def written_order(self) -> Order:
        """Each with the next, as PyTorch does where it is not told otherwise."""
        count = len(self.terms)
        return [(0, 1), *((0, left - 1) for left in range(count - 1, 1, -1))]

    def steps(self, order: Order) -> Iterator[Step]:
        """What each step contracts."""
        left = self.terms
        for first, second in order:
            rest, step = self._contracted(left, first, second)
            yield step
            left = (*rest, step.made)

    def _contracted(self, left: Sequence[str], first: int, second: int) -> tuple[tuple[str, ...], Step]:
        rest = tuple(term for place, term in enumerate(left) if place not in (first, second))
        kept = {*self.output, *"".join(rest)}
        united = dict.fromkeys(left[first] + left[second])
        return rest, Step(left[first], left[second], "".join(letter for letter in united if letter in kept))
