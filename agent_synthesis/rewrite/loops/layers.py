"""The rule of recurrent calls that follow each other: layers of one network, which a kernel runs beside each other."""

from __future__ import annotations

from typing import Any

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.calls.recurrence import is_call
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, only_use, shape
from agent_synthesis.rewrite.loops.assembly import assembled, dependents_of
from warpsmith.graphs import result_specs

_EQUAL = ("has_biases", "train", "bidirectional", "batch_first")


class StackedLayers:
    """A recurrent network on the sequence of another of its kind is one network with the layers of both.

    Holds where cells, widths of states and directions are the same, nothing is dropped, and nothing else reads the
    sequence between them. Nothing is rounded otherwise.
    """

    name = "stacked_layers"
    effect = "runs a recurrent network and the one whose sequence it reads as layers of one"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        above = index.nodes[node]
        if not is_call(above) or not above.results[0].name:
            return None
        given = arguments(above)
        below = only_use(index, given["input"], node)
        if below is None or below.target != above.target or below.results[0].name != given["input"].name:
            return None
        under = arguments(below)
        states, lower = (_states(each) for each in (given, under))
        if not all(_is_plain(index, each) for each in (given, under)) or any(given[k] != under[k] for k in _EQUAL):
            return None
        if shape(index, states[0])[1:] != shape(index, lower[0])[1:]:
            return None
        found = dependents_of(index, index.results(below.name), below.name)
        if not found.isdisjoint(each.name for each in (*states, *given["params"])):
            return None
        draft = Draft(index)
        both = [
            draft.call(draft.free(f"{node}_begin"), "aten.cat.default", [first, second], 0)
            for first, second in zip(lower, states, strict=True)
        ]
        names = [draft.free(f"{node}_layers_{place}") for place in range(1 + len(both))]
        options = {**given, "input": under["input"], "params": [*under["params"], *given["params"]]}
        options |= {"hx": both if len(both) > 1 else both[0], "num_layers": under["num_layers"] + given["num_layers"]}
        with result_specs.known():
            draft.calls(draft.free(f"{node}_layers"), names, above.target, *options.values())
        count = shape(index, lower[0])[0]
        for place, made in enumerate(names[1:], 1):
            _give(index, draft, below.results[place].name, Named(made), 0, count)
            _give(index, draft, above.results[place].name, Named(made), count, count + shape(index, states[0])[0])
        return assembled(index, draft, {below.name, node}, found, {}, {above.results[0].name: names[0]})


def _states(given: dict[str, Any]) -> list[Named]:
    return given["hx"] if isinstance(given["hx"], list) else [given["hx"]]


def _is_plain(index: GraphIndex, given: dict[str, Any]) -> bool:
    """Whether nothing is dropped, no state is projected, and nothing that it reads is written in place."""
    cells = given["num_layers"] * (1 + given["bidirectional"])
    read = [given["input"], *_states(given), *given["params"]]
    if any(index.is_written(each.name) for each in read):
        return False
    is_dropped = given["dropout"] and given["train"]
    return not is_dropped and len(given["params"]) == cells * (4 if given["has_biases"] else 2)


def _give(index: GraphIndex, draft: Draft, name: str, made: Named, begin: int, end: int) -> None:
    """Adds the last states of some layers by the name that they had; what an output shows in memory of its own."""
    if not name:
        return
    if index.root[name] not in {index.root[output] for output in index.outputs}:
        draft.view(name, "aten.slice.Tensor", made, 0, begin, end)
        return
    view = draft.view(draft.free(f"{name}_view"), "aten.slice.Tensor", made, 0, begin, end)
    draft.call(name, "aten.clone.default", view, memory_format=torch.contiguous_format)
