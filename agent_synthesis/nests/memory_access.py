"""How a nest accesses memory along an axis: which accesses are contiguous, aligned and how wide a vector they allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Memory,
    Nest,
    Quotient,
    Remainder,
    remembered,
)

UNALIGNED_ROW = 4096
"""Elements from which on a row that begins anywhere is read in vectors unasked, behind a ragged head and tail."""

Access = OneOf["vector", "same", "each"]
"""Of one access by the elements of a vector: neighbours in memory, all the same element, or anything else."""


@remembered
def loads(nest: Nest) -> Sequence[Load]:
    """Every distinct load, in the order of first use."""
    return loads_below(iteration_space.roots(nest))


def loads_below(roots: Iterable[Expression]) -> list[Load]:
    """Every distinct load at or below the roots, in the order of first use."""
    found: dict[int, Load] = {}
    interner = Interner()
    for root in roots:
        parts = interner.parts([root])
        found.update({number: part for number, part in parts.items() if isinstance(part, Load)})
    return [found[number] for number in sorted(found)]


def accesses(nest: Nest) -> list[tuple[str, Index]]:
    """Buffer and index of every load and store."""
    return [(load.buffer, load.index) for load in loads(nest)] + [(s.buffer, s.index) for s in nest.stores]


def row_data_bytes(nest: Nest, roots: Iterable[Expression] | None = None) -> int:
    """Bytes of what differs from row to row and is read, over all rows; `roots`: by these expressions alone."""
    rows = {axis.name for axis in nest.parallel}
    found = loads(nest) if roots is None else loads_below(roots)
    names = {load.buffer for load in found if load.index.axes() & rows or not rows}
    return sum(b.element_count * b.type.size_bytes for b in nest.buffers if b.name in names)


def access(index: Index, axis: str, width: int) -> Access:
    """How the elements of a vector (aligned, along the axis) lie to each other."""
    step = _step(index, axis, width)
    if step == 0:
        return "same"
    return "vector" if step == 1 and _aligned(index, axis, width) and width > 1 else "each"


@dataclass(frozen=True)
class Lookup:
    """A gather: its buffer, and its offset as an index plus a multiple of each of some positions from data."""

    call: Call
    buffer: str
    index: Index
    positions: tuple[tuple[Expression, int], ...]


def lookups_below(roots: Iterable[Expression]) -> list[Lookup]:
    """Every distinct gather at or below the roots, in the order of first use."""
    return lookups_among(Interner().parts(roots).values())


def lookups_among(parts: Iterable[Expression]) -> list[Lookup]:
    """Those of some expressions that are gathers."""
    found = list[Lookup]()
    for part in parts:
        match part:
            case Call("gather", (Memory(buffer), offset)):
                index, positions = _summands(offset)
                found.append(Lookup(part, buffer, index, tuple(positions)))
    return found


def _summands(offset: Expression) -> tuple[Index, list[tuple[Expression, int]]]:
    match offset:
        case AxisValue(index):
            return index, []
        case Call("add", (left, right)):
            (first, some), (second, others) = _summands(left), _summands(right)
            return first + second, [*some, *others]
        case Call("mul", (value, Literal(step))):
            return Index(), [(value, int(step))]
    return Index(), [(offset, 1)]


def lookup_access(lookup: Lookup, axis: str, width: int) -> Access:
    """How the elements of a vector (aligned, along the axis) lie to each other, wherever the data says that it is."""
    if any(axis in Interner().needs(value) for value, _ in lookup.positions):
        return "each"
    how = access(lookup.index, axis, width)
    return "each" if how == "vector" and any(step % width for _, step in lookup.positions) else how


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


def parts_together(nest: Nest, part: int) -> int:
    """Parts of so many elements of a row that lie together before the next row's do; 1 for more than a run, or 0."""
    length = run(nest)
    return length // part if length % part == 0 else int(length > 0 and part % length == 0)


def is_contiguous(index: Index, axis: str) -> bool:
    """Whether neighbours along the axis are neighbours in memory, but for the ends of merged axes."""
    return _step(index, axis, 1) == 1


