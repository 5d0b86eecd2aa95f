"""Which two axes a nest without reductions is transposed about: stores run along one, some loads along the other.

The one idea: memory moves in pieces (sectors of a GPU, lines of a processor), so an access whose neighbours lie apart
costs a whole piece an element. A tile over two axes lets each access run along the axis that it lies along. Axes that a
view has merged are taken apart first. Nothing here knows how a tile is moved.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.ir import Axis, BufferRef, Index, Load, Nest, Store

SECTOR_BYTES = 32
"""What a GPU's memory moves at least (CUDA programming guide, device memory accesses)."""
WORTH = 1.25
"""Least traffic of accesses along one axis, over that of tiles, from which on tiles are worth their exchange."""


@dataclass(frozen=True)
class Turn:
    """A nest, all its axes parallel, and the axes of a tile."""

    nest: Nest
    along: Axis
    """What computes and most accesses run along."""
    across: Axis
    """What the other accesses run along, through a tile that turns them."""
    bytes: int
    """Traffic, at the granularity of the memory, of accesses that run along either axis."""
    straight_bytes: int
    """The same if all run along the innermost axis."""

    @property
    def pays(self) -> bool:
        """Whether tiles save enough."""
        return self.straight_bytes >= WORTH * self.bytes

    def crosses(self, index: Index) -> bool:
        """Whether the access runs across: it steps to a neighbour there, and far along the other axis."""
        return _crosses(index, self.along, self.across)

    def is_of_a_tile(self, index: Index) -> bool:
        """Whether the access runs along and has other elements in each row of a tile, which are all that tile's own."""
        return not self.crosses(index) and self.across.name in index.axes()

    @property
    def crossing(self) -> list[Load | Store]:
        """Accesses that run across, each once: loads, then stores."""
        loads: list[Load | Store] = [load for load in memory_access.loads(self.nest) if self.crosses(load.index)]
        return loads + [store for store in self.nest.stores if self.crosses(store.index)]

    def width_across(self, access: Load | Store) -> int:
        """Elements that such an access moves at once: 16 bytes, or less where they are not aligned."""
        most, across = 16 // self.nest.buffer(access.buffer).type.size_bytes, self.across
        fits = (size for size in (8, 4, 2) if size <= most and across.extent % size == 0)
        return next((size for size in fits if memory_access.access(access.index, across.name, size) == "vector"), 1)

    @property
    def others(self) -> tuple[Axis, ...]:
        """The axes that count tiles only."""
        return tuple(axis for axis in self.nest.parallel if axis not in (self.along, self.across))


def turn(nest: Nest, granularity: int) -> Turn | None:
    """The best two axes for a memory that moves `granularity` bytes at once; None where no access crosses another."""
    whole = iteration_space.all_parallel(iteration_space.simplified(nest))
    whole = iteration_space.simplified(iteration_space.taken_apart(whole))
    accesses = [(whole.buffer(name), index) for name, index in memory_access.accesses(whole)]
    extents, axes = whole.extents, whole.parallel
    points = [math.prod(extents[name] for name in index.axes()) for _, index in accesses]

    def traffic(along: Axis, across: Axis | None = None) -> tuple[int, int]:
        """Bytes in all, and bytes that cross."""
        total = crossing = 0
        for (buffer, index), count in zip(accesses, points, strict=True):
            if across is not None and _crosses(index, along, across):
                crossing += count * buffer.type.size_bytes
            else:
                total += count * _bytes_each(index, buffer, along, granularity)
        return total + crossing, crossing

    pairs = [pair for pair in itertools.permutations(reversed(axes), 2) if traffic(*pair)[1]]
    if not pairs:
        return None
    along, across = min(pairs, key=lambda pair: traffic(*pair))
    return Turn(whole, along, across, traffic(along, across)[0], traffic(axes[-1])[0])


def across_bytes(simple: Nest, along: Axis, granularity: int) -> int:
    """What accesses cost beyond their own bytes where a reduction's vectors lie along another axis than they do.

    Nothing turns a tile of them, so each element moves a piece of memory of the `granularity`.
    """
    extents, total = simple.extents, 0
    for name, index in memory_access.accesses(simple):
        buffer = simple.buffer(name)
        beyond = _bytes_each(index, buffer, along, granularity) - buffer.type.size_bytes
        total += beyond * math.prod(extents[axis] for axis in index.axes())
    return total


def _crosses(index: Index, along: Axis, across: Axis) -> bool:
    far, near = index.coefficient(along.name), index.coefficient(across.name)
    return far is not None and abs(far) > 1 and near is not None and abs(near) == 1


def _bytes_each(index: Index, buffer: BufferRef, axis: Axis, granularity: int) -> int:
    """Bytes that an element costs when neighbours along the axis are accessed together.

    What is read a few elements apart is still in the first-level cache when the elements between are read; what is
    written so goes to memory in parts.
    """
    step, size = index.coefficient(axis.name), buffer.type.size_bytes
    if step == 0 or memory_access.is_contiguous(index, axis.name):
        return size
    if step is None or abs(step) * size >= granularity:
        return granularity
    return abs(step) * size if buffer.written else size
