"""The candidate's process: the only one that loads candidate code.

The one idea: a program is run several times on equal inputs in guarded memory, each run differing from the first in
one thing only (nothing, the poison, the canaries), so every difference names its cause. It sees no truth: outputs go
to the shared memory for the judge. Served by `warpsmith.worker`; a crash here is the candidate's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_bench import device, guard, policy
from gpu_bench.executor import LoadedProgram, ProgramFault, Sources
from gpu_bench.guard import GuardedMemory
from gpu_bench.loaded import Args, LoadedTask, release_surplus
from gpu_bench.sharing import SharedMemory
from gpu_bench.timed_task import TimedTask
from warpsmith import aten, dtypes
from warpsmith.errors import BadInput
from warpsmith.v1 import benchmark_service_pb2, judging_pb2, verdict_pb2
from warpsmith.worker import Methods

_POISON, _OTHER_POISON = 1000, 1001
_CANARY, _OTHER_CANARY = 0, 1


@dataclass(frozen=True)
class Run:
    """One guarded run: what it returned, and what became of everything around it."""

    memory: GuardedMemory
    outputs: Sequence[torch.Tensor]
    after: dict[str, torch.Tensor]
    """Every source after the run, by the name that comparisons use."""


@dataclass
class Bench:
    """A loaded task and the program that was loaded last."""

    loaded: LoadedTask
    program: LoadedProgram | None = None
    timed: TimedTask | None = None
    """Baselines and buffer sets; made by the first measurement and kept with what they compiled."""

    def load(self, request: judging_pb2.LoadRequest) -> None:
        """Checks and loads a program. Raises ProgramFault."""
        program, artifact = request.program, request.artifact
        if self.program is not None and program.digest and self.program.program.digest == program.digest:
            return
        reasons = policy.objections(program, artifact, aten.is_allowed)
        if program.target != self.loaded.task.target:
            reasons.append("the program is for another target than its task")
        if reasons:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_POLICY_REJECT, reasons[0])
        self.program = None
        self.program = self.loaded.load_program(program, artifact)

    def timing(self) -> TimedTask:
        """What measurements of the task share."""
        if self.timed is None:
            self.timed = TimedTask.of(self.loaded)
        return self.timed

    def execute(self, request: judging_pb2.ExecuteRequest, shared: SharedMemory) -> verdict_pb2.Comparison:
        """Runs the program on a case and writes its outputs where the regions say. Raises ProgramFault."""
        assert self.program is not None
        args = self.loaded.case(request.family, request.seed)
        before = self.loaded.sources(args).named()
        comparison = verdict_pb2.Comparison(family=request.family, seed=request.seed)
        first = self._run(args, request.seed, _POISON, _CANARY)
        names = [region.name for region in request.regions if region.name.startswith("output ")]
        _match_shapes(first.outputs, request.regions[: len(names)])
        _deliver(first, request.regions, shared)
        changed = [name for name, tensor in first.after.items() if not guard.same_bits(tensor, before[name])]
        expected = {region.name for region in request.regions}
        comparison.mutated_sources.extend(name for name in changed if name not in expected)
        broken = first.memory.broken()
        comparison.dirty_workspaces.extend(first.memory.dirty())
        poisoned = [first.memory.still_poisoned(output) for output in first.outputs]

        second = self._run(args, request.seed, _POISON, _CANARY)  # `first` is alive: its addresses are taken
        comparison.unrepeatable_outputs.extend(_different(first, second, names))
        broken += second.memory.broken()
        del second

        other = self._run(args, request.seed, _OTHER_POISON, _CANARY)
        unwritten = self._unwritten(poisoned, other)
        unwritten_names = {name for name, count in zip(names, unwritten, strict=True) if count}
        suspects = [name for name in _different(first, other, names) if name not in unwritten_names]
        comparison.uninitialized_read_outputs.extend(suspects)
        broken += other.memory.broken()
        del other

        moved = self._run(args, request.seed, _POISON, _OTHER_CANARY)
        comparison.stray_read_outputs.extend(_different(first, moved, names))
        broken += moved.memory.broken()
        if (suspects or comparison.stray_read_outputs) and not comparison.unrepeatable_outputs:
            # A rare race looks like either: ask once more with everything equal.
            again = self._run(args, request.seed, _POISON, _CANARY)
            comparison.unrepeatable_outputs.extend(_different(first, again, names))
        comparison.broken_canaries.extend(dict.fromkeys(broken))
        for position, count in enumerate(unwritten):
            comparison.outputs.append(verdict_pb2.OutputError(output=position, unwritten_count=count))
        return comparison

    def _run(self, args: Args, seed: int, poison: int, canary: int) -> Run:
        assert self.program is not None
        memory = GuardedMemory(self.loaded.device, poison, canary)
        copies = {name: memory.copy_of(name, tensor) for name, tensor in self.loaded.sources(args).named().items()}
        try:
            call = self.program.bind(Sources.from_named(copies), memory)
            torch.manual_seed(seed)
            outputs = call()
            self.loaded.executor.synchronize()
        except ProgramFault:
            raise
        except BadInput as refused:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_POLICY_REJECT, str(refused)) from refused
        except (RuntimeError, MemoryError, ValueError, TypeError, IndexError) as error:
            raise ProgramFault(_kind_of(error), f"a step failed: {_first_line(error)}") from error
        return Run(memory, outputs, copies)

    @staticmethod
    def _unwritten(poisoned: Sequence[torch.Tensor | None], other: Run) -> list[int]:
        """Elements of each output that held the poison of the first run and of another one: nobody wrote them."""
        counts = []
        for mask, output in zip(poisoned, other.outputs, strict=True):
            again = other.memory.still_poisoned(output)
            counts.append(0 if mask is None or again is None else int((mask & again).sum()))
        return counts


def _different(left: Run, right: Run, names: Sequence[str]) -> list[str]:
    pairs = zip(names, left.outputs, right.outputs, strict=True)
    return [name for name, first, second in pairs if not guard.same_bits(first, second)]


def _match_shapes(outputs: Sequence[torch.Tensor], regions: Sequence[judging_pb2.Region]) -> None:
    if len(outputs) != len(regions):
        raise ProgramFault(verdict_pb2.FAILURE_KIND_WRONG_SHAPE, f"{len(outputs)} outputs instead of {len(regions)}")
    for region, output in zip(regions, outputs, strict=True):
        wanted = dtypes.to_torch(region.spec.dtype)
        if list(output.shape) != list(region.spec.shape) or output.dtype != wanted:
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_SHAPE,
                f"{region.name} is {output.dtype} {list(output.shape)} instead of {wanted} {list(region.spec.shape)}",
            )


def _deliver(run: Run, regions: Sequence[judging_pb2.Region], shared: SharedMemory) -> None:
    results = {f"output {position}": output for position, output in enumerate(run.outputs)} | run.after
    for region, place in zip(regions, shared.tensors(regions), strict=True):
        place.copy_(results[region.name])


def _kind_of(error: BaseException) -> verdict_pb2.FailureKind.ValueType:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return verdict_pb2.FAILURE_KIND_RESOURCE
    lowered = text.lower()
    if any(word in lowered for word in ("illegal memory access", "misaligned address", "unspecified launch failure")):
        return verdict_pb2.FAILURE_KIND_CRASH
    return verdict_pb2.FAILURE_KIND_LAUNCH_ERROR


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


# ---- methods of the worker -----------------------------------------------------------------------------------

_benches: list[Bench] = []


def _open(request: judging_pb2.PrepareRequest) -> judging_pb2.Preparation:
    _benches.clear()
    _benches.append(Bench(LoadedTask.load(request.task)))
    return judging_pb2.Preparation()


def _load(request: judging_pb2.LoadRequest) -> judging_pb2.Execution:
    try:
        _benches[0].load(request)
    except ProgramFault as fault:
        return judging_pb2.Execution(fault=fault.kind, detail=fault.detail)
    return judging_pb2.Execution()


def _execute(request: judging_pb2.ExecuteRequest) -> judging_pb2.Execution:
    try:
        return judging_pb2.Execution(observed=_benches[0].execute(request, SharedMemory.inherited()))
    except ProgramFault as fault:
        return judging_pb2.Execution(fault=fault.kind, detail=fault.detail)
    finally:
        release_surplus(_benches[0].loaded.device)


def _measure(
    request: benchmark_service_pb2.MeasureArtifactRequest,
) -> benchmark_service_pb2.MeasureArtifactResponse:
    """Times the program that was loaded last: the session loads before it measures."""
    bench = _benches[0]
    assert bench.program is not None
    rewritten = request.rewritten_reference if request.HasField("rewritten_reference") else None
    return bench.timing().measure(bench.program, request.artifact, request.tier, rewritten)


def _reference(
    request: benchmark_service_pb2.RunReferenceRequest,
) -> benchmark_service_pb2.RunReferenceResponse:
    """Times the module by itself; the task was given to `open`."""
    del request
    return benchmark_service_pb2.RunReferenceResponse(report=_benches[0].timing().reference())


def _describe(
    request: benchmark_service_pb2.DescribeDeviceRequest,
) -> benchmark_service_pb2.DescribeDeviceResponse:
    """Measures the machine; needs no task."""
    target = device.resolve_target(request.target)
    response = benchmark_service_pb2.DescribeDeviceResponse(device=device.describe(target).device)
    response.device.environment.CopyFrom(device.environment(target))
    return response


METHODS: Methods = {
    "open": (judging_pb2.PrepareRequest, _open),
    "load": (judging_pb2.LoadRequest, _load),
    "execute": (judging_pb2.ExecuteRequest, _execute),
    "measure": (benchmark_service_pb2.MeasureArtifactRequest, _measure),
    "reference": (benchmark_service_pb2.RunReferenceRequest, _reference),
    "describe": (benchmark_service_pb2.DescribeDeviceRequest, _describe),
}