def _step(index: Index, axis: str, width: int) -> int | None:
    """How far one step inside an aligned vector moves; None when it differs between steps."""
    total = 0
    for atom, coefficient in index.terms:
        if isinstance(atom, str):
            total += coefficient if atom == axis else 0
            continue
        if axis not in atom.value.axes():
            continue
        inner = _step(atom.value, axis, width)
        if inner == 0:
            continue
        if inner != 1 or atom.divisor % width or not _aligned(atom.value, axis, width):
            return None
        total += 0 if isinstance(atom, Quotient) else coefficient
    return total


def _aligned(index: Index, axis: str, width: int) -> bool:
    """Whether the first element of a vector has an index that is a multiple of the vector."""
    if index.offset % width:
        return False
    for atom, coefficient in index.terms:
        if coefficient % width == 0 or atom == axis:
            continue
        if isinstance(atom, str | Quotient) or axis not in atom.value.axes():
            return False
        if atom.divisor % width or not _aligned(atom.value, axis, width):
            return False
    return True


def widest_vector(nest: Nest, axis: Axis) -> int:
    """The most elements that every contiguous access can move at once: 16 bytes of the narrowest type, 8 elements."""
    contiguous = [
        (nest.buffer(name).type.size_bytes, index) for name, index in accesses(nest) if _step(index, axis.name, 1) == 1
    ]
    if not contiguous:
        return 1
    width = min(8, 16 // min(size for size, _ in contiguous))
    largest = max(size for size, _ in contiguous)
    while width * largest > 32:
        width //= 2
    places = [index for _, index in contiguous]
    while width > 1 and (axis.extent % width or any(access(at, axis.name, width) != "vector" for at in places)):
        width //= 2
    return width


def wide_vector(nest: Nest, axis: Axis) -> int:
    """Elements of one access, of 16 bytes of the widest type: a warp then moves what lies together."""
    sizes = [nest.buffer(name).type.size_bytes for name, _ in accesses(nest)]
    return max(1, min(widest_vector(nest, axis), 16 // max(sizes)))


def skew(nest: Nest, axis: Axis, width: int) -> Index | None:
    """Where rows begin that no vector can be aligned to: the place of a row's first element in what is read or written.

    Vectors then begin up to `width - 1` elements before the row, so that they are aligned; accesses of other rows'
    places modulo `width` go element by element. None where vectors are aligned anyway, or where nothing is contiguous.
    """
    if width == 1 or widest_vector(nest, axis) % width == 0:
        return None
    found = [
        (nest.buffer(name).element_count, index)
        for name, index in accesses(nest)
        if index.coefficient(axis.name) == 1 and min([index.offset, *(c for _, c in index.terms)]) >= 0
    ]
    _, largest = max(found, key=lambda access: access[0], default=(0, None))
    if largest is None or axis.extent < width:
        return None
    return Index(largest.offset, tuple(term for term in largest.terms if term[0] != axis.name))


def unaligned_access(index: Index, axis: str, width: int, place: Index) -> Access:
    """`access`, for vectors that are aligned to rows beginning at `place`."""
    if axis not in index.axes():
        return "same"
    if index.coefficient(axis) != 1:
        return "each"
    apart = index + place.scaled(-1)
    moved = [apart.offset, *(coefficient for atom, coefficient in apart.terms if atom != axis)]
    return "vector" if all(coefficient % width == 0 for coefficient in moved) else "each"


def best_vector(nest: Nest, axis: Axis, shortest: int = UNALIGNED_ROW) -> int:
    """The widest vector; in unaligned rows of at least `shortest`, one that begins before the row.

    That needs three quarters of what is contiguous to begin at one place modulo the vector: the rest goes by element.
    """
    width = widest_vector(nest, axis)
    contiguous = [(nest.buffer(name), index) for name, index in accesses(nest) if index.coefficient(axis.name) == 1]
    if width > 1 or axis.extent < shortest or not contiguous:
        return width
    wide = min(8, 16 // max(buffer.type.size_bytes for buffer, _ in contiguous))
    place = skew(nest, axis, wide)
    if place is None:
        return width
    alike = [b.element_count for b, i in contiguous if unaligned_access(i, axis.name, wide, place) == "vector"]
    return wide if 4 * sum(alike) >= 3 * sum(buffer.element_count for buffer, _ in contiguous) else width
