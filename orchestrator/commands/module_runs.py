"""Runs that a bench makes at an orchestrator, one a module, to be stopped together.

The one idea: a run may be asked for while the bench is being stopped, so the thread that begins one looks again
once it is under way.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from orchestrator.commands import client
from orchestrator.commands.progress import Progress
from orchestrator.tasks import intake
from warpsmith.v1 import run_pb2


@dataclass
class ModuleRuns:
    """Runs with the same options."""

    orchestrator: client.Optimization
    budget: run_pb2.Budget
    """Of each run, but for the seconds of search, which `optimise` is told."""
    target: str
    precision: str
    prepared: bool
    search: str
    fresh: bool
    progress: Progress
    _under_way: set[str] = field(default_factory=set)
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
        run = client.create(self.orchestrator, task, budget, self.search, fresh=self.fresh)
        self.progress.expect(run)
        self._under_way.add(run.id)
        try:
            if self._stopping.is_set():  # since before the run was under way
                client.cancel(self.orchestrator, run.id)
            return client.follow(self.orchestrator, run.id, partial(self.progress.take, run.id))
        finally:
            self._under_way.discard(run.id)

    def stop(self) -> None:
        """Asks every run that is under way to end, and lets none begin."""
        self._stopping.set()
        self.progress.note("stopping: the best so far is judged (Ctrl-C again drops it)")
        for identifier in list(self._under_way):
            client.cancel(self.orchestrator, identifier)
