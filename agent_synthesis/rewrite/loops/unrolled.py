"""The rule of loops that were unrolled: steps of a recurrent network as one call on the whole sequence.

The one idea: a loop in Python is a chain of equal cells in the graph, each with its states from the one before. PyTorch
has a call for all of them, whose weights a kernel may keep on chip (`emit/cuda/recurrences`); what the steps read, and
what is done to each state alike, is done once to all steps. Loops are found in `networks`, what lies together in
`together`. Not of a training step: its backward reads what each step made, which the one call does not give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Set

import torch

from agent_synthesis.graphs import in_place
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, shape
from agent_synthesis.rewrite.loops.assembly import assembled, dependents_of
from agent_synthesis.rewrite.loops.joins import Join, joins
from agent_synthesis.rewrite.loops.networks import Elements, Network, networks, others
from agent_synthesis.rewrite.loops.together import Together
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, dtypes
from warpsmith.program_steps import tensor_names


class Unrolled:
    """Cells behind each other, PyTorch's own or what computes their formulas, are a recurrent network on their inputs.

    Holds where the cells are equal, at least four, and no input depends on a state. Weights may be columns of one, an
    input projected before the loop. What is done to each state alike, such as a layer, is done to the sequence. Sums of
    a product are added in another order, gates that are written out are what they are where `exp` does not overflow;
    on a GPU, PyTorch's own call may round its factors to TF32.
    """

    name = "unrolled"
    effect = "runs all steps of a loop as one recurrent network, and what follows each of them once"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        return replacements(index).get(node)


def replacements(index: GraphIndex) -> dict[str, Replacement]:
    """For each loop of a cell that PyTorch has a call for, by the call that ends its last step, what becomes of the
    graph; made once."""
    known: dict[str, Replacement] | None = index.known.get(Unrolled)
    if known is None:
        known = index.known[Unrolled] = {} if index.graph.gradients else _found(index, networks)
    return known


class Stepped:
    """Steps of a loop, of a cell that PyTorch has no call for, are one call that makes a step's calls for each.

    Holds where `Unrolled` does, of any cell. What no step makes is multiplied for all steps at once, columns of a layer
    apart, so sums of a product are added in another order. Worth it where a kernel takes the call.
    """

    name = "stepped"
    effect = "runs all steps of a loop in one kernel, and what follows each of them once"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        return replacements_by_steps(index).get(node)


def replacements_by_steps(index: GraphIndex) -> dict[str, Replacement]:
    """As `replacements`, of other cells."""
    known: dict[str, Replacement] | None = index.known.get(Stepped)
    if known is None:
        made = {} if index.graph.gradients else _found(index, others)
        known = index.known[Stepped] = {name: each for name, each in made.items() if name not in replacements(index)}
    return known


def _found(index: GraphIndex, find: Callable[[GraphIndex], Iterable[Network]]) -> dict[str, Replacement]:
    """Loops are sought where calls that write over what nobody reads any more make new tensors instead. Such calls may
    stay in the graph, so what is read in a loop's place, and what it made, may be written only by calls that go."""
    found = dict[str, Replacement]()
    new, writers = in_place.with_new_results(index), in_place.writers(index)

    def writers_of(tensor: str) -> Set[str]:
        return writers.get(index.root.get(tensor, ""), frozenset())

    every = [*find(new)]
    states = frozenset(state for network in every for lanes in network.states for state in lanes)
    for network in every:
        with contextlib.suppress(BadInput, RuntimeError, TypeError, IndexError):  # of a call on other shapes
            made = _Loop(new, network, states, writers_of).replacement()
            removed = frozenset(made.removed if made is not None else ())
            if made is not None and all(writers_of(tensor) <= removed for tensor in _tensors(made)):
                found[new.producer(network.states[0][-1]) or ""] = made
    return found


def _tensors(made: Replacement) -> set[str]:
    """All that the new calls read and make."""
    read = {name for node in made.added for name in tensor_names(aten.arguments_of(node))}
    return read | {result.name for node in made.added for result in node.results}


