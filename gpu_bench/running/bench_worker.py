"""The candidate's process: it runs programs. Code for a processor it hands to one more, which holds nothing else.

The one idea: a program is run three times on equal inputs in guarded memory, the second time with nothing changed but
addresses, the third with other poison and canaries; where that makes a difference, runs that change one thing each name
the cause. It sees no truth: outputs go to the shared memory for the judge. Served by `warpsmith.sandbox.worker`; a
crash here is the candidate's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from gpu_bench import device, policy
from gpu_bench.judging import alone, guard
from gpu_bench.judging.guard import GuardedMemory, Seeds
from gpu_bench.judging.loaded import Args, LoadedTask, release_surplus
from gpu_bench.pytorch.compiling import compiling_here, keep_headers
from gpu_bench.running import unlike
from gpu_bench.running.executor import LoadedProgram, ProgramFault, Sources
from gpu_bench.timing.timed_memory import KeptContent
from gpu_bench.timing.timed_task import TimedTask
from gpu_bench.values import seeds
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import SharedMemory, move
from gpu_bench.workers.shortage import Shortages, is_want_of_memory
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, capture, dtypes
from warpsmith.graphs.kept import is_function
from warpsmith.graphs.task_module import seed_generators
from warpsmith.program_steps import made_by
from warpsmith.sandbox.worker import Methods
from warpsmith.v1 import benchmark_service_pb2, judging_pb2, task_pb2, tensor_pb2, timing_pb2, verdict_pb2

_PIECE = 1 << 24
"""Elements that are copied to the host at once."""
_REPEATS = 4
"""More runs with nothing changed, before a difference is put down to what was changed: a race may be rare."""
_MORE_RUNS = 3
"""To find the step of which a difference comes."""


class NamedMemory(GuardedMemory):
    """One that knows some tensors of the program by their buffers' names."""

    def __init__(self, device: torch.device, poison: int, canary: int, wanted: Collection[str]) -> None:
        super().__init__(device, poison, canary)
        self.named: dict[str, torch.Tensor] = {}
        self._wanted = wanted

    def empty(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.empty`."""
        return self._note(name, super().empty(name, spec))

    def zeros(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.zeros`."""
        return self._note(name, super().zeros(name, spec))

    def adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """As `Memory.adopt`."""
        return self._note(name, super().adopt(name, tensor))

    def copy_of(self, name: str, tensor: torch.Tensor, *, aligned: bool = True) -> torch.Tensor:
        """As of one that knows none."""
        return self._note(name, super().copy_of(name, tensor, aligned=aligned))

    def _note(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self._wanted:
            self.named[name] = tensor
        return tensor


@dataclass(frozen=True)
class Run:
    """One guarded run: what it returned, and what became of everything around it."""

    memory: GuardedMemory
    outputs: Sequence[torch.Tensor]
    after: dict[Key, torch.Tensor]
    """Every source after the run."""


@dataclass
class Bench:
    """A loaded task and the program that was loaded last."""

    loaded: LoadedTask
    ceilings: device.Ceilings | None = None
    """What the machine can do, where it was measured before."""
    program: LoadedProgram | None = None
    timed: TimedTask | None = None
    """Baselines and buffer sets; made by the first measurement and kept with what they compiled."""
    shortages: Shortages = field(init=False)
    _asked: tuple[bytes, bytes] = (b"", b"")
    """Program and artifact that were loaded last."""

    def __post_init__(self) -> None:
        self.shortages = Shortages(self.give_back)

    def give_back(self) -> None:
        """Drops what later calls can do without."""
        if self.timed is not None:
            self.timed.bench.baselines.give_back_graphs()

    def load(self, request: judging_pb2.LoadRequest) -> None:
        """Checks and loads a program. Raises ProgramFault; OutOfMemoryError where memory is short the first time."""
        program, artifact, self.loaded.learned = request.program, request.artifact, request.learned
        asked = program.SerializeToString(deterministic=True), artifact.SerializeToString(deterministic=True)
        if self.program is not None and asked == self._asked:  # not by its digest, which a stranger has written
            return
        if any(aten.is_outside(step.library.target) for step in program.steps if step.HasField("library")):
            self.loaded.admit_operations()
        reasons = policy.objections(program, artifact, aten.is_allowed)
        if program.target != self.loaded.task.target:
            reasons.append("the program is for another target than its task")
        reasons += policy.objections_to_kept(program, is_function, prepared=self.loaded.task.prepared)
        if reasons:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_POLICY_REJECT, reasons[0])
        self.program = None
        try:
            self.program = self.loaded.load_program(program, artifact)
        except ProgramFault as fault:
            self.shortages.ask(fault, "load", program.digest)
            raise
        self._asked = asked

    def timing(self) -> TimedTask:
        """What measurements of the task share."""
        if self.timed is None:
            self.timed = TimedTask.of(self.loaded, self.ceilings)
        return self.timed

    def execute(self, request: judging_pb2.ExecuteRequest, shared: SharedMemory) -> judging_pb2.Observation:
        """Runs the program on a case and writes its outputs where the regions say. Raises as `load`."""
        assert self.program is not None
        self.loaded.learned = request.learned
        args = self.loaded.case(request.family, request.seed)
        before = self.loaded.sources(args).by_key()
        observed = judging_pb2.Observation(family=request.family, seed=request.seed)
        seeds = Seeds.drawn()
        first = self._guarded(args, request, seeds.poison, seeds.canary)
        names = [str(key) for key in map(Key.of, request.regions) if key.is_output]
        match_shapes(first.outputs, request.regions[: len(names)])
        delivered = _deliver(first, request.regions, shared)
        changed = [key for key, tensor in first.after.items() if not guard.same_bits(tensor, before[key])]
        expected = set(map(Key.of, request.regions))
        observed.mutated_sources.extend(str(key) for key in changed if key not in expected)
        broken = first.memory.broken()
        observed.dirty_workspaces.extend(first.memory.dirty())
        poisoned = [_if_any(first.memory.still_poisoned(output)) for output in first.outputs]

        if request.once:
            delivered()
            observed.broken_canaries.extend(dict.fromkeys(broken))
            return observed

        second = self._guarded(args, request, seeds.poison, seeds.canary)  # the addresses of `first` are taken
        observed.unrepeatable_outputs.extend(_different(first, second, names))
        broken += second.memory.broken()
        del second
        other = self._guarded(args, request, seeds.other_poison, seeds.other_canary)
        unwritten = self._unwritten(poisoned, other)
        written = {name for name, count in zip(names, unwritten, strict=True) if not count}
        differs = written.intersection(_different(first, other, names))
        broken += other.memory.broken()
        del other

        if differs:  # which of the two it was, or a race that is too rare for two equal runs
            poison, canary = (
                self._guarded(args, request, *one_changed)
                for one_changed in ((seeds.other_poison, seeds.canary), (seeds.poison, seeds.other_canary))
            )
            suspects = [name for name in _different(first, poison, names) if name in written]
            observed.uninitialized_read_outputs.extend(suspects)
            observed.stray_read_outputs.extend(_different(first, canary, names))
            for _ in range(_REPEATS):
                if observed.unrepeatable_outputs:
                    break
                again = self._guarded(args, request, seeds.poison, seeds.canary)
                observed.unrepeatable_outputs.extend(_different(first, again, names))
            broken += canary.memory.broken()
            del poison, canary
            if not (suspects or observed.stray_read_outputs or observed.unrepeatable_outputs):
                observed.unrepeatable_outputs.extend(sorted(differs))
        delivered()
        del first
        observed.broken_canaries.extend(dict.fromkeys(broken))
        observed.unwritten_counts.extend(unwritten)
        # On a processor a thread of the program's may be at work yet: it gets no more of our runs to spoil.
        if observed.unrepeatable_outputs and self.loaded.device.type == "cuda":
            observed.unlike_step = self.first_unlike(args, request, seeds)
        return observed

    def first_unlike(self, args: Args, request: judging_pb2.ExecuteRequest, seeds: Seeds) -> str:
        """The first step whose results differ between two more equal runs, where memory allows; else empty."""
        assert self.program is not None
        program, runs = self.program.program, list[unlike.Hashes]()
        sources = {each.name: str(Key.of_source(each.source)) for each in program.buffers if each.HasField("source")}
        made = {sources.get(name, name) for step in program.steps for name in made_by(step)}
        for _ in range(_MORE_RUNS):
            memory = NamedMemory(self.loaded.device, seeds.poison, seeds.canary, made)
            after_step, hashes = unlike.hashing(program, functools.partial(_found, memory.named, sources))
            try:
                self._run(args, request, memory, after_step)
            except ProgramFault as fault:
                if fault.kind != verdict_pb2.FAILURE_KIND_RESOURCE:
                    raise
                break
            runs.append(hashes)
        return unlike.first_unlike(program, runs)

    def execute_group(self, request: judging_pb2.ExecuteGroupRequest, shared: SharedMemory) -> judging_pb2.Observation:
        """Delivers what a group of the program is given in a run of the whole, and what it makes. Raises as `load`."""
        assert self.program is not None
        self.loaded.learned = request.learned
        args = self.loaded.case(request.family, request.seed)
        observed = judging_pb2.Observation(family=request.family, seed=request.seed, group=request.group)
        wanted = {region.name for region in request.regions}
        seeds = Seeds.drawn()
        memory = NamedMemory(self.loaded.device, seeds.poison, seeds.canary, wanted)
        after_step, seen = alone.watching(self.program.program, request, memory.named.get)
        try:
            self._run(args, request, memory, after_step)
        except ProgramFault as fault:
            if fault.kind != verdict_pb2.FAILURE_KIND_RESOURCE:
                raise
            observed.unjudged = f"to keep what it is given takes more memory than is free: {fault.detail}"
            return observed
        if len(seen) < len(request.regions):
            observed.unjudged = "its steps are not side by side"
            return observed
        for region, place in zip(request.regions, shared.tensors(request.regions), strict=True):
            place.copy_(seen[Key.of(region)])
        self.loaded.executor.synchronize()  # another process reads there
        return observed

    def _guarded(self, args: Args, request: judging_pb2.ExecuteRequest, poison: int, canary: int) -> Run:
        return self._run(args, request, GuardedMemory(self.loaded.device, poison, canary))

    def _run(
        self,
        args: Args,
        request: judging_pb2.ExecuteRequest | judging_pb2.ExecuteGroupRequest,
        memory: GuardedMemory,
        after_step: Callable[[], None] | None = None,
    ) -> Run:
        """One run; `after_step` is called before the first step, too."""
        assert self.program is not None
        is_group = isinstance(request, judging_pb2.ExecuteGroupRequest)
        group = request.group if isinstance(request, judging_pb2.ExecuteGroupRequest) else ""
        # Groups are given what they are given when they are timed: no kernel can tell which it is by TF32.
        as_judged = nullcontext if is_group else self.loaded.as_judged
        question = (self.program.program.digest, request.family, request.seed, group)
        copies = {key: memory.copy_of(str(key), t) for key, t in self.loaded.sources(args).by_key().items()}
        try:
            sources, kept = Sources.from_keys(copies), None
            if after_step is not None:
                after_step()
            if any(step.prepared for step in self.program.program.steps):
                with as_judged():
                    kept = KeptContent(self.program.keep(sources, memory, after_step))
            call = self.program.bind(sources, memory, after_step, kept=kept.kept if kept is not None else None)
            seed_generators(seeds.of_generators(request.seed))
            with as_judged():
                outputs = call()
            self.loaded.executor.synchronize()
            if kept is not None:
                kept.look()
        except ProgramFault as fault:
            self.shortages.ask(fault, *question)
            raise
        except BadInput as refused:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_POLICY_REJECT, str(refused)) from refused
        except (RuntimeError, MemoryError, ValueError, TypeError, IndexError) as error:
            self.shortages.ask(error, *question)
            raise ProgramFault(_kind_of(error), f"a step failed: {_first_line(error)}") from error
        return Run(memory, outputs, copies)

    @staticmethod
    def _unwritten(poisoned: Sequence[torch.Tensor | None], other: Run) -> list[int]:
        """Elements of each output that held the poison of the first run and of another one: no kernel wrote them."""
        counts = []
        for mask, output in zip(poisoned, other.outputs, strict=True):
            again = None if mask is None else other.memory.still_poisoned(output)
            counts.append(0 if mask is None or again is None else int((mask & again).sum()))
        return counts


def _found(tensors: Mapping[str, torch.Tensor], sources: Mapping[str, str], buffer: str) -> torch.Tensor | None:
    """The tensor of a buffer, or of the source that it is."""
    return tensors.get(sources.get(buffer, buffer))


def _if_any(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask, or None where nothing in it is set: as good, and to count 1.6 billion elements takes 9 ms."""
    return mask if mask is not None and bool(mask.any()) else None


def _different(left: Run, right: Run, names: Sequence[str]) -> list[str]:
    pairs = zip(names, left.outputs, right.outputs, strict=True)
    return [name for name, first, second in pairs if not guard.same_numbers(first, second)]


def match_shapes(outputs: Sequence[torch.Tensor], regions: Sequence[judging_pb2.Region]) -> None:
    """Raises ProgramFault for outputs of another number, type or shape than the reference's."""
    if len(outputs) != len(regions):
        raise ProgramFault(verdict_pb2.FAILURE_KIND_WRONG_SHAPE, f"{len(outputs)} outputs instead of {len(regions)}")
    for region, output in zip(regions, outputs, strict=True):
        wanted = dtypes.to_torch(region.spec.dtype)
        if list(output.shape) != list(region.spec.shape) or output.dtype != wanted:
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_SHAPE,
                f"{Key.of(region)} is {output.dtype} {list(output.shape)} instead of {wanted} "
                f"{list(region.spec.shape)}",
            )


