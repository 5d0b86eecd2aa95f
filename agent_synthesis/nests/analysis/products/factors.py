"""Factors of products as what lies in memory and what scales it, and where elements of it lie along an axis.

The one idea: what scales a factor and does not vary along the depth scales the sum. It knows no product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import Axis, AxisValue, Call, Expression, Index, Load, Nest, Quotient, Reduced, Type

OF_8_BITS = (Type.E4M3, Type.E5M2)


def along(index: Index, axis: str, extent: int) -> tuple[torch.Tensor, list[int]] | None:
    """Where the elements along an axis are, and the steps of what is the same for all; None where the two are mixed."""
    places, others = torch.full((extent,), index.offset), list[int]()
    for atom, step in index.terms:
        axes = {atom} if isinstance(atom, str) else atom.value.axes()
        if axis not in axes:
            others.append(step)
        elif isinstance(atom, str):
            places += step * torch.arange(extent)
        elif len(axes) == 1 and (inner := along(atom.value, axis, extent)):
            is_quotient = isinstance(atom, Quotient)
            places += step * (inner[0] // atom.divisor if is_quotient else inner[0] % atom.divisor)
        else:
            return None
    return places, others


def taken_apart(factor: Expression, nest: Nest) -> tuple[Load, tuple[Expression, ...]] | None:
    """A factor as a load of floats of 8 bits and what scales it; None where it is anything else."""
    match factor:
        case Load(buffer, _, Type.F32) if nest.buffer(buffer).type in OF_8_BITS:
            return factor, ()
        case Call("cast", (Call("cast", (value,), Type.F16 | Type.BF16),), Type.F32):
            return taken_apart(value, nest)
        case Call("mul", (one, other), Type.F32):
            for value, scale in ((one, other), (other, one)):
                if (found := taken_apart(value, nest)) is not None:
                    return found[0], (*found[1], scale)
    return None


def varies(value: Expression, axes: Iterable[Axis]) -> bool:
    """Whether a value is not the same along these axes."""
    names = {axis.name for axis in axes}
    parts = Interner().parts([value]).values()
    return any(isinstance(part, Load | AxisValue) and part.index.axes() & names for part in parts)


def with_sums(value: Expression, name: str, summed: Expression) -> Expression:
    """The value with scaled sums in the place of sums; shared parts stay shared."""
    done: dict[int, tuple[Expression, Expression]] = {}

    def renew(part: Expression) -> Expression:
        if id(part) not in done:
            fresh = part
            match part:
                case Reduced(reduction, _) if reduction == name:
                    fresh = summed
                case Call(_, arguments, _):
                    fresh = replace(part, arguments=tuple(renew(argument) for argument in arguments))
            done[id(part)] = (part, fresh)
        return done[id(part)][1]

    return renew(value)
