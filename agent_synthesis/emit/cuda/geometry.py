"""Nests put into the form that a CUDA schedule wants, and what an SM allows.

A CUDA kernel sees a number of rows and one reduced axis, taken in packs of neighbouring elements. This file decides
which accesses a pack can make at once, and holds each hardware rule as one predicate. It writes no kernel text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal as OneOf

from agent_synthesis.emit import shape
from agent_synthesis.emit.expression import Interner
from agent_synthesis.nests.ir import Axis, BufferRef, Expression, Index, Load, Nest, Quotient, Remainder, needs_int64
from agent_synthesis.schedule import Parameters
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2, tensor_pb2

HEADERS = ("ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_reduce.cuh")
"""What every CUDA program includes; each includes the ones before it."""

SKEWED_ROW = 4096
"""Elements from which on a row that begins anywhere is read in packs unasked, behind a ragged head and tail."""

Access = OneOf["pack", "same", "each"]
"""Of one access by the elements of a pack: neighbours in memory, all the same element, or anything else."""

KERNEL_OVERHEAD_REGISTERS = 30
"""Registers of addresses, states and temporaries beside the data that a thread holds (typical of -v output)."""


def require_block(
    hardware: Hardware, nest: Nest, *, threads: int, min_blocks: int = 1, shared_bytes: int = 0, held_registers: int = 0
) -> None:
    """Checks a block against one SM.

    Raises:
        IllegalMove: names the limit.
    """
    if threads < 32 or threads > 1024 or threads % 32:
        raise IllegalMove(f"{nest.name}: threads = {threads}; a block has whole warps, from 32 to 1024 threads")
    most, reserved = hardware.shared_bytes, hardware.reserved_shared_bytes
    if (shared_bytes + reserved) * min_blocks > most + reserved:
        raise IllegalMove(f"{nest.name}: {min_blocks} x {shared_bytes} bytes of shared memory, of {most} an SM has")
    if threads * min_blocks > hardware.sm_threads:
        raise IllegalMove(
            f"{nest.name}: {min_blocks} blocks of {threads} threads, of {hardware.sm_threads} that an SM holds"
        )
    registers = hardware.register_limit(threads, min_blocks)
    if held_registers + KERNEL_OVERHEAD_REGISTERS > registers:
        wanted = held_registers + KERNEL_OVERHEAD_REGISTERS
        raise IllegalMove(
            f"{nest.name}: about {wanted} registers a thread, of {registers} for {min_blocks} blocks of {threads}"
        )


# ---- the nest ------------------------------------------------------------------------------------------


def canonical(nest: Nest) -> Nest:
    """Simplified, with one reduced axis at most; what is not contiguous along it has quotients and remainders."""
    simple = shape.simplified(nest)
    if not simple.reductions and (simple.parallel or simple.reduced):
        return simple
    if len(simple.reduced) <= 1:
        return simple
    flat = Axis(simple.reduced[-1].name, simple.column_count)
    singles, extents = _split(simple.reduced, flat)
    extents.update({axis.name: axis.extent for axis in simple.parallel})
    return shape.reindexed(
        simple, lambda index: _recombined(index.substituted(singles, extents)), simple.parallel, [flat]
    )


def _recombined(index: Index) -> Index:
    """The index with quotients and remainders put together where they form the number that they were split from.

    `d (v / d) + v % d` is v, and `a ((v / a) % b) + v % a` is v % (a b): a tensor whose merged axes lie together is
    contiguous along them although others are not.
    """
    terms = dict(index.terms)
    for atom, coefficient in index.terms:
        if not isinstance(atom, Remainder):
            continue
        value, divisor = atom.value, atom.divisor
        for outer, step in index.terms:
            if step != coefficient * divisor or isinstance(outer, str):
                continue
            rest = Index(index.offset, tuple((a, c) for a, c in terms.items() if a not in (atom, outer)))
            if outer == Quotient(value, divisor):
                return _recombined(rest + value.scaled(coefficient))
            if isinstance(outer, Remainder) and outer.value == Index(0, ((Quotient(value, divisor), 1),)):
                whole = Remainder(value, divisor * outer.divisor)
                return _recombined(rest + Index(0, ((whole, coefficient),)))
    return index


def _split(axes: Sequence[Axis], flat: Axis) -> tuple[dict[str, Index], dict[str, int]]:
    """Each axis as a part of their row-major number, and the extents to simplify with."""
    extents = {flat.name: flat.extent}
    parts = {}
    inside = flat.extent
    for axis in axes:
        outside, inside = inside, inside // axis.extent
        part = Index.axis(flat.name)
        part = part.divided(inside, extents)
        parts[axis.name] = part if outside == flat.extent else part.modulo(axis.extent, extents)
    return parts, extents


def row_axes(nest: Nest, row: str) -> dict[str, str]:
    """Each parallel axis as text, from the row-major number of the point."""
    return coordinates(nest.parallel, row)


def coordinates(axes: Sequence[Axis], number: str) -> dict[str, str]:
    """Each axis as text, from the row-major number of a point."""
    texts = {}
    inside = points = math.prod(axis.extent for axis in axes)
    for axis in axes:
        outside, inside = inside, inside // axis.extent
        text = f"{number} / {inside}" if inside > 1 else number
        texts[axis.name] = text if outside == points else f"{text} % {axis.extent}"
    return texts


def offset_type(nest: Nest) -> str:
    """Type of offsets and axes: 32 bits where every buffer allows it."""
    return "ws::int64" if any(needs_int64(buffer) for buffer in nest.buffers) else "int"


def loads(nest: Nest) -> list[Load]:
    """Every distinct load, in the order of first use."""
    return loads_below(shape.roots(nest))


def loads_below(roots: Iterable[Expression]) -> list[Load]:
    """Every distinct load at or below the roots, in the order of first use."""
    found: dict[int, Load] = {}
    interner = Interner()
    for root in roots:
        parts = interner.parts([root])
        found.update({number: part for number, part in parts.items() if isinstance(part, Load)})
    return [found[number] for number in sorted(found)]


def access(index: Index, axis: str, pack: int) -> Access:
    """How the elements of a pack (aligned, along the axis) lie to each other."""
    step = _step(index, axis, pack)
    if step == 0:
        return "same"
    return "pack" if step == 1 and _aligned(index, axis, pack) and pack > 1 else "each"


def run(nest: Nest) -> int:
    """Elements of a row that lie together before the next row's come, where rows take turns in memory; 0 elsewhere.

    So lie the channels of a batch of images.
    """
    stores = [store for store in nest.stores if nest.is_element_store(store)]
    if not stores or len(nest.parallel) != 1 or len(nest.reduced) != 1:
        return 0
    stored = max(stores, key=lambda store: nest.buffer(store.buffer).element_count)
    axis, terms = Index.axis(nest.reduced[0].name), dict(stored.index.terms)
    found = next((atom.divisor for atom in terms if isinstance(atom, Remainder) and atom.value == axis), 0)
    steps = [terms.get(Remainder(axis, found)), terms.get(nest.parallel[0].name), terms.get(Quotient(axis, found))]
    return found if found and steps == [1, found, found * nest.row_count] else 0


def is_contiguous(index: Index, axis: str) -> bool:
    """Whether neighbours along the axis are neighbours in memory, but for the ends of merged axes."""
    return _step(index, axis, 1) == 1


def _step(index: Index, axis: str, pack: int) -> int | None:
    """How far one step inside an aligned pack moves; None when it differs between steps."""
    total = 0
    for atom, coefficient in index.terms:
        if isinstance(atom, str):
            total += coefficient if atom == axis else 0
            continue
        if axis not in atom.value.axes():
            continue
        inner = _step(atom.value, axis, pack)
        if inner == 0:
            continue
        if inner != 1 or atom.divisor % pack or not _aligned(atom.value, axis, pack):
            return None
        total += 0 if isinstance(atom, Quotient) else coefficient
    return total


def _aligned(index: Index, axis: str, pack: int) -> bool:
    """Whether the first element of a pack has an index that is a multiple of the pack."""
    if index.offset % pack:
        return False
    for atom, coefficient in index.terms:
        if coefficient % pack == 0 or atom == axis:
            continue
        if isinstance(atom, str | Quotient) or axis not in atom.value.axes():
            return False
        if atom.divisor % pack or not _aligned(atom.value, axis, pack):
            return False
    return True


def widest_pack(nest: Nest, axis: Axis) -> int:
    """The most elements that every contiguous access can move at once: 16 bytes of the narrowest type, 8 elements."""
    contiguous = [
        (nest.buffer(name).type.size_bytes, index) for name, index in accesses(nest) if _step(index, axis.name, 1) == 1
    ]
    if not contiguous:
        return 1
    pack = min(8, 16 // min(size for size, _ in contiguous))
    largest = max(size for size, _ in contiguous)
    while pack * largest > 32:
        pack //= 2
    while pack > 1 and (axis.extent % pack or any(access(index, axis.name, pack) != "pack" for _, index in contiguous)):
        pack //= 2
    return pack


def skew(nest: Nest, axis: Axis, pack: int) -> Index | None:
    """Where rows begin that no pack can be aligned to: the place of a row's first element in what is read or written.

    Packs then begin up to `pack - 1` elements before the row, so that they are aligned; accesses of other rows' places
    modulo `pack` go element by element. None where packs are aligned anyway, or where nothing is contiguous.
    """
    if pack == 1 or widest_pack(nest, axis) % pack == 0:
        return None
    found = [
        (nest.buffer(name).element_count, index)
        for name, index in accesses(nest)
        if index.coefficient(axis.name) == 1 and min([index.offset, *(c for _, c in index.terms)]) >= 0
    ]
    _, largest = max(found, key=lambda access: access[0], default=(0, None))
    if largest is None or axis.extent < pack:
        return None
    return Index(largest.offset, tuple(term for term in largest.terms if term[0] != axis.name))


def skewed_access(index: Index, axis: str, pack: int, place: Index) -> Access:
    """`access`, for packs that are aligned to rows beginning at `place`."""
    if axis not in index.axes():
        return "same"
    if index.coefficient(axis) != 1:
        return "each"
    apart = index + place.scaled(-1)
    moved = [apart.offset, *(coefficient for atom, coefficient in apart.terms if atom != axis)]
    return "pack" if all(coefficient % pack == 0 for coefficient in moved) else "each"


def best_pack(nest: Nest, axis: Axis, shortest: int = SKEWED_ROW) -> int:
    """The widest pack; in rows of at least `shortest` that begin anywhere, one that is skewed to be aligned.

    That needs three quarters of what is contiguous to begin at one place modulo the pack: the rest goes by element.
    """
    pack = widest_pack(nest, axis)
    contiguous = [(nest.buffer(name), index) for name, index in accesses(nest) if index.coefficient(axis.name) == 1]
    if pack > 1 or axis.extent < shortest or not contiguous:
        return pack
    wide = min(8, 16 // max(buffer.type.size_bytes for buffer, _ in contiguous))
    place = skew(nest, axis, wide)
    if place is None:
        return pack
    alike = [b.element_count for b, i in contiguous if skewed_access(i, axis.name, wide, place) == "pack"]
    return wide if 4 * sum(alike) >= 3 * sum(buffer.element_count for buffer, _ in contiguous) else pack


def accesses(nest: Nest) -> list[tuple[str, Index]]:
    """Buffer and index of every load and store."""
    return [(load.buffer, load.index) for load in loads(nest)] + [(s.buffer, s.index) for s in nest.stores]


# ---- records -------------------------------------------------------------------------------------------


def launch(
    nest: Nest,
    *,
    grid: int,
    threads: int,
    entry: str = "",
    buffers: Iterable[BufferRef] | None = None,
    workspaces: Iterable[str] = (),
    cluster: int = 1,
    cooperative: bool = False,
    dependent: bool = False,
    writes: Iterable[str] | None = None,
    shared_bytes: int = 0,
) -> candidate_pb2.Launch:
    """The launch record of a one-dimensional grid: the nest's buffers (or those given) in order, then workspaces."""
    passed = list(nest.buffers if buffers is None else buffers)
    extra = list(workspaces)
    written = [b.name for b in passed if b.written] + extra if writes is None else list(writes)
    record = candidate_pb2.Launch(
        entry=entry or shape.entry_name(nest),
        grid=candidate_pb2.Extent3(x=grid, y=1, z=1),
        block=candidate_pb2.Extent3(x=threads, y=1, z=1),
        cooperative=cooperative,
        programmatic_dependent=dependent,
        shared_bytes=shared_bytes,
        arguments=[candidate_pb2.LaunchArgument(buffer=name) for name in [*(b.name for b in passed), *extra]],
        writes=written,
    )
    if cluster > 1:
        record.cluster.CopyFrom(candidate_pb2.Extent3(x=cluster, y=1, z=1))
    return record


