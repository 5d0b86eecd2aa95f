"""Integers and booleans of a case: families of their own, within what the module's reference was seen to take.

The one idea: the legal range of an index is learned (`learning`), never known by an operator's name; in it the
families go where stored answers, forgotten masks and wrong bounds show: anything, the ends, all equal, few and many,
sorted. What is in order stays so, as offsets do, and what has no value twice, as a permutation. It tries nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch

from gpu_bench.values import sorting
from warpsmith.v1 import judging_pb2, verdict_pb2

_SHARES: Mapping[int, float] = {
    verdict_pb2.VALUE_FAMILY_NORMAL: 0.5,
    verdict_pb2.VALUE_FAMILY_LARGE: 1.0,
    verdict_pb2.VALUE_FAMILY_TINY: 0.0,
    verdict_pb2.VALUE_FAMILY_MIXED: 0.9,
    verdict_pb2.VALUE_FAMILY_NON_FINITE: 0.05,
}
"""Of booleans that are true."""
_FEW = 3
"""Values of the family that repeats them."""
_NEAR = 8
"""Part of the range that is near an end: one in so many."""
_REPLACED_SHARE = 1 / 32
"""Of a mask or of indices that the task gives alike each time, where fresh ones differ in more than their places."""
_MANY = ((1 << 6, False), (1 << 8, False), (1 << 8, True), (1 << 16, False))
_HANDFULS = (1, 1, 4, 4)
"""How rare values lie, by a case's seed: elements of which one is replaced, and whether those are whole lines; then how
many of all there are in a handful. Who decides by a column is wrong on many, who looks at a grid misses lines, and who
looks at some of an input misses a handful. That lies in one half along each dimension, at even indices or odd ones, and
the next case has another in the opposite places: of any half, and of even and odd, one of the two lies outside."""
_MET = 4096
"""Extent of a dimension up to which each of its indices is to be met: a decision may hang on one column."""
_ROUNDS = 2
"""Lines along each dimension, where there are elements enough."""
_MOST_KEYS = 1 << 24
"""Numbers drawn at most for rows without a value twice; beyond that the task's own are put in another order."""


def drawn(
    leaf: torch.Tensor,
    family: verdict_pb2.ValueFamily.ValueType,
    legal: judging_pb2.Legal,
    generator: torch.Generator,
    *,
    resembling: bool = False,
    arrangement: int = 0,
) -> torch.Tensor:
    """Values of the family in the shape of `leaf`, which holds the task's own; some families are those, if they vary.

    `leaf` has elements, and integers or booleans. `resembling`: whether FRESH ones are as quick as the task's.
    `arrangement`: which one rare ones have.
    """
    if family == verdict_pb2.VALUE_FAMILY_RARE and may_be_rare(legal):
        return _rare(leaf, legal, arrangement, generator)
    is_own = family in (verdict_pb2.VALUE_FAMILY_UNIFORM, verdict_pb2.VALUE_FAMILY_FRESH)
    if is_own and legal.varies:
        return leaf
    resembling = resembling and family == verdict_pb2.VALUE_FAMILY_FRESH
    if leaf.dtype == torch.bool:
        if resembling:
            return resemblance(leaf, torch.logical_not, generator)
        return _booleans(leaf, family, generator)
    if legal.distinct:
        values = _distinct(leaf, legal, generator)
    else:
        values = free = _integers(leaf, family, legal, generator).to(leaf.dtype)
        if resembling:
            values = resemblance(leaf, lambda _: free, generator)
    return _ordered(values, leaf, legal) if legal.ordered else values.to(leaf.dtype)


def may_be_rare(legal: judging_pb2.Legal) -> bool:
    """Whether some elements may be others: not of what is in order or has no value twice."""
    return not (legal.distinct or legal.ordered)


def _rare(leaf: torch.Tensor, legal: judging_pb2.Legal, arrangement: int, generator: torch.Generator) -> torch.Tensor:
    if leaf.dtype == torch.bool:
        return with_few(leaf, torch.logical_not, arrangement, generator)
    if is_handful(arrangement):
        return with_few(leaf, lambda old: _handful(leaf, old, legal, arrangement, generator), arrangement, generator)

    sides = [(legal.highest + 1, legal.beyond_highest), (legal.beyond_lowest, legal.lowest - 1)]
    sides = [(low, high) for low, high in sides if low <= high]

    def others(old: torch.Tensor) -> torch.Tensor:
        values = torch.full_like(old, legal.highest)
        values.masked_fill_(_uniform(list(old.shape), generator) < 0.5, legal.lowest)
        is_own = _uniform(list(old.shape), generator) < 0.25
        values = torch.where(is_own, elsewhere(leaf, old, generator), values)
        for number, (low, high) in enumerate(sides):  # half of them, the first one too
            part = values[number :: 2 * len(sides)]
            part.copy_(torch.randint(low, high + 1, part.shape, generator=generator, device=generator.device))
        return _others(values, old, legal)

    return with_few(leaf, others, arrangement, generator)


