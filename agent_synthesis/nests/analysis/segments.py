"""Reductions over parts of rows among nests: recognised, and put into columns that share where a part begins and ends.

The one idea: what decides a part are some of the parallel axes, and along the others neighbours reduce the same rows of
a matrix, as in an embedding bag. Nothing here knows how rows are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import Axis, Expression, Nest, Reduction, Segmented, remembered

_COLUMN = "column"


@dataclass(frozen=True)
class Segments:
    """A nest whose reductions are all over the same part of a row."""

    nest: Nest
    """Simplified, over one reduced axis, its reductions over the whole of it."""
    begin: Expression
    """The first position of the part, of type I64."""
    end: Expression
    axis: Axis
    """The parallel axis along which a row's elements lie; of extent 1 where there is none."""
    others: tuple[Axis, ...]
    """The other parallel axes."""

    @property
    def count(self) -> int:
        """Points of the other axes."""
        return math.prod(axis.extent for axis in self.others)


@remembered
def segments_of(nest: Nest) -> Segments | None:
    """The nest in that form; None for any other."""
    if not nest.segments or len(nest.segments) < len(nest.reductions) or not iteration_space.is_safe_in_place(nest):
        return None
    simple = iteration_space.simplified(nest)
    (first, *more), interner = simple.segments, Interner()
    _, begin, end = first.parts
    alike = [interner.number(part) for part in (begin, end)]
    if len(simple.reduced) > 1 or any(map(simple.is_element_store, simple.stores)):
        return None
    if any([interner.number(part) for part in each.parts[1:]] != alike for each in more):
        return None
    deciding = interner.needs(begin) | interner.needs(end)
    if any(need.startswith("%") for each in simple.segments for part in each.parts for need in interner.needs(part)):
        return None
    columns = [axis for axis in simple.parallel if axis.name not in deciding]
    stored = simple.stores[0].index
    axis = max(columns, key=lambda each: memory_access.is_contiguous(stored, each.name), default=None)
    if axis is None:
        axis = Axis(_COLUMN, 1)
        simple = replace(simple, parallel=(*simple.parallel, axis))
    reductions = (_whole(each) for each in simple.segments)
    others = tuple(each for each in simple.parallel if each is not axis)
    return Segments(replace(simple, reductions=tuple(reductions)), begin, end, axis, others)


def _whole(segment: Segmented) -> Reduction:
    """The same reduction over all of the row."""
    return Reduction(segment.name, segment.operation, segment.parts[0], segment.type)
