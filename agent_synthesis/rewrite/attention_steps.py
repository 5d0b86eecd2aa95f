"""Attention that a training step writes out, with its derivatives, as the two calls that keep no scores.

The one idea: autograd's derivative of two products and a softmax between them has one form. Where a graph has it, each
product with the operand that it must have and each mask of the forward's in the backward too, both halves are known to
be attention's; where it has another, nothing is said.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite import masks
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, maker, operation, shape
from agent_synthesis.rewrite.identities import never_read
from agent_synthesis.rewrite.linear import number
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, result_specs
from warpsmith.graphs.library import attention
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2

NO_SUCH_CALL = (BadInput, IndexError, RuntimeError)
"""What a draft raises of calls on other shapes."""
NAME = "whole_attention"
"""As the same without derivatives is called in reports."""
_HIDING = -1e4
"""A number that hides the scores in whose place it is, or one below."""


def replacements(index: GraphIndex, *, is_gpu: bool) -> tuple[Replacement, ...]:
    """What makes the first attention that is written out two calls; nothing where there is none.

    Holds where nothing else reads scores, their softmax or derivatives of these, and no mask wants a gradient. Numbers
    that hide scores have to be constants, and to leave each row some. Of 16 bits neither is rounded on the way; sums
    are in another order. A row of scores that are all -inf weighs nothing, and was NaN.
    """
    for name in index.nodes:
        if name in index.of_backward and operation(index.nodes[name]) == "_softmax_backward_data":
            with result_specs.known("cuda" if is_gpu else "cpu"), contextlib.suppress(*NO_SUCH_CALL):
                if made := _made(index, name, is_gpu):
                    return made
    return ()


@dataclass(frozen=True)
class _Chain:
    """Calls of single elements between a product and a softmax, the one nearest to the softmax first."""

    calls: list[str] = field(default_factory=list)
    factor: float = 1.0
    masks: list[tuple[str, Named, float]] = field(default_factory=list)
    """What they do besides: "hide" where a tensor of bools is true (or not: "keep"), by a number, or "add" one."""


@dataclass(frozen=True)
class _Found:
    """Attention of a step: names of its products and of what they multiply."""

    scores: graph_pb2.Node
    result: graph_pb2.Node
    derivatives: dict[str, graph_pb2.Node]
    """Of "value", "query" and "keys", those that are wanted; of keys as they are multiplied, turned."""
    of_weights: graph_pb2.Node
    """The product that makes the derivative of the weights."""
    gradient: Named
    masks: Sequence[tuple[str, Named, float]]
    scale: float
    heads: Sequence[int]
    """Extents of the scores but the last two."""


def _made(index: GraphIndex, node: str, is_gpu: bool) -> tuple[Replacement, ...]:
    found = _found(index, node)
    if found is None:
        return ()
    draft = Draft(index)
    (query, turned), (_, value) = (_operands(each) for each in (found.scores, found.result))
    batch, heads = (1, *found.heads)[-2:]
    wide = [_of_heads(index, draft, each, batch, heads) for each in (query, turned, value)]
    wide[1] = draft.view(draft.free(f"{turned.name}_turned"), "aten.transpose.int", wide[1], -2, -1)
    if not _fits(draft, wide, is_gpu):
        return ()
    extents = (batch, heads, shape(index, query)[-2], shape(index, turned)[-1])
    mask = _mask(index, draft, found, extents, is_gpu)
    if mask is None:
        return ()
    options = {"scale": found.scale} | ({"attn_mask": mask} if isinstance(mask, Named) else {})
    told = (0.0, mask is True)
    names = [draft.free(f"{found.result.name}_{each}") for each in ("attended", "statistics")]
    made = draft.calls(draft.free(f"{found.result.name}_attention"), names, attention.FORWARD, *wide, *told, **options)
    _as_it_lay(index, draft, found.result.name, made[0], is_turned=False)
    count = len(draft.nodes)
    gradient = _of_heads(index, draft, found.gradient, batch, heads)
    if draft.meta(gradient.name).stride(-1) != 1:
        return ()
    products = [found.derivatives.get(name) for name in _ORDER]
    wanted = [draft.free(f"{each.name}_made") if each is not None else "" for each in products]
    given = (gradient, *wide, *made, *told)
    draft.calls(draft.free(f"{node}_attention"), wanted, attention.BACKWARD, *given, **options)
    for kind, each, name in zip(_ORDER, products, wanted, strict=True):
        if each is not None:
            _as_it_lay(index, draft, each.name, Named(name), is_turned=kind == "keys")
    ends = [found.of_weights.name, *(each.name for each in found.derivatives.values())]
    first = min(ends, key=index.position.__getitem__)
    gone = never_read(index, list(_before(index, found)), {found.result.name, *ends})
    gone -= {found.result.name, first, *needed(index, draft.nodes)}
    apart = (*sorted(gone, key=index.position.__getitem__), found.result.name)
    return Replacement(apart, tuple(draft.nodes[:count])), Replacement((first,), tuple(draft.nodes[count:]))


_ORDER = ("query", "keys", "value")
"""Of the derivatives that the call gives."""


# ---- the form -------------------------------------------------------------------------------------------


def _found(index: GraphIndex, node: str) -> _Found | None:
    """The attention whose softmax has its derivative in a call."""
    given = arguments(index.nodes[node])
    softmax = maker(index, given["output"])
    if softmax is None or operation(softmax) != "_softmax" or not index.is_pure(softmax.name):
        return None
    rank = len(shape(index, given["output"]))
    if not 3 <= rank <= 4 or arguments(softmax)["dim"] % rank != rank - 1:
        return None
    weights, others = given["output"].name, {node}
    if len(casts := [each for each in readers(index, weights) if operation(index.nodes[each]) == "_to_copy"]) == 1:
        if readers(index, weights) != {node, *casts}:
            return None
        weights, others = index.results(casts[0])[0], set()
    products = [index.nodes[each] for each in readers(index, weights) - others]
    result = next((each for each in products if _multiplies(index, each, weights, 0, is_turned=False)), None)
    of_value = next((each for each in products if _multiplies(index, each, weights, 0, is_turned=True)), None)
    if result is None or len(products) != 1 + (of_value is not None) or result.name in index.of_backward:
        return None
    back = _upwards(index, given["grad_output"], node)
    if back is None or back[0].factor != 1.0 or back[0].masks:
        return None
    of_weights = back[1]
    gradient, value = _operands(of_weights)
    if not is_other(index, value, _operands(result)[1]):
        return None
    if of_value is not None and not _is_same(index, _operands(of_value)[1], gradient):
        return None
    ahead, behind = _upwards(index, arguments(softmax)["self"], softmax.name), _downwards(index, node)
    if ahead is None or behind is None or not _agree(ahead[0], behind[0]):
        return None
    scores, last = ahead[1], behind[1]
    derivatives = {"value": of_value} if of_value is not None else {}
    query, turned = _operands(scores)
    for each in map(index.nodes.__getitem__, readers(index, last)):
        if _multiplies(index, each, last, 0, is_turned=False) and is_other(index, _operands(each)[1], turned):
            derivatives["query"] = each
        elif _multiplies(index, each, last, 1, is_turned=False) and is_other(index, _operands(each)[0], query):
            derivatives["keys"] = each
        else:
            return None
    if not derivatives.keys() - {"value"}:
        return None
    heads = shape(index, given["output"])[:-2]
    return _Found(scores, result, derivatives, of_weights, gradient, ahead[0].masks, ahead[0].factor, heads)


def _operands(product: graph_pb2.Node) -> tuple[Named, Named]:
    first, second = list(arguments(product).values())[:2]
    return first, second


def readers(index: GraphIndex, tensor: str) -> set[str]:
    """Calls that read a tensor's memory; none where it is given back."""
    found, pending = set[str](), [tensor]
    while pending:
        name = pending.pop()
        if name in index.outputs:
            return set()
        for user in index.users(name):
            if index.is_view(user):
                pending += index.results(user)
            else:
                found.add(user)
    return found


