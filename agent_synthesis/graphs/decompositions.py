"""Calls taken apart into the simpler ATen calls that PyTorch itself says they are made of.

The one idea: PyTorch's decomposition of a call is run once on tensors without data, and what it calls is written down.
So the derivative of a norm, which reduces rows for one result and columns for another, is ordinary calls that fuse
like any others, and no operation needs a rule here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.symbolic import decompositions
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, dtypes
from warpsmith.graphs.library.attention import STAND_INS
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2, tensor_pb2

_ANYWHERE = torch.device("cpu")
"""The device on which a graph makes a tensor: the process that runs the graph chooses the real one."""


@functools.lru_cache(maxsize=1024)
def taken_apart(index: GraphIndex, node: str) -> Replacement | None:
    """The calls that a call is made of; None where PyTorch does not say, or says it in calls that are no data.

    Nor of composites, such as attention or a recurrent network, which are known as a whole or not at all: the calls
    that they are made of round what they do not.
    """
    call = index.nodes[node]
    if aten.is_outside(call.target) or call.random or call.mutates or call.target in STAND_INS:
        return None
    overload = aten.resolve(call.target)
    if torch._C._dispatch_has_kernel_for_dispatch_key(_dispatched(overload), "CompositeImplicitAutograd"):
        return None
    made_of = decompositions().get(overload)
    if made_of is None:
        return None
    calls = _Calls(index, node)
    given = {name: calls.given(value) for name, value in arguments(call).items()}
    positional = [given[each.name] for each in overload._schema.arguments if not each.kwarg_only]
    named = {each.name: given[each.name] for each in overload._schema.arguments if each.kwarg_only}
    try:
        with torch.no_grad(), calls:
            returned = made_of(*positional, **named)
    except (BadInput, _NoData, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    if returned is NotImplemented:  # it is for other arguments than these
        return None
    return calls.replacement(call, [returned] if isinstance(returned, torch.Tensor) else list(returned))


def _dispatched(overload: OpOverload) -> str:
    """The name by which the dispatcher knows it: of a default overload, without that word."""
    schema = overload._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


class _NoData(Exception):
    """A decomposition does what no list of calls can say."""


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the calls that are made inside, on tensors without data."""

    def __init__(self, index: GraphIndex, node: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index, self._node, self._draft = index, node, Draft(index)
        self._names: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []
        self._made: dict[str, graph_pb2.Node] = {}
        """Tensor → the call that makes it."""

    def given(self, value: object) -> Any:
        """An argument of the call: its tensors without data."""
        if isinstance(value, Named):
            tensor = self._draft.meta(value.name)
            return self._know(tensor, value.name)
        if isinstance(value, list | tuple):
            return [self.given(each) for each in value]
        return torch.device("meta") if isinstance(value, torch.device) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prims.convert_element_type.default:
            func, args, kwargs = torch.ops.aten._to_copy.default, args[:1], {"dtype": args[1]}
        made = func(*args, **kwargs)
        results = [made] if isinstance(made, torch.Tensor) else made
        is_data = isinstance(results, list | tuple) and all(isinstance(each, torch.Tensor) for each in results)
        if func.namespace != "aten" or func._schema.is_mutable or not is_data:
            raise _NoData
        target = aten.target_of(func)
        target = aten.INITIALISED.get(target, target)
        name = self._free(f"{self._node}_{aten.operation(target).strip('_')}")
        call = graph_pb2.Node(name=name, target=target, args=map(self._encoded, args))
        call.kwargs.extend(tensor_pb2.NamedValue(name=key, value=self._encoded(each)) for key, each in kwargs.items())
        for number, tensor in enumerate(results):
            result = call.results.add(name=f"{name}_{number}" if len(results) > 1 else name)
            result.spec.CopyFrom(dtypes.spec_of(tensor))
            result.alias_of = self._looked_at(tensor, [*args, *kwargs.values()])
            self._made[result.name] = call
            self._know(tensor, result.name)
        return made

    def _looked_at(self, tensor: torch.Tensor, given: Sequence[object]) -> str:
        """Name of the argument in whose memory a result lies; "" for none."""
        memory = tensor.untyped_storage()._cdata
        tensors = (each for each in given if isinstance(each, torch.Tensor))
        return next((self._names[id(each)] for each in tensors if each.untyped_storage()._cdata == memory), "")

    def replacement(self, call: graph_pb2.Node, results: Sequence[torch.Tensor | None]) -> Replacement | None:
        """What was written down for the results that are read; None where one is an argument, or laid out otherwise."""
        renamed = {}
        for result, tensor in zip(call.results, results, strict=True):
            if not result.name:
                continue
            name = self._names.get(id(tensor), "")
            if tensor is None or name not in self._made or dtypes.spec_of(tensor) != result.spec:
                return None
            renamed[result.name] = name
        needed, kept = {*renamed.values()}, list[graph_pb2.Node]()
        for name, node in reversed(self._made.items()):
            if name in needed and node not in kept:
                kept.insert(0, node)
                needed.update(tensor_names(aten.arguments_of(node)))
        return Replacement((call.name,), tuple(kept), renamed)

    def _know(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self._names[id(tensor)] = name
        self._alive.append(tensor)
        return tensor

    def _encoded(self, value: object) -> tensor_pb2.Value:
        if isinstance(value, torch.device):
            value = _ANYWHERE
        return aten.encode(value, lambda each: self._names.get(id(each)) if isinstance(each, torch.Tensor) else None)

    def _free(self, wanted: str) -> str:
        name, count = self._draft.free(wanted), 1
        while name in self._made or f"{name}_0" in self._made:
            count += 1
            name = self._draft.free(f"{wanted}_{count}")
        return name