def _deliver(run: Run, regions: Sequence[judging_pb2.Region], shared: SharedMemory) -> Callable[[], object]:
    """Begins to copy the results where the regions say; what it returns waits for the end. `run` stays alive.

    On a GPU the copy goes on beside other runs: 6.4 GB take 116 ms on an H200, as long as all else together. It goes
    in pieces, because whatever else comes to the host waits for the piece under way.
    """
    results = {Key.output(position): output for position, output in enumerate(run.outputs)} | run.after
    pairs = [(place, results[Key.of(region)]) for region, place in zip(regions, shared.tensors(regions), strict=True)]
    if not any(result.is_cuda for _, result in pairs):
        for place, result in pairs:
            place.copy_(result)
        return lambda: None
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for place, result in pairs:
            flat = result.reshape(-1)
            for to, piece in zip(torch.split(place.view(-1), _PIECE), torch.split(flat, _PIECE), strict=True):
                to.copy_(piece, non_blocking=True)
            flat.record_stream(side)
            result.record_stream(side)
    wait: Callable[[], object] = side.synchronize
    return wait


def _kind_of(error: BaseException) -> verdict_pb2.FailureKind.ValueType:
    if is_want_of_memory(error):
        return verdict_pb2.FAILURE_KIND_RESOURCE
    lowered = str(error).lower()
    if any(word in lowered for word in ("illegal memory access", "misaligned address", "unspecified launch failure")):
        return verdict_pb2.FAILURE_KIND_CRASH
    return verdict_pb2.FAILURE_KIND_LAUNCH_ERROR


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


