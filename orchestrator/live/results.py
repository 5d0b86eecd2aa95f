"""The kernel for a task: what an earlier run has found, or what a search finds now.

The one idea: a run in the archive is as good as a new one where task, torch and device are the same, so that a program
may ask for it every time that it starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from orchestrator import archive
from orchestrator.commands import client, report
from orchestrator.commands.progress import Progress
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, task_pb2

MOST_RUNS = 50
"""Latest runs of a task among which a faster kernel is looked for."""


@dataclass(frozen=True)
class Result:
    """A run, and its kernel."""

    run: run_pb2.Run
    text: str
    """The kernel as a file of the flavour `module`; empty where nothing faster was found."""


@dataclass(frozen=True)
class Results:
    """Where results come from: an orchestrator elsewhere, or services that start for a search, and a directory."""

    server: str
    runs: Path
    limits: run_pb2.Budget | None
    """Of a search; None where only what is known is wanted."""
    fresh: bool
    """Whether to search although a result is known."""
    progress: bool
    """Whether a search is shown on stderr."""

    def of(self, *tasks: task_pb2.Task) -> list[Result]:
        """Of each task; those that are not known are searched for, one after the other, or have no run.

        Raises:
            BadInput: a module cannot be captured there; Infrastructure: a service failed.
        """
        found = {task.digest: self._known(task) for task in tasks}
        unknown = [task for task in tasks if found[task.digest] is None]
        if unknown and self.limits is not None:
            shown = Progress()
            with client.searching(self.server, self.runs, {}) as serving, shown:
                for task in unknown:
                    if found[task.digest] is None:
                        found[task.digest] = self._searched(task, serving, shown)
        return [found[task.digest] or Result(run_pb2.Run(task=task), "") for task in tasks]

    def _known(self, task: task_pb2.Task) -> Result | None:
        """What an earlier run found for the task, the newest first, where it was measured on what is here."""
        if self.fresh or not (self.server or os.path.lexists(self.runs / archive.FILE_NAME)):
            return None
        with client.reading(self.server, self.runs) as orchestrator:
            for run in client.latest(orchestrator, MOST_RUNS, task_digest=task.digest):
                if run.best.timing.faster and _is_here(run):
                    return Result(run, _exported(orchestrator, run))
        return None

    def _searched(self, task: task_pb2.Task, serving: client.Serving, shown: Progress) -> Result:
        orchestrator = serving.orchestrator
        started = client.create(orchestrator, task, self.limits or run_pb2.Budget(), fresh=self.fresh)
        watcher: client.Watcher = lambda _: None  # noqa: E731
        if self.progress:
            shown.expect(started)
            watcher = partial(shown.take, started.id)
        run = client.follow(
            orchestrator,
            started.id,
            watcher,
            to_cancel=[started.id],
            on_interrupt=lambda: shown.note("stopping: the best so far is judged (Ctrl-C again leaves it)"),
            note=shown.note,
            check=serving.check,
        )
        if error := report.error_text(run):
            kind = BadInput if run.state == run_pb2.RUN_STATE_BAD_INPUT else Infrastructure
            raise kind(f"{task.name}: {error}")
        return Result(run, _exported(orchestrator, run) if run.best.timing.faster else "")


def _is_here(run: run_pb2.Run) -> bool:
    """Whether torch and the GPU are those that the run was measured on; a kernel tells processors apart by itself."""
    measured = run.best.timing.environment
    on_gpu = run.task.target == task_pb2.TARGET_CUDA
    return measured.torch == torch.__version__ and (not on_gpu or measured.device == torch.cuda.get_device_name())


def _exported(orchestrator: client.Optimization, run: run_pb2.Run) -> str:
    return orchestrator.ExportBest(messages.ExportBestRequest(run_id=run.id, flavour="module"), timeout=60.0).text
