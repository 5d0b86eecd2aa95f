"""Judges another author's solution, KernelBench's `ModelNew`, by the rules that our own kernels are judged by.

The one idea: a solution is an artifact like any other, one that is a Python file; so the services that verify and time
programs verify and time it, and this module only asks them. It neither imports nor runs the solution: what can be said
of its text (a fallback, a missing class) is read from its syntax tree.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import agents as deadlines
from orchestrator.agents import Benchmark, Correctness
from orchestrator.commands import report
from orchestrator.pipeline import failed, impossible
from orchestrator.tasks import intake
from warpsmith import digest, printable
from warpsmith.contract import words
from warpsmith.errors import Infrastructure
from warpsmith.sandbox import python_text
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

CLASS_NAME = "ModelNew"
FALLBACK = "FALLBACK"
"""The solution catches exceptions and may do something else than what it is named for."""
UNDECIDED = "UNDECIDED"
"""The machine was too unsteady, several times in a row, to tell whether the solution is faster: it is not called so."""
NOISY = 0.1
"""Noise from which on that is asked again."""
MEASUREMENTS = 3
"""Times that it is, at most."""


@dataclass(frozen=True)
class Judgement:
    """What became of a solution."""

    name: str
    verdict: verdict_pb2.Verdict
    timing: timing_pb2.Timing | None = None
    """None where it is not right."""
    labels: tuple[str, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 3 could not be judged."""
        codes = {verdict_pb2.VERDICT_STATE_PASS: 0, verdict_pb2.VERDICT_STATE_FAIL: 1}
        return codes.get(self.verdict.state, 3)


def read(solution: Path, target: task_pb2.Target.ValueType) -> tuple[candidate_pb2.Program, artifact_pb2.Artifact]:
    """The solution as a program without steps and an artifact that is its text.

    Raises:
        BadInput: the file cannot be read or parsed, or defines no `ModelNew`.
    """
    text = intake.read(intake.Request(str(solution), class_name=CLASS_NAME, needs_inputs=False)).sources[0].content
    own = digest.digest("solution", target, text)
    program = candidate_pb2.Program(target=target, digest=own)
    artifact = artifact_pb2.Artifact(
        digest=own,
        program_digest=own,
        format=artifact_pb2.BINARY_FORMAT_PYTHON_MODULE,
        content=text,
        toolchain=f"{solution.name} {digest.short(own)}",
    )
    return program, artifact


def judge(correctness: Correctness, benchmark: Benchmark, task: task_pb2.Task, solution: Path) -> Judgement:
    """Verifies the solution against the task's module and, where it is right, times it.

    Raises:
        BadInput: the reference is none, or the solution's file is not one; Infrastructure: a service failed.
    """
    if not task.target:  # the machine's best
        described = benchmark.DescribeDevice(
            benchmark_service_pb2.DescribeDeviceRequest(), timeout=deadlines.DESCRIBE_SECONDS
        )
        task.target = described.device.target
    task.digest = digest.of_task(task)
    program, artifact = read(solution, task.target)
    labels = _labels(artifact.content)
    verified = correctness.VerifyArtifact(
        correctness_service_pb2.VerifyArtifactRequest(
            task=task, program=program, artifact=artifact, tier=timing_pb2.TIER_FINAL
        ),
        timeout=deadlines.VERIFY_SECONDS,
    ).verdict
    if verified.state == verdict_pb2.VERDICT_STATE_INFRA:
        raise Infrastructure(verified.detail)
    if verified.state != verdict_pb2.VERDICT_STATE_PASS:
        return Judgement(solution.stem, verified, None, labels)
    for _ in range(MEASUREMENTS):
        measured = benchmark.MeasureArtifact(
            benchmark_service_pb2.MeasureArtifactRequest(
                task=task, program=program, artifact=artifact, tier=timing_pb2.TIER_FINAL
            ),
            timeout=deadlines.MEASURE_SECONDS,
        )
        if not is_undecided(measured.timing):
            return concluded(solution.stem, verified, measured, labels)
    return concluded(solution.stem, verified, measured, (*labels, UNDECIDED))


