"""Loops of any cell in a graph: which tensors are states, step by step, and what all steps do alike to make them.

The one idea: the steps of a loop multiply their states by the same weights, so states are found as what stands, product
by product, beside a weight, each made of the one before. From there back, the tensors of all steps are looked at
together (lanes): calls that are alike make them, of the states before or of what no step makes. Knows no formula.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Named, arguments
from agent_synthesis.rewrite.loops.numbering import Numbering
from agent_synthesis.rewrite.loops.products import product_of
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2

Lanes = tuple[str, ...]
"""Tensors of one shape, one a step."""
LEAST_STEPS = 4
"""Of a loop that is worth a call of its own."""
_MOST_CALLS = 256
"""Of a step."""
_MOST_STATES = 4
_CUTS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
"""Of a chain, how many are no states of a loop: before it, and behind it where others read the same weight."""


@dataclass(frozen=True)
class Alike:
    """Calls of all steps that differ in tensors alone."""

    first: graph_pb2.Node
    result: int
    given: dict[str, Any]
    """The first step's arguments by name."""
    lanes: dict[str, Lanes | list[Lanes]]
    """Arguments that are tensors, or lists of them."""


class Differs(Exception):
    """The steps do not do the same."""


class Alikes:
    """What makes lanes, looked up in a graph."""

    def __init__(self, index: GraphIndex) -> None:
        self.index, self.numbering = index, Numbering.of(index)
        self._known: dict[Lanes, Alike | None] = {}

    def of(self, lanes: Lanes) -> Alike | None:
        """The calls that make them; None where they are sources, differ, or are no pure calls of ATen."""
        if lanes not in self._known:
            self._known[lanes] = self._found(lanes)
        return self._known[lanes]

    def _found(self, lanes: Lanes) -> Alike | None:
        index = self.index
        makers = [self.numbering.maker(Named(lane)) for lane in lanes]
        first = makers[0]
        if first is None or aten.is_outside(first.target):
            return None
        place = [each.name for each in first.results].index(lanes[0])
        for lane, maker in zip(lanes, makers, strict=True):
            if maker is None or maker.target != first.target or len(maker.results) != len(first.results):
                return None
            if maker.results[place].name != lane or maker.results[place].spec != first.results[place].spec:
                return None
            if maker.mutates or not index.is_pure(maker.name) or any(map(index.is_written, index.reads(maker.name))):
                return None
        calls = [arguments(maker) for maker in makers if maker is not None]
        found: dict[str, Lanes | list[Lanes]] = {}
        for name, value in calls[0].items():
            values = [call[name] for call in calls]
            if isinstance(value, Named):
                if not all(isinstance(each, Named) for each in values):
                    return None
                found[name] = self.first_of(each.name for each in values)
            elif isinstance(value, list) and value and all(isinstance(each, Named) for each in value):
                if not all(_is_list_like(each, value) for each in values):
                    return None
                found[name] = [self.first_of(each.name for each in some) for some in zip(*values, strict=True)]
            elif any(each != value for each in values):
                return None
        return Alike(first, place, calls[0], found)

    def first_of(self, names: Iterable[str]) -> Lanes:
        """By the first tensors that are equal."""
        return tuple(map(self.numbering.first, names))


def _is_list_like(value: object, other: list[Any]) -> bool:
    return isinstance(value, list) and len(value) == len(other) and all(isinstance(each, Named) for each in value)


@dataclass(frozen=True)
class Loop:
    """Steps that are alike, at least `LEAST_STEPS`."""

    states: tuple[Lanes, ...]
    """Of each state what it is after each step; the first is what is multiplied. "" for what nobody makes any more."""
    begin: tuple[str, ...]
    """Of each state what it is before the first step."""
    alikes: Alikes = field(compare=False)
    inner: frozenset[Lanes] = field(compare=False)
    """What steps make, states included."""

    @property
    def count(self) -> int:
        """Of steps."""
        return len(self.states[0])

    def before(self, state: int) -> Lanes:
        """A state ahead of each step."""
        return (self.begin[state], *self.states[state][:-1])


