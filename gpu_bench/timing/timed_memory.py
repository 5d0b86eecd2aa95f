"""Where the tensors of timed calls lie, what is put there before each, and whether a call wrote where it may not.

The one idea: a timed call finds what a judged one finds, and nothing of the call before: poison where nothing was
written yet, canaries beside it, and inputs that are looked at in secret places. Times nothing.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_bench.judging import guard
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.policy import span_bytes
from gpu_bench.running.arena import arena, given
from gpu_bench.running.executor import Kept, LoadedProgram, ProgramFault, Sources, TorchMemory
from gpu_bench.running.straight_line import row
from gpu_bench.values import inputs
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import KEPT_BYTES
from warpsmith.graphs import dtypes
from warpsmith.v1 import tensor_pb2, verdict_pb2

SAMPLED = 64
"""Elements of each tensor."""


class InputSample:
    """What tensors hold in secret places: a call that overwrites one of the tensors is found out.

    Sampled, because to draw gigabytes again takes longer than timing a kernel on them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places = [
            (memory, torch.tensor([secrets.randbelow(memory.numel()) for _ in range(SAMPLED)], device=memory.device))
            for memory in map(row, tensors)
            if memory.numel()
        ]
        self._held = self._read()

    def is_unchanged(self) -> bool:
        """Whether every place holds what it held."""
        return all(torch.equal(now, held) for now, held in zip(self._read(), self._held, strict=True))

    def _read(self) -> list[torch.Tensor]:
        return [guard.bits(memory[places]).cpu() for memory, places in self._places]


def tensors_of(held: Mapping[Key, torch.Tensor], written: Sequence[Key], *, are_inputs: bool) -> list[torch.Tensor]:
    """The inputs, or the module's own, less those that the module writes, each once."""
    off = {held[key].data_ptr() for key in written}
    wanted = (tensor for key, tensor in held.items() if key.is_input == are_inputs)
    found = {tensor.data_ptr(): tensor for tensor in wanted if tensor.data_ptr() not in off}
    return [tensor for tensor in found.values() if dtypes.is_supported(tensor.dtype)]


class TimedInputs:
    """The inputs of all buffer sets, and the module's own tensors: a timed program may read them and write none, but
    for `written`, which the module itself writes."""

    def __init__(self, loaded: LoadedTask, sets: Sequence[tuple[Any, ...]], written: Sequence[Key]) -> None:
        self._loaded, self._sets, self._written = loaded, sets, written
        self._held = self._taken_samples()

    def look(self, indices: Sequence[int]) -> None:
        """Raises ProgramFault where the program has written to those of these sets, or to the module's own tensors."""
        held, own = self._held
        if not (own.is_unchanged() and all(held[index].is_unchanged() for index in indices)):
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED,
                "an input or a parameter was changed while the program was timed, and not while it was judged",
            )

    def renew(self, indices: Sequence[int], prepare: Callable[[], object] = lambda: None) -> bool:
        """Moves the parameters, then draws the inputs of buffer sets anew, where they lie. `prepare`, in between, sees
        those that no call will get any more."""
        self.look(indices)
        sets, user = self._sets, self._loaded.user
        if self._loaded.device.type == "cpu":
            self._loaded.move_parameters(secrets.randbits(63))
        self._held = self._held[0], self._taken_samples([])[1]
        prepare()
        self.look([])
        try:
            for index in indices:
                seed = secrets.randbits(63)
                drawn = user.tensor_leaves(user.inputs(seed, self._loaded.device))
                drawn = inputs.replaced(drawn, verdict_pb2.VALUE_FAMILY_FRESH, seed, self._loaded.learned)
                for leaf, new in zip(user.tensor_leaves(sets[index]), drawn, strict=True):
                    row(leaf).copy_(row(new))
        except torch.OutOfMemoryError:
            return False
        held, own = self._held
        self._held = held | self._taken_samples(indices)[0], own
        return True

    def _taken_samples(self, indices: Sequence[int] | None = None) -> tuple[dict[int, InputSample], InputSample]:
        """Of buffer sets, all by default, and of the module's own tensors: of all that a call may not write."""
        sets = self._sets
        found = {
            index: tensors_of(self._loaded.sources(sets[index]).by_key(), self._written, are_inputs=True)
            for index in (range(len(sets)) if indices is None else indices)
        }
        own = tensors_of(self._loaded.sources(sets[0]).by_key(), self._written, are_inputs=False)
        return {index: InputSample(tensors) for index, tensors in found.items()}, InputSample(own)


