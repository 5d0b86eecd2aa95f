"""Attention that is written out as two products and a softmax between them, perhaps under a mask, as one call.

The one idea: scores are many times what they are made of, and a kernel that knows what becomes of them keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, maker, operation, shape
from agent_synthesis.rewrite.linear import number
from warpsmith.v1 import graph_pb2, tensor_pb2

_CALL = "aten.scaled_dot_product_attention.default"
_PRODUCTS = frozenset({"bmm", "matmul"})
_SCORES = frozenset({*_PRODUCTS, "mul", "div"})
"""Calls of which one makes scores, and none a mask that is added to them."""
_TYPES = frozenset({tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16})


class WholeAttention:
    """`softmax(s · Q Kᵀ + mask) V`, scaled at the queries or at the scores by positive numbers, as one call.

    Holds where nothing else that is ever read reads the scores or their softmax. A mask is added to scores, or replaces
    some by -inf. Of 16 bits neither is rounded on the way; sums are in another order. A row of scores that are all
    -inf weighs nothing, and was NaN; so is a score that is NaN and hidden.
    """

    name = "whole_attention"
    effect = "computes attention in one call, which keeps no scores"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        call = index.nodes[node]
        if operation(call) not in _PRODUCTS or not index.is_pure(node) or index.spec(node).dtype not in _TYPES:
            return None
        weights, value = list(arguments(call).values())[:2]
        unread, chain = set[str](), [node]
        if (kept := _whole(index, weights, node)) is not None:
            chain.append(kept.name)
            weights = arguments(kept)["input"]
        softmax = _only_maker(index, weights, chain[-1], unread)
        if softmax is None or operation(softmax) != "softmax" or not isinstance(value, Named):
            return None
        given = arguments(softmax)
        if given["dtype"] is not None or given["dim"] % len(shape(index, weights)) != len(shape(index, weights)) - 1:
            return None
        chain.append(softmax.name)
        last, scale = softmax, 1.0
        made = _only_maker(index, given["self"], softmax.name, unread)
        mask = _mask(index, made) if made is not None else None
        if made is not None and mask is not None:
            chain.append(made.name)
            last, made = made, _only_maker(index, mask.scores, made.name, unread)
        while made is not None and (factor := _factor(index, made)) is not None:
            chain.append(made.name)
            scale, last = scale * factor, made
            made = _only_maker(index, arguments(made)["self"], last.name, unread)
        if made is None or operation(made) not in _PRODUCTS:
            return None
        chain.append(made.name)
        query, keys = list(arguments(made).values())[:2]
        scaled = maker(index, query)
        if scaled is not None and index.is_pure(scaled.name) and (factor := _factor(index, scaled)) is not None:
            chain.append(scaled.name)
            query, scale = arguments(scaled)["self"], scale * factor
        if not _is_attention(index, query, keys, value) or not 0 < scale < math.inf:
            return None
        draft = Draft(index)
        turned = draft.view(draft.free(f"{node}_keys"), "aten.transpose.int", keys, -2, -1)
        given_mask = mask.tensor if mask is not None else None
        if mask is not None and mask.hides:
            given_mask = draft.call(draft.free(f"{node}_seen"), "aten.logical_not.default", mask.tensor)
        draft.call(node, _CALL, query, turned, value, given_mask, 0.0, False, scale=scale)
        draft.nodes[-1].results[0].spec.CopyFrom(index.spec(node))  # a call without data may say otherwise
        return Replacement(_gone(index, chain, unread), tuple(draft.nodes))


def takes(index: GraphIndex, node: str) -> bool:
    """Whether a call that is never read goes where attention becomes one call."""
    rule = WholeAttention()
    made = (rule.replacement(index, each) for each, call in index.nodes.items() if operation(call) in _PRODUCTS)
    return any(each is not None and node in each.removed for each in made)


def _only_maker(index: GraphIndex, tensor: object, user: str, unread: set[str]) -> graph_pb2.Node | None:
    """The call that makes a tensor which, of all that is ever read, only `user` reads, and which nothing writes; other
    readers, and theirs, are added to what is `unread`."""
    made = maker(index, tensor)
    if made is None or not isinstance(tensor, Named) or not index.is_pure(made.name):
        return None
    if tensor.name in index.outputs or index.is_written(tensor.name) or index.is_view(made.name):
        return None
    pending = [each for each in index.users(tensor.name) if each != user]
    while pending:
        name = pending.pop()
        results = index.results(name)
        if not index.is_pure(name) or index.nodes[name].mutates or any(each in index.outputs for each in results):
            return None
        unread.add(name)
        pending += [reader for each in results for reader in index.users(each) if reader not in unread]
    return made


def _whole(index: GraphIndex, tensor: object, user: str) -> graph_pb2.Node | None:
    """A dropout that drops nothing, of which only `user` reads the result: a view."""
    made = maker(index, tensor)
    if made is None or not isinstance(tensor, Named) or operation(made) != "dropout" or not index.is_view(made.name):
        return None
    is_read = list(index.users(tensor.name)) != [user] or tensor.name in index.outputs or index.is_written(tensor.name)
    return None if is_read else made


@dataclass(frozen=True)
class _Mask:
    """What scores get before their softmax."""

    scores: Named
    tensor: Named
    """Bools, or numbers that are added."""
    hides: bool
    """Whether it says which scores count for nothing, and not which count."""


def _mask(index: GraphIndex, call: graph_pb2.Node) -> _Mask | None:
    """The mask that a call lays over scores; None for another call."""
    given = arguments(call)
    match operation(call), call.target.rpartition(".")[2]:
        case "masked_fill", "Scalar" if given["value"] == -math.inf:
            scores, mask, hides = given["self"], given["mask"], True
        case "where", "ScalarOther" if given["other"] == -math.inf:
            scores, mask, hides = given["self"], given["condition"], False
        case "where", "ScalarSelf" if given["self"] == -math.inf:
            scores, mask, hides = given["other"], given["condition"], True
        case "add", "Tensor" if given["alpha"] == 1:
            both = sorted((given["self"], given["other"]), key=lambda each: _operation_of(index, each) not in _SCORES)
            scores, mask, hides = *both, False
        case _:
            return None
    if not isinstance(scores, Named) or not isinstance(mask, Named) or scores == mask:
        return None
    of_scores, of_mask = shape(index, scores), shape(index, mask)
    is_wide = 2 <= len(of_mask) <= len(of_scores) and all(
        one in (1, other) for one, other in zip(reversed(of_mask), reversed(of_scores), strict=False)
    )
    types = {index.spec(each.name).dtype for each in (scores, mask)}
    is_kind = operation(call) != "add" or len(types) == 1
    return _Mask(scores, mask, hides) if is_wide and is_kind and shape(index, Named(call.name)) == of_scores else None


def _operation_of(index: GraphIndex, tensor: object) -> str:
    """The operation that makes a tensor; empty for a source or a number."""
    made = maker(index, tensor)
    return operation(made) if made is not None else ""


def _factor(index: GraphIndex, call: graph_pb2.Node) -> float | None:
    """The positive number by which a call multiplies a tensor; None for another call."""
    kind = operation(call)
    if kind not in ("mul", "div"):
        return None
    given = arguments(call)
    value = number(index, given.get("other"))
    if value is None or value <= 0 or given.get("rounding_mode") is not None or not isinstance(given["self"], Named):
        return None
    if index.spec(given["self"].name).dtype != index.spec(call.name).dtype:
        return None
    return float(value) if kind == "mul" else 1.0 / value


def _is_attention(index: GraphIndex, query: object, keys: object, value: object) -> bool:
    """Whether shapes and types are those of attention without broadcasting; `keys` are turned."""
    if not (isinstance(query, Named) and isinstance(keys, Named) and isinstance(value, Named)):
        return False
    of_query, of_keys, of_value = (shape(index, each) for each in (query, keys, value))
    if not 3 <= len(of_query) == len(of_keys) == len(of_value) <= 4:
        return False
    alike = of_query[:-2] == of_keys[:-2] == of_value[:-2] and of_query[-1] == of_keys[-2]
    types = {index.spec(each.name).dtype for each in (query, keys, value)}
    return alike and of_keys[-1] == of_value[-2] and len(types) == 1 and types <= _TYPES


def _gone(index: GraphIndex, chain: Sequence[str], unread: Set[str]) -> tuple[str, ...]:
    """`unread` calls, and those of a chain, each of which the one before reads, that nothing else reads."""
    gone = {chain[0], *unread}
    for name in chain[1:]:
        readers = {reader for result in index.results(name) for reader in index.users(result)}
        if not readers <= gone or any(result in index.outputs for result in index.results(name)):
            break
        gone.add(name)
    return (*sorted(gone - {chain[0]}, key=index.position.__getitem__), chain[0])