def loops(index: GraphIndex) -> list[Loop]:
    """Loops of a graph, each call in one of them at most; of several ways to see one that with the fewest states."""
    alikes, found = Alikes(index), dict[Loop, None]()
    for parts in _states_of_products(index, alikes.numbering):
        depths = _Depths(index, alikes.numbering, parts)
        for chain in depths.chains():
            for first, ends in _CUTS:
                with contextlib.suppress(Differs):
                    found[_Steps(alikes, depths, chain[first : len(chain) - ends]).loop()] = None
                    break
    taken, result = set[str](), list[Loop]()
    for loop in sorted(found, key=lambda loop: (len(loop.states), -loop.count)):
        made = {lane for lanes in loop.inner for lane in lanes}
        if taken.isdisjoint(made):
            taken |= made
            result.append(loop)
    return result


def _states_of_products(index: GraphIndex, numbering: Numbering) -> list[list[str]]:
    """For each place beside a weight all that stands there, in order, where that is enough for a loop."""
    found: dict[tuple[object, ...], dict[str, None]] = {}
    for node in index.graph.nodes:
        made = node.results[0].name if node.results else ""
        product = product_of(index, numbering, Named(made)) if made else None
        if product is None:
            continue
        for part in product[0].parts:
            key = (product[0].weight, product[0].is_turned, part.begin, part.width)
            found.setdefault(key, {})[part.tensor] = None
    return [list(parts) for parts in found.values() if len(parts) >= LEAST_STEPS]


_MIXED = ""


class _Depths:
    """Of some tensors which are made of which, and of each tensor of a graph the last of them that it depends on."""

    def __init__(self, index: GraphIndex, numbering: Numbering, parts: Sequence[str]) -> None:
        self._parents, self._depths = dict[str, str](), dict[str, int]()
        self._last, self.made_of = dict[str, str](), dict[str, list[str]]()
        wanted = {*parts}
        for source in wanted & index.sources.keys():
            self._put(source, None)
        for node in index.graph.nodes:
            last = self._latest({self._last[name] for name in index.reads(node.name) if name in self._last})
            for result in index.results(node.name):
                if result in wanted and last != _MIXED:
                    self._put(result, last)
                elif last is not None:
                    self._last[result] = last
                    self.made_of.setdefault(last, []).append(numbering.first(result))

    def depth(self, tensor: str) -> int:
        """How many of them it is behind; -1 for none. Raises Differs where they are no chain."""
        last = self._last.get(tensor)
        if last == _MIXED:
            raise Differs
        return -1 if last is None else self._depths[last]

    def is_behind(self, tensor: str, part: str) -> bool:
        return self._last.get(tensor) == part

    def chains(self) -> Iterator[list[str]]:
        """Each made of the one before, the longest first."""
        parents, taken = {*self._parents.values()}, set[str]()
        for end in sorted(self._depths.keys() - parents, key=lambda part: -self._depths[part]):
            chain = [end]
            while (parent := self._parents.get(chain[-1])) is not None and parent not in taken:
                chain.append(parent)
            taken.update(chain[:-1])
            if len(chain) >= LEAST_STEPS:
                yield chain[::-1]

    def _put(self, part: str, parent: str | None) -> None:
        self._last[part], self._depths[part] = part, 0
        if parent is not None:
            self._parents[part], self._depths[part] = parent, self._depths[parent] + 1

    def _latest(self, parts: Collection[str]) -> str | None:
        """The one that all others are ahead of."""
        if not parts or _MIXED in parts:
            return _MIXED if parts else None
        ordered = sorted(parts, key=self._depths.__getitem__)
        last = at = ordered.pop()
        while ordered:
            while self._depths[at] > self._depths[ordered[-1]]:
                at = self._parents[at]
            if at != ordered.pop():
                return _MIXED
        return last


