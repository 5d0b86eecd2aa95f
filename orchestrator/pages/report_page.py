"""The report of one run as an HTML file: the answer first, then where it comes from, then everything to doubt it with.

The one idea: a page is what the run holds at this moment, so a run under way, one that failed and one without trials
have theirs; a part of which nothing is known is left out.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import warpsmith
from orchestrator.commands import report
from orchestrator.pages import answer, measured, rendering, roofline, searched, source, steps
from orchestrator.pages.answer import Fact
from orchestrator.pages.rendering import words
from warpsmith.contract import words as contract
from warpsmith.sandbox import private_files
from warpsmith.v1 import run_pb2, timing_pb2, trial_pb2

PHASES = ("Preparing", "Searching", "Finishing")


def html(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> str:
    """The page of a run with its trials, whose sources are not needed."""
    return rendering.page("report.html", **values(run, trials))


SECTIONS = ("answer", "gain", "arms", "roofline", "steps", "progress", "search", "source", "environment", "raw")
"""Parts of the page, in their order; each has a template of its own."""


def section(name: str, run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> str:
    """One of `SECTIONS` alone, for a page of another frame."""
    return rendering.part(f"sections/{name}.html", **values(run, trials, [name]))


def values(
    run: run_pb2.Run, trials: Sequence[trial_pb2.Trial], sections: Sequence[str] = SECTIONS
) -> dict[str, object]:
    """What templates of these sections need, and what every page of a run says of it."""
    made: dict[str, object] = {}
    for name in sections:
        made |= _MAKERS[name](run, trials)
    return made | {
        "title": words(run.task.name, 80) or "unnamed",
        "run_id": words(run.id, 40),
        "begun": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at)),
        "target": contract.target(run.task.target),
        "device": words(run.device.name, 80),
        "version": warpsmith.__version__,
    }


def _of_raw(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> dict[str, object]:
    return {
        "has_record": run.best.HasField("timing") and run.best.timing.tier == timing_pb2.TIER_FINAL,
        "raw": base64.b64encode(json.dumps(raw(run, trials)).encode()).decode(),
        "raw_name": private_files.file_name(f"warpsmith-{run.id}", ".json"),
    }


def raw(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> Mapping[str, Any]:
    """What `warpsmith report --json` prints, and a line for each trial."""
    return {"tasks": [report.as_json(run)], "trials": [_trial_json(trial) for trial in trials]}


def _trial_json(trial: trial_pb2.Trial) -> Mapping[str, Any]:
    is_timed = trial.ended_at == trial_pb2.STAGE_TIMED
    return {
        "number": trial.number,
        "parent": trial.parent,
        "moves": words(contract.moves(trial.candidate.moves or trial.hypothesis.moves)),
        "predicted_speedup": round(trial.hypothesis.predicted_speedup, 4),
        "source": words(trial.hypothesis.source, 60),
        "stage": contract.stage(trial.ended_at),
        "failure": contract.failure_kind(trial.verdict.kind),
        "speedup_fastest": report.speedup_json(trial.timing.speedup_fastest) if is_timed else None,
        "seconds": round(trial.seconds, 2),
    }


def _environment(run: run_pb2.Run) -> Iterator[Fact]:
    timing = run.best.timing if run.HasField("best") else None
    place = timing.environment if timing is not None and timing.HasField("environment") else run.reference.environment
    held = {
        "Device": place.device or run.device.name,
        "Driver": place.driver,
        "torch": place.torch,
        "Python": place.python,
        "Compiler": place.toolkit or run.best.artifact.toolchain,
        "Threads": f"{place.thread_count}" if place.thread_count else "",
        "Clock before and after": ", ".join(f"{each} MHz" for each in place.clock_mhz if each),
        "Throttled by": ", ".join(place.throttle_reasons),
        "Jail": place.jail_rung,
        "Seed of the inputs": f"{place.seed}" if place.seed else "",
        **{f"Plugin, {role}": name for role, name in sorted(run.plugins.items())},
        "Digest of the task": run.task.digest,
        "Digest of the program": run.best.candidate.program.digest,
    }
    yield from (Fact(words(name, 80), words(value)) for name, value in held.items() if value)
    for spec, kind in ((run.task.inputs, "Input"), (run.task.outputs, "Output")):
        for number, each in enumerate(spec, 1):
            yield Fact(f"{kind} {number}", f"{contract.dtype(each.dtype)} {list(each.shape)}")


def _seconds(run: run_pb2.Run) -> Iterator[Fact]:
    for name, spent in zip(PHASES, run.phase_seconds, strict=False):
        yield Fact(name, f"{spent:.1f} s", "phase")
    if cost := report.device_seconds(run):
        yield Fact("devices", f"{cost:.1f} s", "for which the run had a device, whatever for")
    for stage, spent in sorted(run.stage_seconds.items(), key=lambda item: -item[1]):
        yield Fact(words(stage, 60), f"{spent:.1f} s", "stage; those of parallel trials add up")


_MAKERS: Mapping[str, Callable[[run_pb2.Run, Sequence[trial_pb2.Trial]], dict[str, object]]] = {
    "answer": lambda run, trials: {"answer": answer.of(run, trials)},
    "gain": lambda run, _: {"gain": measured.gain(run)},
    "arms": lambda run, _: {"arms": measured.arms(run)},
    "roofline": lambda run, trials: {"roofline": roofline.of(run, trials)},
    "steps": lambda run, trials: {"timeline": steps.of(run, trials)},
    "progress": lambda _, trials: {"progress": searched.progress(trials)},
    "search": lambda run, trials: {
        "tree": searched.tree(trials, run.best_trial),
        "counts": report.funnel(trials),
    },
    "source": lambda run, _: {"program": source.program(run)},
    "environment": lambda run, _: {"environment": list(_environment(run)), "seconds": list(_seconds(run))},
    "raw": _of_raw,
}
"""By section, what its template needs beyond what all have."""
