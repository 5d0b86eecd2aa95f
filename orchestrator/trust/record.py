"""The record of a result: one JSON file with all that is needed to have it judged again somewhere else.

The one idea: a record is the run as it is kept, task and sources included, in protobuf's own JSON, under a digest.
What it says of itself is checked here without running anything; `verify` does the rest.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from orchestrator.finalists import BASELINE_WAS_FASTER
from orchestrator.tasks import intake
from warpsmith import digest
from warpsmith.contract import earlier, words
from warpsmith.errors import BadInput, NotFound
from warpsmith.sandbox import private_files
from warpsmith.v1 import run_pb2, timing_pb2

FORMAT = "warpsmith-record-1"
OWN_WITHIN = 0.05
"""Relative difference allowed between a recorded speedup, which pairs samples by block, and its medians' ratio."""


def text(run: run_pb2.Run) -> str:
    """The record of a run.

    Raises:
        NotFound: the run judged no finalist, so there is nothing to verify.
    """
    if not run.best.HasField("timing") or run.best.timing.tier == timing_pb2.TIER_SCREENING:
        raise NotFound(f"run {run.id} has no result to record: {run.message}")
    content = MessageToDict(run, preserving_proto_field_name=True)
    return _written({"format": FORMAT, "digest": _digest(content), "run": content})


def read(path: Path) -> tuple[run_pb2.Run, list[str]]:
    """The run of a record, and what in the record contradicts itself.

    Raises:
        BadInput: it cannot be read, or is no record.
    """
    content, own = held(path)
    try:
        run = earlier.translated(ParseDict(content, run_pb2.Run()))
    except (ParseError, RecursionError):  # its text would quote the file
        raise BadInput(f"{path}: a damaged record: it holds what no run does") from None
    intake.require_names(run.task)
    if not run.best.HasField("timing") or not run.task.sources:
        raise BadInput(f"{path}: the record holds no result")
    changed = [] if _digest(content) == own else ["the record was changed after it was written: its digest differs"]
    return run, [*changed, *contradictions(run)]


def held(path: Path) -> tuple[Any, str]:
    """What a record holds of its run as JSON, and the digest that it tells of that.

    Raises:
        BadInput: it cannot be read, or is no record.
    """
    try:
        found = json.loads(private_files.read(path))
        content, own, form = found["run"], found["digest"], found["format"]
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(f"{path}: is no record; `warpsmith export` writes one beside the kernel") from None
    if form != FORMAT:
        raise BadInput(f"{path}: a record of another format; this version reads {FORMAT!r}")
    return content, own


def is_same(one: str, other: str) -> bool:
    """Whether two texts are records that hold the same: a protobuf map has no order, so each writing has its own."""
    try:
        ours, theirs = json.loads(one), json.loads(other)
    except (ValueError, RecursionError):
        return False
    is_record = isinstance(ours, dict) and ours.get("format") == FORMAT
    return is_record and bool(ours == theirs) and one == _written(ours)  # no key stands there twice


def contradictions(run: run_pb2.Run) -> Iterator[str]:
    """What a record says that cannot be true together, as sentences."""
    if digest.of_task(run.task) != run.task.digest:
        yield "the task's digest is not that of its sources: the module was changed"
    program = run.best.candidate.program
    if digest.of_program(program) != program.digest:
        yield "the program's digest is not that of its sources and steps: the kernel was changed"
    timing = run.best.timing
    arms = {arm.kind: arm for arm in timing.arms if arm.median_ns}
    for arm in arms.values():
        measured = statistics.median(arm.samples_ns) if arm.samples_ns else arm.median_ns
        if not _close(measured, arm.median_ns):
            name = words.arm(arm.kind)
            yield f"{name} is recorded with {arm.median_ns:.0f} ns, but the median of its samples is {measured:.0f}"
    eager = timing_pb2.ARM_KIND_EAGER
    for baseline, told in ((timing.fastest_arm, timing.speedup_fastest), (eager, timing.speedup_eager)):
        yield from _of_speedup(baseline, told, arms, is_held=BASELINE_WAS_FASTER in timing.raised)


def _of_speedup(
    baseline: timing_pb2.ArmKind.ValueType,
    told: timing_pb2.Speedup,
    arms: Mapping[timing_pb2.ArmKind.ValueType, timing_pb2.Arm],
    *,
    is_held: bool,
) -> Iterator[str]:
    name, ours = words.arm(baseline), timing_pb2.ARM_KIND_CANDIDATE
    if baseline not in arms or ours not in arms:
        yield f"the record tells a speedup over {name or 'nothing'}, but no time of it or of the candidate"
        return
    if told.median <= 0:
        yield f"the record tells no speedup over {name}"
        return
    ratio = arms[baseline].median_ns / arms[ours].median_ns
    if is_held and told.median < ratio:
        return  # it is over a better time of the same baseline, in the search
    spread = (told.high - told.low) / told.median
    if not _close(told.median, ratio, OWN_WITHIN + max(0.0, spread)):
        yield f"the recorded speedup over {name} is {told.median:.2f}x, but the recorded times give {ratio:.2f}x"


def _written(content: object) -> str:
    return json.dumps(content, indent=1) + "\n"


def _close(left: float, right: float, within: float = OWN_WITHIN) -> bool:
    return abs(left - right) <= within * max(abs(left), abs(right))


def _digest(content: object) -> str:
    return digest.digest("record", json.dumps(content, sort_keys=True))