class _Steps:
    """The steps between the tensors of a chain, and the last one."""

    def __init__(self, alikes: Alikes, depths: _Depths, chain: list[str]) -> None:
        self._alikes, self._depths, self._chain = alikes, depths, chain
        self._base = depths.depth(chain[0]) if chain else 0
        self._known = dict[Lanes, None]()
        self._states = list[Lanes]()
        """Ahead of each step."""

    def loop(self) -> Loop:
        """Raises Differs."""
        if len(self._chain) < LEAST_STEPS:
            raise Differs
        *before, last = self._chain
        made = tuple(self._chain[1:])
        end = self._end(last)
        if end:
            before, made = self._chain, (*made, end)
        self._try(tuple(before), made)
        states = [made, *map(self._after, self._states[1:])]
        begin = tuple(lanes[0] for lanes in self._states)
        if len(made) < LEAST_STEPS:
            raise Differs
        return Loop(tuple(states), begin, self._alikes, frozenset(self._known))

    def _end(self, last: str) -> str:
        """What the last step makes of the last state that is multiplied; "" for what nobody reads."""
        target = self._alikes.numbering.maker(Named(last))
        for other in dict.fromkeys(self._depths.made_of.get(last, ())):
            maker = self._alikes.numbering.maker(Named(other))
            if maker is None or target is None or maker.target != target.target:
                continue
            with contextlib.suppress(Differs):
                self._try(tuple(self._chain), (*self._chain[1:], other))
                return other
        return ""

    def _try(self, before: Lanes, made: Lanes) -> None:
        self._known, self._states = {}, [before]
        self._walk(made)
        for lanes in self._states[1:]:  # which grows
            self._walk(lanes[1:])
            if len(self._states) > _MOST_STATES:
                raise Differs

    def _after(self, state: Lanes) -> Lanes:
        """What a state is after each step: by the last one, if it makes what an other needs."""
        ends = (lanes for lanes in self._known if len(lanes) == len(state) and lanes[:-1] == state[1:])
        return next(ends, (*state[1:], ""))

    def _walk(self, lanes: Lanes) -> None:
        """Adds what steps make on the way to some tensors; a lane fewer where the last step makes none."""
        if lanes in self._known or self.is_given(lanes) or any(state[: len(lanes)] == lanes for state in self._states):
            return
        depths = [self._depths.depth(lane) - self._base for lane in lanes]
        is_early = all(depth < step for step, depth in enumerate(depths[1:], 1))
        made = self._alikes.of(lanes)
        if is_early and (made is None or not self._is_made_early(lanes, made)):
            self._states.append(lanes)
        if is_early:
            return
        if made is None or len(self._known) > _MOST_CALLS:
            raise Differs
        own = zip(lanes, self._chain, self._chain[1:], strict=False)
        if not all(self._depths.is_behind(lane, before) or lane == after for lane, before, after in own):
            raise Differs
        self._walk_to(lanes, made)

    def _is_made_early(self, lanes: Lanes, made: Alike) -> bool:
        """Whether tensors that need no state of the step before are made of others alike, from the first step on, of
        which one at most is a state that is not known: they are none themselves then."""
        known, states = {**self._known}, [*self._states]
        with contextlib.suppress(Differs):
            self._walk_to(lanes, made)
            if len(self._states) <= len(states) + 1:
                return True
        self._known, self._states = known, states
        return False

    def _walk_to(self, lanes: Lanes, made: Alike) -> None:
        self._known[lanes] = None
        for value in made.lanes.values():
            for each in value if isinstance(value, list) else [value]:
                self._walk(each)

    def is_given(self, lanes: Lanes) -> bool:
        """Whether no lane depends on a step, or all are one that none of the later ones makes."""
        return all(self._depths.depth(lane) <= self._base for lane in lanes)
