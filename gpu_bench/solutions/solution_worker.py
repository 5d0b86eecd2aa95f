"""A solution's process: an untrusted `ModelNew`, which is host code and may do anything to the process it is in.

Eager is timed in a process of the same kind, with the reference in it: two processes that differ in what they have
loaded differ by a fifth in calls of many small operations.

The one idea: this process holds nothing worth stealing, and nothing that it says is believed where believing would gain
it anything. Reference, truth and clock are elsewhere. Inputs appear in the shared memory while it stands still; a call
is one word; whether its result is looked at is decided after it. What it says of replaced functions and of structure
catches the careless; what it computes, the judge reads, and how long it takes, others measure.
"""

from __future__ import annotations

import ast
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpu_bench.judging.loaded import device_of
from gpu_bench.running.executor import ProgramFault
from gpu_bench.solutions import callee, integrity, left_memory, structure
from gpu_bench.solutions.signature import arguments_of
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import SharedMemory, move, settle_memory
from warpsmith.errors import BadInput
from warpsmith.graphs import task_module
from warpsmith.graphs.task_module import cause_of, seed_generators
from warpsmith.sandbox.processors import on_all_processors
from warpsmith.sandbox.worker import Methods
from warpsmith.v1 import judging_pb2, task_pb2, verdict_pb2

HANDSHAKE = 255
"""Number of the arm that does nothing: what it takes is the cost of asking."""
_SEED = 42
"""Of the constructor, as in KernelBench and for the reference."""
_GLIMPSED_CALLS, _GLIMPSED_SHARE = 8, 0.25
"""Of a process's first calls all have their results glimpsed at, of the others a drawn share: it takes time."""
_MOST_PERMUTED = 5
"""Dimensions, as those of a convolution's weights in three."""


