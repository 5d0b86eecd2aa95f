"""What values a module's inputs may have: seen in the task's own draws, and tried on the reference.

The one idea: the module draws the line. A range reaches from the lowest to the highest value that the task draws, and
farther only to where the reference begins to refuse, which is at an extent of something in its graph: the rows of a
table, the number of classes. Where nothing refuses, a few elements of one family go farther. What is in order in every
draw stays so, and what has no value twice. Nothing is tried where a refusal would end the process; then what the task
draws is all that is known. It draws no case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gpu_bench.judging import guard
from gpu_bench.timing import floor
from gpu_bench.values import inputs, members, sorting
from warpsmith.graphs import dtypes, task_module
from warpsmith.v1 import graph_pb2, judging_pb2, task_pb2, timing_pb2, verdict_pb2

TASK_VALUES_FIXED = timing_pb2.FLAG_TASK_VALUES_FIXED
"""Whatever the seed, get_inputs draws some input alike: that input is varied by families alone."""

Lost = Callable[[Sequence[torch.Tensor]], float]
"""How many elements of what the reference gives for these inputs are not finite; infinity where it refuses them."""

SECONDS = 1.0
"""Spent on trying at most."""
_EXTENTS = 4
"""Of the graph that are tried as the end of a range."""
_MOST_NUMBERS, _MOST_FLOPS = 1 << 28, 1 << 39
"""Results and arithmetic of a graph that a processor may be asked to compute: about a second each."""
_WIDER = (7, 3, 1)
"""How far the range of a number that the task never varies reaches, if the reference takes that."""
_LOOKED_AT = 1 << 22
"""Elements of a float input."""
_CHANCE = 4.0
"""Pairs of equal values that rows would have by chance, from which on it means something that they have none."""


class Tries:
    """Asks the reference as long as there is time; says None afterwards, and where nothing may be tried."""

    def __init__(self, lost: Lost | None, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._lost, self._now_s, self._until = lost, now_s, now_s() + SECONDS

    def __call__(self, leaves: Sequence[torch.Tensor], position: int, values: torch.Tensor) -> bool | None:
        """Whether the reference takes the values in the place of those at the position."""
        lost = self.lost(leaves, position, values)
        return None if lost is None else lost < math.inf

    def lost(self, leaves: Sequence[torch.Tensor], position: int, values: torch.Tensor) -> float | None:
        """As `Lost`, with the values in the place of those at the position."""
        if self._lost is None or self._now_s() > self._until:
            return None
        return self._lost([*leaves[:position], values.to(leaves[position].dtype), *leaves[position + 1 :]])


def learn(
    leaves: Sequence[torch.Tensor],
    draws: Sequence[Sequence[torch.Tensor]],
    tries: Tries,
    extents: Iterable[int],
    *,
    may_go_beyond: bool = False,
) -> judging_pb2.Learned:
    """From the tensor inputs, what was `seen` of them as the task draws them from other seeds, and the extents of the
    module's graph. `may_go_beyond`: whether numbers that nothing bounds may be other than the task's."""
    known = sorted(set(extents))
    own = [[seen(leaf), *others] for leaf, *others in zip(leaves, *draws, strict=True)]
    inputs = [_legal(leaves, position, each, tries, known) for position, each in enumerate(own)]
    for position, each in enumerate(own):
        legal = inputs[position]
        legal.beyond_lowest, legal.beyond_highest = legal.lowest, legal.highest
        if may_go_beyond:
            _go_beyond(legal, leaves, position, each, tries, known)
    return judging_pb2.Learned(inputs=inputs)


def may_go_beyond(graph: graph_pb2.Graph) -> bool:
    """Whether what is computed with integers is known, and defined for any: bits are shifted by so many at most."""
    return len(graph.nodes) > 0 and not any("shift" in node.target for node in graph.nodes)


def lost(outputs: Sequence[torch.Tensor]) -> int:
    """How many elements are not finite; of what is not laid out by strides none are counted."""
    floats = [each for each in outputs if each.is_floating_point() or each.is_complex()]
    strided = [each for each in floats if each.layout == torch.strided]
    return sum(int((~dtypes.computable(each).isfinite()).sum()) for each in strided)


def seen(leaf: torch.Tensor) -> torch.Tensor:
    """What is looked at of an input: all of integers, some of many floats, spread evenly; floats of 8 bits in 32."""
    leaf = dtypes.computable(leaf)
    if not (leaf.is_floating_point() or leaf.is_complex()) or leaf.numel() <= _LOOKED_AT:
        return leaf
    return leaf.reshape(-1)[:: leaf.numel() // _LOOKED_AT].clone()


def held_back(learned: judging_pb2.Learned) -> judging_pb2.Learned:
    """The same with every family's integers as the task draws them, where nothing may be tried."""
    families = [family for family in verdict_pb2.ValueFamily.values() if family > verdict_pb2.VALUE_FAMILY_TASK]
    learned.restraints.extend(judging_pb2.Restraint(family=family, own_integers=True) for family in families)
    return learned


