"""Calls taken apart into calls that are one nest each: losses of samples and their mean, attention, a convolution's
derivatives.

The one idea: PyTorch's own name for the first part of a loss is the same call with reduction "none", attention is by
definition two products with a softmax between them, and the gradient of a convolution's data is a transposed one. The
value stays; it is no algebra, and reports do not call it that.
"""

from __future__ import annotations

import math

import torch

from agent_synthesis.graphs import row_sums
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, operation, shape
from warpsmith.graphs import dtypes
from warpsmith.v1 import graph_pb2, tensor_pb2

_MEAN, _SUM = 1, 2
_LOSSES = frozenset({
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "triplet_margin_loss", "cosine_embedding_loss",
    "multi_margin_loss", "multilabel_margin_loss", "margin_ranking_loss", "hinge_embedding_loss", "kl_div",
})  # fmt: skip
_BY_CLASS = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
"""Losses whose mean is over the samples that count: weighted by class, without an ignored one."""
_MOST_SCORES = 1 << 31
"""Scores of attention that are kept in memory: 8 GiB of floats."""
_HALVES = frozenset({tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16})
_ANYWHERE = torch.device("cpu")
"""The device on which a graph makes a tensor: the process that runs the graph chooses the real one."""


def wording(index: GraphIndex, node: str) -> str:
    """How the parts follow each other, in words."""
    if operation(index.nodes[node]) in _LOSSES:
        return "sample by sample and then over the samples"
    if operation(index.nodes[node]) == "scaled_dot_product_attention":
        return "scores first, then their softmax and what it weighs"
    if operation(index.nodes[node]) == "convolution_backward":
        return "the data's gradient as a convolution, the weights' by PyTorch"
    if row_sums.is_one(index, node):
        return row_sums.WORDING
    return "by the simpler calls that it is made of"


def taken_apart(index: GraphIndex, node: str) -> Replacement | None:
    """The calls that a call is made of; None for a call that is none of these, or that is one without them."""
    call = index.nodes[node]
    if operation(call) == "scaled_dot_product_attention":
        return _attention(index, node)
    if operation(call) == "convolution_backward":
        return _convolution_backward(index, call)
    if row_sums.is_one(index, node):
        return row_sums.taken_apart(index, node)
    if operation(call) not in _LOSSES:
        return None
    given = arguments(call)
    reduction = given.get("reduction")
    if reduction not in (_MEAN, _SUM):
        return None
    draft = Draft(index)
    given["reduction"] = 0
    samples = draft.call(f"{node}_samples", call.target, *given.values())
    by_class = operation(call) in _BY_CLASS and not _holds_probabilities(index, given["target"])
    if reduction == _SUM:
        draft.call(node, "aten.sum.default", samples)
    elif not by_class:
        draft.call(node, "aten.mean.default", samples)
    else:
        _mean_over_classes(index, draft, node, samples, given["target"], given.get("weight"), given["ignore_index"])
    return Replacement((node,), tuple(draft.nodes))


