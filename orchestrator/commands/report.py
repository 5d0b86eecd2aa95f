"""What a run's result says to a person and to a program: the table, its JSON, and where a gain comes from.

The one idea: the headline is the speedup against the fastest baseline with its interval; everything else (eager,
floor, algebra, flags) stands beside it, and a run without a faster kernel says so in the same place.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.tree import Tree

from orchestrator.commands.terminal import cell
from orchestrator.ledger import DEVICE_STAGES
from warpsmith import printable
from warpsmith.contract import words
from warpsmith.v1 import analysis_pb2, run_pb2, task_pb2, timing_pb2, trial_pb2, verdict_pb2

_LAST_CHARACTERS = 300
"""Of what a process printed, beside how it ended."""

FASTER = run_pb2.RUN_STATE_FASTER
CANDIDATE, EAGER, REWRITTEN = (
    timing_pb2.ARM_KIND_CANDIDATE,
    timing_pb2.ARM_KIND_EAGER,
    timing_pb2.ARM_KIND_REWRITTEN,
)
COMPILED = (timing_pb2.ARM_KIND_COMPILE, timing_pb2.ARM_KIND_COMPILE_MAX_AUTOTUNE)


def verdict_of(run: run_pb2.Run) -> str:
    """PASS for a verified faster kernel, else why there is none: NO_FASTER, AT_FLOOR, CANCELLED, and so on."""
    if run.HasField("best") and run.best.timing.faster:
        return "PASS"
    return state_name(run.state)


def state_name(state: run_pb2.RunState.ValueType) -> str:
    """The state as people see it."""
    return words.run_state(state)


def arms_of(run: run_pb2.Run) -> dict[timing_pb2.ArmKind.ValueType, timing_pb2.Arm]:
    """Everything timed, by kind: of the best trial where there is one, else of the reference."""
    arms = run.best.timing.arms if run.HasField("best") else run.reference.arms
    return {arm.kind: arm for arm in arms}


def failures_of(run: run_pb2.Run) -> dict[str, str]:
    """Why each arm that could not run could not, by its word."""
    return {words.arm(kind): arm.failure for kind, arm in arms_of(run).items() if arm.failure}


class GainSplit(NamedTuple):
    """The two factors of a speedup: over the fastest baseline, or over eager where `is_over_eager`."""

    algebra: float
    kernels: float
    is_over_eager: bool = False


def gain_split(run: run_pb2.Run) -> GainSplit | None:
    """How a speedup splits into algebra and kernels; None without a rewrite.

    Only the second is a kernel's: rewritten reference ÷ ours (measurement, "Faster", 2). The rewritten reference runs
    in eager, so where a compiled baseline is ahead of it, what it gains shows beside eager alone.
    """
    arms, timing = arms_of(run), run.best.timing
    rewritten, ours = arms.get(REWRITTEN), arms.get(CANDIDATE)
    whole, of_eager = timing.speedup_fastest.median, timing.speedup_eager.median
    if not (whole and rewritten and ours) or rewritten.failure or not rewritten.median_ns or not ours.median_ns:
        return None
    kernels = rewritten.median_ns / ours.median_ns
    if not kernels:
        return None
    if whole < kernels and of_eager:
        return GainSplit(of_eager / kernels, kernels, is_over_eager=True)
    return GainSplit(whole / kernels, kernels)


def authored_share(timing: timing_pb2.Timing) -> float | None:
    """Share of the candidate's time that is spent in authored kernels, 0 to 1; None when steps were not timed."""
    total = sum(step.median_ns for step in timing.steps)
    if not total:
        return None
    ours = (step.median_ns for step in timing.steps if step.computed_by == analysis_pb2.ENGINE_AUTHORED)
    return sum(ours) / total


def gain_text(run: run_pb2.Run) -> str:
    """Where the gain comes from, in a few words."""
    if not run.HasField("best"):
        return ""
    parts = []
    split = gain_split(run)
    if split is not None:
        over = "over eager: " if split.is_over_eager else ""
        parts.append(f"{over}algebra {split.algebra:.2f}x × kernels {split.kernels:.2f}x")
    elif run.best.candidate.rewrites:
        parts.append("algebra and kernels, not told apart")
    share = authored_share(run.best.timing)
    if share == 0 and not run.best.candidate.rewrites:
        parts.append("the module's own library calls: what is gained is the host's time between them")
    elif share is not None:
        parts.append(f"{share:.0%} of the time in authored kernels, {1 - share:.0%} in library calls")
    if run.best.candidate.program.cuda_graph:
        parts.append("launched as one CUDA graph")
    return "; ".join(parts)


