"""The rule of loops that were unrolled: steps of a recurrent network as one call on the whole sequence.

The one idea: a loop in Python is a chain of equal cells in the graph, each with its hidden state from the one before.
PyTorch has a call for all of them, whose weights a kernel may keep on chip (`emit/cuda/recurrent.py`); what the steps
read, and what is done to each state alike, is done once to all steps. The cells are found in `cells`, what lies
together in `together`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set

import torch

from agent_synthesis.graphs import in_place
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, operation, shape
from agent_synthesis.rewrite.loops.assembly import assembled, dependents_of
from agent_synthesis.rewrite.loops.cells import Cell, Chain, Factor, Place, chains
from agent_synthesis.rewrite.loops.joins import Join, joins
from agent_synthesis.rewrite.loops.together import Together
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, dtypes, result_specs
from warpsmith.program_steps import tensor_names

_ANYWHERE = torch.device("cpu")
"""Stands for the device of whoever runs it."""


class Unrolled:
    """Cells behind each other, `h = tanh(W x + U h + b)` and PyTorch's own, are a recurrent network on their inputs.

    Holds where the cells are equal, at least four, and no input depends on a state. Weights may be columns of one, an
    input projected before the loop. What is done to each state alike, such as a layer, is done to the sequence. Sums of
    a product are added in another order; on a GPU, PyTorch's own call may round its factors to TF32.
    """

    name = "unrolled"
    effect = "runs all steps of a loop as one recurrent network, and what follows each of them once"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        return replacements(index).get(node)


def replacements(index: GraphIndex) -> dict[str, Replacement]:
    """For each loop, by the call that ends its last step, what becomes of the graph; made once."""
    known: dict[str, Replacement] | None = index.known.get(Unrolled)
    if known is None:
        known = index.known[Unrolled] = {} if index.graph.gradients else _found(index)
    return known


def _found(index: GraphIndex) -> dict[str, Replacement]:
    """Loops are sought where calls that write over what nobody reads any more make new tensors instead. Such calls may
    stay in the graph, so what is read in a loop's place, and what it made, may be written only by calls that go."""
    found = dict[str, Replacement]()
    new, writers = in_place.with_new_results(index), in_place.writers(index)

    def writers_of(tensor: str) -> Set[str]:
        return writers.get(index.root.get(tensor, ""), frozenset())

    loops = chains(new)
    states = frozenset(state for chain in loops for cell in chain.cells for state in cell.states)
    for chain in loops:
        with contextlib.suppress(BadInput, RuntimeError, TypeError, IndexError):  # of a call on other shapes
            made = _Loop(new, chain, states, writers_of).replacement()
            removed = frozenset(made.removed if made is not None else ())
            if made is not None and all(writers_of(tensor) <= removed for tensor in _tensors(made)):
                found[chain.cells[-1].node] = made
    return found


def _tensors(made: Replacement) -> set[str]:
    """All that the new calls read and make."""
    read = {name for node in made.added for name in tensor_names(aten.arguments_of(node))}
    return read | {result.name for node in made.added for result in node.results}


