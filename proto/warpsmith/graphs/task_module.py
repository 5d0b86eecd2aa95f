"""The user's module, loaded from the sources that a task carries.

User code runs here, so only a jailed worker may call this. Every failure of the user's code becomes one
`BadInput` that names the file, the line where known, and the cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from warpsmith.errors import BadInput
from warpsmith.graphs import dtypes, training_step
from warpsmith.graphs.capture import MAX_CONSTANT_BYTES
from warpsmith.graphs.refusals import Frame, frames_of
from warpsmith.sandbox.private_files import relative_path
from warpsmith.v1 import task_pb2

_MODULE_NAME = "warpsmith_task_module"
_TWISTER_BEGIN, _TWISTER_WORDS = 3, 624
"""Where the words of a processor's generator lie in its state, in units of 64 bits, each holding 32
(CPUGeneratorImplStateLegacy of torch: seed, counters, words)."""


def seed_generators(seed: int) -> None:
    """Seeds every generator that a module may draw from: PyTorch's.

    `torch.manual_seed` does it too, but formats a stack trace for each kind of device that is absent: 1 ms a call.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    elif torch.cuda.is_available():
        torch.manual_seed(seed)  # CUDA's are seeded when it is first used
    seed_generator(torch.default_generator, seed)


def seed_all(seed: int) -> None:
    """As `seed_generators`, and Python's and numpy's: `get_inputs` may draw from them, a forward may not."""
    seed_generators(seed)
    random.seed(seed)
    numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32] if seed >> 32 else seed)


def seed_generator(generator: torch.Generator, seed: int) -> torch.Generator:
    """Seeds it with every bit of a seed from 0 to 2^63 − 1: of a processor's, `manual_seed` takes the lowest 32.

    Small seeds give what they give elsewhere.
    """
    generator.manual_seed(seed)
    if generator.device.type == "cpu" and seed >> 32:
        generator.set_state(_twisted(seed))
    return generator


@functools.lru_cache(maxsize=8)
def _twisted(seed: int) -> torch.Tensor:
    """The state of a processor's generator with every bit of the seed; a case seeds several times alike."""
    state = torch.Generator().manual_seed(seed).get_state()
    stream = hashlib.shake_256(seed.to_bytes(8)).digest(4 * _TWISTER_WORDS)
    words = state.view(torch.int64)[_TWISTER_BEGIN : _TWISTER_BEGIN + _TWISTER_WORDS]
    words.copy_(torch.from_numpy(numpy.frombuffer(stream, numpy.uint32).astype(numpy.int64)))
    return state