TRIVIAL = {timing_pb2.FLAG_OUTPUT_CONSTANT: "a constant", timing_pb2.FLAG_OUTPUT_ZERO: "zero"}
"""Flags of references that compute nothing, and what those give."""


def trivial(run: run_pb2.Run) -> str:
    """What the module gives whatever it is given; empty for one that computes something."""
    return next((TRIVIAL[flag] for flag in run.reference.raised if flag in TRIVIAL), "")


KEPT = "BASELINES_KEPT"
"""Label of a run without a final, whose baselines but eager are an earlier run's."""


def labels_of(run: run_pb2.Run) -> list[str]:
    """What a reader of the number must know: algebra, precision, flags of the fairness audit and of the timing."""
    labels = [f"algebra:{rule}" for rule in run.best.candidate.rewrites]
    if run.task.precision not in (task_pb2.PRECISION_UNSPECIFIED, task_pb2.PRECISION_FP32):
        labels.append(words.precision(run.task.precision))
    if run.task.prepared:
        labels.append("prepared")
    labels += map(words.flag, [*run.reference.raised, *run.best.timing.raised])
    was_screened = run.best.timing.tier == timing_pb2.TIER_SCREENING
    if run.reference.is_kept and (was_screened or not run.HasField("best")):
        labels.append(KEPT)
    if run.HasField("best") and not run.best.verdict.kernelbench_pass:
        labels.append("kernelbench_check_fails")
    return list(dict.fromkeys(labels))


def inspections_of(run: run_pb2.Run) -> dict[str, str]:
    """What each tool that looked into the best kernels said, by the tool's name."""
    said = {each.tool: each.skipped and f"skipped: {each.skipped}" for each in run.best.verdict.inspections}
    return {tool: skipped or "nothing found" for tool, skipped in said.items()}


def inspection_text(run: run_pb2.Run) -> str:
    """The same in a few words: tools of one kind that say the same are told together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for tool, what in inspections_of(run).items():
        kind, _, name = tool.partition(" ")
        alike.setdefault((kind, what), []).append(name)
    return "; ".join(f"{kind} ({', '.join(names)}): {what}" for (kind, what), names in alike.items())


def tokens_text(run: run_pb2.Run) -> str:
    """What a language model took; empty where none did."""
    return f"model: {run.model_tokens} tokens" if run.model_tokens else ""


def device_seconds(run: run_pb2.Run) -> float:
    """For how long it had a device; of runs of earlier releases what their budget counted."""
    return sum(run.device_day_seconds.values()) or run.spent.device_seconds


def costs(run: run_pb2.Run) -> list[str]:
    """What it took of devices and of a language model, a line each; nothing of what it took nothing of."""
    stages = [f"{stage} {run.stage_seconds[stage]:.1f} s" for stage in DEVICE_STAGES if stage in run.stage_seconds]
    total = device_seconds(run)
    device = f"device: {total:.1f} s ({', '.join(stages)})" if total else ""
    return [text for text in (device, tokens_text(run)) if text]


def as_json(run: run_pb2.Run) -> dict[str, Any]:
    """The result of one task as `--json` prints it, with the run's identifier and message."""
    timing = run.best.timing if run.HasField("best") else None
    seconds = {words.arm(kind): round(arm.prepare_seconds, 2) for kind, arm in arms_of(run).items()}
    no_earlier_release = {
        "arms_seconds": seconds if any(seconds.values()) else None,
        "device_seconds": round(device_seconds(run), 2) if run.device_day_seconds else None,
        "project": run.project or None,
    }
    told = {name: value for name, value in no_earlier_release.items() if value is not None}
    return {
        "name": run.task.name,
        "verdict": verdict_of(run),
        "speedup_fastest": speedup_json(timing.speedup_fastest) if timing else None,
        "speedup_eager": speedup_json(timing.speedup_eager) if timing else None,
        "floor_percent": round(timing.floor_percent, 2) if timing else None,
        "labels": labels_of(run),
        "run": run.id,
        "state": state_name(run.state),
        "message": run.message,
        "fastest_baseline": words.arm(timing.fastest_arm if timing else run.reference.fastest_arm),
        "arms_ns": {words.arm(kind): arm.median_ns for kind, arm in arms_of(run).items() if not arm.failure},
        "arms_failed": failures_of(run),
        **told,
        "gain": gain_text(run),
        "inspections": inspections_of(run),
        "model_tokens": run.model_tokens,
        "trials": {"total": run.trial_count, "passed": run.pass_count},
        "phase_seconds": [round(seconds, 2) for seconds in run.phase_seconds],
        "stage_seconds": {stage: round(seconds, 2) for stage, seconds in sorted(run.stage_seconds.items())},
    }


