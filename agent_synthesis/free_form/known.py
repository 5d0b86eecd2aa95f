"""What a writer of kernels was told of a task so far: trials that timed its plans, and the best kernel of each part.

The one idea: this is memory for hints. It changes what a model is shown and nothing that is made of its answer, so a
process that has forgotten it, or never knew, only shows less.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.free_form.compose import text_of
from agent_synthesis.plans.plan import Plan
from warpsmith import digest
from warpsmith.v1 import analysis_pb2, trial_pb2

_REMEMBERED = 512


@dataclass(frozen=True)
class Best:
    """The fastest kernel of some nodes that a trial timed."""

    text: str
    nanoseconds: float


class Known:
    """Remembers for all tasks of a process; the oldest is forgotten first. Safe to use from several threads."""

    def __init__(self) -> None:
        self._trials: OrderedDict[tuple[str, str], trial_pb2.Trial] = OrderedDict()
        self._best: OrderedDict[tuple[str, frozenset[str]], Best] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, task: str, plan: Plan, parent: trial_pb2.Trial, before: Sequence[analysis_pb2.Move]) -> None:
        """A kernel is wanted after the moves `before`; `parent` is the trial that it grows from, and `plan` its plan.

        `task` is the task's digest.
        """
        took = {step.group: step.median_ns for step in parent.timing.steps if step.median_ns > 0}
        kernels = {
            frozenset(plan.all_nodes(group)): Best(text_of(plan, group), took[group.name])
            for group in plan.groups
            if group.engine != "library" and group.name in took
        }
        with self._lock:
            self._trials[task, digest.of_moves(before)] = parent
            for nodes, kernel in kernels.items():
                known = self._best.get((task, nodes))
                if known is None or kernel.nanoseconds < known.nanoseconds:
                    self._best[task, nodes] = kernel
            for kept in (self._trials, self._best):
                while len(kept) > _REMEMBERED:
                    kept.popitem(last=False)

    def parent(self, task: str, before: Sequence[analysis_pb2.Move]) -> trial_pb2.Trial | None:
        """The trial that a kernel after these moves grew from."""
        with self._lock:
            return self._trials.get((task, digest.of_moves(before)))

    def best(self, task: str, nodes: Sequence[str]) -> Best | None:
        """The fastest kernel that computes exactly these nodes."""
        with self._lock:
            return self._best.get((task, frozenset(nodes)))