def flags(learned: judging_pb2.Learned) -> list[timing_pb2.Flag.ValueType]:
    """What a reader has to know of the task's values."""
    return [] if all(legal.varies for legal in learned.inputs) else [TASK_VALUES_FIXED]


def _legal(
    leaves: Sequence[torch.Tensor], position: int, own: Sequence[torch.Tensor], tries: Tries, extents: Sequence[int]
) -> judging_pb2.Legal:
    first = own[0]
    legal = judging_pb2.Legal(varies=not first.numel() or any(not guard.same_bits(first, each) for each in own[1:]))
    if not first.numel() or first.dtype == torch.bool or first.is_complex():
        return legal
    if first.is_floating_point():
        finite = [each[each.isfinite()] for each in own]
        legal.least = min((float(each.min()) for each in finite if each.numel()), default=0.0)
        legal.most = max((float(each.max()) for each in finite if each.numel()), default=0.0)
        return legal
    legal.lowest, legal.highest = _range(own)
    if first.dim() and first.shape[-1] > 1:
        legal.distinct = _has_no_pairs(own, legal)
        is_sorted = legal.lowest < legal.highest and all(bool((each.diff(dim=-1) >= 0).all()) for each in own)
        # Numbers in a row, as positions, are as good in another order, if the reference takes that.
        is_count = legal.highest - legal.lowest + 1 == first.shape[-1]
        legal.ordered = is_sorted and not (is_count and tries(leaves, position, first.flip(-1)))
    if legal.ordered:
        legal.begins_fixed, legal.ends_fixed = _is_one([e[..., 0] for e in own]), _is_one([e[..., -1] for e in own])
        return legal

    def takes(value: int) -> bool | None:
        info = torch.iinfo(first.dtype)
        return tries(leaves, position, torch.full_like(first, value)) if info.min <= value <= info.max else None

    if legal.lowest == legal.highest and not legal.varies:
        legal.highest += next((more for more in _WIDER if takes(legal.lowest + more)), 0)
    legal.highest = _end(legal.highest, extents, takes)
    if legal.lowest > 0 and takes(0) and takes(-1) is False:
        legal.lowest = 0
    return legal


def _range(own: Sequence[torch.Tensor]) -> tuple[int, int]:
    return min(int(each.min()) for each in own), max(int(each.max()) for each in own)


def _go_beyond(
    legal: judging_pb2.Legal,
    leaves: Sequence[torch.Tensor],
    position: int,
    own: Sequence[torch.Tensor],
    tries: Tries,
    extents: Sequence[int],
) -> None:
    """Finds out how far numbers may go that nothing bounds: by as much as the task's own span, up to a size in the
    graph, which may bound lengths and labels. Of 0 and 1 a mask may be meant; what has one sign keeps it."""
    first = own[0]
    if not first.numel() or first.dtype == torch.bool or first.is_floating_point() or first.is_complex():
        return
    lowest, highest = _range(own)
    is_open = (legal.lowest, legal.highest) == (lowest, highest) and highest - lowest > 1
    if not is_open or legal.ordered or legal.distinct:
        return
    span, info = highest - lowest, torch.iinfo(first.dtype)
    bound = next((each for each in extents if each >= highest), info.max)
    least = max(lowest - span, info.min, 1 - bound) if lowest < 0 < highest else lowest
    most = min(highest + span, info.max, bound - 1) if highest > 0 else highest

    def lost(value: int) -> float:
        found = tries.lost(leaves, position, torch.full_like(first, value))
        return math.inf if found is None else found

    if most > highest and lost(most) <= lost(highest) < math.inf:
        legal.beyond_highest = most
    if least < lowest and lost(least) <= lost(lowest) < math.inf:
        legal.beyond_lowest = least


def _end(highest: int, extents: Sequence[int], takes: Callable[[int], bool | None]) -> int:
    """The last value before an extent at which the reference begins to refuse; else the highest that was seen."""
    for extent in [each for each in extents if each > highest][:_EXTENTS]:
        if extent - 1 == highest or not takes(extent - 1):
            return highest
        if takes(extent) is False:
            return extent - 1
    return highest


