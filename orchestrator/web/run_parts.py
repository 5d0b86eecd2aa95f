"""The parts of a run's page: the sections of its report, and around them what is live.

The one idea: what costs little (what the run does, its newest trials) is made for every event; sections of the report
cost more with every trial, and are made as often as their cost allows. It knows no request and no watcher.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.commands import report
from orchestrator.ledger import wall_seconds
from orchestrator.pages import answer, explained, rendering, report_page
from orchestrator.pages.answer import Fact
from orchestrator.pages.rendering import words
from orchestrator.search import score
from orchestrator.search_run import ENDED
from warpsmith import printable
from warpsmith.contract import words as contract
from warpsmith.v1 import run_pb2, trial_pb2

NEWEST = 8
"""Trials that are listed as they end."""
SECTIONS = report_page.SECTIONS
LIVE_SECTIONS = tuple(name for name in SECTIONS if name != "raw")
"""Of a run under way: what a reader saves is of no use before the end, and is as large as all the rest."""


@dataclass(frozen=True)
class Newest:
    """A trial that has just ended."""

    number: int
    text: str
    is_timed: bool


def light(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> dict[str, str]:
    """What the run does at this moment, and the one sentence that a screen reader says of it."""
    newest = [
        Newest(trial.number, words(report.trial_line(trial), 200), _is_timed(trial)) for trial in trials[-NEWEST:]
    ]
    return {
        "said": said(run, trials),
        "now": rendering.part(
            "live/now.html",
            facts=list(_facts(run, trials)),
            newest=newest[::-1],
            has_ended=has_ended(run),
            awaits_resume=run.awaits_resume,
            run_id=printable.line(run.id, 40),
        ),
    }


def said(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> str:
    """A sentence that changes only where the answer does: a new state, or a new best."""
    name = explained.VERDICTS.get(report.verdict_of(run), f"The run's state is {report.verdict_of(run)}.")
    found = best(trials)
    if has_ended(run):
        return rendering.escaped(f"The run has ended: {words(run.message or name)}")
    is_faster = found is not None and score(found) > 1.0
    so_far = f" Best so far: {report.speedup_text(found.timing.speedup_fastest)}." if found and is_faster else ""
    return rendering.escaped(f"{name}{so_far}")


def sections(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> dict[str, str]:
    """The sections of the report, by name."""
    names = SECTIONS if has_ended(run) else LIVE_SECTIONS
    values = report_page.values(run, trials, names)
    if not has_ended(run):
        shown = answer.of(run, trials)
        # This page does change by itself.
        values["answer"] = replace(shown, remedies=[each for each in shown.remedies if each not in explained.UNDER_WAY])
    return {name: rendering.part(f"sections/{name}.html", **values) for name in names}


def whole(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> Mapping[str, str]:
    """All parts."""
    return light(run, trials) | sections(run, trials)


def has_ended(run: run_pb2.Run) -> bool:
    """Whether nothing more happens in it."""
    return run.state in ENDED


def best(trials: Sequence[trial_pb2.Trial]) -> trial_pb2.Trial | None:
    """The fastest of the trials that were timed and were right."""
    timed = [trial for trial in trials if _is_timed(trial) and score(trial) > 0]
    return max(timed, key=score, default=None)


def _is_timed(trial: trial_pb2.Trial) -> bool:
    return trial.ended_at == trial_pb2.STAGE_TIMED


def _facts(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> Iterator[Fact]:
    yield Fact("State", report.state_name(run.state))
    if run.message:
        yield Fact("It says", words(run.message))
    counts = report.funnel(trials)
    told = f"{counts['compiled']} compiled, {counts['right']} right, {counts['timed']} timed"
    yield Fact("Trials", f"{counts['tried']}", told)
    if (found := best(trials)) is not None:
        yield Fact(
            "Best so far", report.speedup_text(found.timing.speedup_fastest), f"trial {found.number}, as screened"
        )
    yield Fact("Budget", ", ".join(_budget(run.budget)))
    yield Fact("Target", contract.target(run.task.target) or "not chosen yet", words(run.device.name, 80))
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created_at))
    yield Fact("Asked for", begun)


def _budget(budget: run_pb2.Budget) -> Iterator[str]:
    yield f"{wall_seconds(budget):g} s of search"
    if budget.trial_count:
        yield f"{budget.trial_count} trials"
    if budget.device_seconds:
        yield f"{budget.device_seconds:g} s of the device"
    if budget.model_tokens:
        yield f"{budget.model_tokens} tokens"
