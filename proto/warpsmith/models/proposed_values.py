"""Values that are proposed for one kernel: a few choices from short tables, packed into a seed.

The one idea: a proposal is data. It chooses from these tables and nothing else, so equal seeds still give
equal tensors in every process, a verdict names by its seed what it was found with, and no text of a proposal is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

BASES = ("normal", "uniform", "mixed", "constant_rows")
"""Family of the values before scale and offset."""
SCALES = (1.0, 1e-3, 1e-6, 1e-20, 1e-38, 1e2, 1e4, 1e10, 1e18, 1e38)
OFFSETS = (0.0, 1.0, -1.0, 10.0, -10.0, 88.0, -88.0, 1e4, -1e4, 1e7)
"""Added after scaling; 88 is where exp overflows in fp32."""
SPECIALS = ("none", "inf", "-inf", "nan", "zero", "negative_zero", "largest", "smallest")
"""What some elements are replaced by; "largest" and "smallest" are the type's largest and smallest normal number."""
SHARES = (0.001, 0.01, 0.1, 0.5, 1.0)
"""Of the elements that are replaced."""

_RANDOM_BITS = 48


@dataclass(frozen=True)
class Recipe:
    """One choice from each table, by its place in it."""

    base: int = 0
    scale: int = 0
    offset: int = 0
    special: int = 0
    share: int = 0


_SIZES: Sequence[int] = tuple(map(len, (BASES, SCALES, OFFSETS, SPECIALS, SHARES)))
_NAMES = tuple(each.name for each in fields(Recipe))


def seed_of(recipe: Recipe, randomness: int) -> int:
    """A seed of at most 63 bits that says the recipe too; of `randomness`, from 0 on, the lowest 48 bits count."""
    code = 0
    for name, size in zip(_NAMES, _SIZES, strict=True):
        code = code * size + getattr(recipe, name) % size
    return (code << _RANDOM_BITS) | randomness % (1 << _RANDOM_BITS)


def recipe_of(seed: int) -> Recipe:
    """The recipe of a seed; any integer has one."""
    code = (seed >> _RANDOM_BITS) % math.prod(_SIZES)
    found: dict[str, int] = {}
    for name, size in reversed(list(zip(_NAMES, _SIZES, strict=True))):
        code, found[name] = divmod(code, size)
    return Recipe(**found)
