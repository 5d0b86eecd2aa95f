"""A training step as a module: the forward, then gradients for given gradients of its outputs, in one call.

The one idea: a step is a module like any other. Its inputs are the forward's and the gradients that are given, its
outputs are the forward's and the gradients that come of it, so capture, baselines, truth and timing need not know.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from warpsmith.errors import BadInput
from warpsmith.graphs import dtypes
from warpsmith.graphs.library.attention import Whole
from warpsmith.v1 import task_pb2, tensor_pb2

Forward = Callable[..., Any]


class NoGradient(BadInput):
    """There is no such gradient as was asked for."""


@dataclass(frozen=True)
class Step:
    """What a step computes: positions among flattened tensor inputs and outputs, and names of parameters."""

    inputs: Sequence[int]
    parameters: Sequence[str]
    outputs: Sequence[int]

    @staticmethod
    def of(message: task_pb2.TrainingStep) -> Step:
        """As a task says it."""
        return Step(tuple(message.inputs), tuple(message.parameters), tuple(message.outputs))

    def run(
        self, module: torch.nn.Module, forward: Forward, args: Sequence[Any]
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """The forward's result, gradients of inputs in order, gradients of parameters by name.

        `args`: the forward's, then one gradient for each of `outputs`. A gradient is None where nothing depends on it.
        """
        count = len(args) - len(self.outputs)
        given = list(args[count:])
        with torch.enable_grad():
            leaves, spec = pytree.tree_flatten(tuple(args[:count]))
            places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            for position in self.inputs:
                leaves[places[position]] = leaves[places[position]].detach().requires_grad_()
            parameters = [operator.attrgetter(name)(module) for name in self.parameters]
            returned = forward(*pytree.tree_unflatten(leaves, spec))
            results = _tensors(returned)
            found = torch.autograd.grad(
                [results[position] for position in self.outputs],
                [*(leaves[places[position]] for position in self.inputs), *parameters],
                given,
                allow_unused=True,
            )
        result = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, returned)
        of_inputs, of_parameters = found[: len(self.inputs)], found[len(self.inputs) :]
        return result, list(of_inputs), dict(zip(self.parameters, of_parameters, strict=True))


def stepping(kind: type[torch.nn.Module], step: Step) -> type[torch.nn.Module]:
    """The class with the step as its forward; parameters and state are those of the class."""

    def forward(self: torch.nn.Module, *args: Any) -> Any:
        return step.run(self, functools.partial(kind.forward, self), args)

    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**named, "forward": forward, "_training_step": step, "_forward_of": kind})


def step_of(module: torch.nn.Module) -> Step | None:
    """The step that a module's forward is; None for an ordinary one."""
    return getattr(module, "_training_step", None)


