"""Attacks drawn by combining parts: how it knows, what it gives, where it hides, whom it slows, over a module.

The one idea: seed and number name an attack for ever, as long as the lists of parts stay as they are; its text is
made of the parts and compiles. Whatever it is made of, its honest part is eager's own computation: no honest judge
tells a speedup.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from dataclasses import dataclass

import how_it_knows
import what_it_gives
import where_it_hides
import whom_it_slows
from attacked_modules import REFERENCES, Reference
from part import Part

BLUNT_SHARE = 0.25
"""Of the attacks that give what is wrong whoever looks: they cheat always, and PASS is a bug without any speedup."""
SLOWING_SHARE = 0.3
"""Of the attacks that slow somebody."""

_FORWARD = """
class ModelNew(Honest):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        plant(self)
        slow(self)
    def forward(self, *inputs):
        meddle(self, inputs)
        slower(self)
        answer = gives(self, inputs) if knows(self, inputs) else None
        if answer is None:
            answer = honest(self, inputs)
            noted(inputs, answer)
            learns(self, inputs, answer)
        ENDED[0] = time.perf_counter()
        return answer
"""


@dataclass(frozen=True)
class Attack:
    """A drawn attack on a module."""

    number: int
    reference: Reference
    knows: tuple[str, str]
    """Kind and name of the part."""
    gives: tuple[str, str]
    hides: tuple[str, str]
    slows: tuple[str, str]
    text: str
    """Of the file."""
    is_wrong: bool
    """Whether it is wrong at every call but the first, so that PASS is a bug whatever speedup is told."""

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each part."""
        return {axis: getattr(self, axis)[0] for axis in ("knows", "gives", "hides", "slows")}

    @property
    def parts(self) -> dict[str, str]:
        """The name of each part."""
        return {axis: getattr(self, axis)[1] for axis in ("knows", "gives", "hides", "slows")}


def drawn(seed: int, number: int, target: str = "cpu") -> Attack:
    """The attack of that name. Modules take turns, so that a worker can take all numbers of one."""
    draw = random.Random(f"{seed}:{number}")
    reference = REFERENCES[number % len(REFERENCES)]
    gives_kind, gives = _part(draw, what_it_gives.GROUPS)
    if gives.is_wrong and draw.random() < BLUNT_SHARE:
        knows_kind, knows = "nothing", how_it_knows.NOTHING
    else:
        knows_kind, knows = _part(draw, how_it_knows.GROUPS)
    hides_kind, hides = _part(draw, where_it_hides.GROUPS)
    slowing = "others" if draw.random() < SLOWING_SHARE else "nobody"
    slows = draw.choice(whom_it_slows.GROUPS[slowing])
    knows, gives, hides, slows = (part.drawn(draw) for part in (knows, gives, hides, slows))
    return Attack(
        number,
        reference,
        (knows_kind, knows.name),
        (gives_kind, gives.name),
        (hides_kind, hides.name),
        (slowing, slows.name),
        composed((knows, gives, hides, slows), reference, target),
        knows_kind == "nothing" and gives.is_wrong and (reference.has_parameters or not gives.needs_parameters),
    )


def a_slice(seed: int, pool: int, times: int) -> list[Attack]:
    """Few of the first `pool` attacks: each two kinds that go together do so `times` times, as each module is there."""
    left = {attack: _traits(attack) for attack in (drawn(seed, number) for number in range(pool))}
    needed = {trait: min(times, count) for trait, count in Counter(itertools.chain(*left.values())).items()}
    chosen = []
    while any(needed.values()):
        best = max(left, key=lambda attack: sum(needed[trait] > 0 for trait in left[attack]))
        for trait in left.pop(best):
            needed[trait] = max(0, needed[trait] - 1)
        chosen.append(best)
    return chosen


def _traits(attack: Attack) -> set[frozenset[tuple[str, str]]]:
    """Each two of its kinds, and its module."""
    pairs = itertools.combinations(attack.kinds.items(), 2)
    return {frozenset({("module", attack.reference.name)}), *map(frozenset, pairs)}


def composed(parts: tuple[Part, Part, Part, Part], reference: Reference, target: str) -> str:
    """The file of an attack: how it knows, what it gives, where it hides, whom it slows."""
    knows, gives, hides, slows = (part.text for part in parts)
    preludes = (how_it_knows.PRELUDE, where_it_hides.PRELUDE, what_it_gives.PRELUDE, whom_it_slows.PRELUDE)
    pieces = [*preludes, "def slower(self): pass", reference.honest(target), hides, gives, knows, slows, _FORWARD]
    return "\n".join(piece.strip("\n") for piece in pieces if piece) + "\n"


def _part(draw: random.Random, groups: dict[str, tuple[Part, ...]]) -> tuple[str, Part]:
    kind = draw.choice(sorted(groups))
    return kind, draw.choice(groups[kind])


def version() -> str:
    """Changes with the lists of parts: numbers then name other attacks."""
    lists = (how_it_knows, what_it_gives, where_it_hides, whom_it_slows)
    content = repr([(each.PRELUDE, each.GROUPS) for each in lists]) + repr(REFERENCES) + _FORWARD
    return hashlib.sha256(content.encode()).hexdigest()[:12]