class KeptContent:
    """What a program's prepared steps have made: a call may read it and write none of it."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self._held = self._read()

    @staticmethod
    def of(program: LoadedProgram, sources: Sources) -> KeptContent | None:
        """What the prepared steps of a program make; None where it has none."""
        return KeptContent(program.keep(sources)) if any(step.prepared for step in program.program.steps) else None

    def look(self) -> None:
        """Raises ProgramFault where the program has written to any of it."""
        if not all(torch.equal(now, held) for now, held in zip(self._bytes(), self._held, strict=True)):
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED, "a call wrote to what prepared steps had made"
            )

    def renew(self) -> None:
        """Makes it anew: parameters have changed."""
        self.look()
        self.kept.renew()
        self._held = self._read()

    def _read(self) -> list[torch.Tensor]:
        return [each.clone() for each in self._bytes()]

    def _bytes(self) -> list[torch.Tensor]:
        return [row(tensor).view(torch.uint8) for tensor in self.kept.tensors.values()]


class Places:
    """Where the tensors of timed calls lie: on a processor between canary bands where kernels see them, as in judging.

    Baselines are called on the same tensors.
    """

    def __init__(self, loaded: LoadedTask, written: Collection[Key]) -> None:
        """Moves the module's own tensors. `written`: the sources that the module writes: only those lie where
        kernels could write them."""
        self._user, self._written = loaded.user, written
        self._memories: list[guard.GuardedMemory] = []
        if loaded.device.type == "cpu":
            self._memories = [
                guard.GuardedMemory(loaded.device, secrets.randbelow(1 << 30), secrets.randbelow(1 << 30), place)
                for place in (given(), arena())
            ]
            loaded.move(lambda name, tensor: self._copied((Key.parameter(name), Key.state(name)), tensor, aligned=True))

    def _copied(self, keys: Collection[Key], tensor: torch.Tensor, *, aligned: bool) -> torch.Tensor:
        is_written = any(key in self._written for key in keys)
        return self._memories[is_written].copy_of(str(next(iter(keys))), tensor, aligned=aligned)

    def moved(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with their tensors moved; one that is passed twice stays one."""
        if not self._memories:
            return args
        leaves, made = self._user.tensor_leaves(args), dict[int, torch.Tensor]()
        keys: dict[int, list[Key]] = {}
        for position, leaf in enumerate(leaves):
            keys.setdefault(id(leaf), []).append(Key.input(position))
        for leaf in leaves:
            if id(leaf) not in made:
                made[id(leaf)] = leaf
                if dtypes.is_supported(leaf.dtype):
                    made[id(leaf)] = self._copied(keys[id(leaf)], leaf, aligned=False)
        return self._user.with_leaves(args, [made[id(leaf)] for leaf in leaves])

    def broken(self) -> list[str]:
        """Names of the tensors with a band that was written."""
        return [name for memory in self._memories for name in memory.broken()]


@dataclass
class LargeWorkspaces:
    """Workspaces of a program that all buffer sets share, since no cache holds them until the next call: eager's own
    intermediate results lie in the same memory in every call. (An attention's scores of 8 GiB were seven times 8.)"""

    least_bytes: float = math.inf
    """What is smaller, each buffer set has for itself."""
    _made: dict[str, torch.Tensor] = field(default_factory=dict)

    def get(self, name: str, spec: tensor_pb2.TensorSpec, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The workspace of that name, or a new one."""
        if span_bytes(spec) < self.least_bytes:
            return make()
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


class Workspaces(TorchMemory):
    """The workspaces of one buffer set, which carry nothing from a timed call to the next.

    The inputs of a set are the same in every call: a kernel that kept its answer beside them would only copy it.
    """

    def __init__(self, device: torch.device, shared: LargeWorkspaces | None = None) -> None:
        """`shared`: what other buffer sets of the program have, too."""
        super().__init__(device)
        self._shared = shared or LargeWorkspaces()
        self._kept: list[tuple[torch.Tensor, bool]] = []

    def empty(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.empty`."""
        make = super().empty
        made = self._shared.get(name, spec, lambda: make(name, spec))
        self.keep(made)
        return made

    def keep(self, tensor: torch.Tensor) -> None:
        """Has `forget` fill another tensor, too."""
        self._kept.append((row(tensor).view(torch.uint8), False))

    def zeros(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.zeros`."""
        made = super().zeros(name, spec)  # by way of `empty`
        self._kept[-1] = (self._kept[-1][0], True)
        return made

    def broken(self) -> list[str]:
        """None can be seen: there are no bands beside them."""
        return []

    def forget(self) -> None:
        """Fills them: with zeros what a call may expect to be zero, with 0x3f (0.75 in fp32) all else."""
        for content, is_zero in self._kept:
            content.fill_(0 if is_zero else 0x3F)


class KernelMemory(guard.GuardedMemory):
    """Workspaces and outputs of one buffer set on a processor: the memory that judged calls have, so that nothing tells
    one from the other."""

    def __init__(self, device: torch.device, outputs: Collection[str] = ()) -> None:
        """`outputs`: names of buffers that are fresh in each call, as a module's results are."""
        super().__init__(device, secrets.randbelow(1 << 30), secrets.randbelow(1 << 30))
        self._outputs = outputs
        self._fetched: list[torch.Tensor] = []

    def empty(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.empty`."""
        made = super().empty(name, spec)
        if name in self._outputs and dtypes.element_span(spec) * made.itemsize >= KEPT_BYTES:
            self._fetched.append(made)
        return made

    def forget(self) -> None:
        """Makes them what they were before the first call, with another poison. Large outputs have no pages yet, as
        PyTorch's have none: the first write to such memory waits for them, in the baselines too."""
        self.poison_again(secrets.randbelow(1 << 30))
        for tensor in self._fetched:
            arena().empty_pages(tensor)
