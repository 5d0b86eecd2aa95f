"""A part of an attack: a name, and a fragment of Python."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """What it is called, and what stands in the attack's file."""

    name: str
    text: str
    numbers: tuple[float, ...] = ()
    """What may stand for NUMBER in the text."""
    is_wrong: bool = False
    """Of what an attack gives: whether it is wrong at each call at which it is given, whoever looks."""
    needs_parameters: bool = False
    """Whether it is wrong only for a module that has parameters."""

    def with_number(self, number: float) -> Part:
        """The same with a number in the place of NUMBER."""
        name, text = (each.replace("NUMBER", f"{number:g}") for each in (self.name, self.text))
        return replace(self, name=name, text=text, numbers=())

    def drawn(self, draw: random.Random) -> Part:
        """The same with one of its numbers."""
        return self.with_number(draw.choice(self.numbers)) if self.numbers else self
