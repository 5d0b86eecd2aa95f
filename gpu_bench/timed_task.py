"""A loaded task, ready to be timed: buffer sets, baselines, work; and the two answers that a worker gives about it.

One idea: this is the only place where a program, the module and the stopwatch meet. What the program does wrong while
it is timed becomes a fault, never a timing; some outputs of timed calls are compared with eager's. Runs only in a
jailed worker.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpu_bench import device, executor, floor, guard, policy, reference
from gpu_bench.baselines import CANDIDATE, Baselines
from gpu_bench.executor import LoadedProgram, ProgramFault, Sources, TorchMemory
from gpu_bench.limits import Limits
from gpu_bench.loaded import LoadedTask
from gpu_bench.measurement import Bench, Candidate, measure_candidate, step_infos
from gpu_bench.shortage import Shortages, is_want_of_memory
from gpu_bench.timing import buffer_set_count
from gpu_bench.watchdog import Watchdog
from warpsmith import aten, dtypes
from warpsmith.task_module import seed_generators
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    graph_pb2,
    task_pb2,
    tensor_pb2,
    timing_pb2,
    verdict_pb2,
)

SEED = 42
"""Seed of the first buffer set; set i has the seed that is i higher."""
_MEMORY_SHARE = 4
"""Buffer sets take at most one part in so many of the free memory."""
_KEPT_BY_THE_LIBRARY = 32 << 20
"""Bytes up to which the C library may keep memory that was freed (DEFAULT_MMAP_THRESHOLD_MAX of malloc)."""
SAMPLED = 64
"""Elements of each tensor."""
_VERIFY_WITHIN, _VERIFY_ROUNDINGS = 1e-2, 16
"""Tolerance of the check of timed outputs against eager, and how many roundings of the type it is at least: two right
results of bf16 differ by more than a hundredth. It finds work left out, precision is judged elsewhere."""


@dataclass
class TimedTask:
    """A task with everything that its measurements share. Baselines stay compiled as long as it lives."""

    loaded: LoadedTask
    bench: Bench
    is_pure: bool
    """Whether outputs depend on the inputs alone. Calls of other modules are made again to be checked."""
    written: Sequence[str]
    """Tensors of `loaded.sources` that the module writes."""
    sample: InputSample
    """What all others hold here and there."""
    _subject: Subject | None = None
    """What is timed now."""
    _known_eager_seconds: float = 0.0
    _shortages: Shortages = field(default_factory=Shortages)

    @staticmethod
    def of(loaded: LoadedTask, ceilings: device.Ceilings | None = None) -> TimedTask:
        """Captures the module and draws the buffer sets; measures the machine where `ceilings` are not known.

        Raises:
            BadInput: the module cannot be captured.
        """
        loaded.restore()  # a case that was judged before may have set other parameters
        target = loaded.task.target
        first = loaded.user.inputs(SEED, loaded.device)
        graph = loaded.capture(first)
        ceilings = ceilings or device.describe(target)
        count = buffer_set_count(_set_bytes(graph), ceilings.device.cache_bytes, free_bytes(target) // _MEMORY_SHARE)
        sets = [first, *loaded.input_sets(count - 1, SEED + 1)]
        work = floor.work_of(graph, loaded.task.precision)
        bench = Bench.of(target, Baselines(loaded.module, sets, target), work, ceilings, seed=SEED)
        in_graph = set(aten.written_sources(graph))
        written = [executor.name_of(source) for source in graph.sources if source.name in in_graph]
        is_pure = not any(node.mutates or node.random for node in graph.nodes)
        return TimedTask(loaded, bench, is_pure, written, InputSample(_tensors(loaded, sets, written)))

    def reference(self) -> timing_pb2.ReferenceReport:
        """Audits and times the module by itself."""
        self.loaded.restore()
        draws = [self.loaded.user.tensor_leaves(args) for args in self._draws(3)]
        flags = reference.audit(self._run_leaves, draws)
        self.loaded.restore()
        return reference.measure_reference(self.bench, flags)

    def measure(
        self,
        program: LoadedProgram,
        artifact: artifact_pb2.Artifact,
        tier: timing_pb2.Tier.ValueType,
        rewritten_reference: candidate_pb2.Program | None = None,
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """Times a loaded program; a fault of its own is an answer. Errors that are ours pass through.

        Raises OutOfMemoryError the first time that memory is short: others may have some to give back.
        """
        self.loaded.restore()
        patience = Limits().patience(self.loaded.task.target, self._eager_seconds())
        self.bench.baselines.prepare_with_room(tier)
        with Watchdog(patience) as watchdog:
            return self._measured(program, artifact, tier, rewritten_reference, watchdog)

    def _measured(
        self,
        program: LoadedProgram,
        artifact: artifact_pb2.Artifact,
        tier: timing_pb2.Tier.ValueType,
        rewritten_reference: candidate_pb2.Program | None,
        watchdog: Watchdog,
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        try:
            timing = self._timing(program, artifact, tier, rewritten_reference, watchdog)
        except (ProgramFault, RuntimeError, MemoryError) as error:
            self._subject = None
            lost = self._lost_device()
            if lost is None and is_want_of_memory(error):
                self._shortages.ask(error, program.program.digest, tier)
                lost = ProgramFault(verdict_pb2.FAILURE_KIND_RESOURCE, _line(error))
            fault = lost or error
            if not isinstance(fault, ProgramFault):
                raise
            return benchmark_service_pb2.MeasureArtifactResponse(
                fault=benchmark_service_pb2.ExecutionFault(kind=fault.kind, detail=fault.detail)
            )
        finally:
            self._subject = None  # with its workspaces, which the next program finds in its way
            if self._lost_device() is None:
                self.loaded.restore()
        return benchmark_service_pb2.MeasureArtifactResponse(timing=timing)

    def _timing(
        self,
        program: LoadedProgram,
        artifact: artifact_pb2.Artifact,
        tier: timing_pb2.Tier.ValueType,
        rewritten_reference: candidate_pb2.Program | None,
        watchdog: Watchdog,
    ) -> timing_pb2.Timing:
        """Holds all that is made for the program: with its frame that goes."""
        workspaces = [Workspaces(self.loaded.device) for _ in self.bench.baselines.inputs]
        call = self._guarded(self._bound(program, workspaces))
        self._subject = subject = Subject(program, call, self._forgetting(program.program, workspaces), watchdog)
        candidate = Candidate(
            call=subject.call,
            before=subject.forget,
            watch=watchdog.expecting,
            renew=self._renew,
            rewritten=self._rewritten(rewritten_reference),
            stepwise=self._stepwise(program) if tier == timing_pb2.TIER_FINAL else None,
            steps=step_infos(program.program),
            toolkit=artifact.toolchain,
        )
        timing = measure_candidate(self.bench, candidate, tier, self._inspect)
        self._look_at_inputs()
        return timing

    def _lost_device(self) -> ProgramFault | None:
        """How a kernel ended that nobody can work after: a launch's error shows where the device is waited for."""
        try:
            self.loaded.executor.synchronize()
        except ProgramFault as fault:
            return fault
        return None

    def _look_at_inputs(self) -> None:
        """Raises ProgramFault where the program has written to them."""
        if not self.sample.is_unchanged():
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED,
                "an input or a parameter was changed while the program was timed, and not while it was judged",
            )

    def _renew(self) -> bool:
        """Draws the inputs of every buffer set anew, where they lie."""
        self._look_at_inputs()
        sets, user = self.bench.baselines.inputs, self.loaded.user
        try:
            for args in sets:
                drawn = user.tensor_leaves(user.inputs(secrets.randbelow(1 << 30), self.loaded.device))
                for leaf, new in zip(user.tensor_leaves(args), drawn, strict=True):
                    _flat(leaf).copy_(_flat(new))
        except torch.OutOfMemoryError:
            return False
        self.sample = InputSample(_tensors(self.loaded, sets, self.written))
        return True

    def _eager_seconds(self) -> float:
        """Of one call of the module: the first, which may take longer than others."""
        if not self._known_eager_seconds:
            begin = time.perf_counter()
            self.bench.baselines.eager().call(0)
            self.loaded.executor.synchronize()
            self._known_eager_seconds = time.perf_counter() - begin
            self.loaded.restore()
        return self._known_eager_seconds

    def _forgetting(
        self, program: candidate_pb2.Program, workspaces: Sequence[Workspaces]
    ) -> Callable[[Sequence[int]], object]:
        """Takes the answer of an earlier call out of reach: from workspaces, and from memory that outputs may get."""
        device = self.loaded.device
        specs = [buffer.spec for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_OUTPUT]
        if device.type == "cpu":  # larger ones are given back to the system, which hands out zeros
            specs = [spec for spec in specs if dtypes.element_span(spec) * 8 <= _KEPT_BY_THE_LIBRARY]

        def forget(indices: Sequence[int]) -> None:
            for index in indices:
                workspaces[index].forget()
            with contextlib.suppress(torch.OutOfMemoryError):
                fresh = Workspaces(device)
                for spec in specs * len(indices):  # all that a group will hold at once
                    fresh.empty("", spec)
                fresh.forget()

        return forget

    def _bound(self, program: LoadedProgram, workspaces: Sequence[Workspaces] | None = None) -> list[Callable[[], Any]]:
        """One call for each buffer set."""
        sets = self.bench.baselines.inputs
        own: Sequence[Workspaces | None] = workspaces or [None] * len(sets)
        return [
            program.bind(self.loaded.sources(args), workspaces=memory) for args, memory in zip(sets, own, strict=True)
        ]

    def _rewritten(self, program: candidate_pb2.Program | None) -> Callable[[int], Any] | None:
        """The same algebra in library calls; None where there is none, or it does not load: it is only a side arm.

        Raises OutOfMemoryError where memory is short the first time.
        """
        if program is None or not program.steps:
            return None
        bare = artifact_pb2.Artifact(
            program_digest=program.digest, format=artifact_pb2.BINARY_FORMAT_NONE, toolchain="torch"
        )
        if policy.objections(program, bare, aten.is_allowed):
            return None
        try:
            calls = self._bound(self.loaded.load_program(program, bare))
        except Exception as error:
            self._shortages.ask(error, "rewritten", program.digest)
            return None
        return lambda index: calls[index]()

    def _stepwise(self, program: LoadedProgram) -> Callable[[], Any]:
        sources = self.loaded.sources(self.bench.baselines.inputs[0])
        return program.bind(sources, None, self.bench.clock.stamp)

    @staticmethod
    def _guarded(calls: Sequence[Callable[[], Any]]) -> Callable[[int], Any]:
        """The candidate's call; what a step raises becomes a fault of the program."""

        def call(index: int) -> Any:
            try:
                return calls[index]()
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                if is_want_of_memory(error):
                    raise
                raise ProgramFault(verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, _line(error)) from error

        return call

    def _inspect(self, name: str, index: int, outputs: Any) -> None:
        """Compares a call that was just timed with eager's and with itself as it is judged. Raises ProgramFault.

        The call of a module that changes its state or draws at random is made again, from the state that the timed
        calls have come to, since what it gave cannot be had twice: nothing tells it from them.
        """
        if name != CANDIDATE or self._subject is None:
            return
        subject, seed = self._subject, secrets.randbelow(1 << 30)
        if self.is_pure:
            given = pytree.tree_leaves(outputs)
        else:
            subject.forget([index])
            with subject.watchdog.expecting():
                given = self._outcome(index, seed, lambda: pytree.tree_leaves(subject.call(index)))
                self.loaded.executor.synchronize()
        baselines, user = self.bench.baselines, self.loaded
        eager = self._outcome(index, seed, lambda: user.output_leaves(baselines.eager().call(index)))
        for position, (got, wanted) in enumerate(zip(given, eager, strict=True)):
            if not _agree(got, wanted):
                raise ProgramFault(
                    verdict_pb2.FAILURE_KIND_WRONG_VALUE,
                    f"output {position} of a timed call differs from eager's beyond any rounding",
                )
        try:
            judged = self._as_judged(subject, index, seed)
        except torch.OutOfMemoryError:
            return
        # A library may choose another algorithm where less memory is free.
        calls_library = any(step.HasField("library") for step in subject.program.program.steps)
        for position, (got, wanted) in enumerate(zip(given, judged, strict=True)):
            if guard.same_numbers(got, wanted) or (calls_library and _agree(got, wanted, _rounding(got.dtype))):
                continue
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_CHEAT,
                f"output {position} of a timed call has other bits than the same call made as it is judged",
            )

    def _outcome(self, index: int, seed: int, call: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """What a call on a set of inputs returns, and what it leaves in what it writes, which is put back."""
        sources = self.loaded.sources(self.bench.baselines.inputs[index]).named()
        before = {name: sources[name].clone() for name in self.written}
        seed_generators(seed)
        outputs = [output.clone() if before else output for output in call()]
        after = [sources[name].clone() for name in before]
        for name, tensor in before.items():
            sources[name].copy_(tensor)
        return outputs + after

    def _as_judged(self, subject: Subject, index: int, seed: int) -> Sequence[torch.Tensor]:
        """As `_outcome`, of the program run as it was when it was judged; values and poison differ."""
        poison, canary = secrets.randbelow(1 << 30), secrets.randbelow(1 << 30)
        memory = guard.GuardedMemory(self.loaded.device, poison, canary)
        args = self.bench.baselines.inputs[index]
        copies = {name: memory.copy_of(name, tensor) for name, tensor in self.loaded.sources(args).named().items()}
        call = subject.program.bind(Sources.from_named(copies), memory)
        seed_generators(seed)
        with subject.watchdog.expecting():
            outputs = call()
            self.loaded.executor.synchronize()
        return [*pytree.tree_leaves(outputs), *(copies[name] for name in self.written)]

    def _run_leaves(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """One eager forward, seeded, from flattened inputs to flattened outputs."""
        user = self.loaded.user
        seed_generators(SEED)
        with torch.no_grad():
            args = user.with_leaves(self.bench.baselines.inputs[0], list(leaves))
            return self.loaded.output_leaves(self.loaded.module(*args))

    def _draws(self, count: int) -> list[tuple[Any, ...]]:
        """Inputs of different seeds: the buffer sets, and one more where there is only one."""
        sets = list(self.bench.baselines.inputs[:count])
        return sets if len(sets) > 1 else [*sets, *self.loaded.input_sets(1, SEED + 1)]


@dataclass(frozen=True)
class Subject:
    """A program that is timed."""

    program: LoadedProgram
    call: Callable[[int], Any]
    """On a buffer set; what a step raises becomes a fault of the program."""
    forget: Callable[[Sequence[int]], object]
    """Takes the answers of earlier calls on these buffer sets out of reach."""
    watchdog: Watchdog


class InputSample:
    """What tensors hold at places that nobody else knows: whoever overwrites one of them is found out.

    Sampled, because to draw gigabytes again takes longer than timing a kernel on them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places = [
            (flat, torch.tensor([secrets.randbelow(flat.numel()) for _ in range(SAMPLED)], device=flat.device))
            for flat in map(_flat, tensors)
            if flat.numel()
        ]
        self._held = self._read()

    def is_unchanged(self) -> bool:
        """Whether every place holds what it held."""
        return all(torch.equal(now, held) for now, held in zip(self._read(), self._held, strict=True))

    def _read(self) -> list[torch.Tensor]:
        return [guard.bits(flat[places]).cpu() for flat, places in self._places]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, gaps included, as one row."""
    return tensor.detach().as_strided((dtypes.element_span(dtypes.spec_of(tensor)),), (1,))


def _tensors(loaded: LoadedTask, sets: Sequence[tuple[Any, ...]], written: Sequence[str]) -> list[torch.Tensor]:
    """Of every buffer set and of the module, less those that the module writes."""
    by_set = [loaded.sources(args).named() for args in sets]
    found = {tensor.data_ptr(): tensor for named in by_set for tensor in named.values()}
    for named in by_set:
        for name in written:
            found.pop(named[name].data_ptr(), None)
    return [tensor for tensor in found.values() if dtypes.is_supported(tensor.dtype)]


class Workspaces(TorchMemory):
    """The workspaces of one buffer set, which carry nothing from a timed call to the next.

    The inputs of a set are the same in every call: a kernel that kept its answer beside them would only copy it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._kept: list[tuple[torch.Tensor, bool]] = []

    def empty(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.empty`."""
        made = super().empty(name, spec)
        span = dtypes.element_span(spec)
        self._kept.append((made.as_strided((span,), (1,)).view(torch.uint8), False))
        return made

    def zeros(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.zeros`."""
        made = super().zeros(name, spec)  # by way of `empty`
        self._kept[-1] = (self._kept[-1][0], True)
        return made

    def forget(self) -> None:
        """Fills them: with zeros what a call may expect to be zero, with 0x3f (0.75 in fp32) all else."""
        for content, is_zero in self._kept:
            content.fill_(0 if is_zero else 0x3F)


def free_bytes(target: task_pb2.Target.ValueType, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Free memory of the target; 4 GiB where a processor's system does not tell."""
    if target == task_pb2.TARGET_CUDA:
        return int(torch.cuda.mem_get_info()[0])
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 4 << 30


def _set_bytes(graph: graph_pb2.Graph) -> int:
    """Bytes of the inputs and outputs of one call."""
    specs = {result.name: result.spec for node in graph.nodes for result in node.results}
    specs |= {source.name: source.spec for source in graph.sources}
    inputs = [source.name for source in graph.sources if source.origin == graph_pb2.ORIGIN_INPUT]
    return sum(floor.spec_bytes(specs[name]) for name in (*inputs, *graph.outputs))


def _agree(got: torch.Tensor, wanted: torch.Tensor, within: float = 0.0) -> bool:
    """Whether two outputs are the same result: floats within a share of the element plus that of the rms."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point():
        return torch.equal(got, wanted) or int((got != wanted).sum()) <= wanted.numel() // 100
    within = within or max(_VERIFY_WITHIN, _VERIFY_ROUNDINGS * torch.finfo(wanted.dtype).eps)
    if _is_within_rms(got, wanted, within) or torch.equal(got, wanted):
        return True
    finite = wanted.float().masked_fill(~wanted.isfinite(), 0.0)
    scale = float(finite.square().mean().sqrt()) if wanted.numel() else 0.0
    return torch.allclose(got, wanted, rtol=within, atol=within * scale, equal_nan=True)


def _is_within_rms(got: torch.Tensor, wanted: torch.Tensor, within: float) -> bool:
    """Whether every element is within a share of the rms alone, which says the same of nearly all that agrees in a
    fifth of the time: 6.4 GB took 67 ms on an H200. Never so where one of the two is not finite."""
    wide = torch.float32 if wanted.itemsize < 4 else None
    rms = float(torch.linalg.vector_norm(wanted, dtype=wide)) / math.sqrt(max(wanted.numel(), 1))
    if not math.isfinite(rms) or not wanted.numel():
        return False
    return float(torch.linalg.vector_norm(got - wanted, math.inf)) <= within * rms


def _rounding(dtype: torch.dtype) -> float:
    """What two algorithms of a library may differ by, as a share."""
    return 64 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