def _attention(index: GraphIndex, node: str) -> Replacement | None:
    """`softmax(Q Kᵀ · scale + mask) V`; None with dropout, for scores too many to keep, and of 16 bits: the call's own
    scores are floats, which calls apart would round before the softmax.

    Heads that share keys are a dimension of queries alone. A row of -inf weighs nothing, as PyTorch has it.
    """
    given = arguments(index.nodes[node])
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    of_queries, of_keys, dtype = shape(index, query), shape(index, key), index.spec(node).dtype
    rank, is_causal, is_grouped = len(of_queries), given["is_causal"], given["enable_gqa"]
    if given["dropout_p"] or rank < 3 or dtype in _HALVES or (is_causal and mask is not None):
        return None
    if 0 in of_keys or math.prod(of_queries[:-1]) * of_keys[-2] > _MOST_SCORES:
        return None
    scale = given["scale"] if given["scale"] is not None else of_queries[-1] ** -0.5
    draft = Draft(index)
    if is_grouped:
        if rank != 4 or not of_keys[-3] or of_queries[-3] % of_keys[-3]:
            return None
        group = [of_keys[-3], of_queries[-3] // of_keys[-3]]
        query = draft.view(f"{node}_queries", "aten.unflatten.int", query, 1, group)
        key = draft.view(f"{node}_shared_keys", "aten.unsqueeze.default", key, 2)
        value = draft.view(f"{node}_shared_values", "aten.unsqueeze.default", value, 2)
    keys = draft.view(f"{node}_keys", "aten.transpose.int", key, -2, -1)
    scores = draft.call(f"{node}_scores", "aten.matmul.default", query, keys)
    scores = draft.call(f"{node}_scaled", "aten.mul.Scalar", scores, scale)
    if is_causal or mask is not None:
        if is_grouped and len(shape(index, mask)) == 3:
            return None
        added = _added(index, draft, node, mask, group if is_grouped else [])
        scores = draft.call(f"{node}_masked", "aten.add.Tensor", scores, added)
    weights = draft.call(f"{node}_weights", "aten.softmax.int", scores, -1)
    most = draft.call(f"{node}_most", "aten.amax.default", scores, [-1], True)
    unseen = draft.call(f"{node}_unseen", "aten.eq.Scalar", most, -math.inf)
    weights = draft.call(f"{node}_defined", "aten.masked_fill.Scalar", weights, unseen, 0.0)
    wanted = index.spec(node)
    is_last = rank == 4 and wanted.strides[2] > wanted.strides[1]  # heads, as projections want them
    made = draft.call(f"{node}_product" if is_last or is_grouped else node, "aten.matmul.default", weights, value)
    if is_grouped:
        made = draft.view(f"{node}_heads" if is_last else node, "aten.flatten.using_ints", made, -4, -3)
    if is_last:
        made = draft.view(f"{node}_turned", "aten.transpose.int", made, 1, 2)
        made = draft.call(f"{node}_stored", "aten.clone.default", made, memory_format=torch.contiguous_format)
        draft.view(node, "aten.transpose.int", made, 1, 2)
    return Replacement((node,), tuple(draft.nodes)) if draft.nodes[-1].results[0].spec == wanted else None


def _convolution_backward(index: GraphIndex, call: graph_pb2.Node) -> Replacement | None:
    """The gradient of the data as a convolution (transposed, where the forward's is not), of the bias as a sum, and of
    the weights as it was; None where the data has none."""
    of_data, of_weight, of_bias = (each.name for each in call.results)
    given = arguments(call)
    gradient, data, weight = (given[name] for name in ("grad_output", "input", "weight"))
    if not of_data:
        return None
    draft, spatial = Draft(index), range(len(given["stride"]))
    beyond = [0 for _ in spatial]
    if not given["transposed"]:
        for n in spatial:
            span = given["dilation"][n] * (shape(index, weight)[2 + n] - 1) + 1
            reached = (shape(index, gradient)[2 + n] - 1) * given["stride"][n] - 2 * given["padding"][n] + span
            beyond[n] = shape(index, data)[2 + n] - reached
    sizes = [given[name] for name in ("stride", "padding", "dilation")]
    draft.call(
        of_data, "aten.convolution.default", gradient, weight, None, *sizes, not given["transposed"], beyond,
        given["groups"],
    )  # fmt: skip
    if of_bias:
        draft.call(of_bias, "aten.sum.dim_IntList", gradient, [0, *(2 + n for n in spatial)])
    if any(node.results[0].spec != index.spec(node.name) for node in draft.nodes):
        return None
    if not of_weight:
        return Replacement((call.name,), tuple(draft.nodes))
    rest = graph_pb2.Node()
    rest.CopyFrom(call)
    rest.name = of_weight
    for result, mask in zip(rest.results, rest.args[-1].list.values, strict=True):
        mask.boolean = result.name == of_weight
        if not mask.boolean:
            result.Clear()
    return Replacement((call.name,), (*draft.nodes, rest))


def _added(index: GraphIndex, draft: Draft, node: str, mask: Named | None, group: list[int]) -> Named:
    """What is added to scores: a mask of floats, or zero where bools or the order of rows let a key be seen.

    `group`: heads of keys, and those of queries that share one; empty where every head has its own.
    """
    extents = shape(index, mask)
    if mask is None:
        given = arguments(index.nodes[node])
        extents = [shape(index, given[name])[-2] for name in ("query", "key")]
        ones = draft.call(f"{node}_ones", "aten.ones.default", extents, dtype=torch.bool, device=_ANYWHERE)
        seen = draft.call(f"{node}_seen", "aten.tril.default", ones)
    else:
        seen = mask
        if group and len(extents) == 4:
            heads = group if extents[1] > 1 else [1, 1]
            seen = draft.view(f"{node}_mask", "aten.unflatten.int", mask, 1, heads)
        if index.spec(mask.name).dtype != tensor_pb2.DTYPE_BOOL:
            return seen
    return draft.call(f"{node}_added", "aten.where.Scalar", seen, 0.0, -math.inf)


def _holds_probabilities(index: GraphIndex, target: Named) -> bool:
    return dtypes.to_torch(index.spec(target.name).dtype).is_floating_point


def _mean_over_classes(
    index: GraphIndex, draft: Draft, node: str, samples: Named, target: Named, weight: Named | None, ignored: int
) -> None:
    """`Σ loss / Σ weight of the target's class` over the samples whose target is not `ignored`; 0 / 0 for none.

    16-bit losses are added up in fp32, as PyTorch does inside of the one call.
    """
    dtype = dtypes.to_torch(index.spec(node).dtype)
    wide = {"dtype": torch.float32} if dtype in (torch.float16, torch.bfloat16) else {}
    total = draft.call(f"{node}_total", "aten.sum.default", samples, **wide)
    counts = draft.call(f"{node}_counts", "aten.ne.Scalar", target, ignored)
    if weight is not None:
        # An ignored class need not be one of the weights: look up class 0 for it, and count nothing.
        known = draft.call(f"{node}_known", "aten.mul.Tensor", target, counts)
        flat = draft.call(f"{node}_weights", "aten.take.default", weight, known)
        counts = draft.call(f"{node}_weighted", "aten.mul.Tensor", flat, counts)
    count = draft.call(f"{node}_count", "aten.sum.default", counts, **wide)
    mean = draft.call(f"{node}_wide" if wide else node, "aten.div.Tensor", total, count)
    if wide:
        draft.call(node, "aten._to_copy.default", mean, dtype=dtype)
