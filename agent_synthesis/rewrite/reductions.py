"""Rules of reductions: over one element, one inside another, of a broadcast; and what a softmax does not see."""

from __future__ import annotations

import math

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
from agent_synthesis.rewrite.identities import may_share, renamed
from agent_synthesis.rewrite.linear import number
from warpsmith.v1 import graph_pb2

_OF_ONE = frozenset({"sum", "mean", "prod", "amax", "amin", "max", "min", "logsumexp"})
"""Reductions that give back an element which is all there is."""
_NESTED = {
    "sum": "aten.sum.dim_IntList",
    "mean": "aten.mean.dim",
    "amax": "aten.amax.default",
    "amin": "aten.amin.default",
}
"""Reduction → the overload that takes several dimensions."""


class OfOneElement:
    """A sum, mean, product, maximum, minimum or logsumexp over dimensions of one element: that element.

    Holds where the type stays and no position is asked for. To the last bit.
    """

    name = "reduction_of_one"
    effect = "drops a reduction over one element"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        found = _reduction(index, node)
        if found is None or found.operation not in _OF_ONE or math.prod(found.shape[d] for d in found.dims) != 1:
            return None
        if found.result.shape == index.spec(found.of.name).shape:
            return renamed(index, (node,), found.of)
        result = found.call.results[0].name
        if not may_share(index, result, found.of.name):
            return None
        draft = Draft(index)
        draft.view(result, "aten.squeeze.dims", found.of, found.dims)
        return Replacement((node,), tuple(draft.nodes))


class Nested:
    """`sum(sum(x, d), e) = sum(x, d ∪ e)`; means, maxima and minima alike.

    Holds where only the outer reduction reads the inner one and both have one type. Sums associate in another order.
    """

    name = "nested_reduction"
    effect = "reduces over all dimensions at once"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        outer = _reduction(index, node)
        if outer is None or outer.operation not in _NESTED:
            return None
        call = only_use(index, outer.of, node)
        inner = None if call is None else _reduction(index, call.name)
        if inner is None or inner.operation != outer.operation or inner.result.dtype != outer.result.dtype:
            return None
        left = [dim for dim in range(len(inner.shape)) if inner.keeps or dim not in inner.dims]
        dims = sorted({*inner.dims, *(left[dim] for dim in outer.dims)})
        keeps = outer.keeps and inner.keeps
        draft = Draft(index)
        same = [extent for dim, extent in enumerate(inner.shape) if dim not in dims] == list(outer.result.shape)
        whole = draft.call(node if keeps or same else f"{node}_whole", _NESTED[outer.operation], inner.of, dims, keeps)
        if whole.name != node:  # one of the two kept its dimensions
            draft.view(node, "aten.view.default", whole, list(outer.result.shape))
        return Replacement((inner.call.name, node), tuple(draft.nodes))


class OfBroadcast:
    """A sum, mean, maximum or minimum over dimensions that were only expanded: the element, for a sum n times.

    Holds where all reduced dimensions are expanded ones. A sum of n equal terms becomes one product, rounded once.
    """

    name = "reduction_of_broadcast"
    effect = "reduces a broadcast without walking over it"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        found = _reduction(index, node)
        if found is None or found.operation not in _NESTED:
            return None
        expanded = maker(index, found.of)
        if operation(expanded) not in ("expand", "broadcast_to") or expanded is None:
            return None
        narrow = arguments(expanded)["self"]
        before = shape(index, narrow)
        if len(before) != len(found.shape) or index.is_written(narrow.name):
            return None
        if any(before[dim] != 1 or found.shape[dim] == 1 for dim in found.dims):
            return None
        count = math.prod(found.shape[dim] for dim in found.dims)
        draft = Draft(index)
        kept = [dim for dim in range(len(before)) if found.keeps or dim not in found.dims]
        if [before[dim] for dim in kept] != list(found.result.shape):
            return None  # another dimension is expanded as well
        thin = narrow if found.keeps else draft.view(f"{node}_of", "aten.squeeze.dims", narrow, found.dims)
        draft.call(node, "aten.mul.Scalar", thin, count if found.operation == "sum" else 1)
        if draft.nodes[-1].results[0].spec.dtype != found.result.dtype:
            return None
        return Replacement((node,), tuple(draft.nodes))


class SoftmaxShift:
    """`softmax(x + c) = softmax(x)` for a number c; log-softmax alike.

    Holds where only the softmax reads the sum and c is finite. What the addition rounded away is kept.
    """

    name = "softmax_shift"
    effect = "drops a shift that a softmax does not see"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        call = index.nodes[node]
        if operation(call) not in ("softmax", "log_softmax", "_softmax", "_log_softmax"):
            return None
        given = arguments(call)
        shifted = only_use(index, given["self"], node)
        if shifted is None or operation(shifted) not in ("add", "sub") or given.get("dtype") is not None:
            return None
        of = arguments(shifted)
        shift = number(index, of["other"])
        if shift is None or not math.isfinite(shift) or not isinstance(of["self"], Named):
            return None
        if index.spec(of["self"].name) != index.spec(shifted.results[0].name):
            return None
        draft = Draft(index)
        rest = {key: value for key, value in given.items() if key in ("dim", "half_to_float")}
        draft.call(node, call.target, of["self"], *rest.values())
        return Replacement((shifted.name, node), tuple(draft.nodes))


class _Found:
    """A reduction of a graph."""

    def __init__(self, index: GraphIndex, call: graph_pb2.Node) -> None:
        given = arguments(call)
        self.call, self.operation = call, operation(call)
        self.of: Named = given["self"]
        self.shape = shape(index, self.of)
        self.dims = dims_of(given.get("dim"), len(self.shape))
        self.keeps = bool(given.get("keepdim", False))
        self.result = call.results[0].spec


def _reduction(index: GraphIndex, node: str) -> _Found | None:
    """The reduction that a call is, of a tensor of its result's type; None for any other call."""
    call = index.nodes[node]
    if operation(call) not in _OF_ONE or not index.is_pure(node) or isinstance(arguments(call).get("other"), Named):
        return None
    found = _Found(index, call)
    extra = [result.name for result in call.results[1:] if result.name]
    if any(index.users(name) or name in index.outputs for name in extra):
        return None
    return found if index.spec(found.of.name).dtype == found.result.dtype else None
