"""What is found out before a search: the device, the plan, the reference's times, a compiler, and the headroom.

The one idea: these calls do not need each other, so they are made at once and the device gate orders those
that must be alone. Outside every search budget. It decides nothing but `AT_FLOOR`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator import agents as deadlines
from orchestrator import metrics
from orchestrator.agents import Agents, Benchmark
from orchestrator.serving.device_gate import DeviceGate
from warpsmith import hardware
from warpsmith.contract import words
from warpsmith.errors import DeviceQuarantined, MethodMissing
from warpsmith.service import tracing
from warpsmith.v1 import (
    analysis_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    compile_service_pb2,
    lease_pb2,
    synthesis_service_pb2,
    task_pb2,
    timing_pb2,
)

ResultT = TypeVar("ResultT")

FLOOR_MARGIN = 1.05
"""A baseline within this factor of the floor leaves nothing worth searching for (docs/measurement.md)."""


_STEPS = (
    "looking at the device",
    "capturing the module",
    "looking for a compiler",
    "running the module in its own process, and in fp64 for what is right",
    "timing eager and what torch.compile makes of it",
)

Took = Callable[[str, float], None]
"""Hears how many seconds a stage took."""
KnownReference = Callable[[task_pb2.Task, timing_pb2.Device], timing_pb2.ReferenceReport | None]
"""Gives what an earlier run found of a task's baselines on such a device; None where there is none."""


def nothing_known(task: task_pb2.Task, device: timing_pb2.Device) -> timing_pb2.ReferenceReport | None:
    """None."""
    del task, device
    return None


@dataclass(frozen=True)
class Prepared:
    """All that a search stands on."""

    device: timing_pb2.Device
    analysis: analysis_pb2.Analysis
    """Plan zero with its legal moves."""
    reference: timing_pb2.ReferenceReport


def describe_device(
    gate: DeviceGate, target: task_pb2.Target.ValueType, took: Took = lambda *_: None
) -> timing_pb2.Device:
    """What the device can do; an unspecified target gives the machine's best.

    Raises:
        BadInput: the target is not present.
    """
    if target not in gate.devices:
        request = benchmark_service_pb2.DescribeDeviceRequest(target=target)

        def describe(benchmark: Benchmark, _: metrics.Waited) -> timing_pb2.Device:
            return benchmark.DescribeDevice(request, timeout=deadlines.DESCRIBE_SECONDS).device

        found = deadlines.surviving(lambda: _on_a_device(gate, "describe", describe, took), "the device")
        gate.devices[target] = gate.devices[found.target] = found
    return gate.devices[target]


def _on_a_device(
    gate: DeviceGate, stage: str, call: Callable[[Benchmark, metrics.Waited], ResultT], took: Took
) -> ResultT:
    """Makes a call to one of the devices, and to the next one where that is out of service."""
    for others in reversed(range(max(1, gate.device_count))):
        try:
            with gate.timing() as benchmark, metrics.timed(stage, took) as waited:
                return call(benchmark, waited)
        except DeviceQuarantined:
            if not others:
                raise
    raise AssertionError("the last device answers or raises")


def analyze(
    agents: Agents,
    gate: DeviceGate,
    task: task_pb2.Task,
    moves: list[analysis_pb2.Move],
    go_on: Callable[[], bool] = lambda: True,
) -> analysis_pb2.Analysis:
    """The plan that moves give, with its legal moves; `go_on` as in `agents.asked`.

    Raises:
        BadInput: the module cannot be captured; IllegalMove: a move does not apply.
    """
    request = synthesis_service_pb2.AnalyzePlanRequest(task=task, moves=moves)

    def call() -> analysis_pb2.Analysis:
        with gate.working(task.target), metrics.timed("analyze"):
            return agents.synthesis.AnalyzePlan(request, timeout=deadlines.ANALYZE_SECONDS).analysis

    return deadlines.asked(call, go_on=go_on)


def require_compiler(agents: Agents, gate: DeviceGate, target: task_pb2.Target.ValueType) -> None:
    """Compiles an empty source: what is missing for a kernel is known before anything is timed.

    Raises:
        BadInput: no compiler for the target is installed.
    """
    name = "empty.cu" if target == task_pb2.TARGET_CUDA else "empty.cpp"
    program = candidate_pb2.Program(target=target, sources=[candidate_pb2.DeviceSource(name=name)])
    request = compile_service_pb2.CompileCandidateRequest(program=program)
    with gate.working(target), metrics.timed("compile"):
        agents.compilation.CompileCandidate(request, timeout=deadlines.COMPILE_SECONDS)


def look_ahead(agents: Agents, gate: DeviceGate, task: task_pb2.Task) -> None:
    """What needs no device, for a task whose target is set: the agents remember plan and compiler for `prepare`.

    Raises:
        BadInput: the module cannot be captured, or no compiler is installed; Infrastructure: a service failed.
    """
    with tracing.Pool(2, thread_name_prefix="ahead") as pool:
        for future in (
            pool.submit(analyze, agents, gate, task, []),
            pool.submit(require_compiler, agents, gate, task.target),
        ):
            future.result()


