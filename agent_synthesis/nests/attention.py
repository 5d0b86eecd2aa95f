"""Attention among nests: made from a call, and recognised by the schedule that has a kernel for it.

The one idea: attention is one reduction, a sum of values weighted by a softmax, whose value names the first element of
a query and of a key; the others follow by their strides. So stores, views and batches are those of any other nest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Nest,
    Quotient,
    Reduced,
    Reduction,
    Store,
    Type,
)
from agent_synthesis.nests.symbolic import (
    Fold,
    Indices,
    Ref,
    Refused,
    Symbol,
    Tracer,
    broadcast,
    cast,
    common_shape,
    literal,
    op,
    type_of,
)
from warpsmith.graphs import aten
from warpsmith.graphs.library.attention import FORWARD
from warpsmith.v1 import graph_pb2

_CALL = "aten.scaled_dot_product_attention."


@dataclass(frozen=True)
class Attended(Reduction):
    """`name = Σ over the reduced axis of value · softmax over it of (scale · Σ over the depth of query · key + mask)`.

    `value` is `value · (query · key)` or, with a mask, `value · (query · key + mask)`: loads, those of the query and of
    the key at depth 0. The mask is a load, or zero where a load of bools or a comparison of axes says so, else -inf.
    A row of which all scores are -inf weighs nothing.
    """

    depth: int
    """Elements of a query and of a key."""
    query_stride: int
    """Elements of memory from one element of a query to the next; `key_stride` likewise."""
    key_stride: int
    scale: float

    @property
    def loads(self) -> tuple[Load, Load, Load]:
        """(value, query, key)."""
        match self.value:
            case Call("mul", (Load() as value, Call("mul", (Load() as query, Load() as key)))):
                return value, query, key
            case Call("mul", (Load() as value, Call("add", (Call("mul", (Load() as query, Load() as key)), _)))):
                return value, query, key
        raise AssertionError(f"{self.name} is no attention: {self.value}")

    @property
    def mask(self) -> Expression | None:
        """What is added to a score."""
        match self.value:
            case Call("mul", (_, Call("add", (_, mask)))):
                return mask
        return None

    @property
    def causal_row(self) -> str | None:
        """The axis of rows of which row m sees keys 0 to m alone; None where no rule of this kind hides keys."""
        match self.mask:
            case Call(
                "where",
                (Call("le", (AxisValue(Index(0, ((str(), 1),))), AxisValue(Index(0, ((str() as row, 1),))))), *_),
            ):
                return row
        return None


@dataclass(frozen=True)
class Statistics(Attended):
    """Of a row that an `Attended` reduces, log(sum over keys of exp(scale · query · key + mask)), for its backward.

    Of a row that sees nothing it is infinite, so that every weight which is made of it is zero.
    """


@dataclass(frozen=True, eq=False)
class Attending(Fold):
    """The fold that becomes an `Attended`, or its `Statistics`."""

    depth: int
    query_stride: int
    key_stride: int
    scale: float
    of: Attending | None = None
    """Of statistics, the fold whose rows they are of."""

    def reduction(self, value: Expression) -> Attended:
        """Without a name."""
        kind = Attended if self.of is None else Statistics
        return kind("", self.operation, value, self.type, self.depth, self.query_stride, self.key_stride, self.scale)


@dataclass(frozen=True)
class Factor:
    """Queries, keys or values: element (layer, inner layer, row, column) lies at `offset` and these strides' sum."""

    buffer: str
    offset: int
    outer: int
    inner: int
    row: int
    column: int
    group: int
    """Neighbouring inner layers of queries that this one is of."""


