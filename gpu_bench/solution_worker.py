"""A solution's process: somebody else's `ModelNew`, which is host code and may do anything to the process it is in.

The one idea: this process holds nothing worth stealing and says nothing that is believed without a second look. The
reference, truth, seeds and the clock are elsewhere; values come by shared memory without their origin, outputs leave
by it. What it says of canaries, repeats and replaced functions catches the careless; what it computes is compared by
the judge, and how long it takes is measured from outside on values that it has not seen. Served by `warpsmith.worker`.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from gpu_bench import guard, integrity
from gpu_bench.bench_worker import match_shapes
from gpu_bench.contest import CallSet, fresh_calls, plain_calls
from gpu_bench.executor import ProgramFault
from gpu_bench.guard import GuardedMemory, Seeds
from gpu_bench.loaded import device_of, release_surplus
from gpu_bench.sharing import SharedMemory
from warpsmith import dtypes, task_module
from warpsmith.errors import BadInput
from warpsmith.task_module import cause_of, seed_generators
from warpsmith.v1 import artifact_pb2, judging_pb2, task_pb2, tensor_pb2, verdict_pb2
from warpsmith.worker import Methods

CLASS_NAME = "ModelNew"
_SEED = 42
"""Of the constructor, as in KernelBench and for the reference."""


@dataclass(frozen=True)
class Run:
    """One run: what it returned, copies of that taken at once, and what became of its sources."""

    returned: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    after: Mapping[str, torch.Tensor]
    broken: Sequence[str]


@dataclass
class Solution:
    """A module of class `ModelNew` on its device, in train mode."""

    module: torch.nn.Module
    device: torch.device
    signature: judging_pb2.Signature
    layouts: Sequence[tensor_pb2.TensorSpec]
    has_members: bool = False
    """Whether it has every parameter and state of the reference."""
    sets: dict[int, CallSet] = field(default_factory=dict)
    _places: dict[str, torch.Tensor] = field(default_factory=dict)
    """Inputs that keep their addresses from case to case."""
    _sizes: list[tensor_pb2.TensorSpec] = field(default_factory=list)
    """Of the outputs."""
    _earlier: Run | None = None
    """A run on the values of the case before: no later call may change its result."""

    @staticmethod
    def open(task: task_pb2.Task, artifact: artifact_pb2.Artifact, signature: judging_pb2.Signature) -> Solution:
        """Imports the solution and makes its module as the reference was made. Raises ProgramFault."""
        device = device_of(task.target)
        torch.backends.cuda.matmul.allow_tf32 = task.precision == task_pb2.PRECISION_TF32
        own = task_pb2.Task(entry_path="solution.py", class_name=CLASS_NAME)
        own.sources.add(path="solution.py", content=artifact.content)
        try:
            user = task_module.load(own, Path(tempfile.mkdtemp(prefix="solution-")))
            kind: Any = getattr(user.namespace, CLASS_NAME)
            with user.explaining(f"{CLASS_NAME}(...) failed"):
                arguments = ast.literal_eval(signature.constructor)
                seed_generators(_SEED)
                module = kind(**arguments) if isinstance(arguments, dict) else kind(*arguments)
                module = module.to(device)
        except BadInput as error:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, str(error)) from error
        if not isinstance(module, torch.nn.Module):
            raise ProgramFault(verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, f"{CLASS_NAME} is no nn.Module")
        return Solution(module, device, signature, list(task.inputs))

    def rehearse(self, values: Mapping[str, torch.Tensor]) -> None:
        """Looks for the reference's parameters and state, and calls the module once, which may compile it."""
        own = self._members()
        wanted = {name: tensor for name, tensor in values.items() if not name.startswith("input ")}
        self.has_members = all(
            name in own and own[name].shape == tensor.shape and own[name].dtype == tensor.dtype
            for name, tensor in wanted.items()
        )
        run = self._run(values, Seeds.drawn().poison, None)
        self._sizes = [dtypes.spec_of(output) for output in run.outputs]

    # ---- judging -------------------------------------------------------------------------------------------

    def execute(self, request: judging_pb2.ExecuteRequest, shared: SharedMemory) -> verdict_pb2.Comparison:
        """Runs the module on the sources of a case and writes its outputs where the regions say.

        Raises ProgramFault.
        """
        values = named_sources(request.sources, shared, self.device)
        names = [region.name for region in request.regions if region.name.startswith("output ")]
        expected = {region.name for region in request.regions}
        comparison = verdict_pb2.Comparison(family=request.family, seed=request.seed)

        seeds = Seeds.drawn()
        first = self._run(values, seeds.poison, seeds.canary)
        match_shapes(first.outputs, request.regions[: len(names)])
        second = self._run(values, seeds.poison, None)  # where the inputs of earlier cases lay
        self._deliver(second, request.regions, shared)
        other = self._run(values, seeds.other_poison, seeds.other_canary)
        comparison.unrepeatable_outputs.extend(_different(first.outputs, second.outputs, names))
        differs = set(_different(first.outputs, other.outputs, names)).difference(comparison.unrepeatable_outputs)
        broken = [*first.broken, *other.broken]
        if differs:
            poison = self._run(values, seeds.other_poison, seeds.canary)
            unwritten = _different(first.outputs, poison.outputs, names)
            comparison.uninitialized_read_outputs.extend(unwritten)
            comparison.stray_read_outputs.extend(sorted(differs.difference(unwritten)))
        for run in (first, second, other):
            changed = [n for n, tensor in run.after.items() if n in values and not guard.same_bits(tensor, values[n])]
            comparison.mutated_sources.extend(n for n in changed if n not in expected)
        comparison.broken_canaries.extend(dict.fromkeys(broken))
        comparison.outputs.extend(verdict_pb2.OutputError(output=position) for position in range(len(names)))
        earlier, self._earlier = self._earlier, first
        if earlier is not None and (changed := _different(earlier.returned, earlier.outputs, names)):
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_VALUE,
                f"{changed[0]} of an earlier call was changed by a later one: both are the same memory",
            )
        return comparison

    def _run(self, values: Mapping[str, torch.Tensor], poison: int, canary: int | None) -> Run:
        """One call on copies of the values: between canaries, or without them where the last such call had them."""
        memory = GuardedMemory(self.device, poison, canary or 0)
        leaves: dict[str, torch.Tensor] = {}
        for position, (name, tensor) in enumerate(_inputs(values)):
            placed = self._in_layout(position, tensor)
            if canary is not None:
                leaves[name] = memory.copy_of(name, placed)
            elif name in self._places and self._places[name].shape == placed.shape:
                leaves[name] = self._places[name].copy_(placed)
            else:
                leaves[name] = self._places[name] = placed.clone()
        self._set_members(values)
        _scatter(self._sizes, self.device, poison)
        seed_generators(_SEED)
        returned = self._call(list(leaves.values()))
        outputs = [leaf.clone() for leaf in returned]  # at once, on the stream of the call: what is late is lost
        _wait(self.device)
        members = {name: tensor.clone() for name, tensor in self._members().items()} if self.has_members else {}
        return Run(returned, outputs, {**leaves, **members}, memory.broken() if canary is not None else [])

    def _call(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            with torch.no_grad():
                returned = self.module(*self._arguments(leaves))
        except torch.OutOfMemoryError as error:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_RESOURCE, cause_of(error)) from error
        except (Exception, SystemExit) as error:
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, f"the forward failed: {cause_of(error)}"
            ) from error
        found = pytree.tree_leaves(returned)
        if promises := _promises(found):
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_CHEAT,
                f"the forward returns a tensor of its own kind, {promises[0]}: no result, but a promise of one",
            )
        return [leaf.detach() for leaf in found if isinstance(leaf, torch.Tensor)]

    def _arguments(self, leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        tensors = iter(leaves)
        flat = [ast.literal_eval(text) if text else next(tensors) for text in self.signature.leaves]
        args: tuple[Any, ...] = pytree.tree_unflatten(flat, pytree.treespec_loads(self.signature.tree))
        return args

    def _in_layout(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        if position >= len(self.layouts) or list(self.layouts[position].shape) != list(tensor.shape):
            return tensor
        strides = list(self.layouts[position].strides)
        if strides == list(tensor.stride()) or 0 in strides:
            return tensor
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def _members(self) -> dict[str, torch.Tensor]:
        own = {f"parameter {n}": p.detach() for n, p in self.module.named_parameters(remove_duplicate=False)}
        return own | {f"state {n}": b.detach() for n, b in self.module.named_buffers(remove_duplicate=False)}

    def _set_members(self, values: Mapping[str, torch.Tensor]) -> None:
        if self.has_members:
            own = self._members()
            for name, tensor in values.items():
                if name in own:
                    own[name].copy_(tensor)

    def _deliver(self, run: Run, regions: Sequence[judging_pb2.Region], shared: SharedMemory) -> None:
        results = {f"output {position}": output for position, output in enumerate(run.outputs)} | dict(run.after)
        for region, place in zip(regions, shared.tensors(regions), strict=True):
            if region.name not in results:
                raise ProgramFault(
                    verdict_pb2.FAILURE_KIND_WRONG_VALUE, f"it lacks {region.name}, which the module updates"
                )
            place.copy_(results[region.name])

    # ---- calls that are timed from outside -----------------------------------------------------------------

    def keep(self, index: int, values: Mapping[str, torch.Tensor]) -> None:
        """Makes a buffer set of the values, and gives parameters and state theirs."""
        self._set_members(values)
        leaves = [self._in_layout(position, tensor).clone() for position, (_, tensor) in enumerate(_inputs(values))]
        args = self._arguments(leaves)
        self.sets[index] = CallSet(lambda: self.module(*args), leaves)

    def calls(self, request: judging_pb2.CallsRequest) -> judging_pb2.Calls:
        """Makes the calls, and waits for the device."""
        sets = [self.sets[index] for index in sorted(self.sets)]
        try:
            with torch.no_grad():
                if request.fresh_seed:
                    return judging_pb2.Calls(sums=fresh_calls(sets, request.first, request.count, request.fresh_seed))
                plain_calls(sets, request.first, request.count)
        except (Exception, SystemExit) as error:
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, f"a timed call failed: {cause_of(error)}"
            ) from error
        return judging_pb2.Calls()


def named_sources(
    regions: Sequence[judging_pb2.Region], shared: SharedMemory, device: torch.device
) -> dict[str, torch.Tensor]:
    """Copies of the sources that lie in the shared memory, by name, on the device."""
    tensors = shared.tensors(regions)
    return {region.name: place.to(device, copy=True) for region, place in zip(regions, tensors, strict=True)}


def _promises(leaves: Sequence[object]) -> list[str]:
    """Names of the kinds of tensors that are not torch's own."""
    kinds = [type(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [kind.__name__ for kind in kinds if kind not in (torch.Tensor, torch.nn.Parameter)]


def _inputs(values: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in values.items() if name.startswith("input ")]


def _different(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], names: Sequence[str]) -> list[str]:
    pairs = zip(names, left, right, strict=True)
    return [name for name, one, two in pairs if one.shape != two.shape or not guard.same_numbers(one, two)]


def _scatter(specs: Sequence[tensor_pb2.TensorSpec], device: torch.device, poison: int) -> None:
    """Leaves plausible values in the memory that a module allocating its outputs is likely to get."""
    memory = GuardedMemory(device, poison, 0)
    held = []
    for spec in specs:
        poisoned = memory.empty("", spec)
        held += [torch.empty_like(poisoned).copy_(poisoned) for _ in range(2)]
    del held


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- methods of the worker -----------------------------------------------------------------------------------

_solutions: list[Solution] = []
_whole = integrity.Snapshot.taken()
"""What the process looked like before the solution was imported."""


_set_aside = 0
"""Bytes of the L2 that a process has to itself by default."""


def _open(request: judging_pb2.OpenSolutionRequest) -> judging_pb2.OpenedSolution:
    _solutions.clear()

    def act() -> judging_pb2.OpenedSolution:
        global _set_aside
        torch.zeros(1, device=device_of(request.task.target))  # makes the context that has such a limit
        _set_aside = integrity.set_aside_bytes()
        solution = Solution.open(request.task, request.artifact, request.signature)
        solution.rehearse(named_sources(request.sources, SharedMemory.inherited(), solution.device))
        _solutions.append(solution)
        return judging_pb2.OpenedSolution(has_members=solution.has_members)

    return _answer(act, judging_pb2.OpenedSolution)


def _execute(request: judging_pb2.ExecuteRequest) -> judging_pb2.Execution:
    solution = _solutions[0]

    def act() -> judging_pb2.Execution:
        try:
            return judging_pb2.Execution(observed=solution.execute(request, SharedMemory.inherited()))
        finally:
            release_surplus(solution.device)

    return _answer(act, judging_pb2.Execution)


def _keep(request: judging_pb2.KeepRequest) -> judging_pb2.Drawn:
    solution = _solutions[0]
    solution.keep(request.index, named_sources(request.sources, SharedMemory.inherited(), solution.device))
    return judging_pb2.Drawn()


def _calls(request: judging_pb2.CallsRequest) -> judging_pb2.Calls:
    return _answer(lambda: _solutions[0].calls(request), judging_pb2.Calls)


Answer = TypeVar("Answer", judging_pb2.OpenedSolution, judging_pb2.Execution, judging_pb2.Calls)


def _answer(act: Callable[[], Answer], failed: type[Answer]) -> Answer:
    """What `act` gives, or the fault that it or a look at the process finds."""
    try:
        answer = act()
        if replaced := _whole.replaced():
            raise ProgramFault(verdict_pb2.FAILURE_KIND_CHEAT, f"the solution replaces {replaced[0]}")
        if (held := integrity.set_aside_bytes()) > _set_aside:
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_CHEAT,
                f"the solution keeps {held} bytes of the L2 to itself: it finds there what the call before left",
            )
    except ProgramFault as fault:
        return failed(fault=fault.kind, detail=fault.detail)
    return answer


METHODS: Methods = {
    "open": (judging_pb2.OpenSolutionRequest, _open),
    "execute": (judging_pb2.ExecuteRequest, _execute),
    "keep": (judging_pb2.KeepRequest, _keep),
    "calls": (judging_pb2.CallsRequest, _calls),
}