def workspace(nest: Nest, name: str, words: int, *, zero: bool = False) -> candidate_pb2.Buffer:
    """A workspace of 8-byte words, named after the nest; `zero`: it holds flags and is zero between calls."""
    return candidate_pb2.Buffer(
        name=f"{shape.entry_name(nest)}_{name}",
        role=candidate_pb2.ROLE_WORKSPACE,
        spec=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_INT64, shape=[words], strides=[1]),
        alignment_bytes=16,
        zero_between_calls=zero,
    )


def row_data_bytes(nest: Nest) -> int:
    """Bytes of what differs from row to row and is read, over all rows."""
    rows = {axis.name for axis in nest.parallel}
    names = {load.buffer for load in loads(nest) if load.index.axes() & rows or not rows}
    return sum(b.element_count * b.type.size_bytes for b in nest.buffers if b.name in names)


def legal(parameters: Iterable[Parameters], check: object) -> list[Parameters]:
    """Those that the check, which raises IllegalMove, lets pass."""
    assert callable(check)
    found = []
    for candidate in parameters:
        try:
            check(candidate)
        except IllegalMove:
            continue
        found.append(candidate)
    return found


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below the value."""
    return -(-value // multiple) * multiple


def power_of_two_at_least(value: int) -> int:
    """The least power of two that is not below the value."""
    return 1 << max(0, math.ceil(math.log2(max(1, value))))


def domain_without(parameters: Parameters, domain: Mapping[str, Iterable[str | int]]) -> list[Parameters]:
    """Every set of parameters one change away, for the keys that the parameters have."""
    current = {**parameters.choices, **parameters.integers}
    return shape.variations(parameters, {key: values for key, values in domain.items() if key in current})