@dataclass(frozen=True)
class Mask:
    """A mask in memory: element (outer layer, inner layer of keys, member of those that share them, row, key)."""

    load: Load
    type: Type
    """Storage type; bools say which scores count, floats are added."""
    outer: int
    inner: int
    member: int
    row: int
    key: int

    def comes_in_pairs(self, keys: int) -> bool:
        """Whether, of so many keys, two that follow an even one lie beside each other, at an even place."""
        steps = (self.load.index.offset, self.outer, self.inner, self.member, self.row, keys)
        return self.key == 1 and all(step % 2 == 0 for step in steps)


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
    """At most two axes that all operands know, then the one, if any, whose queries share keys or values."""
    group: int
    """Extent of that axis, or 1."""
    inner: int
    """Inner layers of queries."""
    rows: Axis
    columns: Axis
    keys: Axis
    mask: Mask | None

    @property
    def layers(self) -> int:
        """Independent attentions."""
        return math.prod(axis.extent for axis in self.batch)

    @property
    def is_causal(self) -> bool:
        """Whether row m sees keys 0 to m alone."""
        return self.reduction.causal_row is not None

    @property
    def flop_count(self) -> int:
        """Floating-point operations of both products; half of them where a row sees only the keys before it."""
        pairs = self.layers * self.rows.extent * self.keys.extent
        return 2 * pairs * (self.reduction.depth + self.columns.extent) // (2 if self.is_causal else 1)


def is_call(node: graph_pb2.Node) -> bool:
    """Whether a call is PyTorch's own name for attention, or attention that keeps its rows' statistics."""
    return node.target.startswith(_CALL) or node.target == FORWARD


def traced(node: graph_pb2.Node, lookup: Callable[[str], torch.Tensor], tracer: Tracer) -> list[torch.Tensor]:
    """The call's results, known to the tracer.

    Raises:
        Refused: it has dropout or another form that is not one reduction.
    """
    schema = aten.resolve(node.target)._schema.arguments
    given: dict[str, Any] = {each.name: each.default_value for each in schema if each.has_default_value()}
    given |= {each.name: aten.decode(value, lookup) for each, value in zip(schema, node.args, strict=False)}
    given |= {each.name: aten.decode(each.value, lookup) for each in node.kwargs}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    depth, keys = query.shape[-1], key.shape[-2]
    scale = float(given["scale"] if given["scale"] is not None else depth**-0.5)
    if given["dropout_p"] or (given["is_causal"] and given["attn_mask"] is not None):
        raise Refused("attention with dropout, or with two masks, is not lowered")
    group = _group(query, key) if given.get("enable_gqa", True) else 1
    layers = [*key.shape[:-3], group * key.shape[-3]] if key.dim() > 2 else []
    if list(query.shape[:-2]) != layers or key.shape[:-1] != value.shape[:-1] or not 0 < scale < math.inf:
        raise Refused("attention of broadcast operands, or with a scale that is not positive, is not lowered")
    if 0 in (*query.shape, *value.shape):
        raise Refused("a tensor is empty")
    symbols = [tracer.symbol(tensor) for tensor in (query, key, value)]
    mask: Callable[[Indices], Expression] | None = _causal if given["is_causal"] else None
    if given["attn_mask"] is not None:
        mask = _masked(tracer.symbol(given["attn_mask"]), (*query.shape[:-1], keys))
    made = Attending(
        "attend", (keys,), _body(symbols, query.dim(), group, mask, tracer), Type.F32,
        depth, _stride(symbols[0], depth), _stride(symbols[1], depth), scale,
    )  # fmt: skip
    stored = type_of(query.dtype)
    if stored.compute is not Type.F32:
        raise Refused(f"attention of {query.dtype} is not lowered")

    def at(index: Indices) -> Expression:
        leaf: Any = Ref(made, index, Type.F32)
        return cast(leaf, stored.compute)

    result: torch.Tensor = query.new_empty((*query.shape[:-1], value.shape[-1]))
    tracer.bind(result, Symbol(tuple(result.shape), stored, at))
    if node.target != FORWARD:
        return [result]
    of_rows = replace(made, operation="attend_statistics", of=made)

    def statistics_at(index: Indices) -> Expression:
        leaf: Any = Ref(of_rows, (*index, Index()), Type.F32)
        return leaf  # type: ignore[no-any-return]  # as `at` has it

    statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
    tracer.bind(statistics, Symbol(tuple(statistics.shape), Type.F32, statistics_at))
    return [result, statistics]


