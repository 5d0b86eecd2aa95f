"""The same of solutions: with one look taken away, a solution that the suite catches gets through.

The one idea: judge and solution are in this process, without their jail, where a test can reach them; only solutions
that break nothing here are used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hostile_solutions as solutions
import pytest

from agent_correctness.judge import Judge
from gpu_bench import integrity, judge_worker, solution_worker
from gpu_bench.loaded import LoadedTask
from gpu_bench.sharing import SharedMemory
from warpsmith import digest
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    judging_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

pytestmark = pytest.mark.hostile

Off = Callable[[pytest.MonkeyPatch], object]


@dataclass
class InThisProcess:
    """As the processes of judge and solution."""

    descriptor: int
    shared: SharedMemory

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        judge = judge_worker.Judge(LoadedTask.load(request.task), self.shared)
        os.ftruncate(self.descriptor, judge.total_bytes_with_sources)
        answer = benchmark_service_pb2.CompareOutputsResponse()
        judge.draw(verdict_pb2.VALUE_FAMILY_TASK, 42, fixed_parameters=False)
        bare = task_pb2.Task(target=request.task.target, precision=request.task.precision)
        opened = solution_worker._open(
            judging_pb2.OpenSolutionRequest(
                task=bare, artifact=request.artifact, signature=judge.signature, sources=judge.source_regions
            )
        )
        if opened.fault:
            answer.fault.kind, answer.fault.detail = opened.fault, opened.detail
            return answer
        for case in request.cases:
            judge.draw(case.family, case.seed, fixed_parameters=False)
            asked = judging_pb2.ExecuteRequest(
                family=case.family, seed=case.seed, regions=judge.regions, sources=judge.source_regions
            )
            executed = solution_worker._execute(asked)
            if executed.fault:
                answer.fault.kind, answer.fault.detail = executed.fault, executed.detail
                return answer
            answer.comparisons.append(judge.judge(executed.observed))
        return answer


LAZY = solutions.linear(
    "y = torch.empty(16, 24).as_subclass(Later)\ny.work = lambda: " + solutions.RIGHT + "\nreturn y",
    top="""
from torch.utils import _pytree as pytree
class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            made = pytree.tree_map(lambda leaf: leaf.work() if isinstance(leaf, cls) else leaf, args)
            return func(*made, **(kwargs or {}))
""",
)
"""Right whenever somebody looks; a timed call does nothing."""


def named(name: str) -> str:
    return next(case.text for case in solutions.CHEATS if case.name == name)


LOOKS: list[tuple[str, str, Off]] = [
    ("replaced functions", named("replaces the clock in a call"),
     lambda patch: patch.setattr(integrity.Snapshot, "replaced", lambda _: [])),
    ("plain tensors only", LAZY, lambda patch: patch.setattr(solution_worker, "_promises", lambda _: [])),
    ("results of earlier calls stay", named("gives the same memory again"),
     lambda patch: patch.setattr(solution_worker.Solution, "_earlier", property(lambda _: None, lambda *_: None))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "off"), [look[1:] for look in LOOKS], ids=[look[0] for look in LOOKS])
@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_solution_needs_each_look_at_what_it_does(
    text: str, off: Off, is_on: bool, traces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del traces
    assert verdict_on(text, None if is_on else off, monkeypatch).state != (
        verdict_pb2.VERDICT_STATE_PASS if is_on else verdict_pb2.VERDICT_STATE_FAIL
    )


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_part_of_the_cache_kept_to_itself_needs_the_look_at_the_drivers_limit(
    is_on: bool, traces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU the driver is played by a number that the solution changes, as it would change the limit."""
    del traces
    held = [0]
    if is_on:
        monkeypatch.setattr(integrity, "set_aside_bytes", lambda: held[0])
    monkeypatch.setattr(time, "held_for_a_test", held, raising=False)
    text = solutions.linear(f"import time\ntime.held_for_a_test[0] = 1 << 25\nreturn {solutions.RIGHT}")
    verdict = verdict_on(text, None, monkeypatch)
    assert (verdict.state == verdict_pb2.VERDICT_STATE_PASS) is not is_on, verdict.detail
    assert not is_on or verdict.kind == verdict_pb2.FAILURE_KIND_CHEAT


def verdict_on(text: str, off: Off | None, monkeypatch: pytest.MonkeyPatch) -> verdict_pb2.Verdict:
    own = digest.digest(text)
    request = correctness_service_pb2.VerifyArtifactRequest(
        task=solutions.reference_task(solutions.LINEAR),
        program=candidate_pb2.Program(target=task_pb2.TARGET_CPU, digest=own),
        artifact=artifact_pb2.Artifact(
            digest=own, program_digest=own, format=artifact_pb2.BINARY_FORMAT_PYTHON_MODULE, content=text.encode()
        ),
        tier=timing_pb2.TIER_SCREENING,
    )
    descriptor = os.memfd_create("outputs", os.MFD_CLOEXEC)
    shared = SharedMemory(descriptor)
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "inherited", lambda: shared)
        patch.setattr(time, "perf_counter_ns", time.perf_counter_ns)  # a solution replaces it
        if off is not None:
            off(patch)
        patch.setattr(solution_worker, "_whole", integrity.Snapshot.taken())
        try:
            return Judge(InThisProcess(descriptor, shared)).verify(request)
        finally:
            solution_worker._solutions.clear()
            os.close(descriptor)