def handle(index: GraphIndex, tensor: str) -> str:
    """Of what a tensor views, all of whose elements it has, the first."""
    while (made := index.producer(tensor)) is not None and index.is_view(made):
        (seen, *others) = index.reads(made)
        if others or math.prod(index.spec(seen).shape) != math.prod(index.spec(tensor).shape):
            break
        tensor = seen
    return tensor


def _steps(index: GraphIndex, tensor: str) -> list[tuple[int, int]]:
    """Extents and strides, neighbours merged: equal for tensors that view the same elements in the same order."""
    spec, merged = index.spec(tensor), list[tuple[int, int]]()
    for extent, stride in zip(spec.shape, spec.strides, strict=True):
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride))
    return merged


def _turned(index: GraphIndex, tensor: str) -> tuple[list[int], list[int]]:
    """Extents and strides with the last two exchanged."""
    spec = index.spec(tensor)
    return ([*spec.shape[:-2], *spec.shape[:-3:-1]], [*spec.strides[:-2], *spec.strides[:-3:-1]])


def _is_same(index: GraphIndex, tensor: Named, other: Named) -> bool:
    specs = [index.spec(each.name) for each in (tensor, other)]
    return handle(index, tensor.name) == handle(index, other.name) and specs[0] == specs[1]


def is_other(index: GraphIndex, tensor: Named, other: Named) -> bool:
    """Whether a tensor is another one turned."""
    spec = index.spec(tensor.name)
    is_turned = (list(spec.shape), list(spec.strides)) == _turned(index, other.name)
    return is_turned and handle(index, tensor.name) == handle(index, other.name)


