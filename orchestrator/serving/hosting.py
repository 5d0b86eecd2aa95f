"""Runs searches in threads of its own, and takes up those that were left; the archive keeps all of them.

The one idea: a run is its archived story (`story`), so an orchestrator that ends loses none: whoever owns the run next
(`ownership`) goes on where the story stops. Of a run that has ended the archive alone tells it. The archive failing
ends the run with that as its message, and what memory holds stays readable. A device is one run's at a time
(`device_gate`); a few more prepare what needs none, others wait as QUEUED.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from orchestrator import finalists, metrics
from orchestrator.archive import Archive
from orchestrator.archiving.news import Topic
from orchestrator.search import Search
from orchestrator.search_run import SearchRun
from orchestrator.serving import taking_up
from orchestrator.serving.looking import RunsInSight
from orchestrator.serving.ownership import Owner
from orchestrator.serving.story import Story
from orchestrator.serving.taking_up import MOST_ATTEMPTS, trials_text
from warpsmith import plugins
from warpsmith.errors import ArchiveFault, Infrastructure, RunLost, ServiceGone
from warpsmith.permissions import UNASKED, Caller
from warpsmith.service import tracing
from warpsmith.v1 import run_pb2, task_pb2

log = logging.getLogger("warpsmith.orchestrator")

DEFAULT_SEARCH = "beam"
RETRY_SECONDS = 20.0
"""Pause before the next attempt, in which a service may come back."""
LEAVE_SECONDS = 3.0
"""How long runs may take to end the stage that they are at when the orchestrator ends."""

MakeRun = Callable[[run_pb2.Run, Search, Story, bool], SearchRun]
"""(run, strategy, observer, fresh) → a run that is ready to execute, its task's target set."""