class Solution:
    """A module on its device, in the mode that its constructor leaves it in."""

    def __init__(self, request: judging_pb2.OpenSolutionRequest, shared: SharedMemory) -> None:
        """Imports the solution, makes its module as the reference was made and calls it once, which may compile it.

        Raises ProgramFault.
        """
        self.device = device_of(request.task.target)
        torch.backends.cuda.matmul.allow_tf32 = request.task.precision == task_pb2.PRECISION_TF32
        self._signature = request.introduction.signature
        self._regions = list(request.regions)
        self._places = dict(zip(map(Key.of, self._regions), shared.tensors(self._regions), strict=True))
        sources = request.introduction.sources
        self._sources = dict(zip(map(Key.of, sources), shared.tensors(sources), strict=True))
        self._args = arguments_of(self._signature, self._sources)
        settle_memory()
        self._kind = self._imported(request.task)
        self._returned: Any = None
        self._earlier: Any = None
        """What the last call returned, and the one before."""
        self._draws, self._call_count = random.Random(), 0
        self._glimpses: list[torch.Tensor] = []
        """Elements of the last call's results, as the caller's next operation would have read them."""
        self._resolved: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        """The tensors of the call before and of the last, with no conjugation or negation left to their reader."""
        self._module = self._made()
        self._names = counterparts(
            {
                key: tensor
                for key, tensor in self._sources.items()
                if not key.is_input and key not in map(Key.state, self._signature.constants)
            },
            members_of(self._module),
        )
        self.take_members()
        with torch.no_grad():
            self.call()
            structure.describe(self._returned, self._sources)

    @staticmethod
    def _imported(task: task_pb2.Task) -> Callable[..., Any]:
        try:
            user = task_module.load(task, Path(tempfile.mkdtemp(prefix="solution-")))
        except BadInput as error:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, str(error)) from error

        def make(*arguments: Any, **named: Any) -> torch.nn.Module:
            with user.explaining(f"{user.class_name}(...) failed"):
                kind = getattr(user.namespace, user.class_name)
                is_module = isinstance(kind, type) and issubclass(kind, torch.nn.Module)
                module = (task_module.by_position(kind) if is_module else kind)(*arguments, **named)
            if not isinstance(module, torch.nn.Module):
                raise BadInput(f"{user.class_name} is no nn.Module")
            return module

        return make

    def _made(self) -> torch.nn.Module:
        arguments = ast.literal_eval(self._signature.constructor)
        seed_generators(_SEED)
        try:
            module = self._kind(**arguments) if isinstance(arguments, dict) else self._kind(*arguments)
        except BadInput as error:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, str(error)) from error
        moved: torch.nn.Module = module.to(self.device)
        return moved

    # ---- what words ask for --------------------------------------------------------------------------------

    def call(self, arm: int = 0, seed: int = 0) -> bytes:
        """One forward on the inputs that lie in the shared memory; its result is kept.

        Says what it is beside tensors, as a digest, and where they lie.
        """
        if arm == HANDSHAKE:
            return b""
        self._earlier, self._returned = self._returned, None
        if self._signature.is_random:
            seed_generators(seed)
        try:
            self._returned = self._module(*self._args)
            self._glimpses = self._glimpsed()
            _wait(self.device)
            values = structure.digest(self._returned)  # in the call, or they could be made after it
        except torch.OutOfMemoryError as error:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_RESOURCE, cause_of(error)) from error
        except (Exception, SystemExit) as error:
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, f"the forward failed: {cause_of(error)}"
            ) from error
        return values if self.device.type == "cuda" else values + self._places_left()

    def _glimpsed(self) -> list[torch.Tensor]:
        """On a GPU, elements of the results, read on the caller's stream: what runs on others has not ended by then."""
        self._call_count += 1
        is_drawn = self._call_count <= _GLIMPSED_CALLS or self._draws.random() < _GLIMPSED_SHARE
        return glimpses(self._returned) if is_drawn and self.device.type == "cuda" else []

    def _refuse_unwaited(self) -> None:
        """Raises ProgramFault where a glimpse at the last call's results was at something else."""
        now = glimpses(self._returned) if self._glimpses else []
        if not all(map(torch.equal, self._glimpses, now)):
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_NONDETERMINISTIC,
                "what it returns is not there yet for the next operation on the caller's stream: it is made on another "
                "stream, and the caller's is not told to wait for that (torch.cuda.Stream.wait_stream)",
            )

    def _places_left(self) -> bytes:
        """Where in this process each region's tensor lies."""
        outputs = [leaf.resolve_conj().resolve_neg() for leaf in structure.leaves(self._returned)]
        self._resolved = (self._resolved[1], outputs)
        left = {Key.output(position): output for position, output in enumerate(outputs)}
        if len(self._regions) > len(outputs):
            own = members_of(self._module)
            left |= {key: ours.of(own) for key, ours in self._names.items() if key in self._places}
        return left_memory.packed([_place(left.get(key), expected) for key, expected in self._places.items()])

    def deliver(self, _arm: int = 0, _number: int = 0) -> bytes:
        """Describes the results of the last call; on a GPU, puts them and what is left in the state where the judge
        reads them."""
        described, outputs = structure.describe(self._returned, self._sources)
        refuse_promises(outputs)
        self._refuse_unwaited()
        if self.device.type != "cuda":
            return structure.written(described).encode()
        self._put(outputs)
        own = members_of(self._module)
        for key, place in self._places.items():
            if key in self._names:
                place.copy_(self._names[key].of(own))
        _wait(self.device)
        return structure.written(described).encode()

    def deliver_earlier(self, _arm: int = 0, _number: int = 0) -> bytes:
        """On a GPU, puts the results of the call before there, as they are now. The process is looked at too."""
        look_at_process()
        if self.device.type != "cuda":
            return b""
        described, outputs = structure.describe(self._earlier, self._sources)
        self._put(outputs)
        return structure.written(described).encode()

    def _put(self, outputs: Sequence[torch.Tensor]) -> None:
        for position, output in enumerate(outputs):
            place = self._places.get(Key.output(position))
            if place is not None and place.shape == output.shape and place.dtype == output.dtype:
                place.copy_(output.detach())
        _wait(self.device)

    def take_members(self, _arm: int = 0, _number: int = 0) -> None:
        """Gives parameters and state the values that lie in the shared memory."""
        own = members_of(self._module)
        with torch.no_grad():
            for key, ours in self._names.items():
                ours.of(own).copy_(self._sources[key])

    def make_anew(self, _arm: int = 0, _number: int = 0) -> None:
        """Another module of the class; it gets the values that lie in the shared memory before its first call."""
        self._returned = self._earlier = None
        self._module = self._made()
        self.take_members()


def glimpses(returned: Any) -> list[torch.Tensor]:
    """A few elements of each tensor of a result, as bytes: at most five along each of its dimensions."""
    return [_glimpse(leaf.detach()) for leaf in structure.leaves(returned) if _is_plain(leaf)]


