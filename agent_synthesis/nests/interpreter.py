"""What a nest means: computes it with torch, element by element over whole axes at once.

The reference semantics of the IR, for tests of lowering and of schedules. Slow and memory-hungry on purpose:
every load becomes a gather over the full iteration space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from agent_synthesis.bundle import Bundle
from agent_synthesis.nests.attention import Attended, Statistics
from agent_synthesis.nests.calls.attention_backward import AttentionBackward
from agent_synthesis.nests.calls.recurrence import Recurrence
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import (
    ARG_REDUCTIONS,
    REDUCTIONS,
    SCANS,
    AxisValue,
    Bound,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Memory,
    Nest,
    Quotient,
    Reduced,
    Reduction,
    Scan,
    Segmented,
    Store,
    Summed,
    Windowed,
)
from agent_synthesis.nests.product import Multiplied
from agent_synthesis.nests.symbolic import common_shape
from agent_synthesis.nests.tailed import Tailed
from agent_synthesis.plans.plan import Plan
from warpsmith.graphs import aten, dtypes
from warpsmith.v1 import graph_pb2, tensor_pb2


def run(nest: Nest, memory: Mapping[str, torch.Tensor]) -> None:
    """Runs a nest on flat tensors, one for each buffer, of the buffer's type and at least its element
    count."""
    if isinstance(nest, Bundle):
        for member in nest.members:
            run(member.nest, memory)
        return
    if isinstance(nest, Tailed):
        between = torch.zeros(nest.result.element_count, dtype=TORCH[nest.result.type])
        for each in nest.members:
            run(each, {**memory, nest.result.name: between})
        return
    if isinstance(nest, AttentionBackward):
        nest.run(memory)
        return
    _Run(nest, memory).run()


class _Run:
    def __init__(self, nest: Nest, memory: Mapping[str, torch.Tensor]) -> None:
        self._nest = nest
        self._memory = memory
        axes = nest.parallel + nest.reduced
        shape = [axis.extent for axis in axes]
        self._grids = {
            axis.name: torch.arange(axis.extent).reshape([-1 if n == i else 1 for n in range(len(axes))])
            for i, axis in enumerate(axes)
        }
        self._shape = shape
        self._rank = len(nest.parallel)
        self._reduced: dict[str, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        reduced_dims = list(range(self._rank, len(self._shape)))
        for reduction in self._nest.reductions:
            if reduction.operation in ARG_REDUCTIONS:
                self._reduced[reduction.name] = self._place(reduction)
                continue
            if isinstance(reduction, Attended):
                self._reduced[reduction.name] = self._attended(reduction)
                continue
            if isinstance(reduction, Multiplied):
                self._reduced[reduction.name] = self._multiplied(reduction)
                continue
            element = reduction.parts[0] if isinstance(reduction, Segmented) else reduction.value
            value = self._value(element).to(TORCH[reduction.type]).expand(self._shape)
            if isinstance(reduction, Segmented):
                value = value.where(self._between(*reduction.parts[1:]), _neutral(reduction.operation, value.dtype))
            if isinstance(reduction, Windowed):
                value = value.where(self._inside(reduction.positions), _neutral(reduction.operation, value.dtype))
            self._reduced[reduction.name] = (
                _scanned(reduction, value, self._rank)
                if isinstance(reduction, Scan)
                else _fold(reduction.operation, value, reduced_dims)
            )
        # All values before any store: a nest may not see its own writes.
        pending = [(store, self._stored(store)) for store in self._nest.stores]
        for store, value in pending:
            target = self._memory[store.buffer]
            where = self._index(store.index)
            shape = common_shape((where.shape, value.shape))
            flat = where.expand(shape).reshape(-1)
            target[flat] = value.to(target.dtype).expand(shape).reshape(-1)

    def _stored(self, store: Store) -> torch.Tensor:
        value = self._value(store.value)
        if not isinstance(store, Summed):
            return value
        return _fold("sum", value.to(TORCH[store.type]).expand(self._shape), list(range(self._rank)))

    def _attended(self, reduction: Attended) -> torch.Tensor:
        """Values weighted by a softmax over the only reduced axis, or statistics of that."""
        value, query, key = reduction.loads
        depth = torch.arange(reduction.depth)
        queries = self._memory[query.buffer][self._index(query.index)[..., None] + depth * reduction.query_stride]
        keys = self._memory[key.buffer][self._index(key.index)[..., None] + depth * reduction.key_stride]
        scores = (queries.to(torch.float32) * keys.to(torch.float32)).sum(-1) * reduction.scale
        if reduction.mask is not None:
            scores = scores + self._value(reduction.mask)
        if isinstance(reduction, Statistics):
            sums = torch.logsumexp(scores.expand(self._shape), -1, keepdim=True)
            return sums.masked_fill(sums.isneginf(), torch.inf)
        weights = torch.softmax(scores, -1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)
        weighted = weights * self._value(value)
        return weighted.expand(self._shape).sum(-1, keepdim=True)

    def _multiplied(self, reduction: Multiplied) -> torch.Tensor:
        """At every element, the sum of products of two rows."""
        assert isinstance(reduction.value, Call)
        depth, rows = torch.arange(reduction.depth), []
        strides = (reduction.left_stride, reduction.right_stride)
        for load, stride in zip(reduction.value.arguments, strides, strict=True):
            assert isinstance(load, Load)
            rows.append(self._memory[load.buffer][self._index(load.index)[..., None] + depth * stride])
        return (rows[0].to(torch.float32) * rows[1].to(torch.float32)).sum(-1)

    def _place(self, reduction: Reduction) -> torch.Tensor:
        """The least position of the greatest (or least) value."""
        assert isinstance(reduction.value, Call)
        value, position = (self._value(part).expand(self._shape) for part in reduction.value.arguments)
        dims = list(range(self._rank, len(self._shape)))
        best = _fold(ARG_REDUCTIONS[reduction.operation], value, dims)
        is_best = (value == best) | (torch.isnan(value) & torch.isnan(best))
        return position.where(is_best, torch.iinfo(position.dtype).max).amin(dims, keepdim=True)

    def _inside(self, positions: Sequence[Bound]) -> torch.Tensor:
        inside = torch.ones([1] * len(self._shape), dtype=torch.bool)
        for position in positions:
            where = self._index(position.index)
            inside = inside & (where >= 0) & (where < position.extent)
        return inside

    def _between(self, begin: Expression, end: Expression) -> torch.Tensor:
        place = torch.arange(self._nest.column_count).reshape([1] * self._rank + self._shape[self._rank :])
        return (place >= self._value(begin)) & (place < self._value(end))

    def _index(self, index: Index) -> torch.Tensor:
        total = torch.full([1] * len(self._shape), index.offset, dtype=torch.int64)
        for atom, coefficient in index.terms:
            if isinstance(atom, str):
                part = self._grids[atom]
            elif isinstance(atom, Quotient):
                part = self._index(atom.value) // atom.divisor
            else:
                part = self._index(atom.value) % atom.divisor
            total = total + coefficient * part
        return total

    def _value(self, node: Expression) -> torch.Tensor:
        found = self._values.get(id(node))
        if found is None:
            found = self._values[id(node)] = self._computed(node)
        return found

    def _computed(self, node: Expression) -> torch.Tensor:
        match node:
            case Literal(value, type_):
                return torch.full([1] * len(self._shape), value, dtype=TORCH[type_])
            case Load(buffer, index, type_):
                last = self._nest.buffer(buffer).element_count - 1
                where = self._index(index)
                # Windows look beyond the edges, at elements that are skipped.
                return self._memory[buffer][where.clamp(0, last) if self._nest.windows else where].to(TORCH[type_])
            case Memory(buffer, type_):
                return self._memory[buffer].to(TORCH[type_])
            case AxisValue(index, type_):
                return self._index(index).to(TORCH[type_])
            case Reduced(name, _):
                return self._reduced[name]
            case Call(operation, arguments, type_):
                values = [self._value(argument) for argument in arguments]
                if operation == "cast":
                    return values[0].to(TORCH[type_])
                if operation == "gather" and self._nest.windows:
                    values[1] = values[1].clamp(0, len(values[0]) - 1)
                return OPERATIONS[operation](*values).to(TORCH[type_])


def _fold(operation: str, value: torch.Tensor, dims: list[int]) -> torch.Tensor:
    match operation:
        case "sum":
            return value.sum(dims, keepdim=True, dtype=value.dtype)
        case "max":
            return value.amax(dims, keepdim=True)
        case "min":
            return value.amin(dims, keepdim=True)
    for dim in dims:
        value = value.prod(dim, keepdim=True, dtype=value.dtype)
    return value


def _neutral(operation: str, dtype: torch.dtype) -> torch.Tensor:
    value = REDUCTIONS[operation]
    if math.isinf(value) and not dtype.is_floating_point:
        value = torch.iinfo(dtype).min if value < 0 else torch.iinfo(dtype).max
    return torch.tensor(value, dtype=dtype)


def _scanned(scan: Scan, value: torch.Tensor, rank: int) -> torch.Tensor:
    """The scan of each row, whose elements lie along all dimensions from `rank` on."""
    row = value.flatten(rank)
    row = row.flip(rank) if scan.reverse else row
    made = row.cumsum(rank, dtype=row.dtype) if scan.operation == "cumsum" else row.cumprod(rank, dtype=row.dtype)
    if scan.exclusive:
        neutral = torch.full_like(made[..., :1], REDUCTIONS[SCANS[scan.operation]])
        made = torch.cat([neutral, made[..., :-1]], rank)
    return (made.flip(rank) if scan.reverse else made).reshape(value.shape)


def run_plan(plan: Plan, sources: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a plan in order: library groups by their calls, authored groups by what their nests
    mean; of recurrent networks, which no nest says, that is their call.

    In-place writes go to `sources`, as eager would have it; they must be dense for kernels that read them.
    """
    index = plan.index
    values = dict(sources)
    for source in index.graph.sources:
        if source.origin == graph_pb2.ORIGIN_CONSTANT:
            values[source.name] = aten.constant(source, torch.device("cpu"))

    def lookup(tensor: str) -> torch.Tensor:
        if tensor not in values:
            maker = index.producer(tensor)
            assert maker is not None
            assert index.is_view(maker), f"{tensor} is read before it is made"
            call(maker)
        return values[tensor]

    def call(name: str) -> None:
        node = index.nodes[name]
        for result, tensor in zip(node.results, aten.call(node.target, node.args, node.kwargs, lookup), strict=False):
            if result.name and tensor is not None:
                values[result.name] = tensor if result.alias_of else _planned(tensor, result.spec)

    with torch.no_grad():
        for group in plan.groups:
            if group.engine == "library":
                call(group.nodes[0])
                continue
            nest = plan.nest(group)
            assert isinstance(nest, Nest), nest
            if isinstance(nest, Recurrence):
                call(group.nodes[0])
                continue
            memory = {}
            for buffer in nest.buffers:
                if buffer.written and buffer.name not in index.sources:
                    memory[buffer.name] = torch.zeros(buffer.element_count, dtype=TORCH[buffer.type])
                else:
                    tensor = lookup(buffer.name)
                    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                    memory[buffer.name] = torch.as_strided(parts, (buffer.element_count,), (1,))
            run(nest, memory)
            for buffer in nest.buffers:
                if buffer.written and buffer.name not in index.sources:
                    spec, made = index.spec(buffer.name), memory[buffer.name]
                    if dtypes.to_torch(spec.dtype).is_complex:
                        made = torch.view_as_complex(made.reshape(-1, 2))
                    values[buffer.name] = torch.as_strided(made, list(spec.shape), list(spec.strides))
        return [lookup(name) for name in index.graph.outputs]


def _planned(tensor: torch.Tensor, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
    """A tensor as a plan has it lie: what a GPU's call gives in another order, a processor's may not."""
    if tensor.stride() == tuple(spec.strides) or 0 in spec.strides:
        return tensor
    return torch.empty_strided(tensor.shape, list(spec.strides), dtype=tensor.dtype).copy_(tensor)


def _pairs(*names: str) -> dict[str, Callable[..., torch.Tensor]]:
    return {name: getattr(torch, name) for name in names}


OPERATIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    **_pairs(
        "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos",
        "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "erfc", "sigmoid", "floor", "ceil", "round",
        "trunc", "sign", "isnan", "isinf", "bitwise_not", "add", "sub", "mul", "div", "fmod", "remainder", "pow",
        "atan2", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor", "where",
    ),
    "max": torch.maximum, "min": torch.minimum, "not": torch.logical_not, "and": torch.logical_and,
    "or": torch.logical_or, "xor": torch.logical_xor,
    "shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift,
    "floor_div": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "gather": lambda memory, offset: memory[offset],
}  # fmt: skip
"""How each operation of the IR is computed."""