# ---- methods of the worker -----------------------------------------------------------------------------------

_benches: list[Bench] = []


def _open(request: judging_pb2.OpenBenchRequest) -> judging_pb2.Done:
    _benches.clear()
    ceilings = device.Ceilings.of(request.ceilings) if request.HasField("ceilings") else None
    _benches.append(Bench(LoadedTask.load(request.task), ceilings))
    return judging_pb2.Done()


def _warm_up(request: judging_pb2.WarmUpRequest) -> judging_pb2.Done:
    """Loads what capturing and baselines need, which takes seconds; times nothing, so others may be at work."""
    del request
    preload()
    return judging_pb2.Done()


def _prepare_baselines(request: judging_pb2.PrepareBaselinesRequest) -> judging_pb2.Done:
    """Compiles every baseline of a final; times nothing."""
    del request
    _benches[0].timing().bench.baselines.prepare(timing_pb2.TIER_FINAL)
    return judging_pb2.Done()


def _compile_once(request: judging_pb2.CompileOnceRequest) -> judging_pb2.Done:
    """Lets torch.compile find out about the machine (instruction sets, headers) and keep it in its cache."""
    place = "cuda" if request.target == task_pb2.TARGET_CUDA else "cpu"
    with compiling_here(request.target):
        torch.compile(torch.relu, dynamic=False)(torch.zeros(64, device=place))
    keep_headers()
    return judging_pb2.Done()


