"""Cells of recurrent networks in a graph: what a step of a loop that was unrolled computes, and which steps follow
each other.

The one idea: a step is known by its form, which weights it multiplies which columns by, so that steps of one loop are
found by a hash, and a step's hidden state by where in its form the step before it stands. Time and memory are linear
in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Named, arguments, operation, shape
from agent_synthesis.rewrite.loops.numbering import Numbering
from warpsmith.v1 import graph_pb2

LEAST_STEPS = 4
"""Of a loop that is worth a recurrent network's call."""
_WRITTEN_OUT = {"tanh": "rnn_tanh", "relu": "rnn_relu"}
_CALLED = {
    "lstm_cell": "lstm", "gru_cell": "gru", "rnn_tanh_cell": "rnn_tanh", "rnn_relu_cell": "rnn_relu",
}  # fmt: skip
_MOST_TERMS = 16
Place = tuple[int, int]
"""A factor and a part of it."""


@dataclass(frozen=True)
class Part:
    """A tensor that is multiplied by some columns of a weight."""

    tensor: str
    begin: int
    width: int


@dataclass(frozen=True)
class Factor:
    """Tensors beside each other, times a weight."""

    weight: str
    is_turned: bool
    """Whether the weight has a row for each column that it is multiplied by, as `x @ w` wants it."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Cell:
    """One step of one layer: `activation(sum of products + biases + projected)`, or a cell that is one call."""

    kind: str
    """lstm, gru, rnn_tanh or rnn_relu, as PyTorch's calls are named."""
    node: str
    """The call that gives its state."""
    states: tuple[str, ...]
    """What it gives: the hidden state, and an LSTM's memory."""
    factors: tuple[Factor, ...]
    biases: tuple[str, ...]
    projected: tuple[str, ...]
    """Tensors of the result's shape that are added as they are: inputs that were multiplied before the loop."""
    memory: str = ""
    """An LSTM's memory before the step."""
    is_called: bool = False
    """Whether it is one call, whose second factor has the state and whose first bias is the input's."""

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for the steps of a loop."""
        factors = tuple(
            (each.weight, each.is_turned, tuple((part.begin, part.width) for part in each.parts))
            for each in self.factors
        )
        return (self.kind, self.is_called, factors, self.biases, len(self.projected))

    def part(self, place: Place) -> Part:
        """What stands there."""
        return self.factors[place[0]].parts[place[1]]

    def places(self) -> Iterator[Place]:
        """Where its hidden state may stand."""
        if self.is_called:
            yield 1, 0
            return
        for factor, each in enumerate(self.factors):
            yield from ((factor, part) for part in range(len(each.parts)))


@dataclass(frozen=True)
class Chain:
    """Cells of one form in order, each with its hidden state from the one before."""

    cells: tuple[Cell, ...]
    place: Place
    """Where the hidden state stands in each."""


def chains(index: GraphIndex) -> list[Chain]:
    """Loops of at least `LEAST_STEPS` steps, each step in one of them at most."""
    numbering = Numbering.of(index)
    made: dict[str, tuple[Cell, tuple[object, ...]]] = {}
    longest: dict[tuple[str, Place], tuple[int, Cell | None]] = {}
    for node in index.graph.nodes:
        cell = _cell(index, numbering, node)
        if cell is None:
            continue
        form = cell.form
        for place in cell.places():
            before, of_before = made.get(cell.part(place).tensor, (None, ()))
            if before is None or of_before != form or before.states[1:] != tuple(filter(None, [cell.memory])):
                before = None
            count = longest[before.states[0], place][0] if before is not None else 0
            longest[cell.states[0], place] = (count + 1, before)
        made[cell.states[0]] = (cell, form)
    ends = sorted(longest, key=lambda end: -longest[end][0])
    found, taken = list[Chain](), set[str]()
    for state, place in ends:
        steps, cell = list[Cell](), made[state][0] if longest[state, place][0] >= LEAST_STEPS else None
        while cell is not None and cell.node not in taken:
            steps.append(cell)
            cell = longest[cell.states[0], place][1]
        if len(steps) >= LEAST_STEPS:
            taken |= {cell.node for cell in steps}
            found.append(Chain(tuple(reversed(steps)), place))
    return found


def _cell(index: GraphIndex, numbering: Numbering, node: graph_pb2.Node) -> Cell | None:
    """The cell that ends in a call; None where it ends none that a recurrent network may have."""
    kind = operation(node)
    state = node.results[0].name if node.results else ""
    if not state or not index.is_pure(node.name) or numbering.first(state) != state:
        return None
    if kind in _CALLED:
        return _called(numbering, node)
    if kind not in _WRITTEN_OUT or node.mutates or len(shape(index, Named(state))) != 2:
        return None
    return _written_out(index, numbering, node)


def _called(numbering: Numbering, node: graph_pb2.Node) -> Cell:
    given, first = arguments(node), numbering.first
    state, memory = given["hx"], ""
    if isinstance(state, list):
        state, memory = state[0], first(state[1].name)
    sides = ((given["input"], given["w_ih"]), (state, given["w_hh"]))
    return Cell(
        kind=_CALLED[operation(node)], node=node.name, states=tuple(result.name for result in node.results),
        factors=tuple(Factor(first(weight.name), False, (Part(first(of.name), 0, -1),)) for of, weight in sides),
        biases=tuple(first(given[name].name) for name in ("b_ih", "b_hh") if given[name] is not None), projected=(),
        memory=memory, is_called=True,
    )  # fmt: skip


def _written_out(index: GraphIndex, numbering: Numbering, node: graph_pb2.Node) -> Cell | None:
    result = node.results[0]
    factors, biases, projected = list[Factor](), list[str](), list[str]()
    for term in _terms(numbering, arguments(node)["self"]):
        product = _product(index, numbering, term)
        if product is not None:
            factors.append(product[0])
            biases += product[1]
        elif shape(index, term) == list(result.spec.shape)[1:]:
            biases.append(term.name)
        elif shape(index, term) == list(result.spec.shape):
            projected.append(term.name)
        else:
            return None
    if not factors or len(factors) + len(biases) + len(projected) > _MOST_TERMS:
        return None
    kind = _WRITTEN_OUT[operation(node)]
    return Cell(kind, node.name, (result.name,), tuple(factors), tuple(biases), tuple(projected))


def _terms(numbering: Numbering, total: Named) -> list[Named]:
    """What a sum adds, in order."""
    found, pending = list[Named](), [total]
    while pending and len(found) <= _MOST_TERMS:
        term = pending.pop()
        call = numbering.maker(term)
        given = arguments(call) if call is not None and call.target == "aten.add.Tensor" else {}
        if given and given["alpha"] == 1 and isinstance(given["other"], Named):
            pending += [given["other"], given["self"]]
        else:
            found.append(Named(numbering.first(term.name)))
    return found


def _product(index: GraphIndex, numbering: Numbering, term: Named) -> tuple[Factor, list[str]] | None:
    """A term that is a product with a weight, and its biases."""
    call = numbering.maker(term)
    kind = operation(call)
    if call is None or kind not in ("linear", "matmul", "mm", "addmm"):
        return None
    given = arguments(call)
    if kind == "linear":
        of, weight, bias = given["input"], given["weight"], given["bias"]
    elif kind == "addmm":
        of, weight, bias = given["mat1"], given["mat2"], given["self"]
        if (given["beta"], given["alpha"]) != (1, 1):
            return None
    else:
        of, weight, bias = given["self"], given["other" if kind == "matmul" else "mat2"], None
    if len(shape(index, of)) != 2 or len(shape(index, weight)) != 2 or (bias and len(shape(index, bias)) != 1):
        return None
    parts = tuple(_parts(index, numbering, of))
    biases = [numbering.first(bias.name)] if bias is not None else []
    return Factor(numbering.first(weight.name), kind != "linear", parts), biases


def _parts(index: GraphIndex, numbering: Numbering, of: Named) -> Sequence[Part]:
    """What lies beside each other in a factor of two dimensions."""
    call, tensors = numbering.maker(of), [Named(numbering.first(of.name))]
    if call is not None and call.target == "aten.cat.default" and arguments(call)["dim"] in (1, -1):
        tensors = [Named(numbering.first(each.name)) for each in arguments(call)["tensors"]]
        if any(len(shape(index, each)) != 2 for each in tensors):
            tensors = [of]
    parts, begin = list[Part](), 0
    for each in tensors:
        parts.append(Part(each.name, begin, shape(index, each)[1]))
        begin += parts[-1].width
    return parts