def _handful(
    leaf: torch.Tensor, old: torch.Tensor, legal: judging_pb2.Legal, arrangement: int, generator: torch.Generator
) -> torch.Tensor:
    """Others in the place of a few integers: above the range or its highest, below it or its lowest, zero, and from
    another place."""

    def between(low: int, high: int, if_none: int) -> torch.Tensor:
        if low > high:
            low = high = if_none
        return torch.randint(low, high + 1, old.shape, generator=generator, device=old.device).to(old.dtype)

    above = between(legal.highest + 1, legal.beyond_highest, legal.highest)
    below = between(legal.beyond_lowest, legal.lowest - 1, legal.lowest)
    zero = torch.zeros_like(old).clamp_(legal.lowest, legal.highest)
    turns = turns_of(arrangement, old, 4)
    values = torch.stack([above, below, zero, elsewhere(leaf, old, generator)]).gather(0, turns[None])[0]
    return _others(values, old, legal)


def _others(values: torch.Tensor, old: torch.Tensor, legal: judging_pb2.Legal) -> torch.Tensor:
    """The values, and one of the range's ends where that is what was there."""
    values = torch.where(values == old, legal.highest, values)
    return torch.where(values == old, legal.lowest, values)


def is_handful(arrangement: int) -> bool:
    """Whether by this arrangement a few elements of one input are others."""
    return arrangement % 8 >= len(_MANY)