def _load(request: judging_pb2.LoadRequest) -> judging_pb2.Execution:
    try:
        _benches[0].load(request)
    except ProgramFault as fault:
        return judging_pb2.Execution(fault=fault.kind, detail=fault.detail)
    return judging_pb2.Execution()


def _give_back(request: judging_pb2.GiveBackRequest) -> judging_pb2.Done:
    """Gives back memory that nothing lies in, and graphs of baselines."""
    del request
    _benches[0].give_back()
    if _benches[0].loaded.device.type == "cuda":
        torch.cuda.empty_cache()
    return judging_pb2.Done()


def _execute(request: judging_pb2.ExecuteRequest) -> judging_pb2.Execution:
    return _executed(lambda: _benches[0].execute(request, SharedMemory.inherited()))


def _execute_group(request: judging_pb2.ExecuteGroupRequest) -> judging_pb2.Execution:
    return _executed(lambda: _benches[0].execute_group(request, SharedMemory.inherited()))


def _executed(run: Callable[[], judging_pb2.Observation]) -> judging_pb2.Execution:
    try:
        return judging_pb2.Execution(observed=run())
    except ProgramFault as fault:
        return judging_pb2.Execution(fault=fault.kind, detail=fault.detail)
    finally:
        release_surplus(_benches[0].loaded.device, _benches[0].loaded.task)