def is_undecided(timing: timing_pb2.Timing) -> bool:
    """Whether the machine was too unsteady to tell whether the solution is faster."""
    may_be = timing.speedup_fastest.median > 1.0 or timing.speedup_fastest.high > 1.0 + NOISY
    return not timing.faster and timing.noise_floor > NOISY and may_be


def concluded(
    name: str,
    verdict: verdict_pb2.Verdict,
    measured: benchmark_service_pb2.MeasureArtifactResponse,
    labels: tuple[str, ...] = (),
) -> Judgement:
    """The judgement of a right solution once it was timed; it may still fail, or could not be judged."""
    if measured.HasField("fault"):
        verdict.state, verdict.kind = verdict_pb2.VERDICT_STATE_FAIL, measured.fault.kind
        verdict.detail = f"while timed: {measured.fault.detail}"
        return Judgement(name, verdict, None, labels)
    if why := impossible(measured.timing):
        verdict.CopyFrom(failed(verdict_pb2.FAILURE_KIND_SUSPECT, why))
    return Judgement(name, verdict, measured.timing, (*labels, *map(words.flag, measured.timing.raised)))


def as_json(judgement: Judgement) -> dict[str, Any]:
    """The shape of a result that `--json` prints, with the failure's kind and detail."""
    timing, verdict = judgement.timing, judgement.verdict
    return {
        "name": judgement.name,
        "verdict": state_of(verdict),
        "kind": kind_of(verdict),
        "detail": verdict.detail,
        "speedup_fastest": report.speedup_json(timing.speedup_fastest) if timing else None,
        "speedup_eager": report.speedup_json(timing.speedup_eager) if timing else None,
        "faster": bool(timing and timing.faster),
        "fastest_baseline": words.arm(timing.fastest_arm) if timing else "",
        "arms_ns": {words.arm(arm.kind): arm.median_ns for arm in timing.arms if not arm.failure} if timing else {},
        "arms_failed": {words.arm(arm.kind): arm.failure for arm in timing.arms if arm.failure} if timing else {},
        "floor_percent": round(timing.floor_percent, 2) if timing else None,
        "kernelbench_pass": verdict.kernelbench_pass,
        "worst_rms_ratio": verdict.worst_rms_ratio,
        "labels": list(judgement.labels),
        "jail": verdict.jail_rung,
    }


def rows(judgement: Judgement) -> list[str]:
    """For people, line by line: the verdict and why, then the times."""
    verdict, timing = judgement.verdict, judgement.timing
    head = " ".join(filter(None, [state_of(verdict), kind_of(verdict)]))
    name, detail = printable.line(judgement.name), printable.line(verdict.detail)
    lines = [f"{name}: {head}: {detail} (jail: {verdict.jail_rung or 'none needed'})"]
    if timing is not None:
        faster = "faster" if timing.faster else "not faster"
        lines.append(
            f"{faster}: {report.speedup_text(timing.speedup_fastest)} against {words.arm(timing.fastest_arm)}, the "
            f"fastest baseline that ran; {report.speedup_text(timing.speedup_eager)} against eager"
        )
        times = [(arm, printable.line(arm.failure) or report.time_text(arm.median_ns)) for arm in timing.arms]
        lines += [f"  {words.arm(arm.kind):<22}{time}" for arm, time in times]
    if judgement.labels:
        lines.append(f"labels: {' '.join(judgement.labels)}")
    return lines


def state_of(verdict: verdict_pb2.Verdict) -> str:
    """PASS, FAIL or INFRA: could not be judged."""
    return words.verdict_state(verdict.state)


def kind_of(verdict: verdict_pb2.Verdict) -> str:
    """The kind of a failure; empty where there is none."""
    return words.failure_kind(verdict.kind)


def _labels(text: bytes) -> tuple[str, ...]:
    """What a reader of the number must know that the text alone tells."""
    tree = python_text.parse(text)
    return (FALLBACK,) if any(_falls_back(node) for node in ast.walk(tree)) else ()


def _falls_back(node: ast.AST) -> bool:
    """Whether it is a `try` that goes on after an exception."""
    if not isinstance(node, ast.Try | ast.TryStar):
        return False
    return any(not isinstance(handler.body[-1], ast.Raise) for handler in node.handlers)
