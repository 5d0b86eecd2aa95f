"""An operation that Warpsmith has no kernel for, added from outside: `torch.hypot`, the length of two sides.

Squares of floats leave the range of floats, those in float64 do not; a root in float64 is right to float's last bit.
"""

from collections.abc import Mapping

from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Kind

from agent_synthesis.lowering.handlers.pointwise import elementwise
from agent_synthesis.nests.ir import Expression, Type
from agent_synthesis.nests.symbolic import Handler, Refused, cast, op


def hypot(a: Expression, b: Expression) -> Expression:
    """The formula, over operands of one type."""
    if a.type is Type.F64:
        raise Refused("hypot in float64 would have to be scaled")
    a, b = cast(a, Type.F64), cast(b, Type.F64)
    return op("sqrt", op("add", op("mul", a, a), op("mul", b, b)))


def handlers() -> Mapping[str, Handler]:
    """By the operation's name in ATen, without its overload."""
    return {"hypot": elementwise(2, Kind.DEFAULT, hypot)}
