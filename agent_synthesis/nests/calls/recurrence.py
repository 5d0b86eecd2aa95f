"""Recurrent networks: calls of LSTM, GRU and plain cells, which no loops over independent points describe.

The one idea: a `Recurrence` stands among nests where a kernel's work is asked for, with its buffers, and says what the
network is in numbers alone. It has no stores to read: schedules of recurrent networks take it, and no others are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.element_types import CONTRACT
from agent_synthesis.nests.ir import Axis, BufferRef, Load, Nest, Type
from agent_synthesis.nests.symbolic import Refused
from warpsmith.graphs import dtypes
from warpsmith.v1 import graph_pb2, tensor_pb2

_GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
_CELLS = {
    "aten.lstm.input": "lstm", "aten.gru.input": "gru", "aten.rnn_tanh.input": "tanh", "aten.rnn_relu.input": "relu",
}  # fmt: skip
TYPES = {CONTRACT[each]: each for each in (Type.F32, Type.F16, Type.BF16)}


@dataclass(frozen=True)
class Tensor:
    """A buffer of the nest, by number, and the strides of its dimensions, in elements."""

    buffer: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """What a recurrent call computes. Cells are numbered as PyTorch does: layer by layer, forward before backward."""

    cell: str
    """lstm, gru, tanh or relu."""
    type: Type
    """Of all its tensors."""
    steps: int
    batch: int
    inputs: int
    """Columns of what the first layer reads."""
    hidden: int
    """Units of a cell."""
    layers: int
    directions: int
    """2 where it is bidirectional."""
    values: Tensor
    """What the first layer reads: (step, row of the batch, column)."""
    states: tuple[Tensor, ...]
    """What cells begin with: (cell, row, unit); of an LSTM the cell states too."""
    weights: tuple[tuple[Tensor, ...], ...]
    """For each cell its parameters: weights of the input and of the hidden state (row, column), and biases if any."""
    results: tuple[Tensor | None, ...]
    """The last layer's sequence (step, row, column) and the states after the last step; None for what nobody reads."""

    @property
    def gates(self) -> int:
        """Rows of a cell's matrices for each of its units."""
        return _GATES[self.cell]

    @property
    def cells(self) -> int:
        """Layers times directions."""
        return self.layers * self.directions


@dataclass(frozen=True)
class Read:
    """What a step of a loop reads for a unit: column `first + stride * unit` of a tensor, in the batch's row."""

    kind: str
    """sum: of a gate; state; element: of a sequence; other: what is the same in all steps."""
    number: int
    """Among those of its kind."""
    first: int = 0
    stride: int = 1


@dataclass(frozen=True)
class Gate:
    """What a step multiplies for each unit: row `first + stride * unit` of a weight."""

    weight: Tensor
    first: int
    stride: int


@dataclass(frozen=True)
class Stage:
    """Products of one vector, which all CTAs must know."""

    operand: str
    """The store of the body that makes it; "" for a state as it was ahead of the step."""
    state: int
    """Which state that is; -1 for none."""
    gates: tuple[Gate, ...]