class _Loop:
    """One chain, and the calls that come in its place."""

    def __init__(
        self, index: GraphIndex, chain: Chain, states: Set[str], writers_of: Callable[[str], Set[str]]
    ) -> None:
        """`states`: of all loops. `writers_of`: calls of the real graph that write a tensor's memory in place."""
        self._index, self._chain, self._states, self._writers_of = index, chain, states, writers_of
        self._cells, self._first = chain.cells, chain.cells[0]
        self._draft = Draft(index)
        self._state = Named(self._first.states[0])
        self._dependents = dependents_of(
            index, [state for cell in self._cells for state in cell.states], self._first.node
        )
        """Tensors that depend on what a step makes."""
        self._gone = {cell.node for cell in self._cells}
        self._renamed: dict[str, str] = {}
        """What the graph reads → what it reads in its stead."""
        self._shown = set[str]()
        """Memory of the draft that outputs show."""

    def replacement(self) -> Replacement | None:
        if not self._holds():
            return None
        self._call()
        self._join()
        return assembled(self._index, self._draft, self._gone, self._dependents, self._states_of(), self._renamed)

    # ---- whether it holds

    def _inputs(self, cell: Cell) -> list[str]:
        """What a step reads beside weights and its own state."""
        own = cell.part(self._chain.place)
        parts = [part.tensor for factor in cell.factors for part in factor.parts if part is not own]
        return [*parts, *cell.projected]

    def _holds(self) -> bool:
        index, first = self._index, self._first
        weights = [factor.weight for factor in first.factors] + list(first.biases)
        begin = [first.part(self._chain.place).tensor, *filter(None, [first.memory])]
        inputs = [tensor for cell in self._cells for tensor in self._inputs(cell)]
        made = [state for cell in self._cells for state in cell.states]
        if any(map(index.is_written, (*weights, *begin, *inputs, *made))):
            return False
        if not self._dependents.isdisjoint((*weights, *inputs, *begin)) or not inputs:
            return False
        state, shapes = shape(index, self._state), [shape(index, Named(name)) for name in inputs]
        if len(state) != 2 or any(len(each) != 2 or each[0] != state[0] for each in shapes):
            return False
        if any(shape(index, Named(name)) != state for name in begin):
            return False
        kinds = {index.spec(name).dtype for name in (*weights, *begin, *inputs, *made)}
        if len(kinds) != 1 or not dtypes.to_torch(kinds.pop()).is_floating_point:
            return False
        memories = {state for cell in self._cells[:-1] for state in cell.states[1:]}  # of the last alone it is kept
        readers = {user for state in memories for user in index.users(state)} - {cell.node for cell in self._cells}
        return not readers and memories.isdisjoint(index.outputs)

    # ---- the call

    def _call(self) -> None:
        """Adds the recurrent call; its results' names are in `_results`."""
        draft, first, kind = self._draft, self._first, self._first.kind
        together = Together(self._index, draft, self._states, {})
        weights, values = self._weights(together)
        begin = [first.part(self._chain.place).tensor, *filter(None, [first.memory])]
        states = [draft.view(draft.free(f"{name}_first"), "aten.unsqueeze.default", Named(name), 0) for name in begin]
        name = draft.free(kind)
        self._results = [draft.free(f"{name}_{place}") for place in range(1 + len(states))]
        hx = states if kind == "lstm" else states[0]
        has_biases = len(weights) > 2
        options = (has_biases, 1, 0.0, False, False, False)
        with result_specs.known():
            draft.calls(name, self._results, f"aten.{kind}.input", values, hx, weights, *options)

    def _weights(self, together: Together) -> tuple[list[Named], Named]:
        """(weights of the input and of the state, and biases if any; the sequence that is read)."""
        cells, first, own = self._cells, self._first, self._chain.place
        biases = [Named(name) for name in first.biases]
        if first.is_called:
            weights = [Named(each.weight) for each in first.factors]
            return [*weights, *biases], together.of([cell.factors[0].parts[0].tensor for cell in cells])
        columns = [self._columns(first.factors[place[0]], *ends) for place, ends in self._pieces()]
        values = [together.of([cell.part(place).tensor for cell in cells]) for place in first.places() if place != own]
        for number in range(len(first.projected)):
            weight, bias, value = self._projection(together, [cell.projected[number] for cell in cells])
            columns, values, biases = [*columns, weight], [*values, value], [*biases, *bias]
        state, factor = first.part(own), first.factors[own[0]]
        recurrent = self._columns(factor, state.begin, state.begin + state.width)
        return [self._beside(columns, "weight", 1), recurrent, *self._biases(biases)], self._beside(values, "input", 2)

    def _pieces(self) -> list[tuple[Place, tuple[int, int]]]:
        """Columns of weights that inputs are multiplied by, in order, neighbours of one weight together: where the
        first of them stands, its first column and the last one's end."""
        found = list[tuple[Place, tuple[int, int]]]()
        for place in self._first.places():
            if place == self._chain.place:
                continue
            part = self._first.part(place)
            first, begin, end = place, part.begin, part.begin + part.width
            if found and found[-1][0][0] == place[0] and found[-1][1][1] == begin:
                first, (begin, _) = found.pop()
            found.append((first, (begin, end)))
        return found

    def _columns(self, factor: Factor, begin: int, end: int) -> Named:
        """Columns of a weight that has a row for each unit, as a view."""
        draft, of, weight = self._draft, Named(factor.weight), factor.weight
        if factor.is_turned:
            of = draft.view(draft.free(f"{weight}_turned"), "aten.transpose.int", of, 0, 1)
        if (begin, end) == (0, draft.meta(of.name).shape[1]):
            return of
        return draft.view(draft.free(f"{weight}_columns"), "aten.slice.Tensor", of, 1, begin, end)

    def _beside(self, pieces: Sequence[Named], what: str, dim: int) -> Named:
        if len(pieces) == 1:
            return pieces[0]
        return self._draft.call(self._draft.free(f"{self._state.name}_{what}"), "aten.cat.default", [*pieces], dim)

    def _biases(self, biases: Sequence[Named]) -> list[Named]:
        """Two biases or none: further ones are added to the first, and zeros stand for a second."""
        draft, state = self._draft, self._state
        if not biases:
            return []
        first, *others = biases
        while len(others) > 1:
            first = draft.call(draft.free(f"{state.name}_bias"), "aten.add.Tensor", first, others.pop())
        if not others:
            like = draft.meta(first.name)
            options = {"dtype": like.dtype, "device": _ANYWHERE, "pin_memory": False}
            others = [draft.call(draft.free(f"{state.name}_bias"), "aten.zeros.default", [like.shape[0]], **options)]
        return [first, *others]

    def _projection(self, together: Together, lanes: Sequence[str]) -> tuple[Named, list[Named], Named]:
        """(weight, biases, sequence) of inputs that were projected for all steps at once. Raises BadInput."""
        run = together.run(lanes)
        if run is None or run.keeps or run.dimension == len(shape(self._index, run.base)) - 1:
            raise BadInput("an input is added that is no row of a tensor")
        call, extents = together.numbering.maker(run.base), shape(self._index, run.base)
        if operation(call) in ("view", "reshape", "_unsafe_view") and call is not None:
            call = together.numbering.maker(arguments(call)["self"])
        given = arguments(call) if call is not None and call.target == "aten.linear.default" else {}
        if not given or extents[-1] != shape(self._index, given["weight"])[0]:
            raise BadInput("an input is added that is no layer's")
        if any(self._index.is_written(each.name) for each in given.values() if isinstance(each, Named)):
            raise BadInput("an input's layer is written")
        values, columns = given["input"], shape(self._index, given["weight"])[1]
        if shape(self._index, values) != [*extents[:-1], columns]:
            wanted = self._draft.free(f"{values.name}_steps")
            values = self._draft.view(wanted, "aten.view.default", values, [*extents[:-1], columns])
        bias = [] if given["bias"] is None else [given["bias"]]
        return given["weight"], bias, together.in_a_row(values, run, len(lanes))

    # ---- what follows each step

    def _join(self) -> None:
        """Has what stacks or joins what is done to states read the sequence."""
        sequence = Named(self._results[0])
        steps = {cell.states[0]: (sequence, step) for step, cell in enumerate(self._cells)}
        together = Together(self._index, self._draft, self._states, steps)
        for join in joins(self._index, self._index.position[self._first.node]):
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

    def _states_of(self) -> dict[str, tuple[Named, int]]:
        """For each state that the call gives the tensor and the place in it where it lies."""
        sequence, *last = map(Named, self._results)
        found = {cell.states[0]: (sequence, step) for step, cell in enumerate(self._cells)}
        return found | {state: (of, 0) for state, of in zip(self._cells[-1].states, last, strict=True)}
