"""`warpsmith archive costs`: for how long runs had a device, by project and stage."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from orchestrator.commands import client, report
from orchestrator.commands.options import DEFAULT_RUNS, Json, Runs, Server
from orchestrator.commands.terminal import tell
from orchestrator.ledger import DEVICE_STAGES
from warpsmith import printable
from warpsmith.errors import BadInput
from warpsmith.v1 import run_pb2

PAGE_RUNS = 200
NOWHERE = "-"
"""In a project's place: runs that count for none."""


def costs_command(
    since: Annotated[str, typer.Option("--since", metavar="DAY", help="Only runs begun since; 2026-11-29, UTC.")] = "",
    as_json: Json = False,
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Sums for how many seconds runs had a device, by project and stage; those of parallel trials add up."""
    start = _day(since)
    with client.reading(server, runs) as orchestrator:
        told = summed(_begun_since(orchestrator, start))
    print(json.dumps({"projects": told})) if as_json else tell(*rows(told))


def _begun_since(orchestrator: client.Optimization, start: float) -> Iterator[run_pb2.Run]:
    before = 0.0
    while page := client.latest(orchestrator, PAGE_RUNS, before=before, light=True):
        yield from (run for run in page if run.created_at >= start)
        before = page[-1].created_at
        if before < start:
            return


def summed(runs: Iterable[run_pb2.Run]) -> dict[str, dict[str, float]]:
    """Project → stage → seconds, with `runs`, how many, and `total`, all their stages together."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        sums = found.setdefault(run.project or NOWHERE, dict.fromkeys(("runs", "total", *DEVICE_STAGES), 0.0))
        sums["runs"] += 1
        sums["total"] += report.device_seconds(run)
        for stage in DEVICE_STAGES:
            sums[stage] += run.stage_seconds.get(stage, 0.0)
    return {project: {name: round(value, 2) for name, value in sums.items()} for project, sums in sorted(found.items())}


def rows(told: dict[str, dict[str, float]]) -> list[str]:
    """The same for people, a line for each project."""
    columns = ("total", *DEVICE_STAGES)
    width = max((len(printable.line(project, 60)) for project in told), default=0)
    lines = [f"{'':<{width}}  {'runs':>6}" + "".join(f"{column:>15}" for column in columns)]
    for project, sums in told.items():
        seconds = "".join(f"{sums[column]:>13.1f} s" for column in columns)
        lines.append(f"{printable.line(project, 60):<{width}}  {sums['runs']:>6.0f}{seconds}")
    return lines


def _day(text: str) -> float:
    """When a day of UTC begins, in seconds since the epoch; before all of them where none is named."""
    if not text:
        return -math.inf
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        today = time.strftime("%Y-%m-%d", time.gmtime())
        raise BadInput(f"--since {text!r}: is no day; write it as {today}") from None
