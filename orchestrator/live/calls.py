"""One call of a live module as a graph of flat tensors, captured without computing it or touching the module.

The one idea: the module's tensors are replaced by fake ones in a copy, so neither memory nor a GPU is needed and no
statistics change; where its code looks at values, a real copy on the CPU follows.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from warpsmith.errors import BadInput
from warpsmith.graphs import aten, capture, task_module
from warpsmith.graphs.refusals import CaptureRefused, alone_told
from warpsmith.v1 import graph_pb2

_Given = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
_INNER = "module"
_OWN = frozenset(vars(torch.nn.Module())) | {"_ws_kernels"}
"""Names of every module's own."""
_NOT_THEIRS = (
    "<string>",
    "<eval_with_key>",
    *(str(Path(file).parent) + os.sep for file in (torch.__file__, capture.__file__, __file__)),
)
"""What files begin with that no user has written."""


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
    _require_plain(given)
    try:
        with alone_told(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return _captured(given, partial(_fake, mode=mode), device_type)
    except Exception:  # the real attempt tells better what is wrong, if anything is
        pass
    try:
        with alone_told():
            return _captured(given, _on_the_cpu, device_type)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{type(module).__name__}: cannot be copied: {task_module.cause_of(error)}") from error


def _require_plain(given: _Given) -> None:
    """Refuses tensors that are more than memory with a shape, strides and a type, for a kernel reads that alone."""
    module, args, kwargs = given
    named = [("an example argument", leaf) for leaf in pytree.tree_leaves((args, kwargs))]
    named += [*module.named_parameters(), *module.named_buffers(), *(("an attribute", each) for each in _held(module))]
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise BadInput(f"{type(module).__name__}: {name} has no shape before a first call: make one, then optimize")
        if not isinstance(tensor, torch.Tensor) or type(tensor) is FakeTensor:
            continue
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            what = f"a {type(tensor).__name__}"
        elif tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
            what = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else f"{tensor.layout}"
        else:
            continue
        raise BadInput(f"{type(module).__name__}: {name} is {what}; kernels read plain tensors (torch.strided) alone")


def twins(tensors: Sequence[Any]) -> list[int]:
    """For each tensor, the place of the first one that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


def with_tensors(tree: Any, made_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested arguments with what is made of each tensor, once of one that is there more than once."""
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = made_of(tensor.detach())
        return made[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, once, tree)


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


def _captured(given: _Given, made_of: Callable[[torch.Tensor], torch.Tensor], device_type: str) -> Call:
    """The call by copies, whose tensors are what `made_of` makes of those that there are."""
    leaves, structure = pytree.tree_flatten(given[1:])
    kind = type(given[0]).__name__
    module, args, kwargs = _copied(given, made_of)
    try:
        with torch.no_grad():
            returned = pytree.tree_structure(module(*args, **kwargs))
            before = _bound(module)
            module(*args, **kwargs)
    except Exception as error:
        raise BadInput(f"{kind}: the forward failed on the example arguments: {task_module.cause_of(error)}") from error
    after = _bound(module)
    if changed := sorted(name for name in {*before, *after} if not _is_same(before.get(name), after.get(name))):
        raise BadInput(
            f"{kind}: the forward replaces its attribute {changed[0]} in each call, which a kernel does not: write to "
            "a buffer in place (copy_), and keep counts in buffers"
        )
    module, args, kwargs = _copied(given, made_of)  # those calls may have changed its state
    try:
        graph = capture.capture(_Flat(module, structure), pytree.tree_leaves((args, kwargs)), device_type)
    except CaptureRefused as refused:
        raise BadInput(f"{kind}: {refused}{_where(refused)}") from refused
    for source in graph.sources:
        source.qualified_name = source.qualified_name.removeprefix(f"{_INNER}.")
    _require_named(graph, module)
    return Call(graph, leaves, structure, returned)


def _where(refused: CaptureRefused) -> str:
    """The innermost line that is neither PyTorch's nor ours, as the end of a sentence."""
    theirs = (place for place in reversed(refused.places) if not place[0].startswith(_NOT_THEIRS))
    return next((f" ({file}:{line})" for file, line in theirs), "")


def _bound(module: torch.nn.Module) -> dict[str, Any]:
    """What every attribute of the parts is, by qualified name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for group in (part._buffers, part._parameters, {k: v for k, v in vars(part).items() if k not in _OWN})
        for name, value in group.items()
    }


def _is_same(before: Any, after: Any) -> bool:
    """Whether an attribute is what it was: numbers by value, all else by identity."""
    return before is after or (isinstance(before, bool | int | float | str) and before == after)


def _require_named(graph: graph_pb2.Graph, module: torch.nn.Module) -> None:
    """Refuses a graph that has a tensor of the module's by value, which may be another in another call."""
    held = [tensor for tensor in _held(module) if not isinstance(tensor, FakeTensor)]
    for source in graph.sources:
        if source.origin != graph_pb2.ORIGIN_CONSTANT:
            continue
        constant = aten.constant(source, torch.device("cpu"))
        if any(each.dtype == constant.dtype and torch.equal(each.detach().cpu(), constant) for each in held):
            raise BadInput(
                f"{type(module).__name__}: the forward reads a tensor of shape {list(constant.shape)} that lies in a "
                "list, an object or a module that is not registered: register it as a buffer, or the module"
            )


def _copied(given: _Given, made_of: Callable[[torch.Tensor], torch.Tensor]) -> _Given:
    """Copies of the module and of the arguments, which are the same where they were the same.

    Without the module's own hooks: those are called with the kernel as well.
    """
    module, args, kwargs = given
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers(), *_held(module)]:
        made = made_of(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    copied = copy.deepcopy(module, memo)
    for name, hooks in vars(copied).items():
        if "hooks" in name and isinstance(hooks, dict):
            hooks.clear()
    task_module.name_tensors(copied)  # a graph would hold their values
    args, kwargs = with_tensors((args, kwargs), made_of)
    return copied, args, kwargs


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _on_the_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(tensor).cpu()  # with its strides


def _held(module: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors among the plain attributes of its parts, and those of modules that are not registered."""
    found: list[torch.Tensor] = []
    values = [value for part in module.modules() for name, value in vars(part).items() if name not in _OWN]
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.nn.Module):
            found += [*value.parameters(), *value.buffers()]
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found
