"""Vectors whose elements lie among neighbours in memory, but are not all of them, or not each once.

The one idea: where a tensor holds pairs, as real and imaginary parts or those of an interleaved rotary embedding, a
vector of results needs every other element, or each of a row twice. Which of its neighbours an element is depends on
its number in the vector alone, so they come in one wide access and are picked in registers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.ir import Atom, Axis, BufferRef, Index, Nest, Quotient, Remainder

_MOST_SPREAD, _MOST_BYTES = 4, 64
"""Neighbours for each element of a vector, and bytes of them all, that are worth an access."""
_LONGEST_SHORT = 4
"""Elements of an innermost axis up to which it is merged with the next one."""


@dataclass(frozen=True)
class Neighbours:
    """`count` elements from `index` on, a multiple of their number; the vector's element `e` is the one at `place`."""

    index: Index
    count: int
    place: Index
    """Over the axis of the vector, which stands for `e`."""


def neighbours(index: Index, buffer: BufferRef, axis: str, width: int, extents: Mapping[str, int]) -> Neighbours | None:
    """Those that an aligned vector of `width` elements along `axis` lies among; None where that differs between
    vectors, or they are many more than the vector needs, or not all in the buffer."""
    spread = _spread(index, axis, width)
    if spread is None or min(spread) < 0 or not any(spread):
        return None
    begins = {**extents, axis: extents[axis] - width + 1}
    count = 2
    while count <= min(_MOST_SPREAD * width, _MOST_BYTES // buffer.type.size_bytes):
        first = index.offset % count
        begin = index.shifted(-first)
        if first + max(spread) < count and _known_multiple(begin, axis, width) % count == 0:
            low, high = begin.bounds(begins)
            is_inside = low >= 0 and (high // count + 1) * count <= buffer.element_count
            return Neighbours(begin, count, _of_axis(index, axis).shifted(first)) if is_inside else None
        count *= 2
    return None


def _spread(index: Index, axis: str, width: int) -> Sequence[int] | None:
    """How far each element of an aligned vector is from its first; None where that differs between vectors."""
    total = [0] * width
    for atom, coefficient in index.terms:
        steps: Sequence[int]
        if isinstance(atom, str):
            steps = range(width) if atom == axis else ()
        elif axis not in atom.value.axes():
            steps = ()
        else:
            inner, multiple = _spread(atom.value, axis, width), _known_multiple(atom.value, axis, width)
            if inner is None or min(inner) < 0:
                return None
            is_quotient = isinstance(atom, Quotient)
            if multiple % atom.divisor == 0:
                steps = [each // atom.divisor if is_quotient else each % atom.divisor for each in inner]
            elif atom.divisor % multiple == 0 and max(inner) < multiple:
                steps = () if is_quotient else inner
            else:
                return None
        total = [sum(pair) for pair in zip(total, [coefficient * step for step in steps] or [0] * width, strict=True)]
    return total


def _known_multiple(index: Index, axis: str, width: int) -> int:
    """What the index of an aligned vector's first element is a multiple of, whatever the axes; 0 where it is zero."""
    found = index.offset
    for atom, coefficient in index.terms:
        if isinstance(atom, str):
            multiple = width if atom == axis else 1
        else:
            inner = _known_multiple(atom.value, axis, width)
            if isinstance(atom, Remainder):
                multiple = math.gcd(inner, atom.divisor)
            else:
                multiple = inner // atom.divisor if inner % atom.divisor == 0 else 1
        found = math.gcd(found, coefficient * multiple)
    return found


def _of_axis(index: Index, axis: str) -> Index:
    """What the axis alone adds, without what is a multiple of every vector."""
    terms: list[tuple[Atom, int]] = []
    for atom, coefficient in index.terms:
        if isinstance(atom, str):
            terms += [(atom, coefficient)] if atom == axis else []
        elif axis in atom.value.axes():
            terms.append((type(atom)(_of_axis(atom.value, axis), atom.divisor), coefficient))
    return Index(0, tuple(terms))


def with_pairs_merged(nest: Nest) -> Nest:
    """A nest of parallel axes; an innermost axis of a few elements, stored next to each other, is merged with the next
    one, so that a vector of results can be longer than it."""
    if len(nest.parallel) < 2 or nest.parallel[-1].extent > _LONGEST_SHORT:
        return nest
    *others, outer, inner = nest.parallel
    strides = [(store.index.coefficient(outer.name), store.index.coefficient(inner.name)) for store in nest.stores]
    if any(pair != (inner.extent, 1) for pair in strides):
        return nest
    flat = Axis(inner.name, outer.extent * inner.extent)
    instead, extents = iteration_space.split([outer, inner], flat)
    extents.update({axis.name: axis.extent for axis in others})
    return iteration_space.reindexed(
        nest,
        lambda index: iteration_space.recombined(index.substituted(instead, extents)),
        [*others, flat],
        nest.reduced,
    )