def prepare(
    agents: Agents,
    gate: DeviceGate,
    task: task_pb2.Task,
    go_on: Callable[[], bool] = lambda: True,
    known: KnownReference = nothing_known,
    waits_for: Callable[[str], None] = lambda _: None,
    took: Took = lambda *_: None,
) -> Prepared | None:
    """Makes these calls for a task whose target is set; None where `go_on` became false before they ended.

    `known`: what an earlier run found. `waits_for` hears what is under way, for people; `took`, for how many seconds a
    stage had a device. The first failure ends it at once: what still waits for the device is dropped. The task is told
    the GPU that it will run on, where that is not the one that kernels are made for otherwise.

    Raises:
        BadInput: the module cannot be captured, does not run, is not deterministic, ends the service again and again,
            or the target or its compiler is absent. Infrastructure: a service failed.
    """
    dropped = threading.Event()

    def open_task() -> None:
        device.result()
        if gate.only_benchmark is not None:
            with gate.checking(task.target), metrics.timed("open"):
                if not dropped.is_set():
                    _open(gate.only_benchmark, task, agents.lease)

    def run_reference() -> timing_pb2.ReferenceReport:
        opened.result()  # in this order: were both to wait at the gate, chance would choose
        request = benchmark_service_pb2.RunReferenceRequest(task=task, known=known(task, device.result()))

        def run(benchmark: Benchmark, waited: metrics.Waited) -> timing_pb2.ReferenceReport:
            if dropped.is_set():
                return timing_pb2.ReferenceReport()
            request.lease.CopyFrom(agents.lease())
            return _referenced(benchmark, request, waited)

        return deadlines.surviving(lambda: _on_a_device(gate, "reference", run, took), f"module {task.name}")

    pool = tracing.Pool(5, thread_name_prefix="prepare")
    try:
        # The plan first: a module that cannot be captured is known before anything is timed.
        analysis = pool.submit(analyze, agents, gate, task, [], lambda: go_on() and not dropped.is_set())
        compiler = pool.submit(require_compiler, agents, gate, task.target)
        device = pool.submit(describe_device, gate, task.target, took)
        opened = pool.submit(open_task)
        reference = pool.submit(run_reference)
        steps: dict[Future[Any], str] = dict(zip((device, analysis, compiler, opened, reference), _STEPS, strict=True))
        for future in _as_they_end(steps, go_on, waits_for):
            if future is compiler and future.exception():
                dropped.set()
                device.result()  # a device that is absent explains more than its compiler
            future.result()
        if not go_on():
            return None
        return Prepared(device.result(), _for_card(agents, gate, task, device, analysis), reference.result())
    finally:
        dropped.set()
        pool.shutdown(wait=False)


def _referenced(
    benchmark: Benchmark, request: benchmark_service_pb2.RunReferenceRequest, waited: metrics.Waited
) -> timing_pb2.ReferenceReport:
    answer = benchmark.RunReference(request, timeout=deadlines.MEASURE_SECONDS)
    waited.seconds = answer.waited_seconds
    return answer.report


def _open(benchmark: Benchmark, task: task_pb2.Task, lease: Callable[[], lease_pb2.Lease]) -> None:
    def call() -> None:
        request = benchmark_service_pb2.OpenTaskRequest(task=task, lease=lease())
        benchmark.OpenTask(request, timeout=deadlines.MEASURE_SECONDS)

    with contextlib.suppress(MethodMissing):  # one of an earlier version opens it by itself, later
        deadlines.surviving(call, f"module {task.name}")


def _as_they_end(
    steps: Mapping[Future[Any], str], go_on: Callable[[], bool], waits_for: Callable[[str], None]
) -> Iterator[Future[Any]]:
    """Each as it ends, for as long as `go_on`; `waits_for` hears the first that has not."""
    futures = set(steps)
    while futures and go_on():
        waits_for(next((what for step, what in steps.items() if not step.done()), ""))
        ended, futures = wait(futures, timeout=0.1, return_when=FIRST_COMPLETED)
        yield from ended


def _for_card(
    agents: Agents,
    gate: DeviceGate,
    task: task_pb2.Task,
    device: Future[timing_pb2.Device],
    analysis: Future[analysis_pb2.Analysis],
) -> analysis_pb2.Analysis:
    """The plan for the device's GPU; what was captured meanwhile is remembered."""
    card = device.result().hardware
    if task.target != task_pb2.TARGET_CUDA or hardware.of(card) == hardware.of(task.hardware):
        return analysis.result()
    task.hardware.CopyFrom(card)
    return analyze(agents, gate, task, [])


def fastest_ns(reference: timing_pb2.ReferenceReport) -> float:
    """Median of the fastest baseline in nanoseconds; 0 when none ran."""
    return next((arm.median_ns for arm in reference.arms if arm.kind == reference.fastest_arm), 0.0)


def has_algebra(analysis: analysis_pb2.Analysis) -> bool:
    """Whether a rewrite of the plan makes fewer matrix products.

    The floor counts each byte once whatever the algebra, but products as the module makes them, wherever it cannot see
    that they may be spared: only a rewrite that spares some can come below it.
    """
    return any(
        legal.move.kind == analysis_pb2.MOVE_KIND_REWRITE
        and legal.after.product_flop_count < legal.before.product_flop_count
        for legal in analysis.legal_moves
    )


def at_floor(reference: timing_pb2.ReferenceReport, analysis: analysis_pb2.Analysis) -> str:
    """Why a search is not worth its cost, in one sentence; empty when it is. `analysis`: plan zero."""
    fastest, floor = fastest_ns(reference), reference.floor_ns
    if floor <= 0 or fastest <= 0 or fastest > floor * FLOOR_MARGIN or has_algebra(analysis):
        return ""
    return (
        f"{words.arm(reference.fastest_arm)} takes {fastest / 1e3:.1f} us and the floor of this machine is "
        f"{floor / 1e3:.1f} us: "
        f"at most {max(1.0, fastest / floor):.2f}x could be won"
    )