def speedup_json(speedup: timing_pb2.Speedup) -> dict[str, float]:
    """A speedup with its interval."""
    return {"median": round(speedup.median, 4), "low": round(speedup.low, 4), "high": round(speedup.high, 4)}


TABLE_COLUMNS = 120
"""Of a terminal, from which on a table can be read; below, `lines` can."""
_HEADINGS = ("module", "eager", "torch.compile", "ours", "against the fastest", "% of floor")


def lines(run: run_pb2.Run) -> list[str]:
    """What `row` says, for a narrow terminal: the answer, then the times, then the rest."""
    name, *times, headline, floor, notes = row(run)
    told = [f"{title} {time}" for title, time in zip(_HEADINGS[1:4], times, strict=True) if time != "-"]
    told += [f"{floor} of the floor"] if floor != "-" else []
    return [f"{name}: {headline}", *(f"  {each}" for each in (", ".join(told), notes) if each)]


def next_steps(runs: Sequence[run_pb2.Run], where: str) -> list[str]:
    """The runs by their identifiers, and the commands that look at them. `where`: the option that finds them."""
    said = [f"run {run.id}: {run.task.name}" for run in runs]
    named = shlex.quote(runs[0].id) if len(runs) == 1 else "RUN"
    commands = ["report {}", *(["export {}"] if any(map(_is_found, runs)) else []), "show {} --tree"]
    return [*said, "next: " + " | ".join(f"warpsmith {each.format(named)}{where}" for each in commands)]


def _is_found(run: run_pb2.Run) -> bool:
    return verdict_of(run) == "PASS"


def table(runs: Sequence[run_pb2.Run]) -> Table:
    """One row for each run."""
    made = Table(title=None, header_style="bold", row_styles=["", "dim"] if len(runs) > 8 else None)
    made.add_column(_HEADINGS[0], no_wrap=True)
    for title in _HEADINGS[1:]:
        made.add_column(title, justify="right")
    made.add_column("where it comes from; labels", ratio=1, overflow="fold")
    for run in runs:
        made.add_row(*map(cell, row(run)))
    return made


def row(run: run_pb2.Run) -> list[str]:
    """The cells of a run: module, eager, compile, ours, speedup with its interval, percent of floor, notes."""
    arms = arms_of(run)
    compiled = [arms[kind].median_ns for kind in COMPILED if kind in arms and not arms[kind].failure]
    timing = run.best.timing if run.HasField("best") else None
    headline = run.message if timing is None or trivial(run) else speedup_text(timing.speedup_fastest)
    why = ""
    if timing is not None and not timing.faster:
        why = "" if trivial(run) else run.message.removeprefix("no faster kernel found: ")
        headline = f"no faster kernel found ({headline})"
    failed = [f"{name} could not run: {_first_line(reason)}" for name, reason in failures_of(run).items()]
    said = [why, gain_text(run), inspection_text(run), tokens_text(run), *failed, " ".join(labels_of(run))]
    notes = "; ".join(filter(None, said))
    return [
        run.task.name,
        time_text(arms[EAGER].median_ns) if EAGER in arms else "-",
        time_text(min(compiled)) if compiled else "-",
        time_text(arms[CANDIDATE].median_ns) if CANDIDATE in arms else "-",
        f"{state_name(run.state)}: {headline}" if timing is None else headline,
        f"{timing.floor_percent:.0f} %" if timing is not None and timing.floor_percent else "-",
        notes,
    ]


