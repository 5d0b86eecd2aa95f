"""Whether a run that another orchestrator left can be gone on with, and the story that it goes on from.

The one idea: the archive alone says where a run was; nothing is asked of who left it. It queues nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Lock

import sqlalchemy as sa

from orchestrator import finalists
from orchestrator.archive import Archive
from orchestrator.archiving.tables import EVENTS
from orchestrator.ledger import has_budget_left
from orchestrator.search_run import ENDED
from orchestrator.serving import ownership
from orchestrator.serving.ownership import Owner
from orchestrator.serving.story import Story
from orchestrator.tasks.intake import accept
from warpsmith.errors import BadInput, NotFound, RunLost, WarpsmithError
from warpsmith.v1 import run_pb2

log = logging.getLogger("warpsmith.orchestrator")

MOST_ATTEMPTS = 3
"""How often a run is taken up without getting on before it has failed."""
_STOPPED = "stopped by the user after its orchestrator had ended; its best is kept as it was screened"
_RESUMABLE = frozenset({run_pb2.RUN_STATE_CANCELLED, run_pb2.RUN_STATE_FAILED})


def take_up_left(
    archive: Archive, owner: Owner, go_on: Callable[[Story], object], taking: Lock, leaving: Event
) -> None:
    """Goes on with what orchestrators that stay have left, oldest first, until `leaving`; one of those that pass with
    nothing. Holds `taking` while a run changes hands. Raises Infrastructure where the archive cannot be read."""
    for run_id, before in owner.left() if owner.stays else ():
        try:
            with taking:
                if leaving.is_set():
                    return
                story = taken_up(archive, owner, run_id, before)
                if leaving.is_set():
                    owner.note(run_id, attempt_count=0)  # it is not the run that ends the orchestrator
                    return
                go_on(story)
        except RunLost:
            continue  # another one was sooner
        except WarpsmithError as error:
            log.error("run %s cannot be taken up: %s", run_id, error)


def taken_up(archive: Archive, owner: Owner, run_id: str, before: str, *, anew: bool = False) -> Story:
    """The story of a run that was `before`'s and is `owner`'s from now on. `anew`: its user wants more of it.

    Raises:
        RunLost: it is another's by now; Infrastructure: the archive cannot be read or written.
    """
    if archive.spool:
        archive.spool.deliver(archive.writing, run_id)
    ended = archive.run(run_id) if anew else None  # nobody writes it; once it is taken it is queued
    attempt, epoch = owner.take(run_id, before, anew=anew)
    run, trials = ended or archive.run(run_id), archive.trials(run_id, with_programs=False)
    for trial in finalists.promising(trials):
        trials[trial.number - 1 : trial.number] = archive.trials(run_id, trial.number - 1, 1)
    (last,) = archive.rows(sa.select(sa.func.max(EVENTS.c.number)).where(EVENTS.c.run_id == run_id))[0]
    story = Story(archive, run, (last or 0) + 1, trials, attempt, epoch=epoch)
    story.cancelled = owner.is_to_stop(run_id)
    return story


def last_owner(archive: Archive, run: run_pb2.Run) -> str:
    """Who had a run that is under way nowhere. Raises RunLost where another orchestrator has it under way."""
    before, is_under_way = ownership.whose(archive, run.id)
    if is_under_way and ownership.is_alive(archive, before):
        raise RunLost(f"run {run.id} is under way at another orchestrator")
    return before


def resumed(archive: Archive, owner: Owner, run: run_pb2.Run, before: str) -> Story:
    """The same because its user asks for it.

    Raises:
        RunLost: it is another's by now. BadInput: it has ended otherwise or has spent its budget.
    """
    if run.state in ENDED and run.state not in _RESUMABLE:
        raise BadInput(f"run {run.id} has ended: {run.message}")
    if run.state == run_pb2.RUN_STATE_CANCELLED and not has_budget_left(run):
        raise BadInput(f"run {run.id} has spent its budget; begin another with `warpsmith optimize`")
    return taken_up(archive, owner, run.id, before, anew=True)


def cancelled(archive: Archive, owner: Owner | None, run_id: str) -> run_pb2.Run:
    """A run that is not `owner`'s, asked to stop: by whoever has it or takes it up, or else ended as it was left. One
    that has ended stays as it is.

    Raises:
        NotFound: it is not to be stopped from here, where there is no owner. Infrastructure: the archive cannot be
            read or written, or another takes up the run at this moment.
    """
    run = archive.run(run_id)
    if run.state in ENDED:
        return run
    if owner is None:
        raise NotFound(f"run {run.id} is not under way here")
    before = ownership.owner_of(archive, run.id)
    if ownership.is_alive(archive, before) or is_awaited(owner, before):
        owner.ask_to_stop(run.id)
        return told(archive, run)
    story, ended = taken_up(archive, owner, run.id, before), run_pb2.Run()
    ended.CopyFrom(story.run)
    finalists.keep_best(ended, story.trials)
    ended.state, ended.message = run_pb2.RUN_STATE_CANCELLED, _STOPPED
    story.run_changed(ended)
    return story.run


def is_awaited(owner: Owner, before: str) -> bool:
    """Whether orchestrators such as `owner` take up unasked what `before` has left."""
    return owner.stays and before.startswith(ownership.STAYS)


def queued(story: Story) -> run_pb2.Run:
    """The run of a story that is gone on with, as it waits for its turn."""
    run = run_pb2.Run()
    run.CopyFrom(story.run)
    if story.ended:
        del run.phase_seconds[1:]  # it searches again
        del run.learned[:]
    run.state, run.message = run_pb2.RUN_STATE_QUEUED, f"taken up again after {trials_text(len(story.trials))}"
    return run


def why_never(story: Story) -> str:
    """Why a run is not to be gone on with; empty where it is. A stranger may have written the archive."""
    try:
        accept(story.run.task)
    except BadInput as error:
        return f"it cannot be taken up: {error}"
    if [trial.number for trial in story.trials] != list(range(1, len(story.trials) + 1)):
        return "it cannot be taken up: not all of its trials are kept"
    if story.attempt > MOST_ATTEMPTS:
        return f"taken up {MOST_ATTEMPTS} times, and each time the orchestrator ended before the run got on"
    return ""


def trials_text(count: int) -> str:
    """Such as "1 trial"."""
    return f"{count} trial{'' if count == 1 else 's'}"


def told(archive: Archive, run: run_pb2.Run) -> run_pb2.Run:
    """The run as the archive has it; one whose owner is dead says so."""
    if run.state in ENDED:
        return run
    owner = ownership.owner_of(archive, run.id)
    if owner and not ownership.is_alive(archive, owner):
        run.awaits_resume = not owner.startswith(ownership.STAYS)
        how = (
            f"`warpsmith resume {run.id}` goes on with it"
            if run.awaits_resume
            else "the next one takes it up by itself"
        )
        run.message = f"left when its orchestrator ended: {how}"
    return run


def require_awaited(archive: Archive, owner: Owner, run_id: str) -> None:
    """Raises NotFound where nobody, this orchestrator neither, will go on with another's run unasked."""
    before = ownership.owner_of(archive, run_id)
    if not is_awaited(owner, before) and not ownership.is_alive(archive, before):
        raise NotFound(told(archive, archive.run(run_id)).message)
