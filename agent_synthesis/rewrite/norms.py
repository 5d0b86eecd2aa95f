"""Rules of norms in evaluation: what scales and shifts each channel moves into the weights of the layer before."""

from __future__ import annotations

import math
from typing import Any

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans.plan import Plan
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, maker, only_use, operation, shape
from warpsmith.v1 import graph_pb2, task_pb2

_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})


class NormIntoWeights:
    """`norm(W * x + b) = (s W) * x + s (b - mean) + shift`, where s = scale / sqrt(variance + eps) of each channel.

    Holds where only a batch norm with running statistics reads a convolution, transposed or not, or a linear layer. The
    products round s W, and not the sum before it is scaled. Offered where `is_worth_folding` says so.
    """

    name = "norm_into_weights"
    effect = "folds the norm into the weights of the layer before it, which are smaller than its result"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        norm = index.nodes[node]
        if operation(norm) != "batch_norm" or not index.is_pure(node):
            return None
        given = arguments(norm)
        layer = only_use(index, given["input"], node)
        if given["training"] or given["running_mean"] is None or layer is None:
            return None
        of = _layer(index, layer)
        if of is None or not _has_one_type(index, of, given, node):
            return None
        draft = Draft(index)
        factor = draft.call(draft.free(f"{node}_variance"), "aten.add.Scalar", given["running_var"], given["eps"])
        factor = draft.call(draft.free(f"{node}_factor"), "aten.rsqrt.default", factor)
        if given["weight"] is not None:
            factor = draft.call(draft.free(f"{node}_scale"), "aten.mul.Tensor", factor, given["weight"])
        extents = [1] * len(shape(index, of["weight"]))
        extents[1 if operation(layer) in _TRANSPOSED else 0] = -1
        wide = draft.view(draft.free(f"{node}_wide"), "aten.view.default", factor, extents)
        weight = draft.call(draft.free(f"{node}_weight"), "aten.mul.Tensor", of["weight"], wide)
        bias, mean = of["bias"], given["running_mean"]
        centred = draft.call(draft.free(f"{node}_centred"), "aten.neg.default", mean)
        if bias is not None:
            centred = draft.call(draft.free(f"{node}_biased"), "aten.add.Tensor", centred, bias)
        shift = draft.call(draft.free(f"{node}_shift"), "aten.mul.Tensor", centred, factor)
        if given["bias"] is not None:
            shift = draft.call(draft.free(f"{node}_bias"), "aten.add.Tensor", shift, given["bias"])
        draft.call(node, layer.target, *{**of, "weight": weight, "bias": shift}.values())
        draft.nodes[-1].results[0].spec.CopyFrom(index.spec(node))
        return Replacement((layer.name, node), tuple(draft.nodes))


def _layer(index: GraphIndex, call: graph_pb2.Node) -> dict[str, Any] | None:
    """Arguments of a layer whose weights have the norm's channels in one dimension."""
    kind = operation(call)
    given = arguments(call) if kind in _CONVOLUTIONS | _TRANSPOSED or kind == "linear" else {}
    if kind in _TRANSPOSED and given["groups"] != 1:
        return None  # channels lie in two dimensions of its weights
    ranks = len(shape(index, Named(call.results[0].name))) if given else 0
    if not given or ranks != (2 if kind == "linear" else len(shape(index, given["weight"]))):
        return None  # a norm's channels are dimension 1
    return given


def is_worth_folding(plan: Plan, node: str) -> bool:
    """Whether the layer's call adds the bias that comes of it on its way: a convolution on a GPU does not, and what
    follows takes in a norm as well as a bias.

    Weights and statistics may change between calls, so they are folded in each one, for at most half of what the norm
    costs. On the prepared track they are folded once.
    """
    layer = maker(plan.index, arguments(plan.index.nodes[node])["input"])
    if layer is None or (plan.target == task_pb2.TARGET_CUDA and operation(layer) != "linear"):
        return False
    weight = arguments(layer)["weight"]
    return plan.prepared or 2 * math.prod(shape(plan.index, weight)) <= math.prod(shape(plan.index, Named(node)))


def _has_one_type(index: GraphIndex, of: dict[str, Any], given: dict[str, Any], node: str) -> bool:
    tensors = [*of.values(), *given.values()]
    named = [each for each in tensors if isinstance(each, Named)]
    return {index.spec(each.name).dtype for each in named} == {index.spec(node).dtype}
