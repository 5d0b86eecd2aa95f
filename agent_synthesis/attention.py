"""Attention among nests: made from a call, and recognised by the schedule that has a kernel for it.

The one idea: attention is one reduction, a sum of values weighted by a softmax, whose value names the first element of
a query and of a key; the others follow by their strides. So stores, views and batches are those of any other nest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_synthesis.ir import Axis, Call, Expression, Index, Load, Nest, Reduction, Type
from agent_synthesis.symbolic import Fold, Indices, Ref, Refused, Symbol, Tracer, cast, type_of
from warpsmith import aten
from warpsmith.v1 import graph_pb2

_CALL = "aten.scaled_dot_product_attention."


@dataclass(frozen=True)
class Attended(Reduction):
    """`name = Σ over the reduced axis of value · softmax over it of (scale · Σ over the depth of query · key)`.

    `value` is `value · (query · key)` of three loads, those of the query and of the key at depth 0.
    """

    depth: int
    """Elements of a query and of a key."""
    query_stride: int
    """Elements of memory from one element of a query to the next; `key_stride` likewise."""
    key_stride: int
    scale: float
    causal: bool
    """Whether row m sees keys 0 to m alone."""

    @property
    def loads(self) -> tuple[Load, Load, Load]:
        """(value, query, key)."""
        match self.value:
            case Call("mul", (Load() as value, Call("mul", (Load() as query, Load() as key)))):
                return value, query, key
        raise AssertionError(f"{self.name} is no attention: {self.value}")


@dataclass(frozen=True, eq=False)
class Attending(Fold):
    """The fold that becomes an `Attended`."""

    depth: int
    query_stride: int
    key_stride: int
    scale: float
    causal: bool


@dataclass(frozen=True)
class Factor:
    """Queries, keys or values: element (layer, inner layer, row, column) lies at `offset` and these strides' sum."""

    buffer: str
    offset: int
    outer: int
    inner: int
    row: int
    column: int


@dataclass(frozen=True)
class Attention:
    """A nest that is attention, by its axes; all counts in elements."""

    reduction: Attended
    type: Type
    """Storage type of all three operands."""
    query: Factor
    key: Factor
    value: Factor
    batch: tuple[Axis, ...]
    """At most two axes that all operands know."""
    rows: Axis
    columns: Axis
    keys: Axis

    @property
    def layers(self) -> int:
        """Independent attentions."""
        return math.prod(axis.extent for axis in self.batch)

    @property
    def flop_count(self) -> int:
        """Floating-point operations of both products; half of them where a row sees only the keys before it."""
        pairs = self.layers * self.rows.extent * self.keys.extent
        return 2 * pairs * (self.reduction.depth + self.columns.extent) // (2 if self.reduction.causal else 1)


def is_call(node: graph_pb2.Node) -> bool:
    """Whether a call is PyTorch's own name for attention."""
    return node.target.startswith(_CALL)


def traced(node: graph_pb2.Node, lookup: Callable[[str], torch.Tensor], tracer: Tracer) -> torch.Tensor:
    """The call's result, known to the tracer.

    Raises:
        Refused: it has a mask, dropout, shared heads or another form that is not one reduction.
    """
    schema = aten.resolve(node.target)._schema.arguments
    given: dict[str, Any] = {each.name: each.default_value for each in schema if each.has_default_value()}
    given |= {each.name: aten.decode(value, lookup) for each, value in zip(schema, node.args, strict=False)}
    given |= {each.name: aten.decode(each.value, lookup) for each in node.kwargs}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    depth = query.shape[-1]
    scale = float(given["scale"] if given["scale"] is not None else depth**-0.5)
    if given["attn_mask"] is not None or given["dropout_p"] or given["enable_gqa"]:
        raise Refused("attention with a mask, dropout or shared heads is not lowered")
    if query.shape[:-2] != key.shape[:-2] or key.shape[:-1] != value.shape[:-1] or not 0 < scale < math.inf:
        raise Refused("attention of broadcast operands, or with a scale that is not positive, is not lowered")
    if 0 in (*query.shape, *value.shape):
        raise Refused("a tensor is empty")
    symbols = [tracer.symbol(tensor) for tensor in (query, key, value)]
    made = Attending(
        "attend", (key.shape[-2],), _body(symbols, query.dim()), Type.F32,
        depth, _stride(symbols[0], depth), _stride(symbols[1], depth), scale, given["is_causal"],
    )  # fmt: skip
    stored = type_of(query.dtype)
    if stored.compute is not Type.F32:
        raise Refused(f"attention of {query.dtype} is not lowered")

    def at(index: Indices) -> Expression:
        leaf: Any = Ref(made, index, Type.F32)
        return cast(leaf, stored.compute)

    result: torch.Tensor = query.new_empty((*query.shape[:-1], value.shape[-1]))
    tracer.bind(result, Symbol(tuple(result.shape), stored, at))
    return result


