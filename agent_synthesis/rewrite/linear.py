"""Rules of linear layers: what follows a product is moved before it, onto the smaller operand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from agent_synthesis.graphs.graph_index import GraphIndex
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
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2


class LinearRowSum:
    """`sum(x Wᵀ + b, last dimension) = x · (sum of W's rows) + sum(b)`; a mean alike, with means.

    Between product and sum may stand scaling by numbers, and terms added or subtracted: the sum of each takes its
    place. Holds where each is read by the next only. The sum of the weights is rounded before the products are made.
    """

    name = "linear_row_sum"
    effect = "sums the weight's rows first, so the matrix product becomes a matrix-vector product"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        total = index.nodes[node]
        if total.target not in ("aten.sum.dim_IntList", "aten.mean.dim"):
            return None
        given = arguments(total)
        rank = len(shape(index, given["self"]))
        if given["dtype"] is not None or rank < 2 or dims_of(given["dim"], rank) != [rank - 1]:
            return None
        found = _affine_of_product(index, given["self"], node)
        if found is None:
            return None
        product, steps = found
        keep, width = given["keepdim"], shape(index, given["self"])[-1]
        draft = Draft(index)
        of, is_layer = arguments(product), operation(product) == "linear"
        x, weight = (of["input"], of["weight"]) if is_layer else list(of.values())[:2]
        column = draft.call(f"{node}_weight", total.target, weight, [0 if is_layer else 1], keep)
        bias = of["bias"] if is_layer else None
        shift = [] if bias is None else [draft.call(f"{node}_bias", total.target, bias, [0], keep)]
        if shift and not keep:
            steps.insert(0, _Step("aten.add.Tensor", bias))
        terms = [step for step in steps if isinstance(step.operand, Named) and step.node]
        sums = {bias.name: shift[0]} if bias is not None and shift else {}
        for place, term in enumerate(terms, 1):
            if term.operand.name not in sums:
                sums[term.operand.name] = draft.call(f"{node}_term_{place}", total.target, term.operand, [-1], keep)
        name = f"{node}_product" if steps else node
        if keep and is_layer:
            done = draft.call(name, "aten.linear.default", x, column, *shift)
        else:
            is_vector = len(shape(index, x)) == 2 and not keep
            done = draft.call(name, "aten.mv.default" if is_vector else "aten.matmul.default", x, column)
        for place, step in enumerate(steps, 1):
            operand = sums[step.operand.name] if isinstance(step.operand, Named) else step.operand
            if step.adds and not isinstance(operand, Named) and operation(total) == "sum":
                operand *= width
            done = draft.call(f"{node}_step_{place}" if place < len(steps) else node, step.target, done, operand)
        made = draft.nodes[-1].results[0].spec
        if (made.dtype, list(made.shape)) != (index.spec(node).dtype, list(index.spec(node).shape)):
            return None
        passed = [step.node for step in steps if step.node]
        return Replacement((product.name, *passed, node), tuple(draft.nodes))


@dataclass(frozen=True)
class _Step:
    """`value · operand`, `value + operand` and their like: a number, or a tensor as wide as the value."""

    target: str
    operand: Any
    node: str = ""
    """The call that makes it; none for a layer's bias."""
    value: object = None
    """What it is done to."""

    @property
    def adds(self) -> bool:
        return aten.operation(self.target) in ("add", "sub")


def _affine_of_product(index: GraphIndex, tensor: object, user: str) -> tuple[graph_pb2.Node, list[_Step]] | None:
    """The matrix product that a tensor comes from, and what is done to it on the way, in order."""
    steps: list[_Step] = []
    while True:
        call = only_use(index, tensor, user)
        if call is None:
            return None
        if operation(call) in ("linear", "matmul", "mm"):
            ranks = [len(shape(index, factor)) for factor in list(arguments(call).values())[:2]]
            return (call, steps[::-1]) if ranks[0] >= 2 and ranks[1] == 2 else None
        step = _step(index, call)
        if step is None:
            return None
        steps.append(step)
        tensor, user = step.value, call.name


def _step(index: GraphIndex, call: graph_pb2.Node) -> _Step | None:
    kind, given = operation(call), arguments(call)
    value, other = given.get("self"), given.get("other")
    if kind == "add" and maker(index, value) is None:
        value, other = other, value
    if kind not in ("mul", "div", "add", "sub") or given.get("rounding_mode") is not None or given.get("alpha", 1) != 1:
        return None
    constant = number(index, other)
    if constant is not None:
        usable = math.isfinite(constant) and (kind in ("add", "sub") or constant != 0)
        return _Step(call.target.replace(".Tensor", ".Scalar"), constant, call.name, value) if usable else None
    if kind not in ("add", "sub") or not isinstance(value, Named) or not isinstance(other, Named) or other == value:
        return None
    of, result = index.spec(other.name), index.spec(call.name)
    if index.spec(value.name) != result or of.dtype != result.dtype or list(of.shape)[-1:] != list(result.shape)[-1:]:
        return None
    return None if index.is_written(other.name) else _Step(call.target, other, call.name, value)


class LinearPool:
    """`avg_pool(x Wᵀ + b) = x · pool(W)ᵀ + pool(b)`: the mean of neighbouring columns is one column.

    Holds where windows lie side by side, cover all columns, and only the pool reads the product. The mean of the
    weights is rounded before the products are made.
    """

    name = "linear_pool"
    effect = "pools the weight's rows first, so the matrix product has fewer columns"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        pool = index.nodes[node]
        if pool.target != "aten.avg_pool1d.default":
            return None
        given = arguments(pool)
        views: list[str] = []
        tensor, user = given["self"], node
        while operation(call := only_use(index, tensor, user)) == "unsqueeze" and call is not None:
            views.append(call.name)
            tensor, user = arguments(call)["self"], call.name
        if operation(call) != "linear" or call is None or shape(index, tensor)[-1] != shape(index, given["self"])[-1]:
            return None
        of = arguments(call)
        (size,), stride, (padding,) = given["kernel_size"], given["stride"], given["padding"]
        rows, depth = shape(index, of["weight"])
        if padding or list(stride or [size]) != [size] or size < 2 or rows % size:
            return None
        draft = Draft(index)
        parts = []
        for part, extents in (("weight", [rows // size, size, depth]), ("bias", [rows // size, size])):
            if of[part] is None:
                continue
            if not _is_dense(index, of[part]):
                return None
            windows = draft.view(f"{node}_{part}_windows", "aten.view.default", of[part], extents)
            parts.append(draft.call(f"{node}_{part}", "aten.mean.dim", windows, [1]))
        product = draft.call(f"{node}_product", "aten.linear.default", of["input"], *parts)
        draft.view(node, "aten.view.default", product, list(index.spec(node).shape))
        return Replacement((call.name, *reversed(views), node), tuple(draft.nodes))


def _is_dense(index: GraphIndex, tensor: Named) -> bool:
    """Whether elements lie one behind another in the order of their indices."""
    spec, reach = index.spec(tensor.name), 1
    for extent, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if stride != reach:
            return False
        reach *= extent
    return True


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