class _Loop:
    """One network, and the calls that come in its place."""

    def __init__(
        self, index: GraphIndex, network: Network, states: Set[str], writers_of: Callable[[str], Set[str]]
    ) -> None:
        """`states`: of all loops. `writers_of`: calls of the real graph that write a tensor's memory in place."""
        self._index, self._network, self._states, self._writers_of = index, network, states, writers_of
        self._made = [state for lanes in network.states for state in lanes if state]
        self._gone = {name for name in map(index.producer, self._made) if name is not None}
        self._first = min(self._gone, key=index.position.__getitem__)
        """The call that is the first to make a state."""
        self._draft = Draft(index)
        self._dependents = dependents_of(index, self._made, self._first)
        """Tensors that depend on what a step makes."""
        self._renamed: dict[str, str] = {}
        """What the graph reads → what it reads in its stead."""
        self._shown = set[str]()
        """Memory of the draft that outputs show."""

    def replacement(self) -> Replacement | None:
        if not self._holds():
            return None
        steps, ends = self._network.call(self._draft, Together(self._index, self._draft, self._states, {}))
        self._join(steps)
        return assembled(self._index, self._draft, self._gone, self._dependents, {**steps, **ends}, self._renamed)

    # ---- whether it holds

    def _holds(self) -> bool:
        index, network = self._index, self._network
        given, inputs = {*network.parameters, *network.begin, *network.inputs}, network.inputs
        if any(map(index.is_written, (*given, *self._made))) or not self._dependents.isdisjoint(given) or not inputs:
            return False
        state, shapes = shape(index, Named(network.states[0][0])), [shape(index, Named(name)) for name in inputs]
        if len(state) != 2 or any(len(each) != 2 or each[0] != state[0] for each in shapes):
            return False
        if any(shape(index, Named(name)) != state for name in network.begin):
            return False
        kinds = {index.spec(name).dtype for name in (*given, *self._made)}
        if len(kinds) != 1 or not dtypes.to_torch(kinds.pop()).is_floating_point:
            return False
        return network.shows_all or self._keeps_to_itself()

    def _keeps_to_itself(self) -> bool:
        """Whether nothing else reads what steps make beside their hidden states: the last memory alone is kept."""
        index, shown = self._index, {*self._network.states[0], *(lanes[-1] for lanes in self._network.states)}
        made = {name for call in self._network.calls for name in index.results(call)} - shown
        readers = {user for name in made for user in index.users(name)}
        return readers <= self._network.calls and made.isdisjoint(index.outputs)

    # ---- what follows each step

    def _join(self, steps: Elements) -> None:
        """Has what stacks or joins what is done to states read the sequence."""
        together = Together(self._index, self._draft, self._states, steps)
        for join in joins(self._index, self._index.position[self._first]):
            if self._dependents.isdisjoint(join.lanes) or not self._writers_of(join.result) <= join.calls:
                continue
            try:
                made = together.already(join.lanes)
                done = made is not None and self._joined(join, made)
            except (BadInput, RuntimeError):  # of tensors of several shapes
                done = False
            if done:
                self._gone |= join.calls

    def _joined(self, join: Join, made: Named) -> bool:
        """Whether the result of a join is now made of what was brought together."""
        draft, name, dim = self._draft, join.result, join.dim
        rank = len(draft.meta(made.name).shape) - 1
        if dim:
            order = [*range(1, dim + 1), 0, *range(dim + 1, rank + 1)]
            made = draft.view(draft.free(f"{name}_turned"), "aten.permute.default", made, order)
        spec, copies = self._index.spec(name), {"memory_format": torch.contiguous_format}
        if not join.is_new and dim:
            made = draft.call(draft.free(f"{name}_in_rows"), "aten.clone.default", made, **copies)
        if not join.is_new:
            made = draft.view(draft.free(f"{name}_joined"), "aten.view.default", made, list(spec.shape))
        if dtypes.spec_of(draft.meta(made.name)) != spec or not self._may_be(name, made.name):
            made = draft.call(draft.free(f"{name}_apart"), "aten.clone.default", made, **copies)
            if dtypes.spec_of(draft.meta(made.name)) != spec:
                return False
            draft.rename(made, name)
        else:
            self._renamed[name] = made.name
        return True

    def _may_be(self, result: str, made: str) -> bool:
        """Whether a result may be a tensor of the draft: memory that an output shows is its own."""
        index, views = self._index, {each.name: each.alias_of for call in self._draft.nodes for each in call.results}
        if index.root[result] not in {index.root[output] for output in index.outputs}:
            return True
        while views.get(made):
            made = views[made]
        if made not in views or made in self._shown:
            return False
        self._shown.add(made)
        return True
