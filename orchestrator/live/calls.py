"""One call of a live module as a graph of flat tensors, captured without computing it or touching the module.

The one idea: the module's tensors are replaced by fake ones in a copy, so neither memory nor a GPU is needed and no
statistics change; where its code looks at values, a real copy on the CPU follows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from warpsmith.errors import BadInput
from warpsmith.graphs import capture, task_module
from warpsmith.graphs.refusals import CaptureRefused
from warpsmith.v1 import graph_pb2

_INNER = "module"


@dataclass(frozen=True)
class Call:
    """What was captured of `module(*args, **kwargs)`."""

    graph: graph_pb2.Graph
    """Parameters and state by their names in the module; it returns a flat tuple of what the module returns."""
    leaves: Sequence[Any]
    """The arguments, flattened: tensors and literals."""
    structure: pytree.TreeSpec
    """Of (args, kwargs)."""
    returned: pytree.TreeSpec
    """Of what the module returns."""


def captured(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> Call:
    """The call, on a device of this type.

    Raises:
        BadInput: the module does not take these arguments, or cannot be captured; the message says why.
    """
    given = (module, tuple(args), dict(kwargs))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return _captured(given, partial(_fake, mode=mode), device_type)
    except Exception:  # the real attempt tells better what is wrong, if anything is
        return _captured(given, _on_the_cpu, device_type)


class _Flat(torch.nn.Module):
    """The module as a function of flat leaves to a flat tuple."""

    def __init__(self, module: torch.nn.Module, structure: pytree.TreeSpec) -> None:
        super().__init__()
        self.module, self._structure = module, structure
        self.training = module.training

    def forward(self, *leaves: Any) -> tuple[Any, ...]:
        """What the module returns, flattened."""
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return tuple(pytree.tree_leaves(self.module(*args, **kwargs)))


_Given = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


def _captured(given: _Given, made_of: Callable[[torch.Tensor], torch.Tensor], device_type: str) -> Call:
    """The call by copies, whose tensors are what `made_of` makes of those that there are."""
    leaves, structure = pytree.tree_flatten(given[1:])
    kind = type(given[0]).__name__
    module, args, kwargs = _copied(given, made_of)
    try:
        with torch.no_grad():
            returned = pytree.tree_structure(module(*args, **kwargs))
    except Exception as error:
        raise BadInput(f"{kind}: the forward failed on the example arguments: {task_module.cause_of(error)}") from error
    module, args, kwargs = _copied(given, made_of)  # that call may have changed its state
    try:
        graph = capture.capture(_Flat(module, structure), pytree.tree_leaves((args, kwargs)), device_type)
    except CaptureRefused as refused:
        raise BadInput(f"{kind}: {refused}") from refused
    for source in graph.sources:
        source.qualified_name = source.qualified_name.removeprefix(f"{_INNER}.")
    return Call(graph, leaves, structure, returned)


def _copied(given: _Given, made_of: Callable[[torch.Tensor], torch.Tensor]) -> _Given:
    """Each argument gets a tensor of its own: what is passed twice here may be two in another call."""
    module, *arguments = given
    memo: dict[int, Any] = {}
    for tensor in _tensors(module):
        made = made_of(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: made_of(tensor.detach()), tuple(arguments))
    copied = copy.deepcopy(module, memo)
    task_module.name_tensors(copied)  # a graph would hold their values, which may be others in another call
    return copied, args, kwargs


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _on_the_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Its parameters, its buffers, and the tensors among its plain attributes."""
    held = pytree.tree_leaves([value for part in module.modules() for value in vars(part).values()])
    plain = [value for value in held if isinstance(value, torch.Tensor)]
    return [*module.parameters(), *module.buffers(), *plain]