def _measure(
    request: benchmark_service_pb2.MeasureArtifactRequest,
) -> benchmark_service_pb2.MeasureArtifactResponse:
    """Times the program that was loaded last: the session loads before it measures."""
    bench = _benches[0]
    assert bench.program is not None
    rewritten = request.rewritten_reference if request.HasField("rewritten_reference") else None
    try:
        return bench.timing().measure(bench.program, request.artifact, request.tier, rewritten)
    finally:
        release_surplus(bench.loaded.device, bench.loaded.task)


def _reference(
    request: benchmark_service_pb2.RunReferenceRequest,
) -> benchmark_service_pb2.RunReferenceResponse:
    """Times the module by itself; the task was given to `open`."""
    known = request.known if request.HasField("known") else None
    try:
        return benchmark_service_pb2.RunReferenceResponse(report=_benches[0].timing().reference(known))
    finally:
        release_surplus(_benches[0].loaded.device, _benches[0].loaded.task)


def _describe(request: benchmark_service_pb2.DescribeDeviceRequest) -> judging_pb2.Ceilings:
    """Measures the machine; needs no task."""
    target = device.resolve_target(request.target)
    ceilings = device.describe(target).message()
    ceilings.device.environment.CopyFrom(device.environment(target))
    return ceilings


def preload() -> None:
    """As `fork_server.PRELOAD`: a second each for the first capture and the first compiled baseline."""
    capture.rehearse()
    importlib.import_module("torch._inductor.compile_fx")


METHODS: Methods = {
    "open": (judging_pb2.OpenBenchRequest, _open),
    "warm_up": (judging_pb2.WarmUpRequest, _warm_up),
    "prepare_baselines": (judging_pb2.PrepareBaselinesRequest, _prepare_baselines),
    "compile_once": (judging_pb2.CompileOnceRequest, _compile_once),
    "load": (judging_pb2.LoadRequest, _load),
    "move": (judging_pb2.MoveRequest, move),
    "give_back": (judging_pb2.GiveBackRequest, _give_back),
    "execute": (judging_pb2.ExecuteRequest, _execute),
    "execute_group": (judging_pb2.ExecuteGroupRequest, _execute_group),
    "measure": (benchmark_service_pb2.MeasureArtifactRequest, _measure),
    "reference": (benchmark_service_pb2.RunReferenceRequest, _reference),
    "describe": (benchmark_service_pb2.DescribeDeviceRequest, _describe),
}
