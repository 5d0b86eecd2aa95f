"""A task, loaded: the module, its inputs for a case or for timing, and its tensors as a program's sources.

The one idea: the judge's process and the candidate's hold one of these each, made from the same sources and seeds,
so both see equal values and neither sends a tensor. User code runs here: only in a jailed worker.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase

from gpu_bench.judging import guard
from gpu_bench.running.executor import Call, Executor, LoadedProgram, Memory, Sources
from gpu_bench.values import inputs, members
from warpsmith import plugins
from warpsmith.contract import words
from warpsmith.errors import BadInput, UnknownPlugin
from warpsmith.graphs import capture, dtypes, task_module
from warpsmith.v1 import artifact_pb2, candidate_pb2, graph_pb2, judging_pb2, task_pb2, tensor_pb2, verdict_pb2

_FACTORS = 8191
_PARAMETERS = 1_000_000
"""In the place of an input's position: what moves the parameters of a case that is as timed ones are."""
Args = tuple[Any, ...]
"""Positional arguments of one forward."""


def device_of(target: task_pb2.Target.ValueType) -> torch.device:
    """The device of a target.

    Raises:
        BadInput: this machine has none.
    """
    if target == task_pb2.TARGET_CUDA:
        if not torch.cuda.is_available():
            raise BadInput("the target is cuda, but this machine has no usable GPU: choose the cpu target")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def release_surplus(device: torch.device, task: task_pb2.Task | None = None) -> None:
    """Gives cached memory back where the GPU runs short of it: judge and candidate are two processes on one device.

    `task`: where its tensors are small beside the GPU, memory is kept as long as much is free, for getting it again is
    slow: on an H200 it made comparing 6.4 GB take 217 ms instead of 119. No more than that: sessions that are made
    ready meanwhile, and sanitizers, need some too (with an eighth left free, finals of 6.4 GB met its end).
    """
    if device.type != "cuda":
        return
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # a kernel has failed here: the process is at its end, and its fault is told elsewhere
        return
    kept = torch.cuda.memory_stats_as_nested_dict(device)  # `memory_reserved` flattens and sorts it all: 0.5 ms a call
    surplus = kept["reserved_bytes"]["all"]["current"] - kept["allocated_bytes"]["all"]["current"]
    size = sum(map(_bytes_of, (*task.inputs, *task.outputs))) if task is not None else total
    if not may_keep(surplus, free, total, size):
        torch.cuda.empty_cache()


def may_keep(surplus: int, free: int, total: int, size: int) -> bool:
    """Whether a process may keep its `surplus`, with so many bytes `free` of `total` and a task's tensors of `size`."""
    return surplus <= total // 8 or (size < total // 10 and free > total * 2 // 5)


def _bytes_of(spec: tensor_pb2.TensorSpec) -> int:
    return dtypes.element_span(spec) * dtypes.to_torch(spec.dtype).itemsize


EXECUTORS = ("host", "cuda")
"""Built-in plugins."""


def executor_of(target: task_pb2.Target.ValueType) -> Executor:
    """The executor of a target; a chosen one comes before the built-in ones.

    Raises:
        UnknownPlugin: none runs the target, says which were asked; or none of a chosen name is installed.
    """
    asked = dict.fromkeys((*plugins.chosen("executor"), *EXECUTORS))
    for name in asked:
        executor: Executor = plugins.load("executor", name)
        if executor.target == target:
            return executor
    raise UnknownPlugin(f"no executor runs {words.target(target)}; asked: {', '.join(asked)}")


CONSTRUCTORS = (verdict_pb2.VALUE_FAMILY_TASK, 0)
"""Family and seed of the parameters and state that the constructor made."""


