"""Calls that another process times: plain ones on buffer sets, and ones on values that nobody has seen before.

The one idea: both sides of a contest, the solution and each baseline, make exactly these calls, so that what surrounds
a call costs both the same. On fresh values every call is followed by sums over its outputs: work that was put off,
remembered or done beforehand shows in the time, work left out shows in the sums. It keeps no time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

SURROUNDINGS = "surroundings"
"""Arm of the baselines' process: what surrounds a call on fresh values, around one that gives what is there already."""


@dataclass
class CallSet:
    """One buffer set: a call on it, and its input tensors."""

    call: Callable[[], Any]
    leaves: Sequence[torch.Tensor]
    _first: list[torch.Tensor] = field(default_factory=list)
    """What the inputs held at first; kept from the first fresh call on."""

    def surroundings(self, there: Any) -> CallSet:
        """The same set with a call that gives `there` and does nothing."""
        return CallSet(lambda: there, self.leaves, self._first)

    def freshen(self, draw: random.Random) -> None:
        """Gives the inputs their own first values in another order: of the task's kind, and in no cache by content."""
        if not self._first:
            self._first.extend(leaf.clone() for leaf in self.leaves)
        for leaf, first in zip(self.leaves, self._first, strict=True):
            if leaf.numel() > 1 and 0 not in leaf.stride():
                leaf.copy_(torch.roll(first, draw.randrange(1, leaf.numel())))

    def restore(self) -> None:
        """Gives the inputs back what they held at first."""
        for leaf, first in zip(self.leaves, self._first, strict=True):
            if 0 not in leaf.stride():
                leaf.copy_(first)


def plain_calls(sets: Sequence[CallSet], first: int, count: int) -> None:
    """`count` calls on the sets in turn, beginning with `first`; returns when the device is done."""
    for step in range(count):
        sets[(first + step) % len(sets)].call()
    _wait(sets[0])


def fresh_calls(sets: Sequence[CallSet], first: int, count: int, seed: int) -> list[float]:
    """The same on fresh values drawn from `seed`; gives two sums over each output of each call."""
    draw = random.Random(seed)
    sums: list[torch.Tensor] = []
    used = {(first + step) % len(sets) for step in range(count)}
    for step in range(count):
        chosen = sets[(first + step) % len(sets)]
        chosen.freshen(draw)
        share = draw.random()
        for leaf in pytree.tree_leaves(chosen.call()):
            if isinstance(leaf, torch.Tensor):
                flat = leaf.detach().reshape(-1)
                sums += [flat.sum(dtype=torch.float64), flat[int(share * flat.numel()) :].sum(dtype=torch.float64)]
    answer: list[float] = torch.stack(sums).tolist() if sums else []
    _wait(sets[0])
    for index in used:
        sets[index].restore()
    return answer


def _wait(one: CallSet) -> None:
    if any(leaf.is_cuda for leaf in one.leaves):
        torch.cuda.synchronize()
