"""A live module with an exported kernel as its forward: the same parameters, buffers and inner modules.

The one idea: what is returned is the module's own class with another forward, on the module's own tensors, so that
training, `state_dict` and `to` go on as before; a call that is not the one that was verified is the module's own.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from orchestrator.live.calls import Call


def grafted(module: torch.nn.Module, call: Call, text: str) -> torch.nn.Module:
    """The module, whose calls like `call` run the exported kernel of `text`, a file of the flavour `module`.

    It shares all tensors and inner modules with `module`, which is left as it was.
    """
    exported = _imported(text)
    made = copy.copy(module)
    made.__class__ = _class(type(module), call, exported)
    guard = exported["_ws_guard"]
    by_mode = any(exported["_ws_reads_mode"](type(part)) for part in module.modules())
    vars(made)["_ws_settings"] = exported["_WsSettings"](made, guard._members, by_mode)
    return made


def _imported(text: str) -> dict[str, Any]:
    """What the file defines. It is a module of the process, by which compilers find their way."""
    name = f"warpsmith_kernel_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        made = types.ModuleType(name)
        exec(compile(text, f"<{name}>", "exec"), vars(made))
        # It has found the class that it was written from, and the live one stands in its place.
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder) is not vars(made)["_WsEmbedded"]]
        sys.modules[name] = made
    return vars(sys.modules[name])


def _class(kind: type[torch.nn.Module], call: Call, exported: Mapping[str, Any]) -> type[torch.nn.Module]:
    """The module's class with another forward."""
    guard, is_transformed = exported["_ws_guard"], exported["_ws_is_transformed"]
    wants_gradient, program = exported["_ws_wants_gradient"], _program(exported)
    flat, nested = _flattener(call), _nester(call)

    @functools.wraps(kind.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves = None if is_transformed() else flat(args, kwargs)
        tensors = None if leaves is None else guard.read(self, leaves, {})
        if tensors is None or wants_gradient(self, tensors):
            return kind.forward(self, *args, **kwargs)
        return nested(program(tensors))

    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**named, "forward": forward})


def _program(exported: Mapping[str, Any]) -> Callable[[Any], Any]:
    """The verified program. Each module has CUDA graphs of its own, which are kept by address: equal layers, whose file
    is one, would drive out each other's."""
    shared: types.FunctionType = exported["_ws_forward"]
    if "_ws_graphs" not in exported:
        return shared
    own = {**exported, "_ws_graphs": exported["_WsGraphs"](exported["_ws_run"], exported["_ws_stream"])}
    return types.FunctionType(shared.__code__, own, shared.__name__)


def _flattener(call: Call) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]:
    """Gives the tensors of a call in the verified order, or None where its structure or a literal is another."""
    literals = [(place, leaf) for place, leaf in enumerate(call.leaves) if not isinstance(leaf, torch.Tensor)]
    by_name: dict[str, Any] = pytree.tree_unflatten(call.leaves, call.structure)[1]
    is_plain = not literals and call.structure == pytree.tree_structure(((0,) * len(call.leaves), {}))

    def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        if is_plain and not kwargs and len(args) == len(call.leaves):
            return args  # the guard looks at their types
        if kwargs.keys() == by_name.keys():
            kwargs = {name: kwargs[name] for name in by_name}  # pytree keeps their order
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != call.structure:
            return None
        if any(type(leaves[place]) is not type(known) or leaves[place] != known for place, known in literals):
            return None
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    return flat


def _nester(call: Call) -> Callable[[tuple[Any, ...]], Any]:
    """Puts the kernel's flat results into the structure that the module returns."""
    if call.returned == pytree.tree_structure(0):
        return lambda results: results[0]
    return lambda results: pytree.tree_unflatten(results, call.returned)
