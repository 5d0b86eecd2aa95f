"""Two runs side by side: what differs is said in words, not by colour alone.

The one idea: a line is the same fact of both runs, and the pictures of both have one form. It judges nothing: two runs
of different modules or devices can be compared, and the lines say that they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.commands import report
from orchestrator.pages import rendering, searched, source
from orchestrator.pages.rendering import words
from orchestrator.web.run_parts import best
from warpsmith import printable
from warpsmith.contract import words as contract
from warpsmith.v1 import run_pb2, trial_pb2


@dataclass(frozen=True)
class Side:
    """One of the two runs with its trials."""

    run: run_pb2.Run
    trials: Sequence[trial_pb2.Trial]


@dataclass(frozen=True)
class Line:
    """One fact of both runs."""

    name: str
    first: str
    second: str

    @property
    def differs(self) -> bool:
        """Whether it is another one in the second."""
        return self.first != self.second


def html(first: Side, second: Side) -> str:
    """The two runs side by side."""
    lines = list(_lines(first, second))
    return rendering.part(
        "live/comparison.html",
        lines=lines,
        difference_count=sum(line.differs for line in lines),
        sides=[_side(letter, each) for letter, each in (("a", first), ("b", second))],
    )


def _side(letter: str, side: Side) -> dict[str, object]:
    run = side.run
    return {
        "letter": letter,
        "id": printable.line(run.id, 40),
        "name": words(run.task.name, 60) or "unnamed",
        "verdict": report.verdict_of(run),
        "progress": searched.progress(side.trials),
        "program": source.program(run),
    }


def _lines(first: Side, second: Side) -> Iterator[Line]:
    facts = [_facts(side) for side in (first, second)]
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        yield Line(name, facts[0].get(name, "-"), facts[1].get(name, "-"))


def _facts(side: Side) -> dict[str, str]:
    """By name, in the order in which they are read."""
    run, arms = side.run, report.arms_of(side.run)
    timing = run.best.timing if run.HasField("best") else None
    found, counts = best(side.trials), report.funnel(side.trials)
    made = {
        "Verdict": report.verdict_of(run),
        "It says": words(run.message),
        "Against the fastest baseline": report.speedup_text(timing.speedup_fastest) if timing else "-",
        "Against eager": report.speedup_text(timing.speedup_eager) if timing else "-",
        "Best as screened": report.speedup_text(found.timing.speedup_fastest) if found is not None else "-",
        "Of the floor": f"{timing.floor_percent:.0f} %" if timing and timing.floor_percent else "-",
    }
    made |= {f"Time of {contract.arm(kind)}": _time(arm.median_ns, arm.failure) for kind, arm in arms.items()}
    made |= {
        "Where it comes from": words(report.gain_text(run)) or "-",
        "Labels": words(", ".join(report.labels_of(run))) or "-",
        "Trials": f"{counts['tried']}: {counts['compiled']} compiled, {counts['right']} right, {counts['timed']} timed",
        "Seconds of its phases": ", ".join(f"{seconds:.1f}" for seconds in run.phase_seconds) or "-",
        "Budget": f"{run.budget.wall_seconds:g} s, {run.budget.trial_count or 'any'} trials",
        "Module": words(run.task.name, 80),
        "Digest of the task": words(run.task.digest, 80),
        "Target": contract.target(run.task.target) or "-",
        "Device": words(run.device.name, 80) or "-",
        "Precision": contract.precision(run.task.precision) or "-",
    }
    return made | {f"Plugin, {words(role, 40)}": words(name, 80) for role, name in sorted(run.plugins.items())}


def _time(median_ns: float, failure: str) -> str:
    return f"could not run: {words(failure, 80)}" if failure else report.time_text(median_ns)