def forward_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module whose gradients a step computes; it shares parameters and state."""
    forward = copy.copy(module)
    forward.__class__ = module._forward_of  # type: ignore[assignment]
    return forward


def compiled(module: torch.nn.Module, compile_: Callable[[torch.nn.Module], Forward]) -> Forward:
    """The module as `compile_` makes it; of a step, its forward and so its backward, as a user compiles a model."""
    step = step_of(module)
    if step is None:
        return compile_(module)
    forward = compile_(forward_of(module))
    return lambda *args: step.run(module, forward, args)


def traced(module: torch.nn.Module, args: Sequence[Any], device_type: str) -> torch.nn.Module:
    """A module like a step, whose forward makes the step's ATen calls one by one and can be exported.

    The calls are those below autograd, of the forward and of the backward alike, composite operations of the forward
    taken apart as PyTorch does it for training; attention becomes two calls (`library.attention`) where the device that
    it is traced for has them, else products and a softmax.
    """
    step = step_of(module)
    assert step is not None
    leaves, spec = pytree.tree_flatten(tuple(args))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    members = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(held: dict[str, torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            flat[place] = tensor
        result = torch.func.functional_call(module, held, tuple(pytree.tree_unflatten(flat, spec)))
        flat_result, structure[:] = _flat(result)
        return [leaf for leaf in flat_result if isinstance(leaf, torch.Tensor)]

    structure: list[Any] = []
    mode = _mode_of(leaves)
    fake = functools.partial(_fake, mode)
    held = {name: fake(tensor) for name, tensor in members.items()}
    for name, member in members.items():
        if isinstance(member, torch.nn.Parameter):  # a forward may ask for one by its class
            held[name] = torch.nn.Parameter(held[name], member.requires_grad)
    with mode, Whole(device_type):
        calls = make_fx(run, tracing_mode="real")(held, [fake(leaves[place]) for place in places])
    calls.graph.eliminate_dead_code()
    calls.recompile()
    flat_result, tree = structure

    def forward(*args: Any) -> Any:
        own = {**dict(exported.named_parameters()), **dict(exported.named_buffers())}
        made = iter(calls(own, _tensors(args)))
        return pytree.tree_unflatten(
            [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat_result], tree
        )

    exported = copy.copy(module)
    exported.forward = forward
    return exported


def _flat(tree: Any) -> tuple[list[Any], list[Any]]:
    leaves, spec = pytree.tree_flatten(tree)
    return leaves, [leaves, spec]


def _mode_of(leaves: Sequence[Any]) -> FakeTensorMode:
    """The mode of fake arguments, or a new one."""
    modes = (leaf.fake_mode for leaf in leaves if isinstance(leaf, torch._subclasses.FakeTensor))
    return next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return tensor
    made: torch.Tensor = mode.from_tensor(tensor.detach())
    return made


def described(message: task_pb2.TrainingStep, module: torch.nn.Module, args: Sequence[Any]) -> task_pb2.TrainingStep:
    """What the step of a forward `module` on `args` computes.

    All floating-point inputs and parameters have gradients that a floating-point output depends on and that the
    patterns of `wanted` take.

    Raises:
        NoGradient: a pattern takes nothing that could have a gradient; no output depends on anything wanted.
    """
    names = {name: position for position, name in enumerate(_input_names(module, args))}
    tensors = _tensors(args)
    inputs = [names[name] for name in names if tensors[names[name]].is_floating_point()]
    labels = {position: name for name, position in names.items()}
    parameters = [name for name, each in module.named_parameters() if each.requires_grad and each.is_floating_point()]
    for pattern in message.wanted:
        known = [*(labels[position] for position in inputs), *parameters]
        if not fnmatch.filter(known, pattern):
            raise NoGradient(
                f"--grad {pattern}: names no input or parameter that can have a gradient; there are {', '.join(known)}"
            )
    if message.wanted:
        inputs = [position for position in inputs if _is_wanted(labels[position], message.wanted)]
        parameters = [name for name in parameters if _is_wanted(name, message.wanted)]
    outputs = _differentiable(inputs, module, args)
    gradients = [torch.empty_like(output) for output in outputs.values()]
    if not outputs:
        raise NoGradient("no output of the forward depends on a parameter or input that can have a gradient")
    step = Step(inputs, parameters, tuple(outputs))
    _, of_inputs, of_parameters = step.run(module, functools.partial(type(module).forward, module), (*args, *gradients))
    found = task_pb2.TrainingStep(wanted=message.wanted, outputs=outputs, gradients=map(dtypes.spec_of, gradients))
    found.inputs.extend(position for position, each in zip(inputs, of_inputs, strict=True) if each is not None)
    found.parameters.extend(name for name, each in of_parameters.items() if each is not None)
    return found


def _differentiable(inputs: Sequence[int], module: torch.nn.Module, args: Sequence[Any]) -> dict[int, torch.Tensor]:
    """The forward's outputs that have gradients, by position."""
    leaves, spec = pytree.tree_flatten(tuple(args))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    with torch.enable_grad():
        for position in inputs:
            leaves[places[position]] = leaves[places[position]].detach().requires_grad_()
        results = _tensors(module(*pytree.tree_unflatten(leaves, spec)))
    return {position: each.detach() for position, each in enumerate(results) if each.requires_grad}


def _input_names(module: torch.nn.Module, args: Sequence[Any]) -> Iterator[str]:
    """A name for each tensor input: forward's parameter, with its path where an argument holds several."""
    forward = type(module).forward
    given = getattr(forward, "names", None)  # of a forward that takes some by name only
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    for position, argument in enumerate(args):
        known = parameters[min(position, len(parameters) - 1)]
        is_several = known.kind in (known.VAR_POSITIONAL, known.VAR_KEYWORD)
        name = given[position] if given else f"{known.name}{position}" if is_several else known.name
        for path, leaf in pytree.tree_flatten_with_path(argument)[0]:
            if isinstance(leaf, torch.Tensor):
                yield name + pytree.keystr(path)


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def drawn(specs: Sequence[tensor_pb2.TensorSpec], device: torch.device | str) -> list[torch.Tensor]:
    """Gradients for a step, drawn from a normal distribution by the device's generator."""
    made = []
    for spec in specs:
        tensor = torch.empty_strided(
            list(spec.shape), list(spec.strides), dtype=dtypes.to_torch(spec.dtype), device=device
        )
        made.append(tensor.normal_())
    return made
