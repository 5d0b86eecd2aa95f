"""The prompt: rules, then the task, then the plan with its options, then what was measured.

The one idea: what changes least comes first, so that a server's prefix cache holds the rules for every question, the
task for every question of a run and the plan for every question about one parent. Everything that others wrote stands
in delimited blocks without control characters, cut to sizes; a model with a short context gets smaller sizes, and
the prompt says what was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template

from agent_reasoning import wording
from agent_reasoning.evidence import Evidence, candidate_ns
from agent_reasoning.model.language_model_options import Option
from agent_reasoning.roofline import bound, machine, time_ns, traffic_bytes
from warpsmith import hardware
from warpsmith.contract import words
from warpsmith.models.language_model import Message
from warpsmith.models.untrusted import one_line, quoted
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2, task_pb2, tensor_pb2, trial_pb2, verdict_pb2

VERSION = "choose_moves_v1"
"""Name of the prompt files; a change of their text that changes answers is a new version."""

Request = reasoning_service_pb2.ProposeHypothesesRequest

CHARACTERS_PER_TOKEN = 3.0
"""Fewer than the 3.5 to 4 of real tokenizers on such text, so that the estimate errs towards a shorter prompt."""


@dataclass(frozen=True)
class Size:
    """How much of each part is shown."""

    source_characters: int
    option_count: int
    group_count: int
    trial_count: int
    line_characters: int


SIZES = (
    Size(source_characters=6000, option_count=60, group_count=40, trial_count=24, line_characters=200),
    Size(source_characters=1500, option_count=30, group_count=16, trial_count=12, line_characters=140),
    Size(source_characters=0, option_count=16, group_count=8, trial_count=6, line_characters=110),
    Size(source_characters=0, option_count=6, group_count=4, trial_count=2, line_characters=80),
)
"""From the whole to the least that can be asked."""


@dataclass(frozen=True)
class Prompt:
    """A question, and the options that may be chosen in its answer."""

    messages: tuple[Message, ...]
    open_options: tuple[int, ...]

    @property
    def token_estimate(self) -> int:
        """Tokens of the messages, guessed high."""
        return int(sum(len(message.content) for message in self.messages) / CHARACTERS_PER_TOKEN)


def first(request: Request, options: Sequence[Option], open_options: Sequence[int], count: int, size: Size) -> Prompt:
    """The question about a plan: choose at most `count` of the open options."""
    shown = _shown(options, open_options, size)
    asked = tuple(number for number in shown if number in set(open_options))
    user = _file("user").substitute(
        task=_task(request, size),
        plan=_plan(request, size),
        options=_options(options, shown, size),
        trials=_trials(request, size),
        open=_numbers(asked),
        count=min(count, len(asked)),
    )
    return Prompt((Message("system", _file("system").substitute().strip()), Message("user", user.strip())), asked)


def again(prompt: Prompt, answer: str, complaint: str) -> Prompt:
    """The question again, with what was wrong with the answer."""
    text = _file("again").substitute(complaint=complaint, open=_numbers(prompt.open_options)).strip()
    said = Message("assistant", one_line(answer, 400) or "(nothing)")
    return Prompt((*prompt.messages[:2], said, Message("user", text)), prompt.open_options)


def _file(part: str) -> Template:
    place = resources.files("agent_reasoning") / "prompts" / f"{VERSION}.{part}.txt"
    return Template(place.read_text(encoding="utf-8"))


def _shown(options: Sequence[Option], open_options: Sequence[int], size: Size) -> list[int]:
    """Numbers of the options that are listed: all where they fit, so that the list stays the same; else open ones."""
    if len(options) <= size.option_count:
        return list(range(len(options)))
    return list(open_options[: size.option_count])


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _cut(lines: Sequence[str], shown: int, total: int, what: str) -> str:
    return "\n".join([*lines, f"({shown} of {total} {what} shown)"] if shown < total else lines)


def _task(request: Request, size: Size) -> str:
    task, device, reference = request.task, request.device, request.reference
    on_gpu = task.target == task_pb2.TARGET_CUDA
    target = f"CUDA, {hardware.of(task.hardware).architecture}" if on_gpu else "C++20 with OpenMP on this processor"
    precision = words.precision(task.precision) or "unspecified"
    known = machine(device, task.target)
    lines = [
        f"Target: {target}; precision {precision}; {known.unit_count} units; "
        f"memory {known.bytes_per_second / 1e9:.4g} GB/s; cache {wording.size(known.cache_bytes)}; "
        f"launch {wording.duration(known.launch_ns)}.",
        f"Inputs: {', '.join(map(_spec, task.inputs[:16])) or 'unknown'}.",
    ]
    arms = [f"{words.arm(arm.kind)} {wording.duration(arm.median_ns)}" for arm in reference.arms if arm.median_ns > 0]
    if arms:
        lines.append(f"Baselines: {', '.join(arms)}; floor {wording.duration(reference.floor_ns)}.")
    source = next((each.content for each in task.sources if each.path == task.entry_path), b"")
    if source and size.source_characters:
        text = source.decode("utf-8", errors="replace")
        lines.append("The module:\n" + quoted("module", text, size.source_characters))
    return "\n".join(lines)


def _spec(spec: tensor_pb2.TensorSpec) -> str:
    name = words.dtype(spec.dtype)
    return f"{name}[{','.join(map(str, spec.shape))}]"


def _plan(request: Request, size: Size) -> str:
    analysis, known = request.analysis, machine(request.device, request.task.target)
    measured = Evidence(request.history).measured_groups(analysis.moves)
    times = {group.name: measured.get(group.name) or time_ns(group.cost, known) for group in analysis.groups}
    slowest = sorted(times, key=lambda name: -times[name])[: size.group_count]
    lines = [
        one_line(
            f"{group.name}: {words.engine(group.computed_by)} "
            f"{group.schedule or ', '.join(group.operations[:6])}; reads "
            f"{wording.names(group.producers) if group.producers else 'inputs'}; "
            f"{wording.size(traffic_bytes(group.cost))}; "
            f"{'measured' if group.name in measured else 'predicted'} {wording.duration(times[group.name])}, "
            f"held back by {bound(group.cost, known)}{_parameters(group)}",
            size.line_characters,
        )
        for group in analysis.groups
        if group.name in slowest
    ]
    text = _cut(lines, len(lines), len(analysis.groups), "groups")
    done = _moves(analysis.moves) if analysis.moves else "nothing yet: every group is a library call"
    head = f"The plan, after: {one_line(done, 4 * size.line_characters)}"
    return "Groups in order of execution:\n" + quoted("plan", f"{head}\n{text}", 200 * size.line_characters)


def _parameters(group: analysis_pb2.Group) -> str:
    pairs: list[tuple[str, object]] = [*sorted(group.choices.items()), *sorted(group.parameters.items())]
    return "; " + " ".join(f"{name}={value}" for name, value in pairs) if pairs else ""


def _options(options: Sequence[Option], shown: Sequence[int], size: Size) -> str:
    lines = [one_line(f"{number}. {_option(options[number])}", size.line_characters) for number in shown]
    text = _cut(lines, len(lines), len(options), "options")
    return "Options:\n" + quoted("options", text, 80 * size.line_characters)


def _option(option: Option) -> str:
    guess = "" if option.predicted_speedup else " (predicted to be slower)"
    return f"[{_moves(option.moves[:4])}{', …' if len(option.moves) > 4 else ''}] {option.text}{guess}"


def _moves(moves: Sequence[analysis_pb2.Move]) -> str:
    return ", ".join(map(words.move, moves))


def _trials(request: Request, size: Size) -> str:
    judged = [trial for trial in request.history if trial.verdict.state != verdict_pb2.VERDICT_STATE_INFRA]
    if not judged:
        return "No trial has ended yet."
    recent = judged[-size.trial_count :]
    lines = [one_line(_trial(trial), size.line_characters) for trial in recent]
    text = _cut(lines, len(lines), len(judged), "trials")
    return "Trials so far, newest last:\n" + quoted("trials", text, 60 * size.line_characters)


def _trial(trial: trial_pb2.Trial) -> str:
    moves = trial.hypothesis.moves or trial.candidate.moves
    what = f"{trial.number} (from {trial.parent}) {_moves(moves) or 'plan zero'}: "
    if trial.verdict.state == verdict_pb2.VERDICT_STATE_FAIL:
        kind = words.failure_kind(trial.verdict.kind)
        return f"{what}FAIL {kind} {trial.verdict.detail}"
    if candidate_ns(trial.timing) <= 0:
        return f"{what}right, not timed"
    speedup = trial.timing.speedup_fastest.median or trial.timing.speedup_eager.median
    steps = sorted(trial.timing.steps, key=lambda step: -step.median_ns)[:2]
    slowest = ", ".join(f"{step.group} {wording.duration(step.median_ns)}" for step in steps)
    return f"{what}{speedup:.3g}x, {wording.duration(candidate_ns(trial.timing))}{f' ({slowest})' if slowest else ''}"
