"""A loaded task, ready to be timed: buffer sets, baselines, work; and the two answers that a worker gives about it.

One idea: this is the only place where a program, the module and the stopwatch meet. What the program does wrong while
it is timed becomes a fault, never a timing; some outputs of timed calls are compared with eager's. Runs only in a
jailed worker.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpu_bench import device, policy
from gpu_bench.judging import guard
from gpu_bench.judging.comparison import parts_of
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.limits import Limits
from gpu_bench.pytorch import reference
from gpu_bench.pytorch.baselines import CANDIDATE, Baselines
from gpu_bench.running import executor
from gpu_bench.running.arena import Arena, using
from gpu_bench.running.executor import LoadedProgram, ProgramFault, Sources
from gpu_bench.running.watchdog import Watchdog
from gpu_bench.timing import floor
from gpu_bench.timing.interleaving import buffer_set_count
from gpu_bench.timing.measurement import Bench, Candidate, measure_candidate, step_infos
from gpu_bench.timing.replay import Before, Generators
from gpu_bench.timing.timed_memory import InputSample, KernelMemory, Places, Workspaces, flat, tensors_of
from gpu_bench.values import inputs
from gpu_bench.workers.sharing import settle_memory
from gpu_bench.workers.shortage import Shortages, is_want_of_memory
from warpsmith.graphs import aten
from warpsmith.graphs.task_module import seed_generators
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    graph_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

SEED = 42
"""Seed of the first buffer set; set i has the seed that is i higher."""
_MEMORY_SHARE = 4
"""Buffer sets take at most one part in so many of the free memory."""
_VERIFY_WITHIN, _VERIFY_ROUNDINGS = 1e-2, 16
"""Tolerance of the check of timed outputs against eager, and how many roundings of the type it is at least: two right
results of bf16 differ by more than a hundredth. It finds work left out, precision is judged elsewhere."""


@dataclass
class TimedTask:
    """A task with everything that its measurements share. Baselines stay compiled as long as it lives."""

    loaded: LoadedTask
    bench: Bench
    is_pure: bool
    """Whether outputs depend on the inputs alone. Of other modules it is noted what stood before each reading."""
    written: Sequence[str]
    """Tensors of `loaded.sources` that the module writes."""
    places: Places
    """Where the tensors of calls lie."""
    _subject: Subject | None = None
    """What is timed now."""
    _known_eager_seconds: float = 0.0
    _shortages: Shortages = field(default_factory=Shortages)

    def __post_init__(self) -> None:
        self._renewed = self._taken_samples()

    @staticmethod
    def of(loaded: LoadedTask, ceilings: device.Ceilings | None = None) -> TimedTask:
        """Captures the module and draws the buffer sets; measures the machine where `ceilings` are not known.

        Raises:
            BadInput: the module cannot be captured.
        """
        loaded.restore()  # a case that was judged before may have set other parameters
        settle_memory()
        target = loaded.task.target
        first = loaded.user.inputs(SEED, loaded.device)
        graph = loaded.capture(first)
        in_graph = set(aten.written_sources(graph))
        written = [executor.name_of(source) for source in graph.sources if source.name in in_graph]
        places = Places(loaded, written)
        ceilings = ceilings or device.describe(target)
        count = buffer_set_count(_set_bytes(graph), ceilings.device.cache_bytes, free_bytes(target) // _MEMORY_SHARE)
        sets = list(map(places.moved, [first, *loaded.input_sets(count - 1, SEED + 1)]))
        work = floor.work_of(graph, loaded.task.precision)
        bench = Bench.of(target, Baselines(loaded.module, sets, target), work, ceilings, seed=SEED)
        is_pure = not any(node.mutates or node.random for node in graph.nodes)
        return TimedTask(loaded, bench, is_pure, written, places)

    def reference(self) -> timing_pb2.ReferenceReport:
        """Times the module by itself."""
        self.loaded.restore()
        return reference.measure_reference(self.bench)

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
        ends = [program.elsewhere.kill] if program.elsewhere is not None else []
        with Watchdog(patience, *ends) as watchdog:
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
        workspaces = [self._workspaces(program.program) for _ in self.bench.baselines.inputs]
        call = self._guarded(self._bound(program, workspaces))
        # A process that was timed may know it, and go on as it did then: what is judged runs in one that never was.
        apart = Arena()
        with using(apart):
            judged = program if program.elsewhere is None else self.loaded.load_program(program.program, artifact)
        forget = self._forgetting(program.program, workspaces)
        self._subject = subject = Subject(program, judged, apart, call, forget, watchdog)
        candidate = Candidate(
            call=subject.call,
            before=functools.partial(self._get_ready, subject),
            watch=watchdog.expecting,
            renew=self._renew,
            rewritten=self._rewritten(rewritten_reference),
            stepwise=self._stepwise(program) if tier == timing_pb2.TIER_FINAL else None,
            steps=step_infos(program.program),
            toolkit=artifact.toolchain,
            elsewhere=program.elsewhere,
        )
        timing = measure_candidate(self.bench, candidate, tier, self._inspect)
        self._look_at_inputs(range(self.bench.set_count))
        if broken := sorted({name for memory in workspaces for name in memory.broken()} | set(self.places.broken())):
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_OUT_OF_BOUNDS, f"memory beside {broken[0]} was written in a timed call"
            )
        return timing

    def _workspaces(self, program: candidate_pb2.Program) -> Workspaces | KernelMemory:
        if self.loaded.device.type != "cpu":
            return Workspaces(self.loaded.device)
        outputs = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_OUTPUT}
        return KernelMemory(self.loaded.device, outputs)

    def _lost_device(self) -> ProgramFault | None:
        """How a kernel ended that nobody can work after: a launch's error shows where the device is waited for."""
        try:
            self.loaded.executor.synchronize()
        except ProgramFault as fault:
            return fault
        return None

    def _look_at_inputs(self, indices: Sequence[int]) -> None:
        """Raises ProgramFault where the program has written to them."""
        held, own = self._renewed
        if not (own.is_unchanged() and all(held[index].is_unchanged() for index in indices)):
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED,
                "an input or a parameter was changed while the program was timed, and not while it was judged",
            )

    def _renew(self, indices: Sequence[int]) -> bool:
        """Draws the inputs of buffer sets anew, and moves the parameters, where they lie."""
        self._look_at_inputs(indices)
        sets, user = self.bench.baselines.inputs, self.loaded.user
        try:
            for index in indices:
                seed = secrets.randbits(63)
                drawn = user.tensor_leaves(user.inputs(seed, self.loaded.device))
                drawn = inputs.replaced(drawn, verdict_pb2.VALUE_FAMILY_FRESH, seed, self.loaded.learned)
                for leaf, new in zip(user.tensor_leaves(sets[index]), drawn, strict=True):
                    flat(leaf).copy_(flat(new))
        except torch.OutOfMemoryError:
            return False
        if self.loaded.device.type == "cpu":
            self.loaded.move_parameters(secrets.randbits(63))
        held, _ = self._renewed
        fresh, own = self._taken_samples(indices)
        self._renewed = held | fresh, own
        return True

    def _taken_samples(self, indices: Sequence[int] | None = None) -> tuple[dict[int, InputSample], InputSample]:
        """Of buffer sets, all by default, and of the module's own tensors: what all hold that nobody may write."""
        sets = self.bench.baselines.inputs
        found = {
            index: tensors_of(self.loaded.sources(sets[index]).named(), self.written, "input ")
            for index in (range(len(sets)) if indices is None else indices)
        }
        own = tensors_of(self.loaded.sources(sets[0]).named(), self.written, "parameter ", "state ")
        return {index: InputSample(tensors) for index, tensors in found.items()}, InputSample(own)

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
        self, program: candidate_pb2.Program, workspaces: Sequence[Workspaces | KernelMemory]
    ) -> Callable[[Sequence[int]], object]:
        """Takes the answer of an earlier call out of reach: from workspaces, and from memory that outputs may get."""
        device = self.loaded.device
        specs = [buffer.spec for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_OUTPUT]

        def forget(indices: Sequence[int]) -> None:
            for index in indices:
                workspaces[index].forget()
            if device.type == "cpu":  # its outputs are among them
                return
            with contextlib.suppress(torch.OutOfMemoryError):
                fresh = Workspaces(device)
                for spec in specs * len(indices):  # all that a group will hold at once
                    fresh.empty("", spec)
                fresh.forget()

        return forget

    def _bound(
        self, program: LoadedProgram, workspaces: Sequence[Workspaces | KernelMemory] | None = None
    ) -> list[Callable[[], Any]]:
        """One call for each buffer set."""
        sets = self.bench.baselines.inputs
        own: Sequence[Workspaces | KernelMemory | None] = workspaces or [None] * len(sets)
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

    def _get_ready(self, subject: Subject, sets: Sequence[int]) -> None:
        """Ahead of a reading of the program's calls on these buffer sets."""
        subject.forget(sets)
        if not self.is_pure:
            self.loaded.keep_places()  # what eager set anew is elsewhere than what the program is given
            given = [self.loaded.sources(self.bench.baselines.inputs[index]).named() for index in sets]
            subject.before = Before.of(sets, given, self.written)

    def _inspect(self, name: str, index: int, outputs: Any) -> None:
        """Compares a call that was just timed with eager's and with itself as it is judged. Raises ProgramFault."""
        if name != CANDIDATE or self._subject is None:
            return
        subject, given = self._subject, pytree.tree_leaves(outputs)
        if self.is_pure:
            seed_generators(secrets.randbelow(1 << 30))
            self._hold_against_eager(given, self.loaded.output_leaves(self.bench.baselines.eager().call(index)))
            self._hold_against_judged(given, self._as_judged(subject, index), is_exact=True)
        elif subject.before is not None:
            self._make_again(subject, subject.before, index, given)

    def _make_again(self, subject: Subject, before: Before, index: int, outputs: Sequence[torch.Tensor]) -> None:
        """Has eager make the calls of a reading from what stood before it, and holds against that what the program gave
        on one buffer set and what it left in the end. As it is judged, too: later ones from eager's state."""
        given, left, place = [output.clone() for output in outputs], before.now(), before.sets.index(index)
        before.put_back()
        judged: Sequence[torch.Tensor] | None = None
        try:
            for number, each in enumerate(before.sets):
                if number == place:
                    judged = self._as_judged(subject, index)
                made = self.loaded.output_leaves(self.bench.baselines.eager().call(each))
                self.loaded.keep_places()
                if number == place:
                    wanted = [output.clone() for output in made]
            self._hold_against_eager([*given, *left], [*wanted, *before.now()])
        finally:
            before.leave(left)
        self._hold_against_judged(given, judged, is_exact=not place)

    @staticmethod
    def _hold_against_eager(given: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> None:
        for position, (got, wanted) in enumerate(zip(given, eager, strict=True)):
            if not _agree(got, wanted):
                raise ProgramFault(
                    verdict_pb2.FAILURE_KIND_WRONG_VALUE,
                    f"output {position} of a timed call differs from eager's beyond any rounding",
                )

    def _hold_against_judged(
        self, given: Sequence[torch.Tensor], judged: Sequence[torch.Tensor] | None, *, is_exact: bool
    ) -> None:
        """`judged` is None where there was no memory for it."""
        assert self._subject is not None
        # A library may choose another algorithm where less memory is free.
        is_exact = is_exact and not any(step.HasField("library") for step in self._subject.program.program.steps)
        for position, (got, wanted) in enumerate(zip(given, judged or given, strict=True)):
            if guard.same_numbers(got, wanted) or (not is_exact and _agree(got, wanted, _rounding(got.dtype))):
                continue
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_CHEAT,
                f"output {position} of a timed call has other bits than the same call made as it is judged",
            )

    def _as_judged(self, subject: Subject, index: int) -> Sequence[torch.Tensor] | None:
        """What the program returns where it is run as it was judged, from all as it is now; poison differs. Leaves all
        as it was. None where there is no memory for it."""
        with using(subject.apart):
            return self._as_judged_apart(subject, index)

    def _as_judged_apart(self, subject: Subject, index: int) -> Sequence[torch.Tensor] | None:
        drawn = Generators.now(self.loaded.device)
        poison, canary = secrets.randbelow(1 << 30), secrets.randbelow(1 << 30)
        memory = guard.GuardedMemory(self.loaded.device, poison, canary)
        args = self.bench.baselines.inputs[index]
        try:
            copies = {name: memory.copy_of(name, tensor) for name, tensor in self.loaded.sources(args).named().items()}
            call = subject.judged.bind(Sources.from_named(copies), memory)
            with subject.watchdog.expecting():
                outputs = call()
                self.loaded.executor.synchronize()
        except torch.OutOfMemoryError:
            return None
        finally:
            drawn.put_back()
        return list(pytree.tree_leaves(outputs))


@dataclass
class Subject:
    """A program that is timed."""

    program: LoadedProgram
    judged: LoadedProgram
    """The same program where it was never timed."""
    apart: Arena
    """Where all lies that this one may write."""
    call: Callable[[int], Any]
    """On a buffer set; what a step raises becomes a fault of the program."""
    forget: Callable[[Sequence[int]], object]
    """Takes the answers of earlier calls on these buffer sets out of reach."""
    watchdog: Watchdog
    before: Before | None = None
    """What stood before its last reading, where its calls change something."""


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
    got, wanted = parts_of(got), parts_of(wanted)
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