def _body(symbols: Sequence[Symbol], rank: int) -> Callable[[Indices, Indices], Expression]:
    """The formula of one key's part: loads alone, since a kernel copies operands without looking at them."""
    query, key, value = symbols

    def body(kept: Indices, folded: Indices) -> Expression:
        batch, row, column = kept[: rank - 2], kept[rank - 2], kept[rank - 1]
        loads = (
            value.at((*batch, *folded, column)),
            query.at((*batch, row, Index())),
            key.at((*batch, *folded, Index())),
        )
        if not all(isinstance(load, Load) for load in loads):
            raise Refused("attention reads what the same kernel computes")
        return Call("mul", (loads[0], Call("mul", loads[1:], Type.F32)), Type.F32)

    return body


def _stride(symbol: Symbol, depth: int) -> int:
    """From one element of a row to the next."""
    row = (Index(),) * (len(symbol.shape) - 1)
    places = [symbol.at((*row, Index(element))) for element in range(depth)]
    offsets = [place.index.offset for place in places if isinstance(place, Load)]
    stride = offsets[1] - offsets[0] if len(offsets) > 1 else 1
    if offsets != [offsets[0] + stride * element for element in range(depth)] if offsets else True:
        raise Refused("attention reads what the same kernel computes, or rows without a stride")
    return stride


def attention_of(nest: Nest) -> Attention | None:
    """The nest as attention; None where it is none, or has axes that no strides describe."""
    if len(nest.reductions) != 1 or not isinstance(nest.reductions[0], Attended) or len(nest.reduced) != 1:
        return None
    reduction, keys = nest.reductions[0], nest.reduced[0]
    value, query, key = reduction.loads
    known = [load.index.axes() for load in (value, query, key)]
    batch = tuple(axis for axis in nest.parallel if all(axis.name in axes for axes in known))
    rows = [axis for axis in nest.parallel if [axis.name in axes for axes in known] == [False, True, False]]
    columns = [axis for axis in nest.parallel if [axis.name in axes for axes in known] == [True, False, False]]
    if len(rows) != 1 or len(columns) != 1 or len(batch) > 2 or len(batch) + 2 != len(nest.parallel):
        return None
    types = {nest.buffer(load.buffer).type for load in (value, query, key)}
    queries = _factor(query, batch, rows[0], reduction.query_stride)
    all_keys = _factor(key, batch, keys, reduction.key_stride)
    values = _factor(value, batch, keys, value.index.coefficient(columns[0].name))
    if len(types) != 1 or queries is None or all_keys is None or values is None:
        return None
    return Attention(reduction, types.pop(), queries, all_keys, values, batch, rows[0], columns[0], keys)


def _factor(load: Load, batch: Sequence[Axis], row: Axis, column: int | None) -> Factor | None:
    steps = [load.index.coefficient(axis.name) for axis in (*batch, row)]
    strides = [step for step in steps if step is not None]
    if len(strides) < len(steps) or column is None:
        return None
    outer, inner, own = [0] * (3 - len(strides)) + strides
    return Factor(load.buffer, load.index.offset, outer, inner, own, column)
