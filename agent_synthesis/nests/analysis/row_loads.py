"""What a reduction loads along and beside its rows: which loads rows share, and which are wanted twice.

A nest here is canonical: it reduces its first reduced axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.nests import memory_access
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import Call, Load, Nest, remembered


@remembered
def reduced_loads(nest: Nest) -> Sequence[Load]:
    """What reductions read."""
    return memory_access.loads_below(reduction.value for reduction in nest.reductions)


@remembered
def stored_loads(nest: Nest) -> Sequence[Load]:
    """What stores read."""
    return memory_access.loads_below(store.value for store in nest.stores)


def is_needed_again(nest: Nest) -> bool:
    """Whether stores read along the row what reductions read."""
    first = reduced_loads(nest)
    return any(_runs_along(load, nest) and load in first for load in stored_loads(nest))


@remembered
def values_again(nest: Nest) -> int:
    """Values of an element, as floats, that reductions have and its stores need again: a compiler keeps them rather
    than to compute or widen them twice."""
    axis, interner = nest.reduced[0].name, Interner()
    first = interner.parts([reduction.value for reduction in nest.reductions])
    stores = interner.parts([store.value for store in nest.stores if nest.is_element_store(store)])
    again = {number for number, part in stores.items() if number in first and axis in interner.needs(part)}
    calls = [part for number, part in stores.items() if number not in again and isinstance(part, Call)]
    read = {interner.number(argument) for part in calls for argument in part.arguments}
    return len(again & (read | {interner.number(store.value) for store in nest.stores}))


def looked_up_by_vectors(nest: Nest) -> int:
    """Loads of elements' stores that are the same for some neighbours, such as a weight of each channel: they are asked
    for ahead, one of each vector."""
    axis, first = nest.reduced[0].name, reduced_loads(nest)
    late = memory_access.loads_below(store.value for store in nest.stores if nest.is_element_store(store))
    return sum(_runs_along(each, nest) and not each.index.coefficient(axis) for each in late if each not in first)


@remembered
def reads_later(nest: Nest) -> bool:
    """Whether the elements' stores read along the row what no reduction reads."""
    first = reduced_loads(nest)
    late = memory_access.loads_below(store.value for store in nest.stores if nest.is_element_store(store))
    return any(_runs_along(load, nest) and load not in first for load in late)


@remembered
def own_loads(nest: Nest) -> Sequence[Load]:
    """Contiguous loads that differ from row to row."""
    axis = nest.reduced[0].name
    found = memory_access.loads(nest)
    return [load for load in found if _is_of_row(load, nest) and memory_access.is_contiguous(load.index, axis)]


def kept_loads(nest: Nest, width: int) -> list[Load]:
    """Own loads, in vectors, that reductions need and the stores need again."""
    again, first = stored_loads(nest), reduced_loads(nest)
    return [load for load in own_loads(nest) if load in first and load in again and _in_vectors(load, nest, width)]


def prefetched_loads(nest: Nest, width: int) -> list[Load]:
    """Own loads that reductions need, in vectors, which may begin before the row.

    With sums over rows, all that copies of 16 bytes can bring.
    """
    axis = nest.reduced[0]
    place, first = memory_access.skew(nest, axis, width), reduced_loads(nest)
    if nest.summed:
        unwritten = [load for load in own_loads(nest) if not nest.buffer(load.buffer).written]
        whole = [load for load in unwritten if width * nest.buffer(load.buffer).type.size_bytes % 16 == 0]
        return [load for load in whole if _in_vectors(load, nest, width)]

    def comes_in_vectors(load: Load) -> bool:
        if place is not None:
            return memory_access.unaligned_access(load.index, axis.name, width, place) == "vector"
        return _in_vectors(load, nest, width)

    return [load for load in own_loads(nest) if load in first and comes_in_vectors(load)]


def shared_loads(nest: Nest, width: int) -> list[Load]:
    """Loads along the row, in vectors, that rows share and only stores need."""
    first = reduced_loads(nest)
    found = [load for load in stored_loads(nest) if load not in first and not _is_of_row(load, nest)]
    return [load for load in found if not nest.buffer(load.buffer).written and _in_vectors(load, nest, width)]


def shared_words(nest: Nest, width: int) -> int:
    """Registers that a vector of one of them takes."""
    return max((width * nest.buffer(load.buffer).type.size_bytes // 4 for load in shared_loads(nest, width)), default=0)


def has_common_loads(nest: Nest) -> bool:
    """Whether rows share what they read along the axis, such as a weight."""
    return any(_runs_along(load, nest) and not _is_of_row(load, nest) for load in memory_access.loads(nest))


def row_values(nest: Nest) -> list[Load]:
    """Loads of one element for all of a row, of a size that threads copy."""
    found = [load for load in memory_access.loads(nest) if _is_of_row(load, nest) and not _runs_along(load, nest)]
    return [load for load in found if nest.buffer(load.buffer).type.size_bytes in (4, 8)]


def early_values(nest: Nest) -> list[Load]:
    """Those of them that the nest does not write: the others are read where they are used."""
    return [load for load in row_values(nest) if not nest.buffer(load.buffer).written]


def _is_of_row(load: Load, nest: Nest) -> bool:
    return bool(load.index.axes() & {axis.name for axis in nest.parallel})


def _runs_along(load: Load, nest: Nest) -> bool:
    return nest.reduced[0].name in load.index.axes()


def _in_vectors(load: Load, nest: Nest, width: int) -> bool:
    return memory_access.access(load.index, nest.reduced[0].name, width) == "vector"