def whose_turn(arrangement: int, count: int) -> int:
    """Which of so many inputs has the handful of a case: of two pairs of cases that follow each other, another one."""
    return (arrangement // 8 + arrangement // 2 % 2) % count


def turns_of(arrangement: int, old: torch.Tensor, count: int) -> torch.Tensor:
    """Of the elements of a handful, which of so many kinds of value each gets: one after the other, from any one on."""
    of_all = arrangement // 8
    return (torch.arange(len(old), device=old.device) + of_all + of_all // 1000) % count


def _places_of_handful(leaf: torch.Tensor, arrangement: int) -> torch.Tensor:
    """Flat places, each once: drawn for the first case of a pair, and the opposite ones for the second."""
    draw = random.Random(arrangement // 2)
    seen = [extent if stride else 1 for extent, stride in zip(leaf.shape, leaf.stride(), strict=True)]
    first, places = [draw.randrange(extent) for extent in seen], dict[int, None]()
    for _ in range(_HANDFULS[arrangement % 8 - len(_MANY)]):
        place = 0
        for index, extent, size in zip(first, seen, leaf.shape, strict=True):
            like = _like(index, extent, draw)
            place = place * size + (_opposite(like, extent) if arrangement % 2 else like)
        places[place] = None
    return torch.tensor([*places], device=leaf.device)


def _like(index: int, extent: int, draw: random.Random) -> int:
    """An index of the same half, which is as even or odd."""
    begin, end = (0, extent // 2) if index < extent // 2 else (extent // 2, extent)
    return draw.choice(range(begin + (index - begin) % 2, end, 2))


def _opposite(index: int, extent: int) -> int:
    """The index from the other end, or one beside that, so that one is even and the other odd."""
    from_end = extent - 1 - index
    if extent == 1 or (index - from_end) % 2:
        return from_end
    return from_end + 1 if from_end + 1 < extent else from_end - 1


def with_few(
    leaf: torch.Tensor,
    others: Callable[[torch.Tensor], torch.Tensor],
    arrangement: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Contiguous: the values of `leaf`, a few of which, in places drawn, are what `others` makes of them (1-D, in an
    order drawn). Any number names an arrangement."""
    flat = leaf.reshape(-1).clone()
    if is_handful(arrangement):
        places = _places_of_handful(leaf, arrangement)
    else:
        places = _few_places(leaf.shape, *_MANY[arrangement % 8], generator)
    flat[places] = others(flat[places])
    return flat.view(list(leaf.shape))


def elsewhere(leaf: torch.Tensor, old: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values of `leaf` from places drawn, as many as in `old`: they break order, runs and what is there once."""
    places = torch.randint(leaf.numel(), old.shape, generator=generator, device=generator.device)
    return leaf.reshape(-1)[places]


def _few_places(shape: Sequence[int], every: int, are_lines: bool, generator: torch.Generator) -> torch.Tensor:
    """Flat places, each once and in an order drawn: some anywhere, then such that every index along each dimension is
    among them, as far as one element in `every` goes."""
    count = math.prod(shape)
    found = [_below(count, max(1, count // _MANY[3][0]), generator)]
    left = count // every - len(found[0])
    if left > 0:
        found += _on_lines(shape, left, generator) if are_lines else [_scattered(shape, left, generator)]
    places = torch.cat(found).unique()  # type: ignore[no-untyped-call]
    return places[torch.randperm(len(places), generator=generator, device=generator.device)]  # type: ignore[no-any-return]


def _scattered(shape: Sequence[int], count: int, generator: torch.Generator) -> torch.Tensor:
    """Places that meet the indices of a dimension equally often."""
    places = torch.zeros(count, dtype=torch.int64, device=generator.device)
    for extent in shape:
        index = _below(extent, count, generator)
        if extent <= _MET:
            index = _uniform([-(-count // extent), extent], generator).argsort(dim=1).reshape(-1)[:count]
        places = places * extent + index
    return places


def _on_lines(shape: Sequence[int], count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Places on a line along one dimension after the other, in an order drawn, as long as there are any left."""
    found, all_places = list[torch.Tensor](), math.prod(shape)
    for dim in torch.randperm(len(shape), generator=generator, device=generator.device).tolist() * _ROUNDS:
        extent, step = shape[dim], math.prod(shape[dim + 1 :])
        met = min(extent, count)
        if 1 < extent <= _MET and met > 0:
            place = _below(all_places, 1, generator)
            index = torch.randperm(extent, generator=generator, device=generator.device)[:met]
            found.append(place + (index - place // step % extent) * step)
            count -= met
    return found


def _below(end: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(end, (count,), generator=generator, device=generator.device)


def resemblance(
    leaf: torch.Tensor, others: Callable[[torch.Tensor], torch.Tensor], generator: torch.Generator
) -> torch.Tensor:
    """The values of a mask or of indices in other places, some replaced by what `others` gives for them, at least one
    a row.

    What branches on them or fetches by them is as fast as on the task's own: on a random mask in place of a causal one
    the softmax that `torch.compile` makes of 16 x 512 x 512 took 18 ms for 7. No answer that was kept is right.
    """
    if not leaf.dim():
        return others(leaf)
    shifts = [int(torch.randint(extent, (), generator=generator, device=generator.device)) for extent in leaf.shape]
    moved, width = leaf.roll(shifts, list(range(leaf.dim()))), leaf.shape[-1]
    one = torch.randint(width, _rows(leaf), generator=generator, device=generator.device)
    replaced = _uniform(list(leaf.shape), generator) < _REPLACED_SHARE
    return torch.where(replaced | (torch.arange(width, device=leaf.device) == one), others(moved), moved)


def _uniform(shape: list[int], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def _rows(leaf: torch.Tensor) -> list[int]:
    """The shape of one value for each row."""
    return [*leaf.shape[:-1], 1] if leaf.dim() else []


def _booleans(leaf: torch.Tensor, family: int, generator: torch.Generator) -> torch.Tensor:
    shape = list(leaf.shape)
    if family == verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS:
        return (_uniform(_rows(leaf), generator) < 0.5).expand(shape)
    if family == verdict_pb2.VALUE_FAMILY_MASKED and leaf.dim():
        ends = _uniform(_rows(leaf), generator) * (leaf.shape[-1] + 1)
        return (torch.arange(leaf.shape[-1], device=leaf.device) < ends.floor()).expand(shape)
    share = _SHARES.get(family)
    if share is None:  # as many as the task has, and never none or all
        share = min(max(float(leaf.float().mean()), 0.1), 0.9)
    return _uniform(shape, generator) < share


def _integers(leaf: torch.Tensor, family: int, legal: judging_pb2.Legal, generator: torch.Generator) -> torch.Tensor:
    low, high, shape = legal.lowest, legal.highest, list(leaf.shape)
    near = (high - low) // _NEAR

    def between(least: int, most: int, wanted: list[int]) -> torch.Tensor:
        end = min(most, torch.iinfo(torch.int64).max - 1) + 1
        return torch.randint(least, end, wanted, generator=generator, device=generator.device)

    match family:
        case verdict_pb2.VALUE_FAMILY_LARGE:
            return between(high - near, high, shape)
        case verdict_pb2.VALUE_FAMILY_TINY:
            return between(low, low + near, shape)
        case verdict_pb2.VALUE_FAMILY_MIXED:
            kind = _uniform(shape, generator)
            return between(low, high, shape).masked_fill_(kind < 0.25, low).masked_fill_(kind > 0.75, high)
        case verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS:
            return between(low, high, _rows(leaf)).expand(shape)
        case verdict_pb2.VALUE_FAMILY_NON_FINITE:
            return between(low, high, [_FEW])[between(0, _FEW - 1, shape)]
        case verdict_pb2.VALUE_FAMILY_MASKED if leaf.dim():
            return sorting.in_order(between(low, high, shape))
    return between(low, high, shape)


def _distinct(leaf: torch.Tensor, legal: judging_pb2.Legal, generator: torch.Generator) -> torch.Tensor:
    width, span = leaf.shape[-1], legal.highest - legal.lowest + 1
    rows = list(leaf.shape[:-1])
    if span > width and leaf.numel() // width * span <= _MOST_KEYS:
        return _uniform([*rows, span], generator).argsort(dim=-1)[..., :width] + legal.lowest
    return sorting.permuted(leaf, generator)


def _ordered(values: torch.Tensor, leaf: torch.Tensor, legal: judging_pb2.Legal) -> torch.Tensor:
    made = values.to(leaf.dtype).clone()
    if legal.begins_fixed:
        made[..., 0] = leaf[..., 0]
    if legal.ends_fixed:
        made[..., -1] = leaf[..., -1]
    return sorting.in_order(made)
