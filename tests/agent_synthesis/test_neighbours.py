"""Vectors among neighbours in memory: where they begin and which element is which, against every index by itself."""

from __future__ import annotations

import itertools
import random

import pytest

from agent_synthesis.nests.analysis.neighbours import neighbours
from agent_synthesis.nests.ir import BufferRef, Index, Quotient, Remainder, Type

EXTENTS = {"t": 64, "i": 3, "k": 4}


def valued(index: Index, at: dict[str, int]) -> int:
    total = index.offset
    for atom, coefficient in index.terms:
        if isinstance(atom, str):
            total += coefficient * at[atom]
        else:
            inner = valued(atom.value, at)
            total += coefficient * (inner // atom.divisor if isinstance(atom, Quotient) else inner % atom.divisor)
    return total


def check(index: Index, width: int, count: int = 1 << 20) -> bool:
    """Whether a buffer of `count` elements has neighbours, and whether each element is the one that was said."""
    found = neighbours(index, BufferRef("x", Type.BF16, count), "t", width, EXTENTS)
    if found is None:
        return False
    others = [dict(zip(("i", "k"), pair, strict=True)) for pair in itertools.product(range(3), range(4))]
    for begin, other in itertools.product(range(0, EXTENTS["t"], width), others):
        first = valued(found.index, {"t": begin, **other})
        assert first % found.count == 0
        assert 0 <= first <= count - found.count
        for e in range(width):
            place = valued(found.place, {"t": e})
            assert 0 <= place < found.count
            assert first + place == valued(index, {"t": begin + e, **other})
    return True


T = Index.axis("t")
ROWS = Index.axis("i", 256)
KNOWN = {
    "every other": T.scaled(2) + ROWS,
    "the others": T.scaled(2).shifted(1) + ROWS,
    "each twice": Index(0, ((Quotient(T, 2), 1),)) + ROWS,
    "firsts of pairs": Index(0, ((Quotient(T, 2), 2),)) + ROWS,
    "seconds of pairs": Index(1, ((Quotient(T, 2), 2),)) + ROWS,
    "pairs again and again": Index(0, ((Remainder(T, 2), 1),)) + ROWS,
    "each of a row of 32 twice": Index(0, ((Remainder(Index(0, ((Quotient(T, 2), 1),)), 32), 1),)) + ROWS,
}
NONE = {
    "the same for all": ROWS,
    "far from each other": T.scaled(64),
    "rows that begin anywhere": T.scaled(2) + Index.axis("k", 3),
    "thirds": Index(0, ((Quotient(T, 3), 1),)),
    "one place further": Index(0, ((Quotient(T.shifted(1), 2), 1),)),
    "backwards": T.scaled(-2).shifted(126),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("width", [4, 8])
def test_a_vector_among_neighbours(name: str, width: int) -> None:
    assert check(KNOWN[name], width)


@pytest.mark.parametrize("name", NONE)
def test_others_are_read_one_by_one(name: str) -> None:
    assert not check(NONE[name], 4)


def test_nothing_is_read_behind_the_end() -> None:
    assert check(T.scaled(2), 4, 128)
    assert not check(T.scaled(2), 4, 127)


def test_what_is_said_of_any_index_holds() -> None:
    drawn, found = random.Random(4), 0

    def any_index(depth: int) -> Index:
        made = Index(drawn.choice([0, 0, 1, 2, 3, 8]))
        for _ in range(drawn.randint(1, 2)):
            kind = drawn.choice(["t", "t", "i", "k", "quotient", "remainder"])
            scale = drawn.choice([1, 1, 2, 3, 4, 8, 16, 64])
            if kind in ("quotient", "remainder") and depth:
                atom = (Quotient if kind == "quotient" else Remainder)(any_index(depth - 1), drawn.choice([2, 3, 4, 8]))
                made += Index(0, ((atom, scale),))
            elif kind in EXTENTS:
                made += Index.axis(kind, scale)
        return made

    for _ in range(4000):
        found += check(any_index(2), drawn.choice([2, 4, 8]))
    assert found > 200