def _multiplies(index: GraphIndex, product: graph_pb2.Node, tensor: str, place: int, *, is_turned: bool) -> bool:
    """Whether a call is a product one of whose factors is a tensor's layers, or these turned."""
    if operation(product) != "bmm" or not index.is_pure(product.name):
        return False
    name = _operands(product)[place].name
    if handle(index, name) != handle(index, tensor):
        return False
    (*layers, rows, columns), of_factor = index.spec(tensor).shape, index.spec(name)
    wanted = [math.prod(layers), rows, columns]
    strides = [rows * columns, columns, 1]
    if is_turned:
        wanted, strides = [wanted[0], columns, rows], [strides[0], 1, columns]
    return list(of_factor.shape) == wanted and list(of_factor.strides) == strides


def _step(index: GraphIndex, call: graph_pb2.Node, chain: _Chain) -> tuple[Named, _Chain] | None:
    """What a call of single elements reads, and the chain with it; None for another call."""
    given, kind = arguments(call), operation(call)
    read, factor, mask = given.get("self"), chain.factor, list(chain.masks)
    value = number(index, given.get("other"))
    match kind:
        case "_to_copy":
            pass
        case "mul" | "div" if value is not None and value > 0 and given.get("rounding_mode") is None:
            factor *= value if kind == "mul" else 1.0 / value
        case "masked_fill" if (filled := _one_number(index, given["value"])) is not None:
            mask.append(("hide", given["mask"], filled))
        case "where" if (filled := _one_number(index, given["other"])) is not None:
            mask.append(("keep", given["condition"], filled))
        case "where" if (filled := _one_number(index, given["self"])) is not None:
            read = given["other"]
            mask.append(("hide", given["condition"], filled))
        case "add" if isinstance(given["other"], Named) and given["alpha"] == 1 and factor == 1.0:
            read, other = sorted((given["self"], given["other"]), key=lambda each: len(shape(index, each)) < 3)
            if shape(index, other) == shape(index, Named(call.name)) and _is_scores(index, other):
                read, other = other, read
            mask.append(("add", other, 0.0))
        case _:
            return None
    if not isinstance(read, Named) or not index.is_pure(call.name) or len(call.results) != 1:
        return None
    if shape(index, read) != shape(index, Named(call.results[0].name)):
        return None
    return read, _Chain([*chain.calls, call.name], factor, mask)