class RunHost(RunsInSight):
    """All runs of an orchestrator: queued, under way, and past. `owner`: in whose name; None where it has none.
    `may_begin` is asked before a run of a caller is queued that has so many under way; LimitReached says why not."""

    def __init__(
        self,
        archive: Archive,
        make_run: MakeRun,
        at_once: int = 1,
        owner: Owner | None = None,
        may_begin: Callable[[Caller, int], None] = lambda *_: None,
    ) -> None:
        super().__init__(archive, owner)
        self._make_run, self._may_begin, self._queue = make_run, may_begin, queue.Queue[Story | None]()
        self._coming, self._taking = threading.Lock(), threading.Lock()
        """Held by who begins a run, and by who makes one its own that another had."""
        self._threads = [threading.Thread(target=self._work, name="runs", daemon=True) for _ in range(at_once)]
        for thread in self._threads:
            thread.start()
        if owner is not None:
            owner.live(self._look, self._leaving)
            archive.listen(self._heard, self._leaving)

    # ---- coming --------------------------------------------------------------------------------------

    def create(
        self, task: task_pb2.Task, budget: run_pb2.Budget, search: str, fresh: bool, caller: Caller = UNASKED
    ) -> run_pb2.Run:
        """Queues a run of the caller's and returns it.

        Raises:
            UnknownPlugin: no search strategy of that name; LimitReached: the caller has all that it may have;
            Infrastructure: the archive cannot be written, or the orchestrator ends.
        """
        if self._leaving.is_set():
            raise ServiceGone("the orchestrator ends")
        name = search or DEFAULT_SEARCH
        plugins.load("search", name)
        with self._room(caller):
            return self._enqueue(_begun(self._archive, _new_run(task, budget, name, fresh, caller))).run

    @contextmanager
    def _room(self, caller: Caller) -> Iterator[None]:
        """Held while a run of the caller's begins: no two at once, so that it has as many as it may have, and no more.

        Raises what `may_begin` raises.
        """
        with self._coming, self._owner.counting(caller.name) if self._owner else nullcontext(0) as count:
            here = sum(s.run.user == caller.name and not s.ended for s in self._stories.copy().values())
            self._may_begin(caller, max(here, count))
            yield

    def _look(self) -> None:
        """Stops what others were asked to stop, and takes up what they left; in a thread, since that may take long."""
        assert self._owner is not None
        if self._archive.spool:
            self._archive.spool.deliver_all(self._archive.writing)
        for run_id in self._owner.asked_to_stop():
            if story := self._stories.get(run_id):
                story.cancel()
        taking_up.take_up_left(self._archive, self._owner, self._go_on, self._taking, self._leaving)

    def _heard(self, topic: Topic, run_id: str) -> None:
        """Acts at once on what others have told; what is missed is found by looking."""
        assert self._owner is not None
        if topic is Topic.STOP and (story := self._stories.get(run_id)):
            story.cancel()
        elif topic in (Topic.LEFT, Topic.MISSED):
            self._owner.look_now()
        self.change_count += topic is not Topic.EVENT
        self._bells.ring(run_id)

    def resume(self, run_id: str) -> run_pb2.Run:
        """Queues a run that was left, cancelled or failed, with what is left of its budget; one under way, here or at
        another orchestrator, stays as it is.

        Raises:
            NotFound: no such run. BadInput: it has ended otherwise or has spent its budget.
            LimitReached: its user has all that one may have.
        """
        run = self.run(run_id)
        with self._taking:
            if (story := self._stories.get(run.id)) and not (story.ended and story.is_archived):
                return story.run
            if self._owner is None or self._leaving.is_set():
                raise ServiceGone("this orchestrator takes up no run")
            try:
                before = taking_up.last_owner(self._archive, run)
                with self._room(Caller(run.user, project=run.project)):
                    return self._go_on(taking_up.resumed(self._archive, self._owner, run, before)).run
            except RunLost:
                return self.run(run.id)  # who asked can watch it here as there

    def _go_on(self, story: Story) -> Story:
        """Queues a run that was another's, or ends it where it never gets on."""
        run, why = taking_up.queued(story), taking_up.why_never(story)
        story.run = run
        if why:
            _fail(story, run, why)
            return story
        story.run_changed(run)
        metrics.runs_taken_up.inc()
        return self._enqueue(story)

    def _enqueue(self, story: Story) -> Story:
        self._stories[story.run.id] = story
        self.change_count += 1
        metrics.note_run(story.run.id, is_here=True)
        self._queue.put(story)
        return story

    # ---- ending --------------------------------------------------------------------------------------

    def cancel(self, run_id: str) -> run_pb2.Run:
        """Asks a run to stop, also another orchestrator's; one that nobody takes up unasked ends at once.

        Raises:
            NotFound: no such run, or it is not this orchestrator's, which has no name.
        """
        run_id = self.run(run_id).id
        if (story := self._stories.get(run_id)) is None:
            with self._taking:
                return taking_up.cancelled(self._archive, self._owner, run_id)
        story.cancel()
        self._note(run_id, stop_asked=1)
        return story.run

    def leave(self) -> None:
        """Begins and goes on with nothing more: what has not ended is left as it is, to whoever takes it up."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        left = [story for story in self._stories.copy().values() if not story.ended]
        for story in left:
            if (conductor := story.conductor) is not None:
                conductor.leave()
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + LEAVE_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        for story in left:
            if story.attempt:
                self._note(story.run.id, attempt_count=0)  # it is not the run that ends the orchestrator
            next_one = "the next orchestrator takes it up" if self._owner and self._owner.stays else "it can be resumed"
            story.leave(f"left after {trials_text(len(story.trials))}: {next_one}")
        self._bells.ring()
        if self._owner is not None:
            self._owner.close()  # now, and not after the drain: who takes them up need not wait for that

    def close(self) -> None:
        """Leaves what is under way, and closes the archive."""
        self.leave()
        self._archive.close()

    def _work(self) -> None:
        while (story := self._queue.get()) is not None:
            while not self._leaving.is_set() and not self._execute(story):
                self._leaving.wait(RETRY_SECONDS)
            if story.ended or story.is_left:
                self._done(story)
            del story  # or it is held until the next one

    def _done(self, story: Story) -> None:
        """Leaves an ended run to the archive; what that could not take stays in memory."""
        story.conductor = None
        with self._taking:  # who goes on with it may have been sooner
            if (story.is_archived or story.is_left) and self._stories.get(story.run.id) is story:
                del self._stories[story.run.id]
        self.change_count += 1
        metrics.note_run(story.run.id, is_here=False)
        if story.ended:
            metrics.runs.labels(run_pb2.RunState.Name(story.run.state)).inc()

    def _execute(self, story: Story) -> bool:
        """Goes on with a run to its end; False where a run that is taken up is to be tried once more."""
        run = run_pb2.Run()
        run.CopyFrom(story.run)
        try:
            _conduct(story, run, self._make_run, self._leaving)
        except RunLost as lost:
            _lost(story, run, str(lost), self._leaving)
        except Exception as error:  # whatever it is, the run has ended and its watchers must hear so
            if not isinstance(error, Infrastructure):
                log.exception("run %s failed", run.id)
            run.CopyFrom(story.run)
            message = str(error) if isinstance(error, Infrastructure) else f"{type(error).__name__}: {error}"
            if story.attempt and isinstance(error, Infrastructure) and not isinstance(error, ArchiveFault):
                return self._is_given_up(story, run, message)
            _fail(story, run, message)
        return True

    def _is_given_up(self, story: Story, run: run_pb2.Run, why: str) -> bool:
        """Counts an attempt to take up a run that came to nothing, and ends the run where it was the last."""
        if story.attempt >= MOST_ATTEMPTS or self._owner is None:
            _fail(story, run, f"taken up {story.attempt} times without getting on: {why}")
            return True
        story.attempt += 1
        run.state, run.message = run_pb2.RUN_STATE_QUEUED, f"taken up once more in {RETRY_SECONDS:.0f} s: {why}"
        self._note(run.id, attempt_count=story.attempt)
        with suppress(Infrastructure):  # the next attempt meets it too
            story.run_changed(run)
        return False

    def _note(self, run_id: str, **columns: int) -> None:
        """Tells the next owner of a run, where the archive takes it."""
        if self._owner is not None:
            with suppress(Infrastructure):
                self._owner.note(run_id, **columns)


def _conduct(story: Story, run: run_pb2.Run, make_run: MakeRun, leaving: threading.Event) -> None:
    """Goes on with a run to its end, or until it is left."""
    if story.cancelled and not story.trials:
        _end(story, run, run_pb2.RUN_STATE_CANCELLED, "stopped by the user before it began")
        return
    strategy: Search = plugins.load("search", run.plugins["search"] or DEFAULT_SEARCH)
    conductor = make_run(run, strategy, story, run.fresh)
    story.conductor = conductor
    if story.cancelled:
        conductor.cancel()
    if leaving.is_set():
        conductor.leave()
    with tracing.span("run", parent=run.trace_parent, run=run.id) as span:
        conductor.execute()
        tracing.note(span, state=run_pb2.RunState.Name(run.state), trials=run.trial_count)


def _fail(story: Story, run: run_pb2.Run, message: str) -> None:
    """Ends a run as failed, with the best of its trials as it was screened."""
    finalists.keep_best(run, story.trials)
    _end(story, run, run_pb2.RUN_STATE_FAILED, message)


def _lost(story: Story, run: run_pb2.Run, why: str, leaving: threading.Event) -> None:
    """Ends what is done here for a run that is another's by now. Where a device's service alone says so, the archive
    knows better: it takes a run's end from its owner."""
    if not story.is_left and not leaving.is_set():
        run.CopyFrom(story.run)
        _fail(story, run, why)


def _new_run(task: task_pb2.Task, budget: run_pb2.Budget, search: str, fresh: bool, caller: Caller) -> run_pb2.Run:
    return run_pb2.Run(
        id=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
        task=task,
        state=run_pb2.RUN_STATE_QUEUED,
        budget=budget,
        created_at=time.time(),
        plugins={"search": search},
        fresh=fresh,
        user=caller.name,
        project=caller.project,
        trace_parent=tracing.here(),
    )


def _begun(archive: Archive, run: run_pb2.Run) -> Story:
    """The story of a new run, which is in the archive then."""
    story = Story(archive, run)
    archive.put_run(run)
    story.run_changed(run)
    return story


def _end(story: Story, run: run_pb2.Run, state: run_pb2.RunState.ValueType, message: str) -> None:
    """Ends a run in memory, and in the archive where that is possible."""
    run.state, run.message = state, message
    try:
        story.run_changed(run)
    except Infrastructure as error:
        log.error("run %s: %s", run.id, error)
