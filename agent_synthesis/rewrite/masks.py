"""Attention under a mask that no input decides: without one, or by the rule that it spells out.

The one idea: capture has no shortcut for a mask that hides nothing, so a graph builds from positions what eager never
makes, and a library that is given a mask cannot take its fastest kernels. The mask is computed once, here, and read.
"""

from __future__ import annotations

import functools

import torch

from agent_synthesis.graphs.graph_index import GraphIndex, byte_count
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, operation, shape
from agent_synthesis.rewrite.identities import never_read
from warpsmith.errors import BadInput
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2

_MOST_BYTES = 1 << 27
"""Of each tensor on the way to a mask that is computed: bools of 8,192 positions are half of it."""
_CPU = torch.device("cpu")
_IN_PLACE = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Arguments that the call takes by place; the others have names."""


class ConstantMask:
    """`attention(q, k, v, mask)` without its mask where that hides nothing, and causal where it is a lower triangle.

    Holds where the mask depends on constants alone and is of bools, or of zeros and -inf. A library may sum in another
    order.
    """

    name = "constant_mask"
    effect = "drops a mask that hides nothing, or says causal in its place"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        call = index.nodes[node]
        if operation(call) != "scaled_dot_product_attention" or not index.is_pure(node):
            return None
        given = arguments(call)
        mask = given["attn_mask"]
        if not isinstance(mask, Named) or given["is_causal"]:
            return None
        is_causal = _is_causal(index, mask, shape(index, given["query"])[-2], shape(index, given["key"])[-2])
        if is_causal is None:
            return None
        given |= {"attn_mask": None, "is_causal": is_causal}
        draft = Draft(index)
        draft.call(node, call.target, *[given.pop(each) for each in _IN_PLACE], **given)
        draft.nodes[-1].results[0].spec.CopyFrom(index.spec(node))  # a call without data may say otherwise
        made = index.producer(mask.name)
        gone = {node} if made is None else never_read(index, [made], {node})
        return Replacement(tuple(sorted(gone, key=index.position.__getitem__)), tuple(draft.nodes))


@functools.lru_cache(maxsize=64)
def _is_causal(index: GraphIndex, mask: Named, queries: int, keys: int) -> bool | None:
    """Whether the mask is a lower triangle; False where it hides nothing, None where neither is known."""
    value = constant(index, mask.name)
    if value is None:
        return None
    seen = value if value.dtype is torch.bool else value == 0
    if value.dtype is not torch.bool and not bool((seen | (value == -torch.inf)).all()):
        return None
    return is_triangle(seen, queries, keys)


def is_triangle(seen: torch.Tensor, queries: int, keys: int) -> bool | None:
    """Whether a mask of bools is a lower triangle; False where it hides nothing, None where it hides something else."""
    if bool(seen.all()):
        return False
    return True if bool((seen == torch.ones(queries, keys, dtype=torch.bool).tril()).all()) else None


def constant(index: GraphIndex, tensor: str) -> torch.Tensor | None:
    """A tensor that depends on constants alone, on the CPU, dimensions that are expanded taken once; None for another,
    or where it is too large."""
    value = _computed(index, tensor).get(tensor)
    return value if value is None else value[tuple(slice(None if step else 1) for step in value.stride())]


def _computed(index: GraphIndex, tensor: str) -> dict[str, torch.Tensor]:
    """The tensor and all that it is made of, by name; nothing where that cannot be."""
    calls, sources, pending = set[str](), set[str](), [tensor]
    while pending:
        name = pending.pop()
        if byte_count(index.spec(name)) > _MOST_BYTES:
            return {}
        maker = index.producer(name)
        if maker is None:
            sources.add(name)
        elif maker not in index.constant_calls:
            return {}
        elif maker not in calls:
            calls.add(maker)
            pending += index.reads(maker)
    if any(index.sources[each].origin != graph_pb2.ORIGIN_CONSTANT or index.is_written(each) for each in sources):
        return {}
    values = {each: aten.constant(index.sources[each], _CPU) for each in sources}
    for each in sorted(calls, key=index.position.__getitem__):
        node = index.nodes[each]
        try:
            results = aten.call(node.target, node.args, node.kwargs, values.__getitem__, _CPU)
        except (BadInput, RuntimeError):  # what a processor does not do in this type, say
            return {}
        values |= {told.name: made for told, made in zip(node.results, results, strict=False) if made is not None}
    return values
