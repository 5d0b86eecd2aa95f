"""The first page: all runs, what waits, and what the devices do.

The one idea: the queue is in the orchestrator's memory and is asked for often; the list of runs is in its archive, and
is asked for again when the queue says that a run has come, gone or changed. One feed for all who watch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.commands import client, report
from orchestrator.commands.client import Optimization
from orchestrator.pages import rendering
from orchestrator.pages.answer import Fact
from orchestrator.pages.rendering import words
from orchestrator.web.hub import Channel
from orchestrator.web.run_parts import has_ended
from warpsmith import printable
from warpsmith.contract import words as contract
from warpsmith.errors import MethodMissing, WarpsmithError
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2

PAGE = 20
"""Runs of one page."""
POLL_SECONDS = 0.1
"""Between two looks at the queue, which holds no more than runs under way."""
LIST_SECONDS = 5.0
"""Between two looks at the list where the queue has not changed: another orchestrator may keep runs in the archive."""
PAUSE_SECONDS = 1.0
"""Before an orchestrator that does not answer is asked again."""


@dataclass(frozen=True)
class Row:
    """A run as it is listed."""

    id: str
    begun: str
    name: str
    state: str
    speedup: str
    message: str
    trials: int
    has_ended: bool
    place: int
    """In the queue, from 1; 0 for one that does not wait."""


def queue_of(orchestrator: Optimization) -> messages.DescribeQueueResponse | None:
    """What waits and what is under way; None where an earlier release is asked, which does not say so."""
    try:
        return orchestrator.DescribeQueue(messages.DescribeQueueRequest(), timeout=10.0)
    except MethodMissing:
        return None


def runs_of(orchestrator: Optimization, before: float = 0.0, limit: int = PAGE + 1) -> Sequence[run_pb2.Run]:
    """Runs, newest first; one more than a page has, to know whether there are further ones."""
    return client.latest(orchestrator, limit, before=before, light=True)


def parts(
    runs: Sequence[run_pb2.Run], waiting: messages.DescribeQueueResponse | None, before: float = 0.0
) -> dict[str, str]:
    """The parts of the page."""
    under_way = list(waiting.runs) if waiting is not None else [run for run in runs if not has_ended(run)]
    newer = {run.id: run for run in under_way}
    queued = [run.id for run in under_way if run.state == run_pb2.RUN_STATE_QUEUED]
    shown = [_row(newer.get(run.id, run), queued) for run in runs[:PAGE]]
    older = f"{runs[PAGE - 1].created_at!r}" if len(runs) > PAGE else ""
    told = f"Under way or waiting: {len(under_way)}." if under_way else "Nothing is under way."
    return {
        "said": rendering.escaped(told),
        "queue": rendering.part(
            "live/queue.html",
            under_way=[_row(run, queued) for run in under_way],
            devices=list(_devices(waiting)) if waiting is not None else [],
        ),
        "runs": rendering.part("live/runs.html", runs=shown, older=older, is_first=not before),
    }


def feed(orchestrator: Optimization, channel: Channel) -> None:
    """Publishes the newest page until nobody watches."""
    runs: Sequence[run_pb2.Run] = ()
    known: bytes | None = None
    states: object = None
    listed_at = 0.0
    while not channel.may_end():
        try:
            waiting = queue_of(orchestrator)
            now = waiting.SerializeToString(deterministic=True) if waiting is not None else b""
            seen = (
                ([(run.id, run.state) for run in waiting.runs], waiting.change_count) if waiting is not None else None
            )
            is_due = time.monotonic() >= listed_at + (LIST_SECONDS if waiting is not None else PAUSE_SECONDS)
            if seen != states or is_due:
                runs, states, listed_at = runs_of(orchestrator), seen, time.monotonic()
            elif now == known:
                channel.wait(POLL_SECONDS)
                continue
            known = now
            channel.publish({"connection": ""} | parts(runs, waiting))
            channel.wait(POLL_SECONDS)
        except WarpsmithError:
            channel.publish({"connection": rendering.escaped("The orchestrator does not answer; it is asked again.")})
            channel.wait(PAUSE_SECONDS)


def _row(run: run_pb2.Run, queued: Sequence[str]) -> Row:
    timing = run.best.timing if run.HasField("best") else None
    return Row(
        id=printable.line(run.id, 40),
        begun=time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at)),
        name=words(run.task.name, 60) or "unnamed",
        state=report.verdict_of(run) if has_ended(run) else report.state_name(run.state),
        speedup=report.speedup_text(timing.speedup_fastest) if timing and timing.speedup_fastest.median else "",
        message=words(run.message, 160),
        trials=run.trial_count,
        has_ended=has_ended(run),
        place=queued.index(run.id) + 1 if run.id in queued else 0,
    )


def _devices(waiting: messages.DescribeQueueResponse) -> Iterator[Fact]:
    yield Fact("Devices", f"{waiting.device_count}", "benchmark services, each with a device of its own")
    yield Fact("Timing now", f"{waiting.timing_count}")
    yield Fact("Measurements that wait", f"{waiting.waiting_count}")
    if waiting.aside_count:
        yield Fact("Out of service", f"{waiting.aside_count}", "they have failed a test of themselves")
    for device in waiting.devices:
        yield Fact(contract.target(device.target) or "device", words(device.name, 80) or "not described yet")