@dataclass(frozen=True)
class TaskModule:
    """A loaded entry file: builds the module and draws its inputs."""

    entry_path: str
    """Path of the entry file as the task names it; messages name it."""
    directory: Path
    """Where the sources were written."""
    class_name: str
    """Name of the nn.Module subclass."""
    namespace: ModuleType
    """The imported entry file."""
    training_step: task_pb2.TrainingStep | None = None
    """What the module's forward stands for, where a task is a training step whose gradients are known."""

    def build(self, seed: int = 42, device: torch.device | str = "cpu") -> torch.nn.Module:
        """The module as its constructor makes it (train mode), with weights drawn from `seed` on the CPU.

        Weights are drawn on the CPU and then moved, so they are equal on every device. Large tensors that it keeps as
        plain attributes become buffers in no `state_dict`, which a graph can name and `to` moves.

        Raises:
            BadInput: get_init_inputs or the constructor fails, or the class is no nn.Module.
        """
        kind = getattr(self.namespace, self.class_name, None)
        if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
            raise BadInput(f"{self.entry_path}: {self.class_name} is not an nn.Module subclass")
        kind = by_position(kind)
        if self.training_step is not None:
            kind = training_step.stepping(kind, training_step.Step.of(self.training_step))
        seed_generators(seed)  # get_init_inputs may draw as well, or give a module of its own
        arguments = self.init_inputs()
        with self.explaining(f"{self.class_name}(...) failed"):
            seed_generators(seed)
            built: torch.nn.Module = kind(**arguments) if isinstance(arguments, dict) else kind(*arguments)
            if any(map(torch.nn.parameter.is_lazy, (*built.parameters(), *built.buffers()))):
                self._complete(built, seed)
            name_tensors(built, least_bytes=MAX_CONSTANT_BYTES + 1)
            moved: torch.nn.Module = built.to(device)
        return moved

    def _complete(self, built: torch.nn.Module, seed: int) -> None:
        """Lets lazy modules (`LazyLinear`) take their shapes from the inputs, by a call that changes no statistics."""
        training = [(module, module.training) for module in built.modules()]
        args = self.inputs(seed)
        seed_generators(seed)
        with torch.no_grad():
            built.eval()(*args)
        for module, was_training in training:
            module.training = was_training

    def inputs(self, seed: int, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """The positional arguments of one forward, from get_inputs run on `device` with `seed`.

        A dict whose keys are forward's parameters is its arguments by name; any other is one argument. Those that
        forward takes by name only come last, as `by_position` has them. Of a training step, gradients follow.

        Raises:
            BadInput: get_inputs is missing, fails, returns no tensor, or names an argument that has no position.
        """
        function = getattr(self.namespace, "get_inputs", None)
        if not callable(function):
            raise BadInput(f"{self.entry_path}: defines no get_inputs()")
        with self.explaining("get_inputs() failed"):
            seed_all(seed)
            with torch.device(device):
                returned = function()
        if isinstance(returned, dict):
            returned = self._by_position(returned)
        args = returned if isinstance(returned, list | tuple) else (returned,)
        if not tensor_leaves(tuple(args)):
            raise BadInput(f"{self.entry_path}: get_inputs() returned no tensor")
        return (*_moved(args, device), *self._gradients(device))

    def _gradients(self, device: torch.device | str) -> list[torch.Tensor]:
        """What a training step is given beside the forward's arguments: from get_grad_inputs, or drawn."""
        specs = self.training_step.gradients if self.training_step is not None else ()
        function = getattr(self.namespace, "get_grad_inputs", None)
        if not specs or function is None:
            return training_step.drawn(specs, device)
        with self.explaining("get_grad_inputs() failed"), torch.device(device):
            returned = tensor_leaves(function())
        if [(list(each.shape), each.dtype) for each in returned] != [
            (list(spec.shape), dtypes.to_torch(spec.dtype)) for spec in specs
        ]:
            wanted = ", ".join(f"{dtypes.to_torch(spec.dtype)} {list(spec.shape)}" for spec in specs)
            raise BadInput(f"{self.entry_path}: get_grad_inputs() must return gradients of the outputs: {wanted}")
        return [each.to(device) for each in returned]

    def _by_position(self, given: dict[Any, Any]) -> tuple[Any, ...]:
        """What get_inputs gave as a dict, in the order of forward's parameters, defaults in between."""
        _, *parameters = inspect.signature(getattr(self.namespace, self.class_name).forward).parameters.values()
        left = set(given)
        if not left or not left <= {parameter.name for parameter in parameters}:
            return (given,)
        args: list[Any] = []
        for parameter in parameters:
            if not left:
                break
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise BadInput(
                    f"{self.entry_path}: get_inputs() names {min(left)}, which forward takes in or behind "
                    f"{str(parameter).partition(':')[0]}, and calls are made by position: name each"
                )
            left.discard(parameter.name)
            value = given.get(parameter.name, parameter.default)
            if value is parameter.empty:
                raise BadInput(f"{self.entry_path}: get_inputs() gives no {parameter.name}, which forward needs")
            args.append(value)
        return tuple(args)

    def tensor_leaves(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors among the arguments, flattened in pytree order."""
        return tensor_leaves(args)

    def with_leaves(self, args: tuple[Any, ...], leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The arguments with their tensors, in pytree order, replaced."""
        replaced: tuple[Any, ...] = with_leaves(args, leaves)
        return replaced

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Turns an exception of user code inside the block into a BadInput that says `what` and where."""
        try:
            yield
        except BadInput:
            raise
        except (Exception, SystemExit) as error:
            raise BadInput(f"{self.location(frames_of(error))}: {what}: {cause_of(error)}") from error

    def location(self, frames: Sequence[Frame]) -> str:
        """File and line of the innermost of `frames` in the user's sources, or the entry file."""
        root = self.directory.resolve()
        for file, line in reversed(frames):
            path = Path(file)
            if path.is_absolute() and path.resolve().is_relative_to(root):
                return f"{path.resolve().relative_to(root)}:{line}"
        return self.entry_path

    def init_inputs(self) -> Any:
        """What the constructor gets: a list, a tuple or a dict. Raises BadInput where get_init_inputs fails."""
        function: Callable[[], Any] | None = getattr(self.namespace, "get_init_inputs", None)
        if function is None:
            return ()
        with self.explaining("get_init_inputs() failed"):
            arguments = function()
        if not isinstance(arguments, list | tuple | dict):
            raise BadInput(f"{self.entry_path}: get_init_inputs() must return a list of constructor arguments")
        return arguments


def name_tensors(module: torch.nn.Module, least_bytes: int = 0) -> None:
    """Makes tensors that it keeps as plain attributes, from a size on, buffers in no `state_dict`."""
    for each in module.modules():
        for name, held in list(vars(each).items()):
            if not isinstance(held, torch.Tensor) or isinstance(held, torch.nn.Parameter) or held.nbytes < least_bytes:
                continue
            del vars(each)[name]
            if hasattr(each, name) or not dtypes.is_supported(held.dtype):  # its class has something by that name
                vars(each)[name] = held
            else:
                each.register_buffer(name, held, persistent=False)


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure, flattened in pytree order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def with_leaves(tree: Any, leaves: Sequence[torch.Tensor]) -> Any:
    """The structure with its tensors, in pytree order, replaced; raises ValueError when their number
    differs."""
    flat, spec = pytree.tree_flatten(tree)
    positions = [index for index, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
    for position, leaf in zip(positions, leaves, strict=True):
        flat[position] = leaf
    return pytree.tree_unflatten(flat, spec)


def load(task: task_pb2.Task, directory: Path) -> TaskModule:
    """Writes the task's sources under `directory` and imports the entry file. Only in a jailed worker.

    Raises:
        BadInput: a path leaves the directory, the entry file is missing, does not parse or does not import,
        or
            it defines no class of that name.
    """
    directory = directory.resolve()
    for source in task.sources:
        path = directory / relative_path("source path", source.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.content)
    entry = directory / relative_path("source path", task.entry_path)
    if not entry.is_file():
        raise BadInput(f"{task.entry_path}: the entry file is not among the sources")
    for root in (str(directory), str(entry.parent)):
        if root not in sys.path:
            sys.path.insert(0, root)
    namespace = _import(task.entry_path, entry, directory)
    class_name = task.class_name or "Model"
    if not hasattr(namespace, class_name):
        raise BadInput(f"{task.entry_path}: defines no class {class_name}")
    _register_classes(namespace)
    step = task.training_step if task.training_step.outputs else None  # intake does not know it yet
    return TaskModule(task.entry_path, directory, class_name, namespace, step)


def _register_classes(namespace: ModuleType) -> None:
    """Lets pytree look into the dataclasses of a file, and write down those and its named tuples by name."""
    for name, kind in vars(namespace).items():
        if not isinstance(kind, type):
            continue
        if kind in pytree.SUPPORTED_NODES:
            _name_in_text(kind, f"{_MODULE_NAME}.{name}")
        elif dataclasses.is_dataclass(kind):
            torch.export.register_dataclass(kind, serialized_type_name=f"{_MODULE_NAME}.{name}")
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            pytree._register_namedtuple(kind, serialized_type_name=f"{_MODULE_NAME}.{name}")


def _name_in_text(kind: type, name: str) -> None:
    """Names a class that the file has registered by itself without a name for its structure as text."""
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if known is not None and known.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        pytree.SUPPORTED_SERIALIZED_TYPES[kind] = known._replace(serialized_type_name=name)
        pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind


def by_position(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class, whose calls are made by position: what its forward takes by name only comes last, in order."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY not in kinds or inspect.Parameter.VAR_POSITIONAL in kinds:
        return kind
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    count = kinds.index(inspect.Parameter.KEYWORD_ONLY)

    def forward(self: torch.nn.Module, *args: Any) -> Any:
        return kind.forward(self, *args[:count], **dict(zip(names, args[count:], strict=False)))

    forward.names = [parameter.name for parameter in parameters]  # type: ignore[attr-defined]
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**named, "forward": forward})


def cause_of(error: BaseException) -> str:
    """An exception in one line: its kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _import(name: str, entry: Path, directory: Path) -> ModuleType:
    # Whatever its name ends in: of names that end otherwise Python knows no loader.
    loader = SourceFileLoader(_MODULE_NAME, str(entry))
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, entry, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pickling look the module up while it runs
    shell = TaskModule(name, directory, "", module)
    try:
        with shell.explaining("importing the file failed"):
            spec.loader.exec_module(module)
    except BadInput as error:
        match error.__cause__:
            case SyntaxError(msg=message, lineno=line):
                raise BadInput(f"{name}:{line}: syntax error: {message}") from error.__cause__
        raise
    return module


def _moved(args: Sequence[Any], device: torch.device | str) -> Any:
    """Inputs that get_inputs put elsewhere by name (device="cuda") go to the device that was asked for."""
    wanted = torch.device(device).type
    leaves = tensor_leaves(args)
    if all(leaf.device.type == wanted for leaf in leaves):
        return args
    return with_leaves(args, [leaf.to(device) for leaf in leaves])