@dataclass
class LoadedTask:
    """The module of a task on its device, in train mode, with the weights of seed 42."""

    task: task_pb2.Task
    device: torch.device
    user: task_module.TaskModule
    module: torch.nn.Module
    executor: Executor
    learned: judging_pb2.Learned = field(default_factory=judging_pb2.Learned)
    """What values the inputs may have; in every process what the judge's found out."""
    state_seed: int = field(default_factory=lambda: secrets.randbits(31))
    """From which state of cases is built, where seeds draw it."""
    fresh_members: tuple[verdict_pb2.ValueFamily.ValueType, int] | None = None
    """Family and seed of parameters and state that go with FRESH values; where they are not the constructor's, with all
    values but the task's. None: on a processor the case's own seed moves parameters, as it does those of a candidate's
    timed calls."""
    _pristine: dict[str, torch.Tensor] = field(default_factory=dict)
    _other_state: tuple[int, Mapping[str, torch.Tensor]] = (-1, MappingProxyType({}))
    """A seed, and the buffers that go with it."""
    _attributes: list[tuple[torch.nn.Module, dict[str, Any]]] = field(default_factory=list)
    """What every module of the tree held when it was made."""

    @staticmethod
    def load(task: task_pb2.Task) -> LoadedTask:
        """Imports the task's sources and builds its module.

        Raises:
            BadInput: the sources do not load, or the target is not on this machine.
        """
        device = device_of(task.target)
        torch.backends.cuda.matmul.allow_tf32 = task.precision == task_pb2.PRECISION_TF32
        directory = Path(tempfile.mkdtemp(prefix="task-"))
        user = task_module.load(task, directory)
        loaded = LoadedTask(task, device, user, user.build(device=device), executor_of(task.target))
        loaded._pristine = {name: tensor.clone() for name, tensor in loaded._own_tensors().items()}
        loaded._attributes = [(each, _held(each)) for each in loaded.module.modules()]
        return loaded

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        own: dict[str, torch.Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        own |= dict(self.module.named_buffers(remove_duplicate=False))
        return {name: tensor.detach() for name, tensor in own.items()}

    def restore(self) -> None:
        """Puts parameters and state back to what the constructor made, in place; what a call made is forgotten.

        A module may pack its weights in its first call: they are packed again, after they have moved.
        """
        for each, held in self._attributes:
            each.__dict__.clear()
            each.__dict__.update(_copied(held))
        for name, tensor in self._own_tensors().items():
            tensor.copy_(self._pristine[name])

    def drawn_state(self) -> list[str]:
        """Names of buffers in the `state_dict` that are others when the module is built from `state_seed`, and the same
        each time; none where one then has another shape, which others may go with."""
        there = {name for name, _ in self.module.named_buffers(remove_duplicate=False)} - self.constants
        own = {n: each for n, each in self._pristine.items() if n in there and each.layout is torch.strided}
        if all(map(members.is_of_one_value, own.values())):
            return []
        other = self._built_state(self.state_seed)
        if any(name not in other or other[name].shape != tensor.shape for name, tensor in own.items()):
            return []
        found = [name for name in own if not guard.same_bits(other[name], own[name].cpu())]
        again = self._built_state(self.state_seed) if found else {}
        return sorted(name for name in found if guard.same_bits(other[name], again[name]))

    def _built_state(self, seed: int) -> dict[str, torch.Tensor]:
        """All buffers as the constructor makes them from `seed`, on the processor."""
        task_module.seed_all(seed)  # it may draw as `get_inputs` does
        return {name: each.detach() for name, each in self.user.build(seed).named_buffers(remove_duplicate=False)}

    def _state_of(self, learned: judging_pb2.Learned) -> Mapping[str, torch.Tensor]:
        """The buffers that another seed draws, which is made once."""
        if not learned.drawn_state:
            return {}
        if self._other_state[0] != learned.state_seed:
            built = self._built_state(learned.state_seed)
            moved = {name: built[name].to(self.device) for name in learned.drawn_state}
            self._other_state = learned.state_seed, moved
        return self._other_state[1]

    def positions(self, written: Iterable[str]) -> list[str]:
        """Of `written` state what may index other state: single integers, but for batch norms' counts, which do not."""
        return [
            name
            for name in written
            if name in self._pristine  # no call has made it
            and not isinstance(self.module.get_submodule(name.rpartition(".")[0]), _NormBase)
            and members.is_count(self._pristine[name])
        ]

    @property
    def constants(self) -> frozenset[str]:
        """Qualified names of buffers that are in no `state_dict`: what the module makes for itself never varies."""
        return frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, each in self.module.named_modules(remove_duplicate=False)
            for name in each._non_persistent_buffers_set
        )

    def keep_places(self) -> None:
        """Puts what a call gave its buffers anew (`self.mean = ...`) into the memory that they had."""
        for each, held in self._attributes:
            for name, buffer in held["_buffers"].items():
                now = each._buffers.get(name)
                if buffer is not None and now is not None and now is not buffer and now.shape == buffer.shape:
                    buffer.copy_(now)
                    each._buffers[name] = buffer

    def move(self, copied: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Has the module's tensors lie where `copied` (name, tensor) puts them."""
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if dtypes.is_supported(tensor.dtype):
                tensor.data = copied(name, tensor.detach())

    def move_parameters(self, seed: int) -> None:
        """Scales every parameter's elements by up to a quarter, in place; by what, only who knows the seed can tell.

        The factors repeat after a prime number of elements: to draw as many as there are takes longer than a call.
        """
        generator = inputs.generator_for(verdict_pb2.VALUE_FAMILY_FRESH, seed, _PARAMETERS, torch.device("cpu"))
        factors = (1.0 + 0.25 * (2 * torch.rand(_FACTORS, generator=generator) - 1)).to(self.device)
        for name, parameter in self.module.named_parameters():
            if parameter.is_floating_point() and parameter.is_contiguous() and parameter.numel():
                _scale(parameter.detach().view(-1), self._pristine[name].view(-1), factors.to(parameter.dtype))

    def pristine(self, name: str) -> torch.Tensor:
        """A parameter or a buffer as the constructor made it."""
        return self._pristine[name]

    @property
    def trainable(self) -> set[str]:
        """Names of parameters that training may change."""
        return {name for name, each in self.module.named_parameters(remove_duplicate=False) if each.requires_grad}

    def _keep_padding(self) -> None:
        """Rows of tables that stand for nothing, and are zeros, stay so: training leaves them."""
        for name, each in self.module.named_modules(remove_duplicate=False):
            if isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag) and each.padding_idx is not None:
                own = self._pristine.get(f"{name}.weight".removeprefix("."))
                if own is not None and "weight" in each._parameters and members.is_zero(own[each.padding_idx]):
                    each.weight.detach()[each.padding_idx] = 0.0

    def case(
        self, family: verdict_pb2.ValueFamily.ValueType, seed: int, learned: judging_pb2.Learned | None = None
    ) -> Args:
        """The arguments of one case; parameters and state are set to what goes with them.

        FRESH is what timed calls get, parameters included, so that nothing tells a judged call from one. `learned`: by
        what was known when the case was drawn first, where more is known since.
        """
        learned = learned or self.learned
        args = self.user.inputs(seed, self.device)
        self.restore()
        constants = self.constants - {*learned.written_state}
        is_fresh = family == verdict_pb2.VALUE_FAMILY_FRESH
        is_timed = is_fresh or (family != CONSTRUCTORS[0] and self.fresh_members not in {None, CONSTRUCTORS})
        moved_by = (self.fresh_members if is_timed else None) or (family, seed)
        if is_fresh and self.fresh_members is None and self.device.type == "cpu":
            self.move_parameters(seed)
        own = {name: tensor for name, tensor in self._own_tensors().items() if name not in constants}
        drawn = self._state_of(learned)
        members.vary(own, *moved_by, trainable=self.trainable, drawn=drawn, learned=learned, is_timed=is_timed)
        self._keep_padding()
        leaves = inputs.replaced(self.user.tensor_leaves(args), family, seed, learned)
        return self.user.with_leaves(args, leaves)

    @contextmanager
    def as_judged(self) -> Iterator[None]:
        """Around calls whose results are compared: without TF32 where that was `learned` to leave no yardstick."""
        if not self.learned.without_tf32:
            yield
            return
        before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = before

    def sources(self, args: Args) -> Sources:
        """The tensors of `args` and of the module as they are now, detached, sharing their memory."""
        parameters = {name: p.detach() for name, p in self.module.named_parameters(remove_duplicate=False)}
        state = {name: b.detach() for name, b in self.module.named_buffers(remove_duplicate=False)}
        return Sources([leaf.detach() for leaf in self.user.tensor_leaves(args)], parameters, state)

    def capture(self, args: Args) -> graph_pb2.Graph:
        """The module's graph, captured on the CPU so that it names no device; `args` as `case` gives them.

        Raises:
            BadInput: the module does not export.
        """
        if self.device.type == "cpu":
            try:
                return capture.capture(self.module, args)
            finally:
                self.restore()
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = self.user.inputs(0, "cpu")
        return capture.capture(self.user.build(device="cpu"), fake, self.device.type)

    def admit_operations(self) -> None:
        """Lets programs call the operations outside ATen that the module calls. Raises BadInput as `capture`."""
        self.capture(self.user.inputs(0, self.device))

    # ---- for timing ----------------------------------------------------------------------------------------

    def input_sets(self, count: int, seed: int) -> list[Args]:
        """Arguments for `count` calls, each with memory of its own: the task's values, seeds from `seed` on."""
        return [self.user.inputs(seed + position, self.device) for position in range(count)]

    def eager_call(self, args: Args) -> Callable[[], Any]:
        """The module's own forward on `args`."""
        module = self.module
        return lambda: module(*args)

    def load_program(self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact) -> LoadedProgram:
        """A program loaded beside the module. Raises ProgramFault."""
        return self.executor.load(program, artifact, self.device)

    def candidate_call(self, program: LoadedProgram, args: Args, memory: Memory | None = None) -> Call:
        """One forward by the program, on `args` and the module's own tensors. Raises ProgramFault."""
        return program.bind(self.sources(args), memory)

    def output_leaves(self, returned: Any) -> Sequence[torch.Tensor]:
        """The tensors of what eager returned, flattened in pytree order."""
        return task_module.tensor_leaves(returned)


_MEMBERS = ("_parameters", "_buffers", "_modules")


def _held(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of one module, with its members by name."""
    return _copied(module.__dict__)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """The same values in dicts of their own."""
    return {name: value.copy() if name in _MEMBERS else value for name, value in attributes.items()}


def _scale(to: torch.Tensor, given: torch.Tensor, factors: torch.Tensor) -> None:
    """`to` = `given` times the factors, over and over; all flat."""
    whole = given.numel() // len(factors) * len(factors)
    rows = (-1, len(factors))
    torch.mul(given[:whole].view(rows), factors, out=to[:whole].view(rows))
    torch.mul(given[whole:], factors[: given.numel() - whole], out=to[whole:])
