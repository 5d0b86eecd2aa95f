"""Several calls as one operation: those between which shapes depend on values, such as what a mask picks.

The one idea: graphs have static shapes, so what has none stays inside of one call, `warpsmith::block`. Its first
argument is a graph of its own, as text; the tensors that go in and come out are static. It is a library step wherever
it stands. `warpsmith::loop` makes the calls of such a graph step by step, for loops that a kernel may take as a whole.
Whoever runs or checks steps imports this module, which makes the operations known.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from warpsmith import program_steps
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2

PICK: Final = operator.getitem
"""Picks one of several results."""


def target_of(function: Callable[..., Any]) -> str:
    """A function on numbers by the name that a block calls it, such as "operator.add"."""
    return f"{getattr(function, '__module__', '').lstrip('_')}.{getattr(function, '__name__', '')}"


_OF_TENSORS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType({
    "aten.sym_size.int": lambda tensor, dimension: tensor.size(dimension),
    "aten.sym_stride.int": lambda tensor, dimension: tensor.stride(dimension),
    "aten.sym_numel.default": lambda tensor: tensor.numel(),
    "aten.item.default": lambda tensor: tensor.item(),
    "aten._local_scalar_dense.default": lambda tensor: tensor.item(),
})  # fmt: skip


def _number(target: str) -> Callable[..., Any] | None:
    """What gives a number; None for a call that gives tensors."""
    if target not in program_steps.NUMBERS:
        return None
    module, _, name = target.partition(".")
    return _OF_TENSORS.get(target) or getattr({"math": math, "operator": operator, "torch": torch}[module], name)


def block(
    text: str, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], widen: bool = False
) -> list[torch.Tensor]:
    """Makes the calls of a block. `written` and `read`: its sources in order. `widen`: as `aten.interpret` has it.

    Raises:
        BadInput: the text is no block, or an operation is not allowed.
    """
    graph = program_steps.body(text)
    given = [*written, *read]
    values: dict[str, Any] = dict(zip((source.name for source in graph.sources), given, strict=True))
    device = given[0].device if given else torch.device("cpu")
    for node, call in _calls(text, device):
        results = call(values.__getitem__, widen)
        for result, value in zip(node.results, results, strict=False):
            if result.name:
                values[result.name] = value
    return [values[name] for name in graph.outputs]


@functools.lru_cache(maxsize=64)
def _calls(text: str, device: torch.device) -> list[tuple[graph_pb2.Node, Callable[..., list[Any]]]]:
    return [(node, _call(node, device)) for node in program_steps.body(text).nodes]


def _call(node: graph_pb2.Node, device: torch.device) -> Callable[..., list[Any]]:
    number = _number(node.target)
    if number is None and not aten.is_outside(node.target):
        aten.resolve(node.target)  # refused ahead of any call

    def made(lookup: Callable[[str], Any], widen: bool) -> list[Any]:
        args = [aten.decode(value, lookup, device) for value in node.args]
        kwargs = {named.name: aten.decode(named.value, lookup, device) for named in node.kwargs}
        if number is not None:
            return [number(*args, **kwargs)]
        if widen:
            args, kwargs = list(map(aten.widened_type, args)), {k: aten.widened_type(v) for k, v in kwargs.items()}
        results = aten.flatten_results(aten.resolve(node.target)(*args, **kwargs))
        return [aten.widened_result(each) for each in results] if widen else results

    return made


def loop(
    text: str, sequences: Sequence[torch.Tensor], states: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Makes the calls of a block for each step of sequences [steps, ...]: of an element of each, what states are by
    then, and others; it gives each state anew. All that each state has become: [steps, *shape of a state].

    Raises:
        BadInput: the text is no block, or an operation is not allowed.
    """
    device, now, made = sequences[0].device, [*states], list[list[torch.Tensor]]()
    if device.type == "meta":
        return [state.new_empty((len(sequences[0]), *state.shape)) for state in states]
    for elements in zip(*(sequence.unbind() for sequence in sequences), strict=True):
        now = block(text, (), (*elements, *now, *others))
        made.append(now)
    return [torch.stack(steps) for steps in zip(*made, strict=True)]


_LIBRARY: Final = torch.library.Library("warpsmith", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("block(str text, Tensor(a!)[] written, Tensor[] read, bool widen=False) -> Tensor[]")  # type: ignore[no-untyped-call]
_LIBRARY.impl("block", block, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.define("loop(str text, Tensor[] sequences, Tensor[] states, Tensor[] others) -> Tensor[]")  # type: ignore[no-untyped-call]
_LIBRARY.impl("loop", loop, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
aten.admit(torch.ops.warpsmith.block.default)
aten.admit(torch.ops.warpsmith.loop.default)
