"""Places of values in a picture: an axis from a value to a pixel, with its ticks.

The one idea: a chart is numbers until the template draws it, so a test can ask where a mark lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MOST_TICKS = 6
LEAST, MOST = 1e-12, 1e24
"""Between these lies whatever can be measured, in any unit here. A stranger's archive may hold other numbers."""


@dataclass(frozen=True)
class Plot:
    """A picture and the edges of what is drawn between its axes, in pixels from the top left."""

    height: float
    left: float
    right: float
    top: float
    below: float
    """Room below the bottom edge, for ticks."""
    width: float = 760

    @property
    def bottom(self) -> float:
        """Where the axis of x lies."""
        return self.height - self.below


@dataclass(frozen=True)
class Tick:
    """A labelled place of an axis."""

    at: float
    """Pixels."""
    label: str


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` over pixels from `first` to `last`; by their logarithms where it `is_log`."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Pixels of a value; outside it is at the edge, and what is no number at the low one."""
        value = min(max(self.low, value), self.high)  # in this order `max` drops a NaN
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.first + (self.last - self.first) * share, 1)

    def ticks(self, label: Callable[[float], str]) -> list[Tick]:
        """Round values within it."""
        values = _powers(self.low, self.high) if self.is_log else _steps(self.low, self.high)
        return [Tick(self.at(value), label(value)) for value in values]


def is_drawable(*values: float) -> bool:
    """Whether a picture can show all of them; false for what is no number."""
    return all(LEAST < value < MOST for value in values)


def from_zero(most: float, first: float, last: float) -> Axis:
    """An axis from 0 to somewhat more than a value."""
    return Axis(0.0, 1.05 * most if is_drawable(most) else 1.0, first, last)


def _steps(low: float, high: float) -> Iterator[float]:
    rough = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    first = math.ceil(low / step)
    for number in range(first, math.floor(high / step) + 1):
        yield number * step


def _powers(low: float, high: float) -> Iterator[float]:
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    between = (1, 2, 5) if last - first < 3 else (1,)
    for exponent in range(first, last + 1, max(1, math.ceil((last - first) / MOST_TICKS))):
        yield from (value for each in between if low <= (value := each * 10.0**exponent) <= high)