@dataclass(frozen=True)
class Loop:
    """Steps of any cell: products of what it makes with weights, and what it computes for each unit by itself."""

    type: Type
    """Of all its tensors."""
    steps: int
    batch: int
    units: int
    stages: tuple[Stage, ...]
    """In order; each vector is made of the products of those before."""
    body: Nest
    """Of one step: stores of the states that it makes, and of operands."""
    made: tuple[str, ...]
    """The stores of the states, in order."""
    reads: Mapping[Load, Read]
    """What the loads of the body are."""
    begin: tuple[Tensor, ...]
    """What states begin with: (row, unit)."""
    results: tuple[Tensor | None, ...]
    """What each state becomes: (step, row, unit); None for what nobody reads."""
    sequences: tuple[Tensor, ...]
    """(step, row, column)."""
    others: tuple[Tensor, ...]
    """(row, column)."""

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Of all stages, as sums are numbered."""
        return tuple(gate for stage in self.stages for gate in stage.gates)


@dataclass(frozen=True)
class Recurrence(Nest):
    """A recurrent call or a loop, with the batch and the units of a layer as its axes."""

    network: Network | None = None
    loop: Loop | None = field(default=None, hash=False)


def is_call(node: graph_pb2.Node) -> bool:
    """Whether a node is a recurrent network on sequences of one length."""
    return node.target in _CELLS


def network_of(nest: Nest) -> Network | None:
    """The network of a nest that is one."""
    return nest.network if isinstance(nest, Recurrence) else None


def loop_of(nest: Nest) -> Loop | None:
    """The loop of a nest that is one."""
    return nest.loop if isinstance(nest, Recurrence) else None


def traced(index: GraphIndex, node: graph_pb2.Node, outputs: Sequence[str], name: str) -> Recurrence:
    """The node as a nest that makes `outputs`.

    Raises:
        Refused: it is of another type than floats, projects its hidden states, a bias has gaps, or a tensor is empty.
    """
    values, states, parameters, has_biases, layers, _, _, bidirectional, batch_first = node.args
    spec, reads = index.spec(values.tensor), _names(states)
    sizes = list(spec.shape) if not batch_first.boolean else [spec.shape[1], spec.shape[0], spec.shape[2]]
    hidden, directions = index.spec(reads[0]).shape[2], 1 + bidirectional.boolean
    buffers: dict[str, BufferRef] = {}

    def number(tensor: str, written: bool = False) -> int:
        own = index.spec(tensor)
        if own.dtype not in TYPES or own.dtype != spec.dtype:
            raise Refused("its tensors are not all of one type of 16 or 32 bits")
        buffers.setdefault(tensor, BufferRef(tensor, TYPES[own.dtype], dtypes.element_span(own), written))
        return list(buffers).index(tensor)

    def placed(tensor: str, swaps: bool = False, written: bool = False) -> Tensor:
        first, second, third = index.spec(tensor).strides
        return Tensor(number(tensor, written), (second, first, third) if swaps else (first, second, third))

    made = Network(
        cell=_CELLS[node.target], type=TYPES.get(spec.dtype, Type.F32), steps=sizes[0], batch=sizes[1],
        inputs=sizes[2], hidden=hidden, layers=layers.integer, directions=directions,
        values=placed(values.tensor, batch_first.boolean), states=tuple(map(placed, reads)),
        weights=_by_cell(index, _names(parameters), layers.integer * directions, has_biases.boolean, number),
        results=tuple(
            placed(result.name, batch_first.boolean and place == 0, written=True) if result.name in outputs else None
            for place, result in enumerate(node.results)
        ),
    )  # fmt: skip
    if min(made.steps, made.batch, made.inputs, made.hidden) < 1:
        raise Refused("a tensor is empty")
    axes = (Axis("row", made.batch), Axis("unit", made.directions * made.hidden))
    comment = f"{made.cell}, {made.layers} layers, {made.directions} directions, {made.steps} steps"
    return Recurrence(name, axes, (), (), (), tuple(buffers.values()), comment, network=made)


def _names(value: tensor_pb2.Value) -> list[str]:
    return [each.tensor for each in value.list.values] if value.WhichOneof("kind") == "list" else [value.tensor]


def _by_cell(
    index: GraphIndex, names: Sequence[str], cells: int, has_biases: bool, number: Callable[[str], int]
) -> tuple[tuple[Tensor, ...], ...]:
    """The parameters, for each cell. Raises Refused."""
    each = 4 if has_biases else 2
    if len(names) != cells * each:
        raise Refused("it projects its hidden states")
    tensors = [Tensor(number(name), tuple(index.spec(name).strides)) for name in names]
    if any(len(tensor.strides) == 1 and tensor.strides[0] != 1 for tensor in tensors):
        raise Refused("a bias has gaps")
    return tuple(tuple(tensors[first : first + each]) for first in range(0, len(tensors), each))