def _group(query: torch.Tensor, key: torch.Tensor) -> int:
    """Neighbouring heads of queries that share one of keys."""
    if query.dim() < 3 or key.dim() < 3 or 0 in key.shape or query.shape[-3] % key.shape[-3]:
        raise Refused("its heads of queries are no multiple of those of keys")
    return int(query.shape[-3] // key.shape[-3])


def _body(
    symbols: Sequence[Symbol], rank: int, group: int, mask: Callable[[Indices], Expression] | None, tracer: Tracer
) -> Callable[[Indices, Indices], Expression]:
    """The formula of one key's part: loads alone, since a kernel copies operands without looking at them."""
    query, key, value = symbols

    def body(kept: Indices, folded: Indices) -> Expression:
        batch, row, column = kept[: rank - 2], kept[rank - 2], kept[rank - 1]
        shared = batch if group == 1 else (*batch[:-1], batch[-1].divided(group, tracer.extents))
        made = (
            value.at((*shared, *folded, column)),
            query.at((*batch, row, Index())),
            key.at((*shared, *folded, Index())),
        )
        loads = tuple(
            replace(load, index=_in_steps(load.index, tracer.extents)) for load in made if isinstance(load, Load)
        )
        if len(loads) < len(made):
            raise Refused("attention reads what the same kernel computes")
        scores = Call("mul", loads[1:], Type.F32)
        if mask is not None:
            scores = Call("add", (scores, mask((*batch, row, *folded))), Type.F32)
        return Call("mul", (loads[0], scores), Type.F32)

    return body


def _in_steps(index: Index, extents: Mapping[str, int]) -> Index:
    """The index with quotients of what goes in steps taken of the steps: those of heads that were repeated in memory.

    floor((s a + r) / (s d)) is floor(a / d) where r is less than s.
    """
    result = Index(index.offset)
    for atom, coefficient in index.terms:
        part = Index(0, ((atom, 1),))
        if isinstance(atom, Quotient):
            for step in sorted({math.gcd(each, atom.divisor) for _, each in atom.value.terms}, reverse=True):
                steps = atom.value.divided(step, extents)
                if not any(isinstance(each, Quotient) for each, _ in steps.terms):
                    part = steps.divided(atom.divisor // step, extents)
                    break
        result = result + part.scaled(coefficient)
    return result


def _counted(condition: Expression) -> Expression:
    """What is added to a score that counts where a condition holds, and for nothing elsewhere."""
    return Call("where", (condition, literal(0.0, Type.F32), literal(-math.inf, Type.F32)), Type.F32)


def _causal(index: Indices) -> Expression:
    """Row m sees keys 0 to m."""
    return _counted(op("le", AxisValue(index[-1]), AxisValue(index[-2])))


def _masked(given: Symbol, shape: Sequence[int]) -> Callable[[Indices], Expression]:
    if common_shape((given.shape, shape)) != tuple(shape) or given.type.compute not in (Type.F32, Type.BOOL):
        raise Refused("attention with a mask larger than its scores, or of another type, is not lowered")
    seen = broadcast(given, shape)

    def mask(index: Indices) -> Expression:
        load = seen.at(index)
        if not isinstance(load, Load):
            raise Refused("attention reads what the same kernel computes")
        return _counted(load) if load.type is Type.BOOL else load

    return mask


def _stride(symbol: Symbol, depth: int) -> int:
    """From one element of a row to the next."""
    row = (Index(),) * (len(symbol.shape) - 1)
    places = [symbol.at((*row, Index(element))) for element in range(depth)]
    offsets = [place.index.offset for place in places if isinstance(place, Load)]
    stride = offsets[1] - offsets[0] if len(offsets) > 1 else 1
    if offsets != [offsets[0] + stride * element for element in range(depth)] if offsets else True:
        raise Refused("attention reads what the same kernel computes, or rows without a stride")
    return stride


def without_statistics(nest: Nest) -> tuple[Nest, Store | None]:
    """The nest without the store of its rows' statistics, and that store, if it has one."""
    names = {each.name for each in nest.reductions if isinstance(each, Statistics)}
    found = [store for store in nest.stores if isinstance(store.value, Reduced) and store.value.reduction in names]
    if not found:
        return nest, None
    gone = {store.buffer for store in found}
    reductions = tuple(each for each in nest.reductions if each.name not in names)
    stores = tuple(store for store in nest.stores if store not in found)
    buffers = tuple(buffer for buffer in nest.buffers if buffer.name not in gone)
    return replace(nest, reductions=reductions, stores=stores, buffers=buffers), found[0]


def attention_of(nest: Nest) -> Attention | None:
    """The nest as attention; None where it is none, or has axes that no strides describe."""
    nest, _ = without_statistics(nest)
    if len(nest.reductions) != 1 or not isinstance(nest.reductions[0], Attended) or len(nest.reduced) != 1:
        return None
    reduction, keys = nest.reductions[0], nest.reduced[0]
    value, query, key = reduction.loads
    known = [load.index.axes() for load in (value, query, key)]
    kinds = {axis: tuple(axis.name in axes for axes in known) for axis in nest.parallel}
    alike = [axis for axis, kind in kinds.items() if all(kind)]
    apart = [axis for axis, kind in kinds.items() if kind[1] and not all(kind)]
    columns = [axis for axis, kind in kinds.items() if kind == (True, False, False)]
    # Of two axes of queries alone, either may be the rows, unless a rule counts along one; the other's share keys.
    apart.sort(key=lambda axis: (kinds[axis] == (False, True, False), axis.name == reduction.causal_row, axis.extent))
    if not 1 <= len(apart) <= 2 or len(columns) != 1 or len(alike) + len(apart) + 1 != len(nest.parallel):
        return None
    *member, rows = apart
    if kinds[rows] != (False, True, False) or reduction.causal_row not in (None, rows.name) or len(alike) > 2:
        return None
    # Axes of the outer layers, of the inner ones, and of those among them that share keys.
    inner = [*(alike[1:] if member else alike[-1:])]
    layers = _Layers((*alike[: len(alike) - len(inner)], None)[0], (*inner, None)[0], (*member, None)[0])
    types = {nest.buffer(load.buffer).type for load in (value, query, key)}
    queries = layers.factor(query, rows, reduction.query_stride)
    all_keys = layers.factor(key, keys, reduction.key_stride)
    values = layers.factor(value, keys, value.index.coefficient(columns[0].name))
    mask = layers.mask(nest, reduction.mask, rows, keys)
    has_mask = reduction.mask is not None and reduction.causal_row is None
    if len(types) != 1 or queries is None or all_keys is None or values is None or has_mask != (mask is not None):
        return None
    group, batch = math.prod(axis.extent for axis in member), (*alike, *member)
    count = math.prod(axis.extent for axis in (*inner, *member))
    return Attention(
        reduction, types.pop(), queries, all_keys, values, batch, group, count, rows, columns[0], keys, mask
    )


@dataclass(frozen=True)
class _Layers:
    """What layers are counted by: members of an inner layer are inner layers themselves, side by side."""

    outer: Axis | None
    inner: Axis | None
    member: Axis | None

    def factor(self, load: Load, row: Axis, column: int | None) -> Factor | None:
        """An operand; None where no strides lead from layer to layer."""
        steps = self._steps(load)
        own = load.index.coefficient(row.name)
        if steps is None or own is None or column is None:
            return None
        outer, inner, member = steps
        group = self.member.extent if self.member is not None else 1
        if member == 0:
            return Factor(load.buffer, load.index.offset, outer, inner, own, column, group)
        if self.inner is not None and inner != member * group:
            return None
        return Factor(load.buffer, load.index.offset, outer, member, own, column, 1)

    def mask(self, nest: Nest, mask: Expression | None, row: Axis, keys: Axis) -> Mask | None:
        """A mask in memory; None for one that is not."""
        match mask:
            case Load() as load:
                pass
            case Call("where", (Load() as load, Literal(), Literal())):
                pass
            case _:
                return None
        known = {axis.name for axis in (self.outer, self.inner, self.member, row, keys) if axis is not None}
        steps, by_row, by_key = self._steps(load), *(load.index.coefficient(axis.name) for axis in (row, keys))
        if steps is None or by_row is None or by_key is None or not load.index.axes() <= known:
            return None
        return Mask(load, nest.buffer(load.buffer).type, *steps, by_row, by_key)

    def _steps(self, load: Load) -> tuple[int, int, int] | None:
        found = [
            load.index.coefficient(axis.name) if axis is not None else 0
            for axis in (self.outer, self.inner, self.member)
        ]
        outer, inner, member = found
        return (outer, inner, member) if outer is not None and inner is not None and member is not None else None