def funnel(trials: Iterable[trial_pb2.Trial]) -> Mapping[str, int]:
    """How many trials came how far: proposed, compiled, right, timed."""
    counts = {"tried": 0, "compiled": 0, "right": 0, "timed": 0}
    for trial in trials:
        counts["tried"] += 1
        counts["compiled"] += trial.ended_at > trial_pb2.STAGE_COMPILE
        counts["right"] += trial.verdict.state == verdict_pb2.VERDICT_STATE_PASS
        counts["timed"] += trial.ended_at == trial_pb2.STAGE_TIMED
    return counts


def trial_lines(trial: trial_pb2.Trial) -> list[str]:
    """A trial in one line, and one for each process that ended over it."""
    return [trial_line(trial), *(f"    {each}" for each in evidence(trial))]


def trial_line(trial: trial_pb2.Trial) -> str:
    """A trial in one line: number, parent, what it did, how it ended."""
    return f"#{trial.number} (from {trial.parent or 'plan zero'}) {_done(trial)}"


def evidence(trial: trial_pb2.Trial) -> list[str]:
    """Each process that ended over a trial's program: when, which, at what, how, and what it last printed."""
    return [
        f"{time.strftime('%H:%M:%S', time.localtime(end.at))} {end.worker} ended at {end.work}: {end.how}"
        + (f"; it last printed {printable.quotation(end.log_tail[-_LAST_CHARACTERS:])}" if end.log_tail.strip() else "")
        for end in trial.ends
    ]


def tree(title: str, trials: Iterable[trial_pb2.Trial]) -> Tree:
    """Which trial grew from which; those that passed and were timed are bold."""
    root = Tree(cell(title))
    places = {0: root}
    for trial in trials:
        style = "bold" if trial.ended_at == trial_pb2.STAGE_TIMED else "dim"
        label = cell(f"#{trial.number} {_done(trial)}")
        label.stylize(style)
        places[trial.number] = places.get(trial.parent, root).add(label)
    return root


def _done(trial: trial_pb2.Trial) -> str:
    moves = trial.candidate.moves or trial.hypothesis.moves
    new = moves[len(moves) - trial.hypothesis.new_move_count :] if trial.hypothesis.new_move_count else []
    did = words.moves(new) or trial.hypothesis.source or "plan zero"
    if trial.ended_at == trial_pb2.STAGE_TIMED:
        ended = f"{speedup_text(trial.timing.speedup_fastest)} against {words.arm(trial.timing.fastest_arm)}"
    else:
        kind = words.failure_kind(trial.verdict.kind)
        ended = f"{kind}: {_first_line(trial.verdict.detail)[:160]}"
    return f"{did}: {ended}"


def speedup_text(speedup: timing_pb2.Speedup) -> str:
    """`1.83x [1.80, 1.86]`; without the interval where there is none."""
    interval = f" [{speedup.low:.2f}, {speedup.high:.2f}]" if speedup.low else ""
    return f"{speedup.median:.2f}x{interval}"


def time_text(nanoseconds: float) -> str:
    """A time with three digits and its unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.0f} ns"


def error_text(run: run_pb2.Run) -> str:
    """Why a run could not be made to its end, in one line that names the file; empty when it was."""
    if run.state not in (run_pb2.RUN_STATE_BAD_INPUT, run_pb2.RUN_STATE_FAILED):
        return ""
    file, message = run.task.entry_path, _first_line(run.message)
    return message if message.startswith(file) else f"{file}: {message}"


def exit_code(runs: Sequence[run_pb2.Run]) -> int:
    """0 done, 1 nothing passed anywhere, 2 bad input, 3 infrastructure."""
    states = [run.state for run in runs]
    if run_pb2.RUN_STATE_FAILED in states:
        return 3
    if run_pb2.RUN_STATE_BAD_INPUT in states:
        return 2
    return 0 if any(run.pass_count or run.state == run_pb2.RUN_STATE_AT_FLOOR for run in runs) else 1


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
