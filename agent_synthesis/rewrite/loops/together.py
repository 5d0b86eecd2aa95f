"""Tensors that the steps of a loop read or make, as one tensor with a step more in front.

The one idea: what each step does alike to tensors of its own is done once to all of them (superword-level parallelism,
Larsen and Amarasinghe, PLDI 2000), from what is wanted together back to where it lies together already: a view of a
sequence. What is done otherwise in one step is stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.calls.recurrence import is_call
from agent_synthesis.rewrite.calls import Draft, Named, arguments, operation, shape
from agent_synthesis.rewrite.loops.numbering import Numbering
from warpsmith.errors import BadInput
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2

Lanes = tuple[str, ...]
"""Tensors of one shape, one a step."""

_ALONG_ROWS = {
    "clone": "self", "contiguous": "self", "dropout": "input", "embedding": "indices", "layer_norm": "input",
    "linear": "input", "matmul": "self", "mm": "self", "rms_norm": "input", "to": "self",
}  # fmt: skip
"""Operation → the argument that alone may differ from step to step; the dimension of steps is one more of rows."""
_DIMENSIONS = {
    "cat": ("dim",), "log_softmax": ("dim",), "mean": ("dim",), "select": ("dim",), "slice": ("dim",),
    "softmax": ("dim",), "squeeze": ("dim",), "sum": ("dim",), "transpose": ("dim0", "dim1"), "unsqueeze": ("dim",),
}  # fmt: skip
"""Operation → arguments that name dimensions."""
_SHAPES = {"reshape": "shape", "view": "size"}
_MOST_CALLS = 32
"""Of a step, behind each other."""
_PARTS = frozenset({"chunk", "split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split"})


@dataclass(frozen=True)
class Run:
    """Lanes that lie one after the other in a tensor."""

    base: Named
    dimension: int
    first: int
    step: int
    keeps: bool
    """Whether each lane has the dimension still, with one element."""


class Together:
    """Lanes brought together, by calls that are added to a draft; the same lanes once."""

    def __init__(
        self, index: GraphIndex, draft: Draft, states: Set[str], sequences: Mapping[str, tuple[Named, int]]
    ) -> None:
        """`states`: what loops make step by step, and so nothing makes together; `sequences`: tensors that are an
        element of another, along its first dimension."""
        self._index, self._draft, self._states, self._sequences = index, draft, states, sequences
        self.numbering = Numbering.of(index)
        self._found: dict[Lanes, Named] = {}
        self._depth = 0

    def of(self, lanes: Sequence[str]) -> Named:
        """[len(lanes), *shape of a lane]. Raises BadInput, or what ATen raises on bad arguments."""
        lanes = tuple(map(self.numbering.first, lanes))
        if self.already(lanes) is None:
            self._found[lanes] = self._stacked(lanes)
        return self._found[lanes]

    def already(self, lanes: Sequence[str]) -> Named | None:
        """Likewise, where it is more than to stack them."""
        lanes = tuple(map(self.numbering.first, lanes))
        if any(map(self._index.is_written, lanes)):
            raise BadInput("what is brought together is written in place, and may be something else by then")
        if lanes not in self._found and (made := self._same(lanes) or self._in_a_row(lanes) or self._alike(lanes)):
            self._found[lanes] = made
        return self._found.get(lanes)

    def in_a_row(self, base: Named, run: Run, count: int) -> Named:
        """`count` elements of a tensor, the dimension they are numbered by in front, as a view if none goes back."""
        draft, stop = self._draft, run.first + run.step * (count - 1)
        rank = len(draft.meta(base.name).shape)
        extent = draft.meta(base.name).shape[run.dimension]
        low, high = min(run.first, stop), max(run.first, stop)
        if run.dimension:
            order = [run.dimension, *(each for each in range(rank) if each != run.dimension)]
            base = draft.view(self._name(base, "steps"), "aten.permute.default", base, order)
        if (low, high, abs(run.step)) != (0, extent - 1, 1):
            of = (0, low, high + 1, abs(run.step))
            base = draft.view(self._name(base, "steps"), "aten.slice.Tensor", base, *of)
        if run.step < 0:
            base = draft.call(self._name(base, "backwards"), "aten.flip.default", base, [0])
        if run.keeps:
            base = draft.view(self._name(base, "step"), "aten.unsqueeze.default", base, run.dimension + 1)
        return base

    def run(self, lanes: Sequence[str]) -> Run | None:
        """Where lanes lie one after the other; None where they do not."""
        found = [self._element(self.numbering.first(lane)) for lane in lanes]
        first, second = found[0], found[1 if len(found) > 1 else 0]
        if first is None or second is None:
            return None
        step = second.first - first.first or 1
        wanted = [replace(first, first=first.first + place * step) for place in range(len(found))]
        return replace(first, step=step) if found == wanted else None

    def _element(self, lane: str) -> Run | None:
        """The tensor that a lane is an element of, and which."""
        if (known := self._sequences.get(lane)) is not None:
            return Run(known[0], 0, known[1], 1, keeps=False)
        call = self.numbering.maker(Named(lane))
        kind = operation(call)
        if call is None or kind not in ("select", "slice", *_PARTS):
            return None
        given = arguments(call)
        base = Named(self.numbering.first(given["self"].name))
        extents = shape(self._index, base)
        dimension = given["dim"] % len(extents)
        if kind == "select":
            return self._of_state(base) or Run(base, dimension, given["index"] % extents[dimension], 1, keeps=False)
        if kind == "unbind":
            return Run(base, dimension, [each.name for each in call.results].index(lane), 1, keeps=False)
        if shape(self._index, Named(lane))[dimension] != 1:
            return None
        if kind == "slice":
            return Run(base, dimension, (given["start"] or 0) % extents[dimension], 1, keeps=True)
        names = [each.name for each in call.results]
        if not all(each.name and each.spec.shape[dimension] == 1 for each in call.results):
            return None
        return Run(base, dimension, names.index(lane), 1, keeps=True)

    def _of_state(self, state: Named) -> Run | None:
        """The last element of a recurrent call's sequence, where that is the hidden state it ends with."""
        call = self.numbering.maker(state)
        if call is None or not is_call(call) or state.name != call.results[1].name or not call.results[0].name:
            return None
        given, steps = arguments(call), call.results[0].spec.shape[0]
        is_plain = given["num_layers"] == 1 and not given["bidirectional"] and not given["batch_first"]
        return Run(Named(call.results[0].name), 0, steps - 1, 1, keeps=False) if is_plain else None

    def _same(self, lanes: Lanes) -> Named | None:
        if len(set(lanes)) > 1 or lanes[0] in self._states:
            return None
        one = self._draft.view(self._name(Named(lanes[0]), "step"), "aten.unsqueeze.default", Named(lanes[0]), 0)
        extents = [len(lanes), *shape(self._index, Named(lanes[0]))]
        return self._draft.view(self._name(Named(lanes[0]), "steps"), "aten.expand.default", one, extents)

    def _in_a_row(self, lanes: Lanes) -> Named | None:
        run = self.run(lanes)
        return None if run is None else self.in_a_row(run.base, run, len(lanes))

    def _stacked(self, lanes: Lanes) -> Named:
        return self._draft.call(self._name(Named(lanes[0]), "steps"), "aten.stack.default", [*map(Named, lanes)])

    def _alike(self, lanes: Lanes) -> Named | None:
        """What one call makes of what the calls of all lanes read; None where they differ, or mix their rows."""
        index, makers = self._index, [self.numbering.maker(Named(lane)) for lane in lanes]
        first = makers[0]
        if first is None or not self._states.isdisjoint(lanes) or self._depth > _MOST_CALLS:
            return None
        for maker in makers:
            if (
                maker is None
                or maker.target != first.target
                or len(maker.results) != 1
                or aten.is_outside(maker.target)
            ):
                return None
            if maker.mutates or not index.is_pure(maker.name) or maker.results[0].spec != first.results[0].spec:
                return None
            if any(map(index.is_written, index.reads(maker.name))):
                return None
        calls = [arguments(maker) for maker in makers if maker is not None]
        varying = [name for name in calls[0] if any(self._differs(call[name], calls[0][name]) for call in calls)]
        target = _of_all(index, first, calls[0], varying)
        if target is None or not all(_is_alike(call[name], calls[0][name]) for call in calls for name in varying):
            return None
        given = _shifted(operation(first), calls[0], len(lanes))
        self._depth += 1
        for name in varying:
            if isinstance(calls[0][name], Named):
                given[name] = self.of([call[name].name for call in calls])
            else:
                places = zip(*(call[name] for call in calls), strict=True)
                given[name] = [self.of([each.name for each in place]) for place in places]
        self._depth -= 1
        return self._done(first, target, given, len(lanes))

    def _done(self, first: graph_pb2.Node, target: str, given: dict[str, Any], count: int) -> Named | None:
        name, draft = self._name(Named(first.results[0].name), "steps"), self._draft
        positional = {each.name for each in aten.resolve(first.target)._schema.arguments if not each.kwarg_only}
        args = [value for argument, value in given.items() if argument in positional]
        others = {argument: value for argument, value in given.items() if argument not in positional}
        made = len(draft.nodes)
        try:
            result = (draft.view if first.results[0].alias_of else draft.call)(name, target, *args, **others)
        except (BadInput, RuntimeError, TypeError, IndexError):
            return None
        spec, expected = draft.nodes[made].results[0].spec, first.results[0].spec
        if list(spec.shape) == [count, *expected.shape] and spec.dtype == expected.dtype:
            return result
        del draft.nodes[made:]
        return None

    def _differs(self, value: object, other: object) -> bool:
        if isinstance(value, Named) and isinstance(other, Named):
            return self.numbering.first(value.name) != self.numbering.first(other.name)
        if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
            return any(self._differs(*pair) for pair in zip(value, other, strict=True))
        return value != other

    def _name(self, of: Named, what: str) -> str:
        return self._draft.free(of.name if of.name.endswith(f"_{what}") else f"{of.name}_{what}")


