"""Runs that a bench makes, one a module, to be stopped together; with several orchestrators, each has a GPU of its own.

The one idea: a run may be asked for while the bench is being stopped, so the thread that begins one looks again
once it is under way. Where the services of one GPU have ended, its modules go to the others.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from orchestrator.commands import client
from orchestrator.commands.directory_bench import RunLog
from orchestrator.commands.progress import Progress
from orchestrator.tasks import intake
from warpsmith.errors import BadInput, Infrastructure, NotFound, WarpsmithError
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, task_pb2

_UNDONE = (run_pb2.RUN_STATE_CANCELLED, run_pb2.RUN_STATE_FAILED)


_EARLIER_RUNS = 20
"""That say how long a phase mostly takes."""


def optimise_all(
    serving: client.Serving,
    tasks: list[task_pb2.Task],
    limits: run_pb2.Budget,
    search: str,
    fresh: bool,
    progress: Progress,
) -> list[run_pb2.Run]:
    """Starts a run for each task and watches them one after another."""
    orchestrator = serving.orchestrator
    with suppress(WarpsmithError):  # a hint for people keeps no search from beginning
        progress.learn(client.latest(orchestrator, _EARLIER_RUNS))
    with progress:
        started = [client.create(orchestrator, task, limits, search, fresh=fresh) for task in tasks]
        return followed(serving, started, progress)


def followed(serving: client.Serving, started: Sequence[run_pb2.Run], progress: Progress) -> list[run_pb2.Run]:
    """Watches runs one after another to their ends; Ctrl-C asks those that have not ended to stop."""
    for run in started:
        progress.expect(run)
    identifiers, ended = [run.id for run in started], list[run_pb2.Run]()
    try:
        for place, identifier in enumerate(identifiers):
            run = client.follow(
                serving.orchestrator,
                identifier,
                partial(progress.take, identifier),
                to_cancel=identifiers[place:],
                on_interrupt=lambda: progress.note("stopping: the best so far is judged (Ctrl-C again leaves it)"),
                note=progress.note,
                check=serving.check,
            )
            ended.append(run)
    except (KeyboardInterrupt, SystemExit):
        for identifier in identifiers[len(ended) :]:
            progress.note(f"left: `warpsmith {serving.goes_on.replace('{}', identifier, 1)}` goes on with it")
        raise
    return ended


@dataclass
class ModuleRuns:
    """Runs with the same options."""

    serving: Sequence[client.Serving]
    """A module goes to the one with the fewest."""
    budget: run_pb2.Budget
    """Of each run, but for the seconds of search, which `optimise` is told."""
    target: str
    precision: str
    prepared: bool
    gradients: Sequence[str] | None
    """As `intake.Request` has them."""
    search: str
    fresh: bool
    progress: Progress
    log: RunLog | None = None
    """Where runs that begin are noted, and those that were left are found."""
    _under_way: dict[str, client.Optimization] = field(default_factory=dict)
    _taken: Counter[int] = field(default_factory=Counter)
    """Modules at each orchestrator, by its place."""
    _gone: set[int] = field(default_factory=set)
    """Places of orchestrators of which a service has ended."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def optimise(self, path: Path, most_seconds: float) -> run_pb2.Run:
        """A module's run in its end.

        Raises BadInput: the module cannot be read or its options are wrong; Infrastructure: no orchestrator is left.
        """
        request = intake.Request(
            str(path),
            target=self.target,
            precision=self.precision,
            prepared=self.prepared,
            gradients=self.gradients,
        )
        task = intake.inspect(intake.read(request))
        if self._stopping.is_set():
            return run_pb2.Run(task=task, state=run_pb2.RUN_STATE_CANCELLED, message="stopped before it began")
        budget = run_pb2.Budget()
        budget.CopyFrom(self.budget)
        budget.wall_seconds = most_seconds
        while True:
            with self._one() as place:
                try:
                    run = self._followed(self.serving[place], path, task, budget)
                except Infrastructure:
                    self.check()
                    if place not in self._gone:
                        raise
                    continue
            if place not in self._gone or run.state not in _UNDONE or self._stopping.is_set():
                return run

    def _begun(
        self, orchestrator: client.Optimization, path: Path, task: task_pb2.Task, budget: run_pb2.Budget
    ) -> run_pb2.Run:
        """A module's run: the one that an earlier command has left, or else a new one."""
        if self.log is not None and (left := self.log.left(path)):
            with suppress(BadInput, NotFound):  # its budget is spent, or its archive is another one
                run = orchestrator.GetRun(messages.GetRunRequest(run_id=left), timeout=30.0).run
                is_same = (run.task.digest, run.budget, run.fresh) == (task.digest, budget, self.fresh)
                if is_same and run.state != run_pb2.RUN_STATE_FAILED:
                    is_left = run.awaits_resume or run.state == run_pb2.RUN_STATE_CANCELLED
                    return client.resume(orchestrator, left) if is_left else run
        run = client.create(orchestrator, task, budget, self.search, fresh=self.fresh)
        if self.log is not None:
            self.log.begun(path, run.id, budget.wall_seconds)
        return run

    def _followed(
        self, serving: client.Serving, path: Path, task: task_pb2.Task, budget: run_pb2.Budget
    ) -> run_pb2.Run:
        orchestrator, progress = serving.orchestrator, self.progress
        run = self._begun(orchestrator, path, task, budget)
        self.progress.expect(run)
        self._under_way[run.id] = orchestrator
        try:
            if self._stopping.is_set():  # since before the run was under way
                client.cancel(orchestrator, run.id)
            take = partial(progress.take, run.id)
            try:
                return client.follow(orchestrator, run.id, take, note=progress.note, check=serving.check)
            except NotFound:  # who had it a moment ago, of a command that was killed, has left it
                client.resume(orchestrator, run.id)
                return client.follow(orchestrator, run.id, take, note=progress.note, check=serving.check)
        finally:
            del self._under_way[run.id]

    @contextmanager
    def _one(self) -> Iterator[int]:
        """The place of an orchestrator for one more module."""
        with self._lock:
            left = set(range(len(self.serving))) - self._gone
            place = min(left or {0}, key=lambda place: (self._taken[place], place))
            self._taken[place] += 1
        try:
            yield place
        finally:
            with self._lock:
                self._taken[place] -= 1

    def check(self) -> None:
        """Looks for services that have ended; what their orchestrator was at goes to another.

        Raises Infrastructure: no orchestrator is left.
        """
        for place, each in enumerate(self.serving):
            with self._lock:
                if place in self._gone and len(self._gone) < len(self.serving):
                    continue
                try:
                    each.check()
                except Infrastructure as error:
                    self._gone.add(place)
                    if len(self._gone) == len(self.serving):
                        raise
                    self.progress.note(f"{error}; its modules go to the other GPUs")
                else:
                    continue
            self._cancel(each.orchestrator)

    def stop(self) -> None:
        """Asks every run that is under way to end, and lets none begin."""
        self._stopping.set()
        self.progress.note("stopping: the best so far is judged (Ctrl-C again leaves it)")
        for each in self.serving:
            self._cancel(each.orchestrator)

    def _cancel(self, orchestrator: client.Optimization) -> None:
        for identifier, at in list(self._under_way.items()):
            with contextlib.suppress(WarpsmithError):  # one that has ended, or is gone, keeps no other from being asked
                if at is orchestrator:
                    client.cancel(orchestrator, identifier)
