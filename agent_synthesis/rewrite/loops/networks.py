"""Loops of a graph that are recurrent networks, of cells that are calls or that are written out.

The one idea: however a loop was found, all that is asked of it is what its states are step by step, what its steps
read, and how the weights of the one call come about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named
from agent_synthesis.rewrite.loops.cells import Cell, chains
from agent_synthesis.rewrite.loops.gates import Gated, gated
from agent_synthesis.rewrite.loops.numbering import Numbering
from agent_synthesis.rewrite.loops.steps import Lanes, loops
from agent_synthesis.rewrite.loops.together import Together
from agent_synthesis.rewrite.loops.weights import Weights

Build = Callable[[Draft, Together], tuple[list[Named], Named]]


@dataclass(frozen=True)
class Network:
    """All steps of one layer."""

    kind: str
    """lstm, gru, rnn_tanh or rnn_relu, as PyTorch's calls are named."""
    states: tuple[Lanes, ...]
    """What each step gives: the hidden state, and an LSTM's memory."""
    begin: tuple[str, ...]
    """These before the first step."""
    calls: frozenset[str]
    """Calls of the steps."""
    inputs: tuple[str, ...]
    """Tensors [rows, columns] that steps read beside weights and their own states."""
    parameters: tuple[str, ...]
    build: Build
    """Adds (weights of the input and of the state, and biases if any; the sequence that is read) to a draft. Raises
    BadInput, or what ATen raises on bad arguments."""


def networks(index: GraphIndex) -> Iterator[Network]:
    """All, each call in one of them at most."""
    yield from (_called(chain) for chain in chains(index))
    for loop in loops(index):
        found = gated(loop)
        if found is not None:
            yield _written(index, found)


def _called(chain: tuple[Cell, ...]) -> Network:
    first = chain[0]
    weights, inputs = [Named(name) for name in first.weights], [cell.input for cell in chain]
    return Network(
        kind=first.kind, states=tuple(zip(*(cell.states for cell in chain), strict=True)), begin=first.begin,
        calls=frozenset(cell.node for cell in chain), inputs=tuple(inputs), parameters=first.weights,
        build=lambda _, together: (weights, together.of(inputs)),
    )  # fmt: skip


def _written(index: GraphIndex, found: Gated) -> Network:
    sides = [side for gate in found.gates for side in (gate.input, gate.hidden)]
    lanes = [each for gate in found.gates for each, _ in (*gate.input.products, *gate.input.projected)]
    weights = [piece.weight for side in sides for _, piece in side.products]
    vectors = [vector.tensor for side in sides for vector in side.vectors]
    state, loop, first = found.loop.states[0][0], found.loop, Numbering.of(index).first
    inner = {lane for each in loop.inner for lane in each}
    calls = (node.name for node in index.graph.nodes if not inner.isdisjoint(map(first, index.results(node.name))))
    return Network(
        kind=found.kind, states=loop.states, begin=loop.begin, calls=frozenset(calls),
        inputs=tuple(dict.fromkeys(lane for each in lanes for lane in each)),
        parameters=tuple(dict.fromkeys([*weights, *vectors])),
        build=lambda draft, together: Weights(draft, together, found, state).made(),
    )  # fmt: skip
