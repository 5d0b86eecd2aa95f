"""What an exported forward checks on the way, and the numbers that nothing but a check reads.

The one idea: a graph has what computes its outputs; a check computes none. The module itself still makes it.
"""

from __future__ import annotations

import operator
from typing import Final

import torch
from torch._ops import OpOverload

CHECKS: Final = frozenset({
    "_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range",
    "sym_constrain_range_for_size", "_functional_assert_async",
})  # fmt: skip
_OF_NUMBERS: Final = frozenset({
    operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne, operator.add, operator.sub,
    operator.mul, operator.neg, operator.mod, operator.floordiv, operator.and_,
})  # fmt: skip
"""What they check is made with."""


def is_check(node: torch.fx.Node) -> bool:
    """Whether a call checks or annotates and computes nothing."""
    return isinstance(node.target, OpOverload) and node.target._schema.name.removeprefix("aten::") in CHECKS


def is_only_checked(node: torch.fx.Node) -> bool:
    """Whether a node is a number out of a tensor, or made of such, that nothing but checks reads."""
    if isinstance(node.target, OpOverload):
        is_number = node.target is torch.ops.aten.item.default
    else:
        is_number = node.target in _OF_NUMBERS and not isinstance(node.meta.get("val"), torch.Tensor)
    return is_number and all(is_check(user) or is_only_checked(user) for user in node.users)
