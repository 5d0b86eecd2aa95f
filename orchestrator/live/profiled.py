"""Which inner modules are worth a search: those that take the time, and that stand in a model several times.

The one idea: a call of the model is a tree of calls of its modules, each with its time. From the root down a module is
taken as a whole (the more is in a part, the more can be fused), but where most of its time is that of blocks that come
several times, those are taken: one search serves all of them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

TIMED_CALLS, TIMED_SECONDS, MOST_CALLS = 3, 0.5, 100
"""Of the model, after one call that is not counted: so many at least, and more of a quick one, for so long."""
LEAST_SHARE = 0.05
"""Of the model's time, that a part and its equals have to take."""


@dataclass
class Part:
    """A module that is called within a call of the model."""

    name: str
    kind: Hashable
    """Equal where class, arguments and parameters are: shapes and types of tensors, and all else by value."""
    seconds: float = 0.0
    """Of all its calls within one call of the model, with what they call."""
    parts: list[Part] = field(default_factory=list)

    def __iter__(self) -> Iterator[Part]:
        """Itself and all within it."""
        yield self
        for each in self.parts:
            yield from each


@dataclass(frozen=True)
class Group:
    """Equal parts, which one search serves."""

    parts: Sequence[Part]

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return sum(part.seconds for part in self.parts)


def profile(model: torch.nn.Module, call: Callable[[], object]) -> Part:
    """The tree of what a `call` of the model calls, each where it is first called, by the least of several times."""
    call()
    whole, count, end = _called(model, call), 1, time.monotonic() + TIMED_SECONDS
    while count < TIMED_CALLS or (time.monotonic() < end and count < MOST_CALLS):
        again = {part.name: part.seconds for part in _called(model, call)}
        for part in whole:
            part.seconds = min(part.seconds, again.get(part.name, part.seconds))
        count += 1
    return whole


def groups(parts: Sequence[Part], whole: Part) -> list[Group]:
    """Of what is called within the `parts`: what is worth a search, the most time first, none within another.

    `whole`: the model, whose blocks are told as such by how often they come in it.
    """
    count = Counter(part.kind for part in whole)
    found: dict[Hashable, list[Part]] = defaultdict(list)

    def is_block(part: Part) -> bool:
        return bool(part.parts) and count[part.kind] > 1

    def in_blocks(part: Part) -> float:
        return sum(each.seconds if is_block(each) else in_blocks(each) for each in part.parts)

    def look(part: Part) -> None:
        for each in part.parts:
            if is_block(each) or in_blocks(each) < each.seconds / 2:
                found[each.kind].append(each)
            else:
                look(each)

    for part in parts:
        look(part)
    made = [Group(each) for each in found.values()]
    worth = [each for each in made if each.seconds >= LEAST_SHARE * whole.seconds]
    return sorted(worth, key=lambda group: -group.seconds)


def _called(model: torch.nn.Module, call: Callable[[], object]) -> Part:
    known: dict[int, Part] = {}
    under_way: list[tuple[Part, float]] = []
    names = {id(module): name for name, module in model.named_modules()}

    def now() -> float:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        part = known.get(id(module))
        if part is None:
            part = known[id(module)] = Part(names[id(module)], _kind(module, (given, named)))
            if under_way:
                under_way[-1][0].parts.append(part)
        under_way.append((part, now()))

    def end(module: torch.nn.Module, given: tuple[Any, ...], result: Any) -> None:
        del module, given, result
        part, began = under_way.pop()
        part.seconds += now() - began

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(end))
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return known[id(model)]


def _kind(module: torch.nn.Module, given: Any) -> Hashable:
    leaves, structure = pytree.tree_flatten(given)
    told = [_like(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)[:200] for leaf in leaves]
    held = [(name, _like(tensor)) for name, tensor in module.state_dict().items()]
    return type(module), module.training, str(structure), tuple(told), tuple(held)


def _like(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