def _is_alike(value: object, other: object) -> bool:
    """Whether both are tensors, or lists of as many."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(isinstance(each, Named) for each in (*value, *other))
    return isinstance(value, Named) and isinstance(other, Named)


def _of_all(index: GraphIndex, call: graph_pb2.Node, given: Mapping[str, Any], varying: Sequence[str]) -> str | None:
    """The operation that does the same to all steps at once; None where there may be none."""
    kind, rank = operation(call), len(call.results[0].spec.shape)
    if kind in _ALONG_ROWS:
        if varying != [_ALONG_ROWS[kind]]:
            return None
        is_product = kind in ("matmul", "mm")
        ranks = [len(shape(index, each)) for each in given.values() if isinstance(each, Named)]
        return None if is_product and ranks != [2, 2] else "aten.matmul.default" if is_product else call.target
    if kind in _DIMENSIONS or kind in _SHAPES:
        names = _DIMENSIONS.get(kind, ())
        is_whole = varying == [next(iter(given))] and all(given.get(name) not in (None, []) for name in names)
        return call.target if is_whole else None
    is_pointwise = torch.Tag.pointwise in aten.resolve(call.target).tags
    if not is_pointwise or any(isinstance(each, list) for each in given.values()):
        return None
    ranks = [len(shape(index, given[name])) for name in varying]
    return call.target if varying and all(each == rank for each in ranks) else None


def _shifted(kind: str, given: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Arguments of the call on all steps, whose dimensions are one further back."""

    def further(dim: Any) -> Any:
        return [further(each) for each in dim] if isinstance(dim, list) else dim + (dim >= 0)

    if kind in _SHAPES:
        return {name: [count, *value] if name == _SHAPES[kind] else value for name, value in given.items()}
    names = _DIMENSIONS.get(kind, ())
    return {name: further(value) if name in names else value for name, value in given.items()}