def _has_no_pairs(own: Sequence[torch.Tensor], legal: judging_pb2.Legal) -> bool:
    """Whether no row has a value twice, though some would by chance."""
    width, span = own[0].shape[-1], legal.highest - legal.lowest + 1
    by_chance = sum(each.numel() for each in own) * (width - 1) / 2 / span
    return (
        by_chance >= _CHANCE
        and span >= width
        and all(bool((sorting.in_order(each).diff(dim=-1) != 0).all()) for each in own)
    )


def _is_one(values: Sequence[torch.Tensor]) -> bool:
    return all(bool((each == values[0].reshape(-1)[0]).all()) for each in values)


def restrain(learned: judging_pb2.Learned, family: verdict_pb2.ValueFamily.ValueType) -> bool:
    """Holds a family back whose values the reference refused, one step further; False where nothing is left to try.

    Where parameters are as trained, they keep their signs, or integers stay as the task draws them, or both; then state
    stays the constructor's. Of rare values, floats stay within what the task draws before each of these, as
    probabilities must. Of other families it is integers; of unusual values then parameters and state, which stay the
    constructor's; of normal values then floats, which at last are the task's own with each moved a little, as of
    matrices that have to be positive definite. Others leave floats out: they would all be the same.
    """
    if family == verdict_pb2.VALUE_FAMILY_TASK:
        return False
    restraint = restraint_in(learned, family)
    if family in members.AS_TRAINED:
        is_rare = family == verdict_pb2.VALUE_FAMILY_RARE
        if restraint.own_integers and restraint.own_signs and restraint.floats_within == is_rare:
            was_own, restraint.own_state = restraint.own_state, True
            return not was_own
        if is_rare and not restraint.floats_within:
            restraint.floats_within = True
            return True
        restraint.floats_within = False
        restraint.own_integers |= restraint.own_signs
        restraint.own_signs = not restraint.own_signs
        return True
    if not restraint.own_integers:
        restraint.own_integers = True
        return True
    if family in inputs.UNUSUAL and not restraint.own_state:
        restraint.own_state, restraint.own_integers = True, False
        return True
    if family != verdict_pb2.VALUE_FAMILY_NORMAL or restraint.floats_near:
        return False
    restraint.floats_near, restraint.floats_within = restraint.floats_within, not restraint.floats_within
    restraint.own_integers = False
    return True


def restraint_in(learned: judging_pb2.Learned, family: verdict_pb2.ValueFamily.ValueType) -> judging_pb2.Restraint:
    """How a family is held back, to be changed in place."""
    found = [each for each in learned.restraints if each.family == family]
    return found[0] if found else learned.restraints.add(family=family)


class Rehearsal:
    """The reference on a processor: there a refusal is an exception, which on a GPU would end the process."""

    def __init__(self, user: task_module.TaskModule) -> None:
        self._user, self._module = user, user.build(device="cpu")
        self._state = [(each, _copied(each._buffers)) for each in self._module.modules()]
        """What a call may write, or make."""
        self._proven: set[int] = set()

    @staticmethod
    def of(user: task_module.TaskModule, graph: graph_pb2.Graph, sources: Sequence[torch.Tensor]) -> Rehearsal | None:
        """None where nothing among inputs and state that may index others is of integers, or it would take too long."""
        numbers = sum(math.prod(result.spec.shape) for node in graph.nodes for result in node.results)
        if all(each.is_floating_point() or each.is_complex() for each in sources) or numbers > _MOST_NUMBERS:
            return None
        flops = floor.work_of(graph, task_pb2.PRECISION_FP32).executed_flops
        return Rehearsal(user) if flops <= _MOST_FLOPS else None

    def take(self, args: tuple[Any, ...], family: int, state: Mapping[str, torch.Tensor] | None = None) -> int:
        """How many elements of what it gives are `lost`. Raises BadInput where the reference refuses the arguments,
        with the integers of `state` (by qualified name); one case of a family speaks for all, and loses nothing."""
        if family in self._proven:
            return 0  # never of no family: those are tries
        leaves = [leaf.to("cpu", copy=True) for leaf in task_module.tensor_leaves(args)]
        for each, held in self._state:
            each._buffers.clear()
            each._buffers.update(_copied(held))
        own = dict(self._module.named_buffers(remove_duplicate=False))
        for name, tensor in (state or {}).items():
            is_number = tensor.is_floating_point() or tensor.is_complex()
            if not is_number and name in own and own[name].shape == tensor.shape:
                own[name].copy_(tensor)
        with torch.no_grad(), self._user.explaining("the forward failed"):
            returned = self._module(*task_module.with_leaves(args, leaves))
        if family:
            self._proven.add(family)
        return lost(task_module.tensor_leaves(returned))


def _copied(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: each if each is None else each.clone() for name, each in buffers.items()}
