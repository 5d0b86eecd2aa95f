"""Attention's backward: a call with three results of different shapes, which no loops over one space describe.

The one idea: as a recurrent network does (`recurrence`), an `AttentionBackward` stands among nests where a kernel's
work is asked for, with its buffers, and says what the call is in numbers alone. One schedule takes it, and no others
are asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.element_types import CONTRACT
from agent_synthesis.nests.ir import Axis, BufferRef, Nest, Type
from agent_synthesis.nests.symbolic import Refused
from warpsmith.graphs import dtypes
from warpsmith.graphs.library import attention_products
from warpsmith.graphs.library.attention import is_causal, mask_of
from warpsmith.v1 import graph_pb2

_TYPES = {CONTRACT[each]: each for each in (Type.F32, Type.F16, Type.BF16)}


@dataclass(frozen=True)
class Rows:
    """A buffer by its number in the nest, and elements from one outer layer, head, row and column to the next."""

    buffer: int
    outer: int
    inner: int
    row: int
    column: int


@dataclass(frozen=True)
class Derivatives:
    """What the call computes. Heads of queries that share those of keys are neighbours."""

    type: Type
    """Of operands, gradients and results; statistics are floats."""
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    depth: int
    """Elements of a row of queries, keys and values."""
    scale: float
    causal: bool
    given: tuple[Rows, ...]
    """Gradient, queries, keys, values, result and, without columns, statistics."""
    mask: Rows | None
    """What is added to scores: a row's elements are keys."""
    results: tuple[Rows, ...]
    """Gradients of queries, keys and values."""

    @property
    def layers(self) -> int:
        """Heads of queries in all."""
        return self.batch * self.heads

    @property
    def pair_count(self) -> int:
        """Pairs of a query and a key that see each other, whatever a mask hides."""
        whole = min(self.queries, self.keys)
        seen = whole * (whole + 1) // 2 + (self.queries - whole) * self.keys
        return self.layers * (seen if self.causal else self.queries * self.keys)


@dataclass(frozen=True)
class AttentionBackward(Nest):
    """The call, with heads of queries and keys as its axes."""

    derivatives: Derivatives | None = None

    def run(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Computes it on flat tensors, one for each buffer."""
        made = self.derivatives
        assert made is not None

        def at(rows: Rows, heads: int, count: int, columns: int | None) -> torch.Tensor:
            extents, steps = [made.batch, heads, count], [rows.outer, rows.inner, rows.row]
            if columns is not None:
                extents, steps = [*extents, columns], [*steps, rows.column]
            return memory[self.buffers[rows.buffer].name].as_strided(extents, steps)

        heads = (made.heads, made.heads, made.key_heads, made.key_heads, made.heads, made.heads)
        counts = (made.queries, made.queries, made.keys, made.keys, made.queries, made.queries)
        columns = (*[made.depth] * 5, None)
        gradient, *operands, result, sums = (at(*e) for e in zip(made.given, heads, counts, columns, strict=True))
        query, key, value = operands
        mask = at(made.mask, made.heads, made.queries, made.keys) if made.mask is not None else None
        found = attention_products.backward(
            gradient, query, key, value, result, sums, 0.0, made.causal, attn_mask=mask, scale=made.scale
        )
        for rows, own, count, each in zip(made.results, heads[1:4], counts[1:4], found, strict=True):
            at(rows, own, count, made.depth).copy_(each)


def traced(index: GraphIndex, node: graph_pb2.Node, outputs: Sequence[str], name: str) -> AttentionBackward:
    """The node as a nest that makes `outputs`.

    Raises:
        Refused: some result is not read, a tensor is empty, or types differ.
    """
    given = [each.tensor for each in node.args[:6]]
    mask, results = mask_of(node), [each.name for each in node.results]
    if not set(results) <= set(outputs):
        raise Refused("a gradient of attention that is not read")
    shapes = [list(index.spec(tensor).shape) for tensor in given]
    (batch, heads, queries, depth), (_, key_heads, keys, _) = shapes[1], shapes[2]
    if 0 in (batch, heads, queries, keys, depth):
        raise Refused("a tensor is empty")
    buffers: dict[str, BufferRef] = {}

    def rows(tensor: str, written: bool = False) -> Rows:
        spec = index.spec(tensor)
        if spec.dtype not in _TYPES:
            raise Refused("attention of another type than floats of 16 or 32 bits")
        buffers.setdefault(tensor, BufferRef(tensor, _TYPES[spec.dtype], dtypes.element_span(spec), written))
        return Rows(list(buffers).index(tensor), *[*spec.strides, 0][:4])

    places = tuple(map(rows, given))
    masked = rows(mask) if mask is not None else None
    made = tuple(rows(tensor, written=True) for tensor in results)
    types = [each.type for each in buffers.values()]
    named = {each.name: each.value.real for each in node.kwargs if each.name == "scale" and not each.value.none}
    operands = {_TYPES[index.spec(tensor).dtype] for tensor in [*given[:5], *results]}
    if len(operands) != 1 or types[places[5].buffer] is not Type.F32:
        raise Refused("attention of operands of several types")
    derivatives = Derivatives(
        operands.pop(), batch, heads, key_heads, queries, keys, depth, named.get("scale", depth**-0.5),
        is_causal(node), places, masked, made,
    )  # fmt: skip
    comment = f"attention's backward, {queries} queries, {keys} keys{', causal' if derivatives.causal else ''}"
    axes = (Axis("layer", batch * heads), Axis("key", keys))
    return AttentionBackward(name, axes, (), (), (), tuple(buffers.values()), comment, derivatives=derivatives)
