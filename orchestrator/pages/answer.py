"""The first thing that a reader sees: what was found, how sure that is, what was checked, and what would help.

The one idea: a run without a faster kernel has its answer in the same place as one with it, and every label that a
number carries is told in plain words beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.commands import report
from orchestrator.pages import explained
from orchestrator.pages.rendering import words
from orchestrator.search_run import ENDED
from warpsmith.contract import words as contract
from warpsmith.v1 import run_pb2, timing_pb2, trial_pb2, verdict_pb2

MESSAGE_CHARACTERS = 2000
NOISY = 0.05
"""Half-width of the A/A interval from which on a busy machine is named as a reason for no faster kernel."""


@dataclass(frozen=True)
class Fact:
    """A line of a table of two columns."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """What stands at the top of the page."""

    verdict: str
    is_pass: bool
    headline: str
    """The number, or why there is none."""
    said: str
    """What the run says of its end."""
    facts: Sequence[Fact]
    checks: Sequence[Fact]
    labels: Sequence[Fact]
    remedies: Sequence[str]


def of(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> Answer:
    """The answer of a run, whatever its state."""
    verdict = report.verdict_of(run)
    return Answer(
        verdict=verdict,
        is_pass=verdict == "PASS",
        headline=_headline(run, verdict),
        said=words(run.message, MESSAGE_CHARACTERS),
        facts=list(_facts(run, trials)),
        checks=list(_checks(run)) if run.HasField("best") else [],
        labels=[Fact(words(each, 80), explained.label(each)) for each in report.labels_of(run)],
        remedies=[] if verdict == "PASS" else list(_remedies(run, verdict)),
    )


def _headline(run: run_pb2.Run, verdict: str) -> str:
    if trivial := report.trivial(run):
        return f"No speedup of this module means anything: it gives {trivial} whatever it is given."
    if verdict == "PASS":
        timing = run.best.timing
        return f"{timing.speedup_fastest.median:.2f}x as fast as {_baseline(timing.fastest_arm)}"
    return explained.VERDICTS.get(verdict, f"The run's state is {verdict}.")


def _baseline(kind: timing_pb2.ArmKind.ValueType) -> str:
    return f"the fastest baseline, {contract.arm(kind) or 'of unknown kind'}"


def _facts(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> Iterator[Fact]:
    arms = report.arms_of(run)
    timing = run.best.timing if run.HasField("best") else None
    if timing is not None and timing.speedup_fastest.median:
        against = "95 % interval in brackets"
        yield Fact(f"Against {_baseline(timing.fastest_arm)}", report.speedup_text(timing.speedup_fastest), against)
    if timing is not None and timing.speedup_eager.median:
        yield Fact("Against eager", report.speedup_text(timing.speedup_eager), "the module as it is")
    fastest = arms.get(timing.fastest_arm if timing is not None else run.reference.fastest_arm)
    if fastest is not None and fastest.median_ns:
        yield Fact("Time before", report.time_text(fastest.median_ns), contract.arm(fastest.kind))
    if report.CANDIDATE in arms and arms[report.CANDIDATE].median_ns:
        yield Fact("Time after", report.time_text(arms[report.CANDIDATE].median_ns), "median, with a cold cache")
    reached = timing.floor_percent if timing is not None else 0.0
    if timing is None and fastest is not None and fastest.median_ns:
        reached = 100 * run.reference.floor_ns / fastest.median_ns
    if reached:
        yield Fact("Of the floor", f"{reached:.0f} %", "100 % is the least time at this machine's ceilings")
    counts = report.funnel(trials)
    said = f"{counts['compiled']} compiled, {counts['right']} right, {counts['timed']} timed"
    yield Fact("Trials", f"{counts['tried']}", said)
    if run.model_tokens:
        yield Fact("Language model", f"{run.model_tokens} tokens")


def _checks(run: run_pb2.Run) -> Iterator[Fact]:
    verdict, timing = run.best.verdict, run.best.timing
    yield Fact(
        "Right", contract.verdict_state(verdict.state) or "not judged", words(verdict.detail, MESSAGE_CHARACTERS)
    )
    tier = "final" if timing.tier == timing_pb2.TIER_FINAL else "screening"
    care = "a fresh process, every arm in turns" if tier == "final" else "few readings: no final was made"
    yield Fact("Care", tier, care)
    if verdict.state == verdict_pb2.VERDICT_STATE_PASS:
        error = f"{verdict.worst_rms_ratio:.2g} times {contract.yardstick(verdict)}"
        yield Fact("Largest error", error, "root mean square against float64; 4 times is the limit")
    holds = "holds" if verdict.kernelbench_pass else "does not hold"
    yield Fact("KernelBench's own check", holds, "allclose against eager, on the task's own values")
    noise = f"{timing.noise_floor:.1%}" if math.isfinite(timing.noise_floor) else "not known"
    yield Fact("Noise", noise, "what equal programs differ by here, half of the A/A interval")
    for tool, what in report.inspections_of(run).items():
        yield Fact(words(tool, 80), words(what))
    precision = contract.precision(run.task.precision) or "as the module has it"
    yield Fact("Track", f"{precision}{', prepared' if run.task.prepared else ''}", "the numeric contract it is held to")
    if verdict.jail_rung:
        yield Fact("Jail", words(verdict.jail_rung, 80), "how the process with the kernel was confined")


def _remedies(run: run_pb2.Run, verdict: str) -> Iterator[str]:
    if run.state not in ENDED:
        yield from explained.UNDER_WAY
    noise = run.best.timing.noise_floor if run.HasField("best") else 0.0
    if verdict == "NO_FASTER" and NOISY < noise < math.inf:
        yield explained.UNSTEADY.format(noise=noise)
    yield from explained.REMEDIES.get(verdict, ())