def _glimpse(tensor: torch.Tensor) -> torch.Tensor:
    few = tensor[tuple(slice(None, None, max(1, size // 4)) for size in tensor.shape)]
    few = few.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return few.view(torch.uint8)


def _place(tensor: torch.Tensor | None, expected: torch.Tensor) -> left_memory.Place:
    """Where a tensor lies, if it is such a one as is expected."""
    if tensor is None or not _is_plain(tensor) or not _is_alike(tensor, expected):
        return 0, [0] * expected.dim()
    return tensor.data_ptr(), tensor.stride()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _wait(device: torch.device) -> None:
    if device.type == "cuda":  # for the stream that a caller's next operation would be on, and for no other
        torch.cuda.current_stream().synchronize()


def members_of(module: torch.nn.Module) -> dict[Key, torch.Tensor]:
    """Parameters and state by the keys that sources have."""
    own = {Key.parameter(n): p.detach() for n, p in module.named_parameters(remove_duplicate=False)}
    return own | {Key.state(n): b.detach() for n, b in module.named_buffers(remove_duplicate=False)}


@dataclass(frozen=True)
class Counterpart:
    """Where a solution keeps one of the reference's parameters or states."""

    key: Key
    order: tuple[int, ...]
    """Of its dimensions, as the reference's has them: (1, 0) for a transposed one."""

    def of(self, own: Mapping[Key, torch.Tensor]) -> torch.Tensor:
        """Its memory, as the reference's tensor has its dimensions."""
        return own[self.key].permute(self.order)


def counterparts(wanted: Mapping[Key, torch.Tensor], own: Mapping[Key, torch.Tensor]) -> dict[Key, Counterpart]:
    """The solution's counterpart of each of the reference's parameters and states.

    By name; else the first that is left which has its values, as both constructors draw the same numbers, with its
    dimensions in whatever order.

    Raises ProgramFault where there is none: the bench could not tell whether the solution uses that tensor.
    """
    found = {
        key: Counterpart(key, tuple(range(tensor.dim())))
        for key, tensor in wanted.items()
        if key in own and _is_alike(own[key], tensor)
    }
    left = [key for key in own if key not in found]
    for key, tensor in wanted.items():
        if key in found:
            continue
        tried = (Counterpart(other, order) for other in left for order in _orders(own[other].dim()))
        same = next((each for each in tried if _is_equal(each.of(own), tensor)), None)
        if same is None:
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_SHAPE,
                f"it lacks {key}, {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, under this "
                "name and under any other with the values of the reference's constructor",
            )
        found[key] = same
        left.remove(same.key)
    return found


def _orders(rank: int) -> Iterator[tuple[int, ...]]:
    """Of dimensions, as they are first; of many dimensions only that."""
    return itertools.permutations(range(rank)) if rank <= _MOST_PERMUTED else iter([tuple(range(rank))])


def _is_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return _is_alike(left, right) and torch.equal(left, right)


def _is_alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


def refuse_promises(outputs: Sequence[torch.Tensor]) -> None:
    """Raises ProgramFault for tensors that are not torch's own."""
    for output in outputs:
        if type(output) not in (torch.Tensor, torch.nn.Parameter):
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_CHEAT,
                f"the forward returns a tensor of its own kind, {type(output).__name__}: no result, but a promise of "
                "one",
            )


# ---- methods of the worker -----------------------------------------------------------------------------------

_solutions: list[Solution] = []
_whole = integrity.Snapshot.taken()
"""What the process looked like before the solution was imported."""
_set_aside = 0
"""Bytes of the L2 that a process has to itself by default."""


def look_at_process() -> None:
    """Raises ProgramFault where functions were replaced, or a part of the L2 is kept."""
    if replaced := _whole.replaced():
        raise ProgramFault(verdict_pb2.FAILURE_KIND_CHEAT, f"the solution replaces {replaced[0]}")
    if (held := integrity.set_aside_bytes()) > _set_aside:
        raise ProgramFault(
            verdict_pb2.FAILURE_KIND_CHEAT,
            f"the solution keeps {held} bytes of the L2 to itself: it finds there what the call before left",
        )


def _open(request: judging_pb2.OpenSolutionRequest) -> judging_pb2.OpenedSolution:
    _solutions.clear()

    def act() -> judging_pb2.OpenedSolution:
        global _set_aside
        torch.zeros(1, device=device_of(request.task.target))  # makes the context that has such a limit
        _set_aside = integrity.set_aside_bytes()
        with on_all_processors():  # it may compile an extension
            _solutions.append(Solution(request, SharedMemory.inherited()))
        look_at_process()
        return judging_pb2.OpenedSolution()

    return _answer(act, judging_pb2.OpenedSolution)


def _calls(request: judging_pb2.CallsRequest) -> judging_pb2.Calls:
    del request
    solution = _solutions[0]

    def act() -> judging_pb2.Calls:
        with torch.no_grad():
            callee.serve({
                callee.CALL: solution.call, callee.DELIVER: solution.deliver, callee.MEMBERS: solution.take_members,
                callee.EARLIER: solution.deliver_earlier, callee.ANEW: solution.make_anew,
            })  # fmt: skip

    return _answer(act, judging_pb2.Calls)


Answer = TypeVar("Answer", judging_pb2.OpenedSolution, judging_pb2.Calls)


def _answer(act: Callable[[], Answer], failed: type[Answer]) -> Answer:
    """What `act` gives, or the fault that it finds."""
    try:
        return act()
    except ProgramFault as fault:
        return failed(fault=fault.kind, detail=fault.detail)


METHODS: Methods = {
    "open": (judging_pb2.OpenSolutionRequest, _open),
    "calls": (judging_pb2.CallsRequest, _calls),
    "move": (judging_pb2.MoveRequest, move),
}
