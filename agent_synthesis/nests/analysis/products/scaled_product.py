"""Products of two floats of 8 bits, which scales make larger or smaller on the way: with the scales where the sums are.

The one idea: what does not vary along the depth is a factor of the whole sum. In the module the scaled factors are
rounded to 16 bits, so they may be; a sum of products of floats of 8 bits, each of which is exact in fp32, is closer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import AxisValue, Call, Expression, Load, Nest, Reduced, Reduction, Type, remembered
from agent_synthesis.nests.product import MatrixProduct, matrix_product

OF_8_BITS = (Type.E4M3, Type.E5M2)


@dataclass(frozen=True)
class ScaledProduct:
    """`nest` loads both factors as they lie and scales its sums; it is the `product`."""

    nest: Nest
    product: MatrixProduct


@remembered
def scaled_product(nest: Nest) -> ScaledProduct | None:
    """The nest with its scales at the sums; None where a factor is no float of 8 bits, or a scale varies on the way."""
    simple = iteration_space.simplified(nest)
    if len(simple.reductions) != 1 or type(simple.reductions[0]) is not Reduction:
        return None
    reduction = simple.reductions[0]
    match reduction.value:
        case Call("mul", (first, second), Type.F32) if reduction.operation == "sum":
            factors = [_taken_apart(factor, simple) for factor in (first, second)]
        case _:
            return None
    loads, scales = list[Load](), list[Expression]()
    for factor in factors:
        if factor is None:
            return None
        loads.append(factor[0])
        scales += factor[1]
    summed: Expression = Reduced(reduction.name, Type.F32)
    for scale in scales:
        summed = Call("mul", (summed, scale), Type.F32)
    made = replace(
        simple,
        reductions=(replace(reduction, value=Call("mul", tuple(loads), Type.F32)),),
        stores=tuple(replace(store, value=_with_sums(store.value, reduction.name, summed)) for store in simple.stores),
    )
    product = matrix_product(made)
    return None if product is None else ScaledProduct(made, product)


def _taken_apart(factor: Expression, nest: Nest) -> tuple[Load, tuple[Expression, ...]] | None:
    """A factor as a load of floats of 8 bits and what scales it; None where it is anything else."""
    match factor:
        case Load(buffer, _, Type.F32) if nest.buffer(buffer).type in OF_8_BITS:
            return factor, ()
        case Call("cast", (Call("cast", (value,), Type.F16 | Type.BF16),), Type.F32):
            return _taken_apart(value, nest)
        case Call("mul", (one, other), Type.F32):
            for value, scale in ((one, other), (other, one)):
                found = _taken_apart(value, nest) if _is_scale(scale, nest) else None
                if found is not None:
                    return found[0], (*found[1], scale)
    return None


def _is_scale(value: Expression, nest: Nest) -> bool:
    """Whether a value is the same along the depth."""
    parts = Interner().parts([value]).values()
    reduced = {axis.name for axis in nest.reduced}
    places = [part.index for part in parts if isinstance(part, Load | AxisValue)]
    return not any(isinstance(part, Reduced) for part in parts) and not any(each.axes() & reduced for each in places)


def _with_sums(value: Expression, name: str, summed: Expression) -> Expression:
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