def _one_number(index: GraphIndex, value: object) -> float | None:
    """A number, or a tensor's only element that no input decides; None for anything else."""
    found = number(index, value)
    if found is None and isinstance(value, Named) and math.prod(shape(index, value)) == 1:
        made = masks.constant(index, value.name)
        found = None if made is None else made.item()
    return None if found is None else float(found)


def _is_scores(index: GraphIndex, tensor: Named) -> bool:
    """Whether a product is behind a tensor, by calls of single elements."""
    made = maker(index, Named(handle(index, tensor.name)))
    while made is not None and operation(made) in ("mul", "div", "_to_copy", "masked_fill", "add", "where"):
        first = next(
            (each for each in arguments(made).values() if isinstance(each, Named) and len(shape(index, each)) > 2), None
        )
        made = maker(index, Named(handle(index, first.name))) if first is not None else None
    return operation(made) == "bmm"


def _upwards(index: GraphIndex, tensor: object, user: str) -> tuple[_Chain, graph_pb2.Node] | None:
    """The calls behind a tensor, back to the product that they begin with; each is read by the next alone."""
    chain = _Chain()
    while isinstance(tensor, Named):
        seen = handle(index, tensor.name)
        made = maker(index, Named(seen))
        if made is None or _steps(index, seen) != _steps(index, tensor.name) or readers(index, seen) != {user}:
            return None
        if operation(made) == "bmm":
            return (chain, made) if index.is_pure(made.name) else None
        found = _step(index, made, chain)
        if found is None:
            return None
        tensor, chain, user = *found, made.name
    return None


def _downwards(index: GraphIndex, node: str) -> tuple[_Chain, str] | None:
    """The calls that a softmax's derivative goes through, and the tensor that is multiplied after them."""
    chain, tensor = _Chain(), index.results(node)[0]
    while len(found := readers(index, tensor)) == 1:
        call = index.nodes[next(iter(found))]
        if operation(call) == "bmm":
            break
        step = _step(index, call, chain)
        if step is None or _steps(index, step[0].name) != _steps(index, tensor):
            return None
        if handle(index, step[0].name) != handle(index, tensor):
            return None
        tensor, chain = call.results[0].name, step[1]
    return chain, tensor


def _agree(ahead: _Chain, behind: _Chain) -> bool:
    """Whether a chain is the derivative of another: of one factor, and zero where that hides."""
    hidden = [[(kind, mask.name) for kind, mask, _ in each.masks if kind != "add"] for each in (ahead, behind)]
    is_zero = all(kind != "add" and value == 0.0 for kind, _, value in behind.masks)
    return (
        is_zero and sorted(hidden[0]) == sorted(hidden[1]) and math.isclose(ahead.factor, behind.factor, rel_tol=1e-6)
    )


def _before(index: GraphIndex, found: _Found) -> Iterator[str]:
    """Calls that make what the products multiply."""
    for product in (found.result, found.of_weights, *found.derivatives.values()):
        for tensor in index.reads(product.name):
            if (made := index.producer(tensor)) is not None:
                yield made


def needed(index: GraphIndex, calls: Iterable[graph_pb2.Node]) -> set[str]:
    """Calls of the graph on which new ones depend."""
    pending = [tensor for call in calls for tensor in tensor_names(aten.arguments_of(call))]
    found = set[str]()
    while pending:
        tensor = pending.pop()
        made = index.producer(tensor) if tensor in index.root else None
        if made is not None and made not in found:
            found.add(made)
            pending += index.reads(made)
    return found


# ---- the calls ------------------------------------------------------------------------------------------


def _of_heads(index: GraphIndex, draft: Draft, tensor: Named, batch: int, heads: int) -> Named:
    """A factor of a product as [batch, heads, …], without the copy that put its heads side by side."""
    wanted = [batch, heads, *shape(index, tensor)[-2:]]
    seen = handle(index, tensor.name)
    made = maker(index, Named(seen))
    if made is not None and operation(made) == "clone" and _steps(index, seen) == _steps(index, tensor.name):
        copied = arguments(made)["self"]
        own, others = ([extent for extent in extents if extent > 1] for extents in (shape(index, copied), wanted))
        if own == others and not index.is_written(copied.name):
            tensor = copied
    return draft.view(draft.free(f"{tensor.name}_heads"), "aten.view.default", tensor, wanted)


