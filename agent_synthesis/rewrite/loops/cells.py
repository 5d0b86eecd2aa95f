"""Cells of recurrent networks that are one call, `nn.LSTMCell` and its like, and which of them follow each other.

The one idea: a call is known by its operation and its parameters, so a loop is a chain of equal calls, each with its
states from the one before. Linear in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import arguments, operation
from agent_synthesis.rewrite.loops.numbering import Numbering
from agent_synthesis.rewrite.loops.steps import LEAST_STEPS
from warpsmith.v1 import graph_pb2

_CALLED = {
    "lstm_cell": "lstm", "gru_cell": "gru", "rnn_tanh_cell": "rnn_tanh", "rnn_relu_cell": "rnn_relu",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One step of one layer."""

    kind: str
    """lstm, gru, rnn_tanh or rnn_relu, as PyTorch's calls are named."""
    node: str
    states: tuple[str, ...]
    """What it gives: the hidden state, and an LSTM's memory."""
    begin: tuple[str, ...]
    """These before the step."""
    input: str
    weights: tuple[str, ...]
    """Of the input and of the state, then biases if any."""


def chains(index: GraphIndex) -> Iterator[tuple[Cell, ...]]:
    """Loops of at least `LEAST_STEPS` steps."""
    numbering = Numbering.of(index)
    ends = dict[tuple[str, ...], list[Cell]]()
    for node in index.graph.nodes:
        if operation(node) not in _CALLED or not index.is_pure(node.name):
            continue
        if numbering.first(node.results[0].name) != node.results[0].name:
            continue
        cell = _cell(numbering, node)
        chain = ends.get(cell.begin, [])
        if chain and (chain[-1].kind, chain[-1].weights) == (cell.kind, cell.weights):
            del ends[cell.begin]
        else:
            chain = []
        ends[cell.states] = [*chain, cell]
    yield from (tuple(chain) for chain in ends.values() if len(chain) >= LEAST_STEPS)


def _cell(numbering: Numbering, node: graph_pb2.Node) -> Cell:
    given, first = arguments(node), numbering.first
    begin = given["hx"] if isinstance(given["hx"], list) else [given["hx"]]
    weights = (given[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh"))
    return Cell(
        kind=_CALLED[operation(node)], node=node.name, states=tuple(result.name for result in node.results),
        begin=tuple(first(each.name) for each in begin), input=first(given["input"].name),
        weights=tuple(first(each.name) for each in weights if each is not None),
    )  # fmt: skip
