"""Attention that is written out as two products and a softmax between them, as the one call that PyTorch has for it.

The one idea: scores are many times what they are made of, and a kernel that knows what becomes of them keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, maker, operation, shape
from agent_synthesis.rewrite.linear import number
from warpsmith.v1 import graph_pb2, tensor_pb2

_CALL = "aten.scaled_dot_product_attention.default"
_PRODUCTS = frozenset({"bmm", "matmul"})
_TYPES = frozenset({tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16})


class WholeAttention:
    """`softmax(s · Q Kᵀ) V`, scaled at the queries or at the scores by positive numbers, as one call.

    Holds where nothing else that is ever read reads the scores or their softmax. Of 16 bits neither is rounded on the
    way; sums are in another order. A row of scores that are all -inf weighs nothing, and was NaN.
    """

    name = "whole_attention"
    effect = "computes attention in one call, which keeps no scores"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        call = index.nodes[node]
        if operation(call) not in _PRODUCTS or not index.is_pure(node) or index.spec(node).dtype not in _TYPES:
            return None
        weights, value = list(arguments(call).values())[:2]
        unread: set[str] = set()
        softmax = _only_maker(index, weights, node, unread)
        if softmax is None or operation(softmax) != "softmax" or not isinstance(value, Named):
            return None
        given = arguments(softmax)
        if given["dtype"] is not None or given["dim"] % len(shape(index, weights)) != len(shape(index, weights)) - 1:
            return None
        last, scale = softmax, 1.0
        made = _only_maker(index, given["self"], softmax.name, unread)
        chain = [node, softmax.name]
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
        draft.call(node, _CALL, query, turned, value, None, 0.0, False, scale=scale)
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
