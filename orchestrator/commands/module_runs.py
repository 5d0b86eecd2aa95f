"""Runs that a bench makes, one a module, to be stopped together; with several orchestrators, each has a GPU of its own.

The one idea: a run may be asked for while the bench is being stopped, so the thread that begins one looks again
once it is under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from orchestrator.commands import client
from orchestrator.commands.progress import Progress
from orchestrator.tasks import intake
from warpsmith.errors import WarpsmithError
from warpsmith.v1 import run_pb2


@dataclass
class ModuleRuns:
    """Runs with the same options."""

    orchestrators: Sequence[client.Optimization]
    """A module goes to the one with the fewest."""
    budget: run_pb2.Budget
    """Of each run, but for the seconds of search, which `optimise` is told."""
    target: str
    precision: str
    prepared: bool
    search: str
    fresh: bool
    progress: Progress
    _under_way: dict[str, client.Optimization] = field(default_factory=dict)
    _taken: Counter[int] = field(default_factory=Counter)
    """Modules at each orchestrator, by its place."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def optimise(self, path: Path, most_seconds: float) -> run_pb2.Run:
        """A module's run in its end.

        Raises BadInput: the module cannot be read or its options are wrong; Infrastructure: a service is gone.
        """
        request = intake.Request(str(path), target=self.target, precision=self.precision, prepared=self.prepared)
        task = intake.inspect(intake.read(request))
        if self._stopping.is_set():
            return run_pb2.Run(task=task, state=run_pb2.RUN_STATE_CANCELLED, message="stopped before it began")
        budget = run_pb2.Budget()
        budget.CopyFrom(self.budget)
        budget.wall_seconds = most_seconds
        with self._one() as orchestrator:
            run = client.create(orchestrator, task, budget, self.search, fresh=self.fresh)
            self.progress.expect(run)
            self._under_way[run.id] = orchestrator
            try:
                if self._stopping.is_set():  # since before the run was under way
                    client.cancel(orchestrator, run.id)
                return client.follow(orchestrator, run.id, partial(self.progress.take, run.id))
            finally:
                del self._under_way[run.id]

    @contextmanager
    def _one(self) -> Iterator[client.Optimization]:
        """An orchestrator for one more module."""
        with self._lock:
            place = min(range(len(self.orchestrators)), key=self._taken.__getitem__)
            self._taken[place] += 1
        try:
            yield self.orchestrators[place]
        finally:
            with self._lock:
                self._taken[place] -= 1

    def stop(self) -> None:
        """Asks every run that is under way to end, and lets none begin."""
        self._stopping.set()
        self.progress.note("stopping: the best so far is judged (Ctrl-C again drops it)")
        for identifier, orchestrator in list(self._under_way.items()):
            with contextlib.suppress(WarpsmithError):  # one that has ended, or is gone, keeps no other from being asked
                client.cancel(orchestrator, identifier)
