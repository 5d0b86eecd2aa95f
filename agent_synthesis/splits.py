"""Calls that reduce twice taken apart into calls that are one nest each: losses of samples and their mean, attention.

The one idea: PyTorch's own name for the first part of a loss is the same call with reduction "none", and attention is
by definition two products with a softmax between them. The value stays; it is no algebra, and reports do not call it
that.
"""

from __future__ import annotations

import torch

from agent_synthesis.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, operation, shape
from warpsmith import dtypes
from warpsmith.v1 import tensor_pb2

_MEAN, _SUM = 1, 2
_LOSSES = frozenset({
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "triplet_margin_loss", "cosine_embedding_loss",
    "multi_margin_loss", "multilabel_margin_loss", "margin_ranking_loss", "hinge_embedding_loss", "kl_div",
})  # fmt: skip
_BY_CLASS = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
"""Losses whose mean is over the samples that count: weighted by class, without an ignored one."""


def wording(index: GraphIndex, node: str) -> str:
    """How the parts follow each other, in words."""
    if operation(index.nodes[node]) in _LOSSES:
        return "sample by sample and then over the samples"
    return "scores first, then their softmax and what it weighs"


def taken_apart(index: GraphIndex, node: str) -> Replacement | None:
    """The calls that a call is made of; None for a call that is none of these, or that is one without them."""
    call = index.nodes[node]
    if operation(call) == "scaled_dot_product_attention":
        return _attention(index, node)
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
    """`softmax(Q Kᵀ · scale) V`; None with a mask, dropout or heads that share keys, and for halves.

    Rows masked throughout would be NaN, and PyTorch makes them zero; scores of halves overflow before they are scaled.
    """
    given = arguments(index.nodes[node])
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if given["dropout_p"] or given["is_causal"] or given["enable_gqa"] or len(shape(index, query)) < 3:
        return None
    dtype = index.spec(node).dtype
    if mask is not None or dtype == tensor_pb2.DTYPE_FLOAT16:
        return None
    scale = given["scale"] if given["scale"] is not None else shape(index, query)[-1] ** -0.5
    draft = Draft(index)
    keys = draft.view(f"{node}_keys", "aten.transpose.int", key, -2, -1)
    scores = draft.call(f"{node}_scores", "aten.matmul.default", query, keys)
    scaled = draft.call(f"{node}_scaled", "aten.mul.Scalar", scores, scale)
    weights = draft.call(f"{node}_weights", "aten.softmax.int", scaled, -1)
    draft.call(node, "aten.matmul.default", weights, value)
    return Replacement((node,), tuple(draft.nodes)) if draft.nodes[-1].results[0].spec == index.spec(node) else None


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
