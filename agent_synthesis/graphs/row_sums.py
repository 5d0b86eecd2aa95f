"""Rows added up by an index, taken apart: the gradient of an embedding and of whatever else is looked up.

The one idea: such a sum is an embedding bag of the rows that come in. Their index is sorted, stably and by PyTorch,
which says which rows of one place come in which order; where each place begins among them is searched. So nothing is
added in an order that differs from call to call, and each sum is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.symbolic import common_shape
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, maker, operation
from warpsmith.graphs import dtypes

WORDING = "rows sorted by where they go first, and then each place's added up"
STAY = frozenset({"sort", "searchsorted"})
"""Calls among the parts that PyTorch makes."""
_ANYWHERE = torch.device("cpu")
"""The device on which a graph makes a tensor: the process that runs the graph chooses the real one."""
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_SUM, _MEAN = 0, 1


def is_one(index: GraphIndex, node: str) -> bool:
    """Whether a call is such a sum."""
    return operation(index.nodes[node]) in _MADE_OF


def taken_apart(index: GraphIndex, node: str) -> Replacement | None:
    """The calls that such a call is made of; None for another, for integers, and where a tensor is empty."""
    call = index.nodes[node]
    made_of = _MADE_OF.get(operation(call))
    if made_of is None or call.mutates:
        return None
    specs = [index.spec(name) for name in (*index.reads(node), node)]
    if any(0 in spec.shape for spec in specs) or not dtypes.to_torch(specs[-1].dtype).is_floating_point:
        return None
    parts = _Parts(index, node)
    made_of(parts, **arguments(call))
    if not parts.nodes or parts.nodes[-1].results[0].spec != specs[-1]:
        return None
    return Replacement((*parts.unread, node), tuple(parts.nodes))


class _Parts(Draft):
    """The parts of one such call; none where it is of a form that has none."""

    def __init__(self, index: GraphIndex, node: str) -> None:
        super().__init__(index)
        self._index, self.node = index, node
        self.unread: list[str] = []
        """Calls that nobody reads any more."""

    def shape(self, of: Named) -> list[int]:
        return list(self.meta(of.name).shape)

    def part(self, name: str, target: str, *args: Any, **kwargs: Any) -> Named:
        """A call; `name` is the end of its name."""
        return self.call(self.free(f"{self.node}_{name}"), target, *args, **kwargs)

    def seen(self, name: str, target: str, of: Named, *args: Any) -> Named:
        """A view likewise."""
        return self.view(self.free(f"{self.node}_{name}"), target, of, *args)

    def shaped(self, name: str, of: Named, extents: Sequence[int]) -> Named:
        """A tensor under another shape: copied where no view has it."""
        if self.shape(of) == list(extents):
            return of
        try:
            return self.seen(name, "aten.view.default", of, list(extents))
        except RuntimeError:
            copy = self.part(f"{name}_copy", "aten.clone.default", of, memory_format=torch.contiguous_format)
            return self.seen(name, "aten.view.default", copy, list(extents))

    def sums(self, rows: Named, keys: Named, places: int, *, mode: int = _SUM, name: str = "") -> Named:
        """`sums[k] = Σ over n with keys[n] = k of rows[n]`, of shape [places, columns], in the order of n.

        rows: [count, columns], floats. keys: [count], integers from 0 to `places` - 1.
        """
        if places < 1 << 31:  # a sort by digits has half as many of them
            keys = self.part("keys", "aten._to_copy.default", keys, dtype=torch.int32)
        sort = self.free(f"{self.node}_sort")
        found, order = self.calls(
            sort, [f"{sort}_keys", f"{sort}_order"], "aten.sort.stable", keys, stable=True, dim=0, descending=False
        )
        kind = self.meta(keys.name).dtype
        every = self.part("places", "aten.arange.default", places + 1, dtype=kind, device=_ANYWHERE)
        begins = self.part("begins", "aten.searchsorted.Tensor", found, every)
        name, target = name or self.free(f"{self.node}_sums"), "aten._embedding_bag.default"
        return self.calls(name, [name, "", "", ""], target, rows, order, begins, False, mode, False, None, True)[0]

    def added_to(self, x: Named, placed: Sequence[int], rows: Named, keys: Named, *, alpha: float = 1) -> None:
        """The whole call, `x` and the sums of rows: its dimensions `placed` are what keys number, in that order."""
        extents = self.shape(x)
        order = [*placed, *(dim for dim in range(len(extents)) if dim not in placed)]
        is_turned, there = order != sorted(order), [extents[dim] for dim in order]
        places, zeros, narrow = math.prod(there[: len(placed)]), self._zeros(x), self.meta(x.name).dtype
        is_rounded = narrow in (torch.float16, torch.bfloat16) and not (zeros and alpha == 1)
        if is_rounded:  # once, as a whole
            rows = self.part("wide", "aten._to_copy.default", rows, dtype=torch.float32)
        is_all = zeros and alpha == 1 and there == [places, self.shape(rows)[1]] and not is_turned
        total = self.sums(rows, keys, places, name=self.node if is_all else "")
        if is_all:
            return
        if alpha != 1:
            total = self.part("scaled", "aten.mul.Scalar", total, alpha)
        total = self.shaped("shaped", total, there)
        if is_turned:
            total = self.seen("turned", "aten.permute.default", total, [order.index(dim) for dim in range(len(order))])
        if not zeros:
            total = self.part("added", "aten.add.Tensor", x, total)
        if is_rounded:
            total = self.part("rounded", "aten._to_copy.default", total, dtype=narrow)
        if is_turned and zeros:
            self.part("stored", "aten.clone.default", total, memory_format=torch.contiguous_format)
        self.name_last(self.node)

    def _zeros(self, x: Named) -> bool:
        """Whether a tensor is made of zeros, which need not be made any more if nobody else reads them."""
        made = maker(self._index, x)
        if made is None or operation(made) not in _ZEROS or self._index.is_written(x.name):
            return False
        if list(self._index.users(x.name)) == [self.node] and x.name not in self._index.outputs:
            self.unread.append(made.name)
        return True

    def number_of(self, places: Mapping[int, Named], extents: Sequence[int]) -> Named:
        """The row-major number of positions along some dimensions, of tensors that broadcast; flat.

        `places`: by dimension, in order; `extents`: of the tensor that they are positions in.
        """
        number: Named | None = None
        for dim, place in places.items():
            if number is None:
                number = place
                continue
            number = self.part(f"outer_{dim}", "aten.mul.Scalar", number, extents[dim])
            number = self.part(f"number_{dim}", "aten.add.Tensor", number, place)
        assert number is not None
        return self.shaped("flat", number, [self.meta(number.name).numel()])


def _embedding(
    parts: _Parts, *, grad_output: Named, indices: Named, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> None:
    count = parts.meta(indices.name).numel()
    rows = parts.shaped("rows", grad_output, [count, parts.shape(grad_output)[-1]])
    keys = parts.shaped("index", indices, [count])
    mode, is_padded = _MEAN if scale_grad_by_freq else _SUM, padding_idx >= 0
    total = parts.sums(rows, keys, num_weights, mode=mode, name="" if is_padded else parts.node)
    if is_padded:
        words = parts.part("words", "aten.arange.default", num_weights, dtype=torch.int64, device=_ANYWHERE)
        words = parts.seen("words_column", "aten.unsqueeze.default", words, 1)
        padded = parts.part("padded", "aten.eq.Scalar", words, padding_idx)
        parts.call(parts.node, "aten.masked_fill.Scalar", total, padded, 0.0)


def _index_add(parts: _Parts, *, self: Named, dim: int, index: Named, source: Named, alpha: float) -> None:
    if not (rank := len(parts.shape(self))):
        return
    dim, count = dim % rank, parts.meta(index.name).numel()
    rows = _rows(parts, source, [dim], count)
    parts.added_to(self, [dim], rows, parts.shaped("flat", index, [count]), alpha=alpha)


def _scatter_add(parts: _Parts, *, self: Named, dim: int, index: Named, src: Named) -> None:
    """Rows where all elements of a row go to one; else elements."""
    extents, indexed = parts.shape(self), parts.shape(index)
    if not extents:
        return
    dim, strides = dim % len(extents), parts.meta(index.name).stride()
    for each, extent in enumerate(indexed):
        if parts.shape(src)[each] > extent:
            src = parts.seen(f"part_{each}", "aten.slice.Tensor", src, each, 0, extent)
    others = [each for each in range(len(extents)) if each != dim]
    if all(indexed[each] == extents[each] and not (strides[each] and extents[each] > 1) for each in others):
        for each in reversed(others):
            index = parts.seen(f"row_{each}", "aten.select.int", index, each, 0)
        parts.added_to(self, [dim], _rows(parts, src, [dim], indexed[dim]), index)
        return
    places = dict[int, Named]()
    for each, extent in enumerate(indexed):
        if each == dim:
            places[each] = index
            continue
        place = parts.part(f"place_{each}", "aten.arange.default", extent, dtype=torch.int64, device=_ANYWHERE)
        column = [extent if other == each else 1 for other in range(len(extents))]
        places[each] = parts.shaped(f"along_{each}", place, column)
    keys = parts.number_of(places, extents)
    parts.added_to(self, range(len(extents)), parts.shaped("rows", src, [math.prod(indexed), 1]), keys)


def _index_put(parts: _Parts, *, self: Named, indices: Sequence[Named | None], values: Named, accumulate: bool) -> None:
    """A negative position counts from the end."""
    extents, given = parts.shape(self), {dim: each for dim, each in enumerate(indices) if each is not None}
    kinds = {parts.meta(each.name).dtype for each in given.values()}
    if not accumulate or not given or kinds - {torch.int64, torch.int32}:
        return
    places = dict[int, Named]()
    for dim, place in given.items():
        is_from_end = parts.part(f"negative_{dim}", "aten.lt.Scalar", place, 0)
        from_end = parts.part(f"from_end_{dim}", "aten.add.Scalar", place, extents[dim])
        places[dim] = parts.part(f"place_{dim}", "aten.where.self", is_from_end, from_end, place)
    seen = common_shape(parts.shape(each) for each in given.values())
    rest = [extent for dim, extent in enumerate(extents) if dim not in given]
    is_together = list(given) == list(range(min(given), max(given) + 1))
    before = min(given) if is_together else 0
    whole = [*rest[:before], *seen, *rest[before:]]
    if parts.shape(values) != whole:
        values = parts.seen("spread", "aten.expand.default", values, whole)
    keys = parts.number_of(places, extents)
    if parts.meta(keys.name).numel() != math.prod(seen):
        return
    rows = _rows(parts, values, range(before, before + len(seen)), math.prod(seen))
    parts.added_to(self, list(given), rows, keys)


def _put(parts: _Parts, *, self: Named, index: Named, source: Named, accumulate: bool) -> None:
    if accumulate:
        count = parts.meta(index.name).numel()
        rows, keys = parts.shaped("rows", source, [count, 1]), parts.shaped("flat", index, [count])
        parts.added_to(self, range(len(parts.shape(self))), rows, keys)


def _rows(parts: _Parts, source: Named, placed: Sequence[int], count: int) -> Named:
    """A tensor with some dimensions first and flat, and the others flat."""
    rank = len(parts.shape(source))
    order = [*placed, *(dim for dim in range(rank) if dim not in placed)]
    if order != sorted(order):
        source = parts.seen("rows_first", "aten.permute.default", source, order)
    return parts.shaped("rows", source, [count, parts.meta(source.name).numel() // count])


_MADE_OF: Mapping[str, Callable[..., None]] = {
    "embedding_dense_backward": _embedding,
    "index_add": _index_add,
    "scatter_add": _scatter_add,
    "index_put": _index_put,
    "_unsafe_index_put": _index_put,
    "put": _put,
}
"""Operation → what drafts its parts, given its arguments by ATen's names."""
