"""A nest that reduces and stores elements, as two: one that reduces, and one that makes the elements.

The one idea: what elements need of a reduction is the same for a whole row; kept in memory between both, it is little.
The second nest reduces nothing, so whatever moves elements well may take it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space, memory_access, passes
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    BufferRef,
    Index,
    Load,
    Nest,
    Reduced,
    Store,
    Type,
    remembered,
)


@dataclass(frozen=True)
class Apart:
    """Both nests, and what the first leaves for the second: a value for each point of the parallel axes."""

    reducing: Nest
    storing: Nest
    kept: tuple[BufferRef, ...]


@remembered
def apart(nest: Nest) -> Apart | None:
    """The nests; None where no elements are stored, or where these read what is stored once a row."""
    if not passes.is_reduction(nest) or nest.summed:
        return None
    simple, interner = iteration_space.simplified(nest), Interner()
    elements = passes.element_stores(simple)
    stored = [store for store in simple.stores if simple.is_element_store(store)]
    once = tuple(store for store in simple.stores if store not in stored)
    calls = passes.per_column(simple, elements, interner)
    bare = [part for part in interner.parts(elements, calls).values() if isinstance(part, Reduced)]
    parts = [*calls, *bare]
    if not parts or any(part.type not in (Type.F32, Type.F64) for part in parts):
        return None
    place, step = Index(), simple.row_count
    for axis in simple.parallel:
        step //= axis.extent
        place += Index.axis(axis.name, step)
    kept = tuple(BufferRef(f"{nest.name}_kept{k}", part.type, simple.row_count) for k, part in enumerate(parts))
    loads = [Load(buffer.name, place, buffer.type) for buffer in kept]
    known = {interner.number(part): load for part, load in zip(parts, loads, strict=True)}
    buffers = (*simple.buffers, *kept)
    leaving = tuple(Store(load.buffer, place, part) for load, part in zip(loads, parts, strict=True))
    reducing = replace(simple, name=f"{nest.name}_rows", stores=once + leaving, buffers=buffers)
    storing = replace(
        simple,
        parallel=simple.parallel + simple.reduced,
        reduced=(),
        reductions=(),
        stores=tuple(replace(store, value=interner.replaced(store.value, known)) for store in stored),
        buffers=buffers,
    )
    written = {store.buffer for store in once}
    if any(load.buffer in written for load in memory_access.loads(storing)):
        return None
    return Apart(iteration_space.touching(reducing), iteration_space.touching(storing), kept)
