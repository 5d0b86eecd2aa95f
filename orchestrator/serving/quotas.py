"""Seconds of devices that a project has used on a day, and whether it may begin a run.

The one idea: what a run has cost stands beside it in the archive, so that the sum is that of all orchestrators which
share one, and of those that are gone. Days are those of UTC. Runs under way are not stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import sqlalchemy as sa

from orchestrator import metrics
from orchestrator.archive import Archive
from orchestrator.archiving.tables import RUNS
from orchestrator.ledger import day_of
from warpsmith.errors import BadInput
from warpsmith.service.admission import refusal
from warpsmith.settings import Lines

VARIABLE = "WARPSMITH_QUOTA_FILE"
EVERY_OTHER = "*"
"""In a project's place: each project that the file does not name."""
DAY_SECONDS = 86400


def read_line(line: str) -> tuple[str, float]:
    """A project, or `EVERY_OTHER`, and its seconds a day.

    Raises:
        BadInput: says how a line is written.
    """
    words = line.split()
    try:
        project, seconds = words[0], float(words[1])
    except (IndexError, ValueError):
        seconds = math.nan
    if len(words) != 2 or not 0 <= seconds < math.inf:
        raise BadInput(f"{line!r}: a line is PROJECT SECONDS, or * SECONDS for every other project")
    return project, seconds


class Quotas:
    """Of the projects that share an archive. `file`: of lines as `read_line` reads them; None for no quota.

    Raises:
        BadInput: the file cannot be read.
    """

    def __init__(self, archive: Archive, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._archive, self._clock = archive, clock
        self._lines = Lines(file, read_line, "quota", VARIABLE) if file else None

    def require_room(self, project: str) -> None:
        """Refuses a run of a project that has used up its day.

        Raises:
            LimitReached: says when it may again. ArchiveFault: the archive cannot be read.
        """
        if self._lines is None:
            return
        most = _of(project, self._lines.now())
        if most is None:
            return
        now = self._clock()
        used = self.used_seconds(project, day_of(now))
        metrics.note_quota(project, used / most if most else 1.0)
        if used >= most:
            left = DAY_SECONDS - now % DAY_SECONDS
            again = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now + left))
            raise refusal(
                "project_seconds",
                f"project {project or 'of no name'} has used {used:.0f} s of devices today and may use {most:.0f} "
                f"({self._lines.file}): try again at {again}, in {left / 3600:.1f} h",
                left,
            )

    def used_seconds(self, project: str, day: str) -> float:
        """What the runs of a project have used on a day, on all devices together."""
        here = (RUNS.c.project == project) & (RUNS.c.device_day == day)
        return float(self._archive.rows(sa.select(sa.func.sum(RUNS.c.device_seconds)).where(here))[0][0] or 0.0)


def _of(project: str, quotas: Sequence[tuple[str, float]]) -> float | None:
    named = dict(quotas)
    return named.get(project, named.get(EVERY_OTHER))
