"""What a product's sums become: the nest over batch, rows and columns, its stores alone, and which sums they use.

The one idea: with the product's axes merged to `batch`, `m` and `n`, the stores are a pointwise function of one sum;
where that function picks a triangle, the rest of the product need not be made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    Call,
    Expression,
    Index,
    Literal,
    Memory,
    Nest,
    Reduced,
    Type,
    walk,
)
from agent_synthesis.nests.product import MatrixProduct

EVERYWHERE = (-(1 << 30), 1 << 30)
"""A band of all columns."""
HELD_WIDTH = 8
"""Columns that an end takes at once where it is made during the next tile: it is unrolled over all of them."""


def band_of(end: Nest) -> tuple[int, int]:
    """The columns of row m whose sums the stores use, m + first to m + last: a triangle's where the end has one."""
    needs = [_needed(store.value, {}) for store in end.stores]
    found = [need for need in needs if need is not None]
    return (min(first for first, _ in found), max(last for _, last in found)) if found else EVERYWHERE


def _needed(value: Expression, seen: dict[int, tuple[int, int] | None]) -> tuple[int, int] | None:
    """The band outside of which the value does not depend on the sum; None where it never does."""
    if id(value) in seen:
        return seen[id(value)]
    found: tuple[int, int] | None = None
    if isinstance(value, Reduced):
        found = EVERYWHERE
    elif isinstance(value, Call):
        parts = [_needed(part, seen) for part in value.arguments]
        if value.operation == "where" and parts[1] is not None and (inside := _band(value.arguments[0])) is not None:
            parts[1] = (max(parts[1][0], inside[0]), min(parts[1][1], inside[1]))
        known = [part for part in parts if part is not None]
        found = (min(first for first, _ in known), max(last for _, last in known)) if known else None
    seen[id(value)] = found
    return found


def _band(condition: Expression) -> tuple[int, int] | None:
    """Where `n - m + constant` compared with a constant holds; None for another condition."""
    match condition:
        case Call("ge" | "le" | "gt" | "lt" as operation, (AxisValue(index), Literal(bound))):
            if index.terms != (("m", -1), ("n", 1)):
                return None
            edge = int(bound) - index.offset + {"gt": 1, "lt": -1}.get(operation, 0)
            return (edge, EVERYWHERE[1]) if operation in ("ge", "gt") else (EVERYWHERE[0], edge)
    return None


def three_axes(nest: Nest, product: MatrixProduct) -> Nest:
    """The nest over axes `batch` (where there is one), `m` and `n`; what is not affine in them has quotients."""
    groups = {"batch": product.batch, "m": product.rows, "n": product.columns}
    return over_axes(nest, groups, nest.reduced)


def over_axes(nest: Nest, groups: Mapping[str, Sequence[Axis]], reduced: Sequence[Axis]) -> Nest:
    """The nest over parallel axes that are groups of its own, merged in row-major order; empty groups are left out."""
    kept = [(Axis(name, math.prod(axis.extent for axis in axes)), axes) for name, axes in groups.items() if axes]
    extents = {axis.name: axis.extent for axis in (*(axis for axis, _ in kept), *reduced)}
    parts: dict[str, Index] = {}
    for whole, axes in kept:
        inside = whole.extent
        for axis in axes:
            outside, inside = inside, inside // axis.extent
            part = Index.axis(whole.name).divided(inside, extents)
            parts[axis.name] = part if outside == whole.extent else part.modulo(axis.extent, extents)
    return iteration_space.reindexed(
        nest, lambda index: index.substituted(parts, extents), [axis for axis, _ in kept], reduced
    )


def end_of(nest: Nest, widest: int) -> tuple[Nest, int]:
    """The stores alone, with the buffers that they touch, and how many neighbours every access takes at once."""
    end = replace(nest, reduced=(), reductions=())
    used = {name for name, _ in memory_access.accesses(end)}
    used |= {part.buffer for store in end.stores for part in walk(store.value) if isinstance(part, Memory)}
    end = replace(end, buffers=tuple(buffer for buffer in nest.buffers if buffer.name in used))
    columns = next(axis for axis in end.parallel if axis.name == "n")
    return end, min(widest, memory_access.widest_vector(end, columns))


def can_hold(nest: Nest, product: MatrixProduct) -> bool:
    """Whether a tile's sums may be rounded to the operands' 16 bits and come to their end during the next tile.

    PyTorch rounds a product before it goes on, but for a bias, which a library adds to floats: so nothing may be read.
    """
    end, width = end_of(three_axes(nest, product), HELD_WIDTH)
    types = {operand.type for operand in (product.left, product.right)}
    reads_nothing = all(buffer.written for buffer in end.buffers) and not iteration_space.reads_what_it_writes(end)
    return types <= {Type.F16, Type.BF16} and reads_nothing and width == HELD_WIDTH and band_of(end) == EVERYWHERE


def with_erfc(end: Nest) -> Nest:
    """The stores of 16 bits with `1 + erf(x)` as `erfc(-x)`, for which a short one will do; others as they were.

    So a GELU takes half the instructions, and its negative tail is closer than where 1 - 1 has lost its digits.
    """
    roots = [store.value for store in end.stores]
    parts = Interner().parts(roots).values()
    if any(end.buffer(store.buffer).type not in (Type.F16, Type.BF16) for store in end.stores):
        return end
    if any(isinstance(part, Call) and part.operation == "erfc" for part in parts):
        return end  # one that stands alone keeps all its digits
    done: dict[int, tuple[Expression, Expression]] = {}

    def renew(value: Expression) -> Expression:
        if id(value) not in done:
            fresh = value
            match value:
                case Call("add", (Literal(1), Call("erf", (inner,))) | (Call("erf", (inner,)), Literal(1)), Type.F32):
                    fresh = Call("erfc", (Call("neg", (renew(inner),), Type.F32),), Type.F32)
                case Call(_, arguments, _):
                    fresh = replace(value, arguments=tuple(renew(argument) for argument in arguments))
            done[id(value)] = (value, fresh)
        return done[id(value)][1]

    return replace(end, stores=tuple(replace(store, value=renew(store.value)) for store in end.stores))
