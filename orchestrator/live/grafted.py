"""A live module with an exported kernel as its forward: the same parameters, buffers and inner modules.

The one idea: what is returned is the module's own class with another forward, on the module's own tensors, so that
training, `state_dict` and `to` go on as before; a call that is not the one that was verified is the module's own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from orchestrator.exports.carried import guard
from orchestrator.live.calls import Call, twins
from orchestrator.live.settings import Settings

_SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set")
"""What a copy has in common with the module; hooks and inner modules are the copy's own."""
_trying = threading.local()
_is_transformed = cast("Callable[[], bool]", guard._ws_is_transformed)
_tell_once = cast("Callable[[object, object, int], None]", guard._ws_tell_once)


def shallow(module: torch.nn.Module, kind: type[torch.nn.Module] | None = None) -> torch.nn.Module:
    """A module of the same tensors and inner modules, which may get others and hooks of its own; `kind`: its class.

    What its `compile()` has made is the other's, and is left there.
    """
    kind = kind or type(module)
    made: torch.nn.Module = object.__new__(kind)
    for name, value in vars(module).items():
        is_own = isinstance(value, dict) and name.startswith("_") and name not in _SHARED
        vars(made)[name] = copy.copy(value) if is_own and name in vars(torch.nn.Module()) else value
    vars(made).pop("_compiled_call_impl", None)
    return made


def grafted(module: torch.nn.Module, call: Call, text: str) -> torch.nn.Module:
    """The module, whose calls like `call` run the exported kernel of `text`, a file of the flavour `module`.

    It shares all tensors and inner modules with `module`, which is left as it was; kernels that that has for other
    calls stay.
    """
    known = vars(module).get("_ws_kernels", [])
    made = shallow(module, type(module) if known else _class(type(module)))
    kernel = Kernel(call, _imported(text), made)
    vars(made)["_ws_kernels"] = [*(each.of(made) for each in known), kernel]
    return made


def answered_by(module: torch.nn.Module) -> int:
    """How many calls the newest kernel of a grafted module has answered."""
    return int(vars(module)["_ws_kernels"][-1].count)


def trains(module: torch.nn.Module) -> bool:
    """Whether the newest kernel of a grafted module gives gradients."""
    return bool(vars(module)["_ws_kernels"][-1].trains)


@contextlib.contextmanager
def tried() -> Iterator[None]:
    """Around calls that a kernel answers although a compiler is at work, as it is within a backend of its own."""
    _trying.now = True
    try:
        yield
    finally:
        _trying.now = False


class Kernel:
    """What answers calls like one call of a module."""

    def __init__(self, call: Call, exported: Mapping[str, Any], module: torch.nn.Module) -> None:
        self._call, self._exported = call, exported
        self._flat, self._run = _flattener(call), _runner(call, exported)
        self._guard, self._training = exported["_ws_guard"], exported.get("_ws_training")
        self._ws_settings = Settings(module, self._guard._members)
        self.count = 0

    def of(self, module: torch.nn.Module) -> Kernel:
        """The same for another module."""
        return Kernel(self._call, self._exported, module)

    def answer(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Whether the kernel takes a call, and then its answer."""
        settings = self._ws_settings
        if settings.parts[0] is not module or (leaves := self._flat(args, kwargs)) is None:
            return False, None
        tensors = self._guard.known(settings, leaves)
        if tensors is None:
            if _is_transformed() and not getattr(_trying, "now", False):
                return False, None
            # The guard asks `self` for the settings, as it asks an exported module.
            tensors = self._guard.matched(self, leaves, {})
            if tensors is None:
                return False, None
        training = self._training
        if training is None:
            wants_another = self._exported["_ws_wants_gradient"](self, tensors)
        else:
            wants_another = not training.serves(tensors)
        if wants_another:  # a gradient that the kernel does not give
            _tell_once(self, tensors, 6)
            return False, None
        self.count += 1
        return True, self._run(tensors)

    @property
    def trains(self) -> bool:
        """Whether it gives gradients."""
        return self._training is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        module = self._ws_settings.parts[0]
        return self.of(copy.deepcopy(module, memo))


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


def _class(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The module's class with a forward that asks kernels first."""

    @functools.wraps(kind.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            for kernel in self.__dict__.get("_ws_kernels", ()):
                is_answered, result = kernel.answer(self, args, kwargs)
                if is_answered:
                    return result
        return kind.forward(self, *args, **kwargs)

    def deepcopy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        made: torch.nn.Module = object.__new__(type(self))
        memo[id(self)] = made
        kernels = vars(self).get("_ws_kernels", [])
        plain = {name: value for name, value in vars(self).items() if name != "_ws_kernels"}
        vars(made).update(copy.deepcopy(plain, memo))
        vars(made)["_ws_kernels"] = [kernel.of(made) for kernel in kernels]
        return made

    def reduce(self: torch.nn.Module, _: Any) -> Any:
        plain = shallow(self, kind)
        for name in ("_ws_kernels", "warpsmith"):
            vars(plain).pop(name, None)
        return _itself, (plain,)

    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"forward": forward, "__deepcopy__": deepcopy, "__reduce_ex__": reduce}
    return type(kind.__name__, (kind,), {**named, **own})


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    """What a pickle calls, which holds the plain module."""
    return module


def _runner(call: Call, exported: Mapping[str, Any]) -> Callable[[Any], Any]:
    """The verified program, whose flat results it puts into the structure that the module returns."""
    is_one = call.returned == pytree.tree_structure(0)
    nested = operator.itemgetter(0) if is_one else functools.partial(_nested, structure=call.returned)
    if (training := exported.get("_ws_training")) is not None:
        structured = exported["_ws_structured"]
        return lambda tensors: nested(structured(training(tensors)))
    program = _program(exported)
    return lambda tensors: nested(program(tensors))


def _nested(results: Any, structure: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(results, structure)


def _program(exported: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A forward's program. Each module has CUDA graphs of its own, which are kept by address: equal layers, whose file
    is one, would drive out each other's."""
    shared: types.FunctionType = exported["_ws_forward"]
    if "_ws_graphs" not in exported:
        return shared
    own = {**exported, "_ws_graphs": exported["_WsGraphs"](exported["_ws_run"], exported["_ws_stream"])}
    return types.FunctionType(shared.__code__, own, shared.__name__)


def _flattener(call: Call) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]:
    """Gives the tensors of a call in the verified order, or None where it is another call by all but its tensors."""
    literals = [(place, leaf) for place, leaf in enumerate(call.leaves) if not isinstance(leaf, torch.Tensor)]
    by_name: dict[str, Any] = pytree.tree_unflatten(call.leaves, call.structure)[1]
    is_plain = not literals and call.structure == pytree.tree_structure(((0,) * len(call.leaves), {}))
    is_one = len(call.leaves) == 1
    same = twins([leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)])

    def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        if is_plain and not kwargs and len(args) == len(call.leaves):
            return args if is_one or twins(args) == same else None  # the guard looks at their types
        if kwargs.keys() == by_name.keys():
            kwargs = {name: kwargs[name] for name in by_name}  # pytree keeps their order
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != call.structure:
            return None
        for place, known in literals:
            if type(leaves[place]) is not type(known) or repr(leaves[place]) != repr(known):  # zeros have signs
                return None
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return tensors if twins(tensors) == same else None

    return flat
