"""Rules of linear layers: what follows a product is moved before it, onto the smaller operand."""

from __future__ import annotations

import math

from agent_synthesis.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import (
    Draft,
    Named,
    Replacement,
    arguments,
    dims_of,
    maker,
    only_use,
    operation,
    shape,
)


class LinearRowSum:
    """`sum(x Wᵀ + b, last dimension) = x · (sum of W's rows) + sum(b)`; a mean alike, with means.

    Holds where only the sum reads the product. The sum of the weights is rounded before the products are made.
    """

    name = "linear_row_sum"
    effect = "sums the weight's rows first, so the matrix product becomes a matrix-vector product"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        total = index.nodes[node]
        if total.target not in ("aten.sum.dim_IntList", "aten.mean.dim"):
            return None
        given = arguments(total)
        product = only_use(index, given["self"], node)
        rank = len(shape(index, given["self"]))
        if given["dtype"] is not None or operation(product) != "linear" or product is None:
            return None
        if dims_of(given["dim"], rank) != [rank - 1] or rank < 2:
            return None
        of = arguments(product)
        x, weight, bias, keep = of["input"], of["weight"], of["bias"], given["keepdim"]
        draft = Draft(index)
        column = draft.call(f"{node}_weight", total.target, weight, [0], keep)
        shift = None if bias is None else draft.call(f"{node}_bias", total.target, bias, [0], keep)
        if keep:
            draft.call(node, "aten.linear.default", x, column, *([shift] if shift else []))
        else:
            vector = "aten.mv.default" if len(shape(index, x)) == 2 else "aten.matmul.default"
            done = draft.call(f"{node}_product" if shift else node, vector, x, column)
            if shift:
                draft.call(node, "aten.add.Tensor", done, shift)
        return Replacement((product.name, node), tuple(draft.nodes))


class ScaleIntoWeights:
    """`(x Wᵀ + b) · c = x (c W)ᵀ + c b` for a number c.

    Holds where only the product with c reads the layer. Weights may change between calls, so they are scaled in each
    one: offered where that touches at most half as much as scaling the result. The products round c W, not the sum.
    """

    name = "scale_into_weights"
    effect = "scales the weights, which are smaller, instead of the result"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        scaled = index.nodes[node]
        if scaled.target not in ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"):
            return None
        given = arguments(scaled)
        factor = number(index, given["other"])
        product = only_use(index, given["self"], node)
        if factor is None or not math.isfinite(factor) or operation(product) != "linear" or product is None:
            return None
        of = arguments(product)
        weight, bias = of["weight"], of["bias"]
        if index.spec(node).dtype != index.spec(weight.name).dtype:
            return None
        if 2 * math.prod(shape(index, weight)) > math.prod(shape(index, Named(node))):
            return None
        draft = Draft(index)
        target = scaled.target.replace(".Tensor", ".Scalar")
        parts = [draft.call(f"{node}_weight", target, weight, factor)]
        if bias is not None:
            parts.append(draft.call(f"{node}_bias", target, bias, factor))
        draft.call(node, "aten.linear.default", of["input"], *parts)
        return Replacement((product.name, node), tuple(draft.nodes))


def number(index: GraphIndex, value: object) -> float | int | None:
    """A number, written in the call or a constant of one element; None for anything else."""
    if isinstance(value, Named) and maker(index, value) is None:
        value = index.constant_value(value.name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
