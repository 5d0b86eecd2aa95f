"""What a live module's forward may depend on beside tensors: all of it has to be as it was for a kernel to answer.

The one idea: everything that lies in the module's parts is looked at, plain values by value and all else by identity,
and what is not known counts as changed. A look takes a few microseconds.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from orchestrator.exports.carried import guard

_DEPTH = 4
"""Objects within objects that are looked into."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OPAQUE = (torch.Tensor, torch.nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_OWN = frozenset(vars(torch.nn.Module())) | {"_ws_kernels", "warpsmith"}
"""Names of every module's own, and ours."""
_GONE = object()
_tied = cast("Callable[[list[torch.nn.Module]], list[tuple[Any, ...]]]", guard._ws_tied)


class Settings:
    """Of a module, as it is when this is made. `members`: names of the parameters and buffers that a kernel reads."""

    def __init__(self, module: torch.nn.Module, members: tuple[str, ...]) -> None:
        self.parts = list(module.modules())
        places = [name.rpartition(".") for name in members]
        self._members = [(module.get_submodule(owner), name) for owner, _, name in places]
        self._modes = [(part, part.training) for part in self.parts]
        self._children = [(part._modules, list(part._modules.values())) for part in self.parts if part._modules]
        held = [group for part in self.parts for group in (part._parameters, part._buffers) if group]
        self._held = [(group, {name: tensor is None for name, tensor in group.items()}) for group in held]
        self._inner, self._tied = self.parts[1:], _tied(self.parts)
        # A graph of torch.fx is its code, and nothing else.
        named = [part for part in self.parts if not isinstance(part, torch.fx.GraphModule)]
        self._places = [place for part in named for place in _places(vars(part), 0, _OWN)]

    def hold(self) -> bool:
        """Whether all is as it was and no inner part has a hook."""
        # Loops, not generators, which cost more than what they look at.
        for part, mode in self._modes:
            if part.training is not mode:
                return False
        for children, modules in self._children:
            if [*children.values()] != modules:
                return False
        for group, are_none in self._held:
            if {name: tensor is None for name, tensor in group.items()} != are_none:
                return False
        for one, name, other, again in self._tied:
            if one.get(name) is not other.get(again):
                return False
        for place, name, known in self._places:
            now = place.get(name, _GONE)
            if now is not known and not _is_same(now, known):
                return False
        for part in self._inner:  # noqa: SIM110 (as above)
            if part._forward_hooks or part._forward_pre_hooks:
                return False
        return True

    def read(self) -> list[Any]:
        """The parameters and buffers that the kernel reads, as they are now."""
        found: list[Any] = []
        for part, name in self._members:
            tensor = part._parameters.get(name)
            found.append(getattr(part, name) if tensor is None else tensor)
        return found

    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters of the module."""
        return [each for part in self.parts for each in part._parameters.values() if each is not None]


def _places(
    group: dict[Any, Any], depth: int, left_out: frozenset[str] = frozenset()
) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """(dict, key, value) of what lies in a dict, and in dicts and objects in it."""
    for name, value in list(group.items()):
        if name in left_out or (depth == 0 and isinstance(value, torch.Tensor)):
            continue  # of a tensor that is a plain attribute a kernel reads the one that is there
        yield group, name, copy.copy(value) if isinstance(value, list | set) else value
        if depth < _DEPTH and not isinstance(value, (*_PLAIN, *_OPAQUE)):
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if isinstance(inner, dict):
                yield from _places(inner, depth + 1)


def _is_same(now: Any, known: Any) -> bool:
    if now is known:
        return True
    if type(now) is not type(known):
        return False
    if isinstance(known, _PLAIN):
        return bool(now == known) and repr(now) == repr(known)  # zeros have signs
    if isinstance(known, list | tuple):
        return len(now) == len(known) and all(map(_is_same, now, known))
    return isinstance(known, set) and now == known
