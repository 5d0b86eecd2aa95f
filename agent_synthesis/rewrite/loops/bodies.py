"""Loops of cells that PyTorch has no call for, as one call of a step's calls (`warpsmith.graphs.blocks.loop`).

The one idea: what no step makes is brought together and multiplied for all steps at once, so that a step multiplies its
states alone; the rest of it is copied once, whatever it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agent_synthesis.rewrite.calls import Draft, Named, call_of
from agent_synthesis.rewrite.loops.products import Factor, product_of
from agent_synthesis.rewrite.loops.steps import Alike, Lanes, Loop
from agent_synthesis.rewrite.loops.together import Together
from warpsmith import program_steps
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, dtypes
from warpsmith.v1 import graph_pb2


@dataclass
class Body:
    """A step of a loop as a graph, and what is given to it, which is added to a draft."""

    loop: Loop
    draft: Draft
    together: Together
    graph: graph_pb2.Graph = field(default_factory=graph_pb2.Graph)
    sequences: dict[str, Named] = field(default_factory=dict)
    """Name in the graph → all steps' elements."""
    others: dict[str, Named] = field(default_factory=dict)
    _states: dict[Lanes, str] = field(default_factory=dict)
    _names: dict[Lanes, str] = field(default_factory=dict)
    _copied: dict[str, list[str]] = field(default_factory=dict)

    def call(self, name: str) -> list[Named]:
        """Adds the loop's call, which gives what each state becomes. Raises BadInput, or what ATen raises."""
        loop = self.loop
        states = [f"state_{place}" for place in range(len(loop.states))]
        self._states = {loop.before(place): state for place, state in enumerate(states)}
        made = (lanes if lanes[-1] else lanes[:-1] for lanes in loop.states)
        self.graph.outputs.extend([self._name(lanes) for lanes in made])
        if not self.sequences:
            raise BadInput("a loop that goes through no sequence")
        given = [(each, Named(begin)) for each, begin in zip(states, loop.begin, strict=True)]
        for own, tensor in (*self.sequences.items(), *given, *self.others.items()):
            meta = self.draft.meta(tensor.name)
            meta = meta[0] if own in self.sequences else meta
            self.graph.sources.add(name=own, origin=graph_pb2.ORIGIN_INPUT).spec.CopyFrom(dtypes.spec_of(meta))
        begin = [tensor for _, tensor in given]
        results = [self.draft.free(f"{name}_{state}") for state in states]
        text = program_steps.body_text(self.graph)
        arguments = (text, [*self.sequences.values()], begin, [*self.others.values()])
        return self.draft.calls(self.draft.free(name), results, program_steps.LOOP, *arguments)

    def _name(self, lanes: Lanes) -> str:
        if lanes not in self._names:
            self._names[lanes] = self._state(lanes) or self._made(lanes)
        return self._names[lanes]

    def _state(self, lanes: Lanes) -> str | None:
        """A state ahead of each step, also where the last step is not known to read it."""
        return next((own for known, own in self._states.items() if known[: len(lanes)] == lanes), None)

    def _made(self, lanes: Lanes) -> str:
        index, numbering = self.loop.alikes.index, self.loop.alikes.numbering
        if lanes not in self.loop.inner:
            if len(set(lanes)) == 1:
                return self._other(Named(lanes[0]))
            return self._sequence(self.together.of([*lanes, *self._rest(lanes)]))
        if (product := product_of(index, numbering, Named(lanes[0]))) is not None:
            return self._product(lanes, *product)
        made = self.loop.alikes.of(lanes)
        assert made is not None
        if made.first.name not in self._copied:
            self._copied[made.first.name] = self._copy(made)
        return self._copied[made.first.name][made.result]

    def _rest(self, lanes: Lanes) -> Lanes:
        """What stands for a last step that is not known to read any: the step's before, whose result nobody reads."""
        return lanes[-1:] * (self.loop.count - len(lanes))

    def _copy(self, made: Alike) -> list[str]:
        def own(value: Lanes | list[Lanes]) -> Any:
            return [Named(self._name(each)) for each in value] if isinstance(value, list) else Named(self._name(value))

        given = {name: own(made.lanes[name]) if name in made.lanes else value for name, value in made.given.items()}
        schema = aten.resolve(made.first.target)._schema.arguments
        keywords = {each.name for each in schema if each.kwarg_only}
        args = [value for name, value in given.items() if name not in keywords]
        name = self._free()
        node = call_of(name, made.first.target, args, {key: given[key] for key in given if key in keywords})
        for place, result in enumerate(made.first.results):
            view = node.args[0].tensor if result.alias_of else ""
            own_name = name if len(made.first.results) == 1 else f"{name}_{place}"
            node.results.add(name=own_name, spec=result.spec, alias_of=view)
        self.graph.nodes.append(node)
        return [result.name for result in node.results]

    def _product(self, lanes: Lanes, factor: Factor, biases: list[str]) -> str:
        """Columns of states in the step, those of what is given for all steps at once, and the bias."""
        index, numbering = self.loop.alikes.index, self.loop.alikes.numbering
        found = [product_of(index, numbering, Named(lane)) for lane in lanes]
        if any(each is None or _form(*each) != _form(factor, biases) for each in found):
            raise BadInput("the weights of a step are its own")
        terms, given = list[str](), list[str]()
        for place, part in enumerate(factor.parts):
            of = tuple(each[0].parts[place].tensor for each in found if each is not None)
            weight = self._columns(factor, part.begin, part.width)
            if of in self.loop.inner or self._state(of):
                terms.append(self._add_call(lanes, "aten.linear.default", self._name(of), self._other(weight)))
                continue
            values = self.together.of([*of, *self._rest(of)])
            name = self.draft.free(f"{self.loop.begin[0]}_projected")
            given.append(self._sequence(self.draft.call(name, "aten.linear.default", values, weight)))
        total, *more = [*terms, *given, *(self._other(Named(bias)) for bias in biases)]
        for each in more:
            total = self._add_call(lanes, "aten.add.Tensor", total, each)
        return total

    def _columns(self, factor: Factor, begin: int, width: int) -> Named:
        """Columns of a weight that has a row for each unit, as a view."""
        draft, of = self.draft, Named(factor.weight)
        if factor.is_turned:
            of = draft.view(draft.free(f"{factor.weight}_turned"), "aten.transpose.int", of, 0, 1)
        if (begin, width) == (0, draft.meta(of.name).shape[1]):
            return of
        return draft.view(draft.free(f"{factor.weight}_columns"), "aten.slice.Tensor", of, 1, begin, begin + width)

    def _add_call(self, lanes: Lanes, target: str, *names: str) -> str:
        """A call whose result lies as some lanes do."""
        node = call_of(self._free(), target, [Named(name) for name in names], {})
        node.results.add(name=node.name, spec=self.loop.alikes.index.spec(lanes[0]))
        self.graph.nodes.append(node)
        return node.name

    def _free(self) -> str:
        return f"made_{len(self.graph.nodes)}"

    def _sequence(self, tensor: Named) -> str:
        known = {each.name: own for own, each in self.sequences.items()}
        own = known.get(tensor.name, f"element_{len(known)}")
        self.sequences[own] = tensor
        return own

    def _other(self, tensor: Named) -> str:
        known = {each.name: own for own, each in self.others.items()}
        own = known.get(tensor.name, f"other_{len(known)}")
        self.others[own] = tensor
        return own


def _form(factor: Factor, biases: list[str]) -> object:
    parts = tuple((part.begin, part.width) for part in factor.parts)
    return factor.weight, factor.is_turned, parts, tuple(biases)
