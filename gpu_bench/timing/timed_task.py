"""A loaded task, ready to be timed: buffer sets, baselines, work; and the two answers that a worker gives about it.

One idea: this is the only place where a program, the module and the stopwatch meet. What the program does wrong while
it is timed becomes a fault, never a timing; whether a timed call was right is `inspection`'s to say. Runs only in a
jailed worker.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_bench import device, policy
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.limits import Limits
from gpu_bench.pytorch import reference
from gpu_bench.pytorch.baselines import Baselines
from gpu_bench.running.arena import Arena, using
from gpu_bench.running.executor import LoadedProgram, ProgramFault, Sources
from gpu_bench.running.gpu.cuda_graph import GraphCall
from gpu_bench.running.watchdog import Watchdog
from gpu_bench.timing import floor
from gpu_bench.timing.inspection import Inspection, Subject
from gpu_bench.timing.interleaving import CACHES, buffer_set_count
from gpu_bench.timing.measurement import Bench, Candidate, measure_candidate, step_infos
from gpu_bench.timing.replay import Before
from gpu_bench.timing.timed_memory import KeptContent, KernelMemory, LargeWorkspaces, Places, TimedInputs, Workspaces
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import settle_memory
from gpu_bench.workers.shortage import Shortages, is_want_of_memory
from warpsmith.graphs import aten
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


@dataclass
class TimedTask:
    """A task with everything that its measurements share. Baselines stay compiled as long as it lives."""

    loaded: LoadedTask
    bench: Bench
    is_pure: bool
    """Whether outputs depend on the inputs alone. Of other modules it is noted what stood before each reading."""
    written: Sequence[Key]
    """Tensors of `loaded.sources` that the module writes."""
    places: Places
    """Where the tensors of calls lie."""
    _known_eager_seconds: float = 0.0
    _shortages: Shortages = field(init=False)

    def __post_init__(self) -> None:
        self._shortages = Shortages(self.bench.baselines.give_back_graphs)
        self.inputs = TimedInputs(self.loaded, self.bench.baselines.inputs, self.written)

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
        keys = [Key.of_source(source) for source in graph.sources if source.name in in_graph]
        written = [key for key in keys if key is not None]
        places = Places(loaded, written)
        ceilings = ceilings or device.describe(target)
        count = buffer_set_count(_set_bytes(graph), ceilings.device.cache_bytes, free_bytes(target) // _MEMORY_SHARE)
        sets = list(map(places.moved, [first, *loaded.input_sets(count - 1, SEED + 1)]))
        work = floor.work_of(graph, loaded.task.precision, prepared=loaded.task.prepared)
        bench = Bench.of(
            target, Baselines(loaded.module, sets, target, loaded.task.prepared), work, ceilings, seed=SEED
        )
        bench.graph_digest = graph.digest
        is_pure = not any(node.mutates or node.random for node in graph.nodes)
        return TimedTask(loaded, bench, is_pure, written, places)

    def reference(self, known: timing_pb2.ReferenceReport | None = None) -> timing_pb2.ReferenceReport:
        """Times the module by itself; `known`: what an earlier run found."""
        self.loaded.restore()
        return reference.measure_reference(self.bench, known)

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
        is_short = False
        try:
            timing = self._timing(program, artifact, tier, rewritten_reference, watchdog)
        except (ProgramFault, RuntimeError, MemoryError) as error:
            lost = self._lost_device()
            if lost is None and is_want_of_memory(error):
                self._shortages.ask(error, program.program.digest, tier)
                lost, is_short = ProgramFault(verdict_pb2.FAILURE_KIND_RESOURCE, _line(error)), True
            fault = lost or error
            if not isinstance(fault, ProgramFault):
                raise
            answer = benchmark_service_pb2.MeasureArtifactResponse(
                fault=benchmark_service_pb2.ExecutionFault(kind=fault.kind, detail=fault.detail)
            )
        else:
            answer = benchmark_service_pb2.MeasureArtifactResponse(timing=timing)
        finally:
            if self._lost_device() is None:
                self.loaded.restore()
        # Only in a final, whose process is its own: screenings are ranked by one baseline.
        if is_short and tier == timing_pb2.TIER_FINAL and self.bench.baselines.give_up_graphs():
            return self._measured(program, artifact, tier, rewritten_reference, watchdog)
        return answer

    def _timing(
        self,
        program: LoadedProgram,
        artifact: artifact_pb2.Artifact,
        tier: timing_pb2.Tier.ValueType,
        rewritten_reference: candidate_pb2.Program | None,
        watchdog: Watchdog,
    ) -> timing_pb2.Timing:
        """Holds all that is made for the program: with its frame that goes, or the next program finds it in its way."""
        large = LargeWorkspaces(CACHES * self.bench.ceilings.device.cache_bytes)
        workspaces = [self._workspaces(program.program, large) for _ in self.bench.baselines.inputs]
        own = self._kept(program, watchdog)
        calls = self._bound(program, own, workspaces)
        if program.program.cuda_graph:
            calls = self._captured(calls, workspaces, watchdog)
        call = _guarded(calls)
        # A process that was timed may know it, and go on as it did then: what is judged runs in one that never was.
        apart = Arena()
        with using(apart):
            judged = program if program.elsewhere is None else self.loaded.load_program(program.program, artifact)
        forget = _forgetting(self.loaded.device, program.program, workspaces)
        subject = Subject(program, judged, apart, call, forget, watchdog)
        inspection = Inspection(self.loaded, self.bench.baselines, self.is_pure, self.written, subject)
        candidate = Candidate(
            call=subject.call,
            before=inspection.get_ready,
            watch=watchdog.expecting,
            renew=functools.partial(self.inputs.renew, prepare=functools.partial(_renewed, own, watchdog)),
            rewritten=self._rewritten(rewritten_reference),
            work=self._work_by(rewritten_reference),
            stepwise=self._stepwise(program, own, large) if tier == timing_pb2.TIER_FINAL else None,
            steps=step_infos(program.program),
            toolkit=artifact.toolchain,
            elsewhere=program.elsewhere,
        )
        timing = measure_candidate(self.bench, candidate, tier, inspection.look)
        self.inputs.look(range(self.bench.set_count))
        if own is not None:
            own.look()
        if broken := sorted({name for memory in workspaces for name in memory.broken()} | set(self.places.broken())):
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_OUT_OF_BOUNDS, f"memory beside {broken[0]} was written in a timed call"
            )
        return timing

    def _workspaces(self, program: candidate_pb2.Program, large: LargeWorkspaces) -> Workspaces | KernelMemory:
        if self.loaded.device.type != "cpu":
            return Workspaces(self.loaded.device, large)
        outputs = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_OUTPUT}
        return KernelMemory(self.loaded.device, outputs)

    def _lost_device(self) -> ProgramFault | None:
        """The fault of a kernel that broke the device for later calls: it shows where the device is waited for."""
        try:
            self.loaded.executor.synchronize()
        except ProgramFault as fault:
            return fault
        return None

    def _eager_seconds(self) -> float:
        """Of one call of the module: the first, which may take longer than others."""
        if not self._known_eager_seconds:
            begin = time.perf_counter()
            self.bench.baselines.eager().call(0)
            self.loaded.executor.synchronize()
            self._known_eager_seconds = time.perf_counter() - begin
            self.loaded.restore()
        return self._known_eager_seconds

    def _kept(self, program: LoadedProgram, watchdog: Watchdog) -> KeptContent | None:
        """What its prepared steps make of the parameters, which all buffer sets share."""

        def make() -> KeptContent | None:
            return KeptContent.of(program, self._first_sources())

        with watchdog.expecting():
            kept: KeptContent | None = _guarded([make])(0)
        return kept

    def _bound(
        self,
        program: LoadedProgram,
        own: KeptContent | None,
        workspaces: Sequence[Workspaces | KernelMemory] | None = None,
    ) -> list[Callable[[], Any]]:
        """One call for each buffer set, of the steps that are not kept."""
        sets, kept = self.bench.baselines.inputs, own.kept if own is not None else None
        memories: Sequence[Workspaces | KernelMemory | None] = workspaces or [None] * len(sets)
        return [
            program.bind(self.loaded.sources(args), workspaces=memory, kept=kept)
            for args, memory in zip(sets, memories, strict=True)
        ]

    def _captured(
        self, calls: Sequence[Callable[[], Any]], workspaces: Sequence[Workspaces | KernelMemory], watchdog: Watchdog
    ) -> list[Callable[[], Any]]:
        """The calls as graphs, which keep their results: those are forgotten as workspaces are."""
        sets = self.bench.baselines.inputs
        before = Before.of(range(len(sets)), [self.loaded.sources(args).by_key() for args in sets], self.written)
        pool, found = torch.cuda.graph_pool_handle(), list[Callable[[], Any]]()
        for call, memory in zip(calls, workspaces, strict=True):
            assert isinstance(memory, Workspaces)
            with watchdog.expecting():  # of each anew: what is captured takes its time on the host
                captured = GraphCall(call, pool)
            for result in captured.results:
                memory.keep(result)
            found.append(captured)
        before.put_back()  # each was called once before it was captured
        return found

    def _rewritten(self, program: candidate_pb2.Program | None) -> Callable[[int], Any] | None:
        """The same algebra in library calls; None where there is none, or it does not load: it is only a side arm.

        Raises OutOfMemoryError where memory is short the first time.
        """
        if program is None or not program.steps:
            return None
        bare = artifact_pb2.Artifact(
            program_digest=program.digest, format=artifact_pb2.BINARY_FORMAT_NONE, toolchain="torch"
        )
        plain = candidate_pb2.Program()
        plain.CopyFrom(program)
        for step in plain.steps:
            step.prepared = False  # values that are kept would not follow parameters that move
        if policy.objections(plain, bare, aten.is_allowed):
            return None
        try:
            calls = self._bound(self.loaded.load_program(plain, bare), None)
        except Exception as error:
            self._shortages.ask(error, "rewritten", program.digest)
            return None
        return lambda index: calls[index]()

    def _work_by(self, program: candidate_pb2.Program | None) -> floor.Work | None:
        """Least work by that algebra; None where there is none, or it may not run."""
        if program is None or policy.objections(program, artifact_pb2.Artifact(), aten.is_allowed):
            return None
        return floor.work_by(self.bench.work, program, self.loaded.task.precision)

    def _stepwise(self, program: LoadedProgram, own: KeptContent | None, large: LargeWorkspaces) -> Callable[[], Any]:
        device, kept = self.loaded.device, own.kept if own is not None else None
        workspaces = Workspaces(device, large) if device.type == "cuda" else None
        return program.bind(self._first_sources(), None, self.bench.clock.stamp, workspaces, kept)

    def _first_sources(self) -> Sources:
        """Parameters in them are those of all buffer sets."""
        return self.loaded.sources(self.bench.baselines.inputs[0])


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


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _forgetting(
    device: torch.device, program: candidate_pb2.Program, workspaces: Sequence[Workspaces | KernelMemory]
) -> Callable[[Sequence[int]], object]:
    """Takes the answer of an earlier call out of reach: from workspaces, and from memory that outputs may get."""
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


def _renewed(own: KeptContent | None, watchdog: Watchdog) -> None:
    """Has the program's prepared steps read parameters that have moved."""
    if own is not None:
        with watchdog.expecting():
            _guarded([own.renew])(0)


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
