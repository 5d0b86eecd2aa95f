"""What is written of a run in one transaction: itself as it is now, or an ended trial, and the event that tells of it.

The one idea: whose the run is, is looked at in the same transaction, and nothing is written for who has lost it. It
opens no connection and waits for nothing.
"""

from __future__ import annotations

import sqlalchemy as sa

from orchestrator.archiving import news, programs
from orchestrator.archiving.tables import EVENTS, GROUPS, RUNS, TRIALS
from orchestrator.search import score
from orchestrator.search_run import ENDED
from warpsmith.errors import RunLost
from warpsmith.v1 import analysis_pb2, run_pb2, trial_pb2

# Made once, with the values beside them: to make a statement anew costs more than to carry it out.
_REPLACE_RUN = sa.update(RUNS).where(RUNS.c.id == sa.bindparam("which"))
_ADD_RUN, _ADD_TRIAL, _ADD_EVENT = (sa.insert(table) for table in (RUNS, TRIALS, EVENTS))
_GOT_ON = sa.update(RUNS).where(RUNS.c.id == sa.bindparam("which"), RUNS.c.attempt_count > 0).values(attempt_count=0)
_OWNER = sa.select(RUNS.c.owner, RUNS.c.epoch).where(RUNS.c.id == sa.bindparam("which")).with_for_update(key_share=True)
_TOLD = sa.select(EVENTS.c.number).where(
    EVENTS.c.run_id == sa.bindparam("which"), EVENTS.c.number >= sa.bindparam("first")
)


def is_kept(connection: sa.Connection, run_id: str, owner: str, epoch: int | None) -> bool:
    """Whether there is such a run, whose owner then stays the same until the transaction ends.

    Its owner may have lost it and taken it up again meanwhile: what it was to write before is refused too.

    Raises:
        RunLost: it is not `owner`'s, or has changed hands since `epoch`.
    """
    now = connection.execute(_OWNER, {"which": run_id}).one_or_none()
    if now is not None and (now.owner != owner or epoch not in (None, now.epoch)):
        raise RunLost(f"run {run_id} has been taken up since")
    return now is not None


def told(connection: sa.Connection, run_id: str, first: int) -> set[int]:
    """Numbers of the events of a run that are there, from one on."""
    return set(connection.execute(_TOLD, {"which": run_id, "first": first}).scalars())


def is_told(connection: sa.Connection, run_id: str, event: run_pb2.RunEvent | None) -> bool:
    """Whether an event is there: a commit whose answer was lost may have been made."""
    return event is not None and event.number in told(connection, run_id, event.number)


def put_run(
    connection: sa.Connection, run: run_pb2.Run, event: run_pb2.RunEvent | None, owner: str, epoch: int | None
) -> None:
    """Adds a run, or replaces what is kept of it. Raises RunLost."""
    row = _run_row(run)
    if is_kept(connection, run.id, owner, epoch):
        connection.execute(_REPLACE_RUN, {**row, "which": run.id})
    else:
        connection.execute(_ADD_RUN, {**row, "owner": owner})
    if run.learned:
        connection.execute(sa.delete(GROUPS).where(GROUPS.c.run_id == run.id))
        connection.execute(sa.insert(GROUPS), [_group_row(run, group) for group in run.learned])
    _add_event(connection, run.id, event)


class TrialRow:
    """An ended trial as it is written; `known` are digests of texts that are kept already."""

    def __init__(self, run_id: str, trial: trial_pb2.Trial, known: set[str]) -> None:
        self._run_id = run_id
        kept, names, self.texts = programs.left_out(trial, known)
        self._row = {"run_id": run_id, **_trial_row(kept), "texts": names}

    def add(self, connection: sa.Connection, event: run_pb2.RunEvent | None, owner: str, epoch: int | None) -> None:
        """Adds it. Raises RunLost."""
        is_kept(connection, self._run_id, owner, epoch)
        programs.add(connection, self.texts)
        connection.execute(_ADD_TRIAL, self._row)
        connection.execute(_GOT_ON, {"which": self._run_id})
        _add_event(connection, self._run_id, event)


def _cost(run: run_pb2.Run) -> dict[str, object]:
    day = max(run.device_day_seconds, default="")
    return {"project": run.project, "device_day": day, "device_seconds": run.device_day_seconds[day] if day else 0.0}


def _run_row(run: run_pb2.Run) -> dict[str, object]:
    return {
        "id": run.id,
        "task_digest": run.task.digest,
        "task_name": run.task.name,
        "target": run.task.target,
        "device": run.device.name,
        "state": run.state,
        "created_at": run.created_at,
        "speedup": score(run.best) if run.HasField("best") else 0.0,
        "message": run.SerializeToString(),
        "shape_digest": run.shape_digest,
        "client": run.user,
        **_cost(run),
    }


def _trial_row(trial: trial_pb2.Trial) -> dict[str, object]:
    return {
        "number": trial.number,
        "program_digest": trial.candidate.program.digest,
        "verdict": trial.verdict.state,
        "speedup": score(trial) if trial.HasField("timing") else 0.0,
        "message": trial.SerializeToString(),
    }


def _group_row(run: run_pb2.Run, group: analysis_pb2.KnownGroup) -> dict[str, object]:
    kept = {"form": group.form, "median_ns": group.median_ns, "message": group.SerializeToString()}
    return {"run_id": run.id, "device": run.device.name, **kept}


def _add_event(connection: sa.Connection, run_id: str, event: run_pb2.RunEvent | None) -> None:
    if event is not None:
        row = {"run_id": run_id, "number": event.number, "message": event.SerializeToString()}
        connection.execute(_ADD_EVENT, row)
        is_of_run = event.run.state in ENDED or event.run.state == run_pb2.RUN_STATE_QUEUED
        news.tell(connection, news.Topic.RUN if is_of_run else news.Topic.EVENT, run_id)
