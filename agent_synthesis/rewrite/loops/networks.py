"""Loops of a graph that are recurrent networks, of cells that are calls, that are written out, or that have no call.

The one idea: however a loop was found, all that is asked of it is what its states are step by step, what its steps
read, and how the one call comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named
from agent_synthesis.rewrite.loops.bodies import Body
from agent_synthesis.rewrite.loops.cells import Cell, chains
from agent_synthesis.rewrite.loops.gates import Gated, gated
from agent_synthesis.rewrite.loops.numbering import Numbering
from agent_synthesis.rewrite.loops.steps import Lanes, Loop, loops
from agent_synthesis.rewrite.loops.together import Together
from agent_synthesis.rewrite.loops.weights import Weights
from warpsmith.graphs import result_specs

Elements = Mapping[str, tuple[Named, int]]
"""State → the tensor that it is an element of, and which."""


@dataclass(frozen=True)
class Network:
    """All steps of one layer."""

    states: tuple[Lanes, ...]
    """What each step gives; of an LSTM the hidden state, and its memory."""
    begin: tuple[str, ...]
    """These before the first step."""
    calls: frozenset[str]
    """Calls of the steps."""
    inputs: tuple[str, ...]
    """Tensors [rows, columns] that steps read beside weights and their own states."""
    parameters: tuple[str, ...]
    shows_all: bool
    """Whether the call gives all states after each step, not the hidden one alone."""
    call: Callable[[Draft, Together], tuple[Elements, Elements]]
    """Adds the call to a draft. (States as steps of a sequence, last states as tensors of their own.) Raises BadInput,
    or what ATen raises on bad arguments."""


def networks(index: GraphIndex) -> Iterator[Network]:
    """Those that PyTorch has a call for, each call in one of them at most."""
    yield from (_called(chain) for chain in chains(index))
    yield from (_written(index, found) for loop in loops(index) if (found := gated(loop)) is not None)


def others(index: GraphIndex) -> Iterator[Network]:
    """Those that it may have none for: all that are no chains of its cells."""
    yield from (_stepped(index, loop) for loop in loops(index))


def _called(chain: tuple[Cell, ...]) -> Network:
    first = chain[0]
    weights, inputs = [Named(name) for name in first.weights], [cell.input for cell in chain]
    states = tuple(zip(*(cell.states for cell in chain), strict=True))
    return Network(
        states=states, begin=first.begin, calls=frozenset(cell.node for cell in chain), inputs=tuple(inputs),
        parameters=first.weights, shows_all=len(states) == 1,
        call=lambda draft, together: _recurrent(
            draft, first.kind, states, first.begin, weights, together.of(inputs)
        ),
    )  # fmt: skip


def _written(index: GraphIndex, found: Gated) -> Network:
    sides = [side for gate in found.gates for side in (gate.input, gate.hidden)]
    lanes = [each for gate in found.gates for each, _ in (*gate.input.products, *gate.input.projected)]
    weights = [piece.weight for side in sides for _, piece in side.products]
    vectors = [vector.tensor for side in sides for vector in side.vectors]
    loop = found.loop

    def call(draft: Draft, together: Together) -> tuple[Elements, Elements]:
        parameters, values = Weights(draft, together, found, loop.states[0][0]).made()
        return _recurrent(draft, found.kind, loop.states, loop.begin, parameters, values)

    return Network(
        states=loop.states, begin=loop.begin, calls=_calls(index, loop),
        inputs=tuple(dict.fromkeys(lane for each in lanes for lane in each)),
        parameters=tuple(dict.fromkeys([*weights, *vectors])), shows_all=len(loop.states) == 1, call=call,
    )  # fmt: skip


def _recurrent(
    draft: Draft, kind: str, states: tuple[Lanes, ...], first: tuple[str, ...], weights: list[Named], values: Named
) -> tuple[Elements, Elements]:
    """Adds a recurrent call of PyTorch's."""
    begin = [draft.view(draft.free(f"{name}_first"), "aten.unsqueeze.default", Named(name), 0) for name in first]
    name = draft.free(kind)
    results = [draft.free(f"{name}_{place}") for place in range(1 + len(begin))]
    options = (len(weights) > 2, 1, 0.0, False, False, False)
    with result_specs.known():
        hx = begin if kind == "lstm" else begin[0]
        sequence, *last = draft.calls(name, results, f"aten.{kind}.input", values, hx, weights, *options)
    ends = {lanes[-1]: (made, 0) for lanes, made in zip(states, last, strict=True)}
    return {state: (sequence, step) for step, state in enumerate(states[0])}, ends


def _stepped(index: GraphIndex, loop: Loop) -> Network:
    def call(draft: Draft, together: Together) -> tuple[Elements, Elements]:
        made = Body(loop, draft, together).call("loop")
        steps = zip(loop.states, made, strict=True)
        return {state: (of, step) for lanes, of in steps for step, state in enumerate(lanes)}, {}

    given = dict.fromkeys(lanes for lanes in _read(loop) if lanes not in loop.inner and not _is_state(loop, lanes))
    return Network(
        states=loop.states, begin=loop.begin, calls=_calls(index, loop),
        inputs=tuple(dict.fromkeys(lane for each in given if len(set(each)) > 1 for lane in each)),
        parameters=tuple(each[0] for each in given if len(set(each)) == 1), shows_all=True, call=call,
    )  # fmt: skip


def _read(loop: Loop) -> Iterator[Lanes]:
    """All that steps read."""
    for lanes in sorted(loop.inner):
        made = loop.alikes.of(lanes)
        for value in made.lanes.values() if made is not None else ():
            yield from value if isinstance(value, list) else [value]


def _is_state(loop: Loop, lanes: Lanes) -> bool:
    return any(loop.before(place)[: len(lanes)] == lanes for place in range(len(loop.states)))


def _calls(index: GraphIndex, loop: Loop) -> frozenset[str]:
    inner, first = {lane for each in loop.inner for lane in each}, Numbering.of(index).first
    made = (node.name for node in index.graph.nodes if not inner.isdisjoint(map(first, index.results(node.name))))
    return frozenset(made)
