"""Attention of a training step whose keys and values are repeated for heads that share them, as calls that share them.

The one idea: both calls take fewer heads of keys than of queries, and the derivative of a repetition is a sum that they
make anyway; so the copies need not be made, nor gradients of each be written down and added up.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.attention_steps import NO_SUCH_CALL, handle, is_other, laid_out, needed, readers
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, dims_of, maker, operation, shape
from agent_synthesis.rewrite.identities import never_read
from warpsmith.graphs import result_specs
from warpsmith.graphs.library import attention
from warpsmith.v1 import graph_pb2


@dataclass(frozen=True)
class _Repeated:
    """Keys or values that come several times."""

    expanded: str
    """[batch, heads, times, rows, depth], of which the third dimension is one element of memory."""
    total: graph_pb2.Node | None
    """The sum over it that is wanted of the derivative; None where that is not read."""


def replacements(index: GraphIndex) -> tuple[Replacement, ...]:
    """What makes the first such attention share its heads, on a GPU; nothing where there is none.

    Holds without a mask, where nothing but a sum over the repetition reads the derivatives. Sums are in another order.
    """
    for node in index.graph.nodes:
        if node.target == attention.BACKWARD and attention.mask_of(node) is None:
            with result_specs.known("cuda"), contextlib.suppress(*NO_SUCH_CALL):
                if made := _made(index, node):
                    return made
    return ()


def _made(index: GraphIndex, backward: graph_pb2.Node) -> tuple[Replacement, ...]:
    gradient, query, key, value, out, statistics, *_ = arguments(backward).values()
    forward = maker(index, out)
    if forward is None or forward.target != attention.FORWARD or attention.mask_of(forward) is not None:
        return ()
    results = [result.name for result in backward.results]
    found = [_repeated(index, each, name) for each, name in ((key, results[1]), (value, results[2]))]
    if any(
        each is None or shape(index, each_) != shape(index, key)
        for each, each_ in zip(found, (key, value), strict=True)
    ):
        return ()
    draft, told = Draft(index), (0.0, attention.is_causal(forward))
    shared = [
        draft.view(draft.free(f"{each.expanded}_once"), "aten.select.int", Named(each.expanded), 2, 0)
        for each in found
        if each is not None
    ]
    if not attention.gpu_takes(*(draft.meta(each.name) for each in (query, *shared))):
        return ()
    options = {"scale": arguments(forward)["scale"]} if arguments(forward)["scale"] is not None else {}
    made = [result.name for result in forward.results]
    draft.calls(forward.name, made, attention.FORWARD, query, *shared, *told, **options)
    if any(draft.meta(name).stride() != tuple(index.spec(name).strides) for name in made if name):
        return ()
    counts = [len(draft.nodes)]
    wanted = [results[0], *(draft.free(f"{name}_shared") if name else "" for name in results[1:])]
    given = (gradient, query, *shared, out, statistics, *told)
    draft.calls(backward.name, wanted, attention.BACKWARD, *given, **options)
    counts.append(len(draft.nodes))
    for each, name in zip(found, wanted[1:], strict=True):
        if each is not None and each.total is not None:
            laid_out(index, draft, each.total.results[0].name, Named(name))
            counts.append(len(draft.nodes))
    ends = [forward.name, backward.name, *(each.total.name for each in found if each is not None and each.total)]
    before = [index.producer(tensor) for end in ends for tensor in index.reads(end)]
    gone = never_read(index, [each for each in before if each is not None], {*ends})
    gone -= {*ends, *needed(index, draft.nodes)}
    apart: list[tuple[str, ...]] = [(end,) for end in ends]
    apart[-1] = (*sorted(gone, key=index.position.__getitem__), ends[-1])
    begins = [0, *counts[:-1]]
    nodes = [tuple(draft.nodes[begin:end]) for begin, end in zip(begins, counts, strict=True)]
    return tuple(Replacement(removed, added) for removed, added in zip(apart, nodes, strict=True))


def _repeated(index: GraphIndex, tensor: Named, derivative: str) -> _Repeated | None:
    """Keys or values as they are repeated, with what is wanted of their derivative; None for others."""
    copy = maker(index, Named(handle(index, tensor.name)))
    if copy is None or operation(copy) != "clone" or not index.is_pure(copy.name):
        return None
    expanded = arguments(copy)["self"]
    (batch, heads, *rest), extents = shape(index, tensor), shape(index, expanded)
    if len(extents) != 5 or extents[:1] + extents[3:] != [batch, *rest] or extents[1] * extents[2] != heads:
        return None
    if extents[2] == 1 or index.spec(expanded.name).strides[2] or index.is_written(expanded.name):
        return None
    if not derivative:
        return _Repeated(expanded.name, None)
    total, is_turned = _only_reader(index, derivative), False
    if total is not None and operation(total) == "clone":  # as products gave it
        is_turned = is_other(index, arguments(total)["self"], Named(derivative))
        total = _only_reader(index, total.results[0].name) if is_turned else None
    if total is None or operation(total) != "sum" or shape(index, arguments(total)["self"]) != extents:
        return None
    rows, depth = rest
    strides = list(index.spec(arguments(total)["self"].name).strides)
    if is_turned and strides != [heads * rows * depth, extents[2] * rows * depth, rows * depth, 1, rows]:
        return None
    if not is_turned and strides[3:] != list(index.spec(derivative).strides)[2:]:
        return None
    given = arguments(total)
    is_over = dims_of(given["dim"], 5) == [2] and index.spec(total.name).dtype == index.spec(tensor.name).dtype
    return _Repeated(expanded.name, total) if is_over else None


def _only_reader(index: GraphIndex, tensor: str) -> graph_pb2.Node | None:
    found = readers(index, tensor)
    return index.nodes[next(iter(found))] if len(found) == 1 else None
