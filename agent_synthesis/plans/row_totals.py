"""Sums over rows and columns at once, of elements that need a sum of their own row, as sums of rows and then of these.

The one idea: a kernel that has a row knows what the row's sum is, and adds up in the same visit what becomes of its
elements; a loop over all rows and columns would have to be told, by a kernel of its own that reads them once more.
"""

from __future__ import annotations

import math

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import saving
from agent_synthesis.plans.plan import Plan
from agent_synthesis.rewrite import with_replacement
from agent_synthesis.rewrite.calls import Draft, Replacement, arguments, dims_of, operation, shape
from warpsmith.graphs import dtypes

_OF_ROWS = frozenset({"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "norm", "linalg_vector_norm", "var", "logsumexp"})
_MOST_STEPS = 64
"""Calls of single elements before a sum that are looked at."""
_LEAST_COLUMNS = 32
"""Elements of a row that are worth it."""


def apart(plan: Plan) -> Plan:
    """The plan with such sums in two."""
    plan = saving.with_new_results(plan)
    made = [made for name in plan.index.nodes if (made := _in_two(plan.index, name)) is not None]
    return with_replacement(plan, *made) if made else plan


def _in_two(index: GraphIndex, node: str) -> Replacement | None:
    call = index.nodes[node]
    if operation(call) not in ("sum", "mean") or not index.is_pure(node) or len(call.results) != 1:
        return None
    given = arguments(call)
    of, rank = shape(index, given["self"]), len(shape(index, given["self"]))
    dims = [dim for dim in dims_of(given.get("dim"), rank) if of[dim] > 1]
    dtype = dtypes.to_torch(index.spec(node).dtype)
    if rank < 2 or rank - 1 not in dims or len(dims) < 2 or not dtype.is_floating_point:
        return None
    if of[-1] < _LEAST_COLUMNS or not _needs_rows(index, given["self"].name):
        return None
    draft, kept = Draft(index), given.get("keepdim", False)
    wide = {"dtype": torch.promote_types(dtype, torch.float32)}
    rows = draft.call(draft.free(f"{node}_rows"), "aten.sum.dim_IntList", given["self"], [-1], True, **wide)
    every = dims_of(given.get("dim"), rank)
    total = draft.call(draft.free(f"{node}_total"), "aten.sum.dim_IntList", rows, every, kept)
    if operation(call) == "mean":
        count = math.prod(of[dim] for dim in every)
        total = draft.call(draft.free(f"{node}_mean"), "aten.div.Tensor", total, count)
    if draft.meta(total.name).dtype is not dtype:
        draft.call(draft.free(f"{node}_rounded"), "aten._to_copy.default", total, dtype=dtype)
    draft.name_last(node)
    return Replacement((node,), tuple(draft.nodes)) if draft.nodes[-1].results[0].spec == index.spec(node) else None


def _needs_rows(index: GraphIndex, tensor: str) -> bool:
    """Whether elements are made of something that was reduced along their row, by calls of single elements."""
    wanted, pending, seen = list(index.spec(tensor).shape), [tensor], set[str]()
    while pending and len(seen) < _MOST_STEPS:
        name = pending.pop()
        made = index.producer(name)
        if made is None or name in seen:
            continue
        seen.add(name)
        call, extents = index.nodes[made], list(index.spec(name).shape)
        if operation(call) in _NORMS and extents == wanted:
            return True
        if operation(call) in _OF_ROWS:
            if extents == wanted and arguments(call)["dim"] % len(wanted) == len(wanted) - 1:
                return True
        elif index.is_view(made) or saving.is_elementwise(index, made):
            pending += index.reads(made)
        elif operation(call) in _REDUCTIONS and extents[-1:] == [1]:
            return True
    return False