def _fits(draft: Draft, operands: Sequence[Named], is_gpu: bool) -> bool:
    """Whether there are such calls for these queries, keys and values."""
    query, key, value = (draft.meta(each.name) for each in operands)
    if is_gpu:
        return attention.gpu_takes(query, key, value)
    is_alike = key.shape == value.shape and query.shape[-1] == key.shape[-1] and query.dtype == key.dtype == value.dtype
    return is_alike and query.dtype.itemsize <= 4 and all(each.stride(-1) == 1 for each in (query, key, value))


def _mask(
    index: GraphIndex, draft: Draft, found: _Found, extents: tuple[int, int, int, int], is_gpu: bool
) -> Named | bool | None:
    """What is added to scores, or whether they are causal; None where neither can be said."""
    dtype, hidden, is_constant = draft.meta(found.gradient.name).dtype, torch.zeros(1, 1, dtype=torch.bool), True
    for kind, mask, filled in found.masks:
        if kind != "add" and not filled <= _HIDING:
            return None
        value = masks.constant(index, mask.name)
        if value is not None and kind == "add":
            value = value == -math.inf if bool(((value == 0) | (value == -math.inf)).all()) else None
        if value is None:
            is_constant = False
        else:
            hidden = hidden | (~value if kind == "keep" else value)
        if not is_constant and kind != "add" and filled > -math.inf:
            return None
    if any(filled > -math.inf for kind, _, filled in found.masks if kind != "add") and bool(hidden.all(-1).any()):
        return None  # a row of equal scores, which are hidden from derivatives
    if is_constant and (is_causal := masks.is_triangle(~hidden, *extents[-2:])) is not None:
        return is_causal
    made: Named | None = None
    name = draft.free(f"{found.scores.name}_mask")
    for kind, mask, _ in reversed(found.masks):
        if kind == "add":
            if draft.meta(mask.name).dtype is not dtype:
                return None
            made = mask if made is None else draft.call(draft.free(f"{name}_sum"), "aten.add.Tensor", made, mask)
            continue
        is_kept = kind == "keep"
        hides = draft.call(draft.free(f"{name}_hidden"), "aten.logical_not.default", mask) if is_kept else mask
        if made is None:
            made = draft.call(draft.free(f"{name}_numbers"), "aten.where.Scalar", hides, -math.inf, 0.0)
            made = draft.call(draft.free(name), "aten._to_copy.default", made, dtype=dtype)
        else:
            made = draft.call(draft.free(f"{name}_sum"), "aten.where.ScalarSelf", hides, -math.inf, made)
    assert made is not None
    if is_gpu and not attention.gpu_takes_mask(draft.meta(made.name), dtype, *extents[-2:]):
        return None
    return draft.view(draft.free(f"{name}_expanded"), "aten.expand.default", made, list(extents))


def _as_it_lay(index: GraphIndex, draft: Draft, name: str, made: Named, *, is_turned: bool) -> None:
    """What a product of layers was, of attention's result or derivative, laid out as it was."""
    if is_turned:
        made = draft.view(draft.free(f"{name}_turned"), "aten.transpose.int", made, -2, -1)
    laid_out(index, draft, name, made)


def laid_out(index: GraphIndex, draft: Draft, name: str, made: Named) -> None:
    """A tensor under the name and the shape of one that goes, whose elements lie side by side."""
    if not draft.meta(made.name).is_contiguous():
        contiguous = {"memory_format": torch.contiguous_format}
        made = draft.call(draft.free(f"{name}_laid"), "aten.clone.default", made, **contiguous)
    draft.view(draft.free(f"{name}_view"), "aten.view.default", made, list(index.spec(name).shape))
    draft.name_last(name)
