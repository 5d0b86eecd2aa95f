"""Judges a record again from nothing: builds the kernel from its moves, compiles, verifies and times it.

The one idea: nothing of the record is believed but the task and the moves; all else is made again and then compared,
and every difference is a sentence. A number from another machine is told, not compared.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from orchestrator import agents as deadlines
from orchestrator import finalists
from orchestrator.agents import Agents
from orchestrator.commands import report
from orchestrator.pipeline import Judged, Pipeline
from orchestrator.prepare import describe_device
from orchestrator.serving.device_gate import DeviceGate
from warpsmith import printable
from warpsmith.contract import words
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.v1 import (
    candidate_pb2,
    hypothesis_pb2,
    run_pb2,
    synthesis_service_pb2,
    task_pb2,
    trial_pb2,
    verdict_pb2,
)

WITHIN = {task_pb2.TARGET_CUDA: 0.05, task_pb2.TARGET_CPU: 0.15}
"""Relative difference of a speedup between two measurements of one machine that says nothing, beside their noise."""

TOO_NOISY = 0.5
"""A tolerance from which on a comparison of speedups would say nothing."""


@dataclass
class Verification:
    """What judging again found."""

    run: run_pb2.Run
    """As recorded."""
    trial: trial_pb2.Trial
    """As judged now."""
    differences: list[str] = field(default_factory=list)
    """What contradicts the record."""
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""
    tolerance: float = 0.0
    """Relative difference of the speedup that was allowed."""

    @property
    def exit_code(self) -> int:
        """0 the record holds, 1 it does not."""
        return 1 if self.differences else 0


def verify(agents: Agents, gate: DeviceGate, run: run_pb2.Run, contradictions: list[str]) -> Verification:
    """Judges the recorded result again.

    Raises:
        BadInput: the task does not work here; Infrastructure: a service failed.
    """
    pipeline = Pipeline(agents, gate, run.task)
    found = Verification(run, trial_pb2.Trial(), list(contradictions))
    candidate = _rebuilt(pipeline, run, found)
    device = describe_device(gate, run.task.target)
    outcome = finalists.final(pipeline, trial_pb2.Trial(candidate=candidate))
    if not isinstance(outcome, Judged):
        raise Infrastructure(f"the record could not be judged: {getattr(outcome, 'reason', 'interrupted')}")
    found.trial = outcome.trial
    _compare_verdicts(found)
    if found.trial.HasField("timing"):
        _compare_times(found, device.name)
    return found


def _rebuilt(pipeline: Pipeline, run: run_pb2.Run, found: Verification) -> candidate_pb2.Candidate:
    """The candidate that the moves give now; the recorded one where that is another."""
    recorded = run.best.candidate
    hypothesis = hypothesis_pb2.Hypothesis(
        moves=recorded.moves,
        new_move_count=len(recorded.moves),
        predicted_speedup=1.0,
        rationale="a recorded result",
        source="record",
    )
    request = synthesis_service_pb2.SynthesizeCandidateRequest(task=run.task, hypothesis=hypothesis)
    try:
        reply = pipeline.agents.synthesis.SynthesizeCandidate(request, timeout=deadlines.SYNTHESIZE_SECONDS)
    except BadInput as error:
        found.differences.append(f"the recorded moves give no kernel: {error}")
        return recorded
    if reply.candidate.program.digest == recorded.program.digest:
        return reply.candidate
    found.differences.append(_other_program(recorded.program, reply.candidate.program))
    return recorded


def _other_program(recorded: candidate_pb2.Program, rebuilt: candidate_pb2.Program) -> str:
    """Where two programs differ first."""
    texts = {source.name: source.text for source in rebuilt.sources}
    for source in recorded.sources:
        if source.name not in texts:
            return f"the moves give no source {source.name}, which the record has"
        if texts[source.name] != source.text:
            lines = difflib.unified_diff(texts[source.name].splitlines(), source.text.splitlines(), lineterm="", n=0)
            changed = next((line for line in lines if line.startswith("+") and not line.startswith("+++")), "+")
            return (
                f"the moves give another {source.name} than the recorded one, which has the line: {changed[1:].strip()}"
            )
    return "the moves give another program than the recorded one: other steps or buffers"


def _compare_verdicts(found: Verification) -> None:
    recorded, now = found.run.best.verdict, found.trial.verdict
    if recorded.state != now.state:
        found.differences.append(f"recorded {_named(recorded)}, now {_named(now)}: {now.detail}")
    elif recorded.kernelbench_pass != now.kernelbench_pass:
        found.notes.append(f"KernelBench's own comparison says {now.kernelbench_pass} on today's values")


def _compare_times(found: Verification, device: str) -> None:
    recorded, now = found.run.best.timing, found.trial.timing
    # The noise of both sessions; 3 sigma of an A/A difference is what `faster` asks for as well.
    found.tolerance = WITHIN[found.run.task.target] + 3.0 * (min(recorded.noise_floor, 1) + min(now.noise_floor, 1))
    if device != found.run.device.name:
        found.notes.append(f"measured on {found.run.device.name}, judged on {device}: speedups are not compared")
        return
    if found.tolerance > TOO_NOISY:
        found.notes.append(f"the noise of the two sessions allows {found.tolerance:.0%}: speedups are not compared")
        return
    then, today = recorded.speedup_eager.median, now.speedup_eager.median
    if finalists.BASELINE_WAS_FASTER in recorded.raised:
        found.notes.append("recorded against a time of a baseline in its search: speedups are not compared")
    elif then <= 0:
        found.differences.append("the record tells no speedup over eager")
    elif abs(today / then - 1.0) > found.tolerance:
        found.differences.append(
            f"recorded {then:.2f}x over eager, now {report.speedup_text(now.speedup_eager)}: farther apart than "
            f"{found.tolerance:.0%}"
        )
    if recorded.faster and not now.faster:
        sentence = (
            f"recorded as faster, now not: {report.speedup_text(now.speedup_fastest)} over {words.arm(now.fastest_arm)}"
        )
        (found.notes if now.noise_floor > 0.1 else found.differences).append(sentence)


def _named(verdict: verdict_pb2.Verdict) -> str:
    state = words.verdict_state(verdict.state)
    kind = words.failure_kind(verdict.kind)
    return f"{state} {kind}".strip()


def as_json(found: Verification) -> dict[str, Any]:
    """The outcome for programs."""
    recorded, now = found.run.best, found.trial
    return {
        "name": found.run.task.name,
        "verdict": "HOLDS" if not found.differences else "DIFFERS",
        "differences": found.differences,
        "notes": found.notes,
        "tolerance": round(found.tolerance, 4),
        "recorded": _result_json(recorded),
        "now": _result_json(now),
    }


def _result_json(trial: trial_pb2.Trial) -> dict[str, Any]:
    return {
        "verdict": _named(trial.verdict),
        "faster": trial.timing.faster,
        "labels": [words.flag(flag) for flag in trial.timing.raised],
        "program": trial.candidate.program.digest,
        "speedup_fastest": report.speedup_json(trial.timing.speedup_fastest) if trial.HasField("timing") else None,
        "speedup_eager": report.speedup_json(trial.timing.speedup_eager) if trial.HasField("timing") else None,
        "device": trial.timing.environment.device,
    }


def rows(found: Verification) -> list[str]:
    """The outcome for people, line by line."""
    told, name = as_json(found), printable.line(found.run.task.name)
    lines = [f"{name}: {'the record holds' if not found.differences else 'the record does not hold'}"]
    lines += [f"  differs: {printable.line(sentence)}" for sentence in found.differences]
    lines += [f"  note: {printable.line(sentence)}" for sentence in found.notes]
    for when in ("recorded", "now"):
        result = told[when]
        speedups = [result[name] or {"median": 0.0} for name in ("speedup_fastest", "speedup_eager")]
        lines.append(
            f"  {when:<9}{result['verdict']}  {speedups[0]['median']:.2f}x over the fastest baseline, "
            f"{speedups[1]['median']:.2f}x over eager  on {printable.line(result['device'], 80)}, program "
            f"{printable.line(result['program'], 12)}"
        )
    if found.tolerance:
        lines.append(f"  speedups over eager agree where they differ by less than {found.tolerance:.0%}")
    return lines
