"""The synthesizer: plans described, hypotheses made into candidates, failures mended.

The one idea: everything follows from the task and the moves, so every answer can be remembered and asked
again. The user's module runs only in a jailed worker; here there is only its graph.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from agent_synthesis import generator
from agent_synthesis.emit import registry
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import install_plugins
from agent_synthesis.plans import analysis, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith import digest, hardware
from warpsmith.contract import words
from warpsmith.errors import BadInput, IllegalMove, NotFound, WorkerCrashed, WorkerTimeout
from warpsmith.sandbox import jail
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import (
    analysis_pb2,
    candidate_pb2,
    graph_pb2,
    hypothesis_pb2,
    task_pb2,
    trial_pb2,
    verdict_pb2,
)

CAPTURE_DEADLINE_S: Final = 120.0
"""Longest that importing, building and exporting a module may take."""

_REMEMBERED: Final = 32

Capture = Callable[[task_pb2.Task], graph_pb2.Graph]


class Synthesizer(Protocol):
    """The role: it knows plans. Equal calls give equal answers; every exception is one of
    `warpsmith.errors`."""

    def analyze(self, task: task_pb2.Task, moves: Sequence[analysis_pb2.Move]) -> analysis_pb2.Analysis:
        """Describes the plan that moves give, with its legal moves.

        Raises BadInput for a module that cannot be captured, IllegalMove for a move that does not apply.
        """
        ...

    def synthesize(
        self, task: task_pb2.Task, hypothesis: hypothesis_pb2.Hypothesis, parent: trial_pb2.Trial | None = None
    ) -> candidate_pb2.Candidate:
        """Makes the candidate that a hypothesis names; `parent` is the timed trial that it grew from, if one is told.

        Raises as `analyze` does; NotFound where a kernel had to be written and none was.
        """
        ...

    def repair(
        self, task: task_pb2.Task, failed: trial_pb2.Trial, diagnostics: str
    ) -> tuple[hypothesis_pb2.Hypothesis, candidate_pb2.Candidate]:
        """Makes another candidate from one that failed.

        Raises BadInput when the trial did not fail, NotFound when no remedy is known.
        """
        ...


class BuiltInSynthesizer:
    """Captures in a jailed worker, plans by moves, emits by schedules.

    Raises:
        UnknownPlugin: a chosen schedule or lowering is not installed, or does not import.
        BadInput: it takes the name of another.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        install_plugins()
        for target in (task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA):
            registry.every_schedule(target)
        self._capture = capture or capture_in_worker
        self._graphs: OrderedDict[str, GraphIndex] = OrderedDict()
        self._analyses: OrderedDict[str, analysis_pb2.Analysis] = OrderedDict()
        self._lock = threading.Lock()
        self._capturing: dict[str, threading.Lock] = {}

    def analyze(self, task: task_pb2.Task, moves: Sequence[analysis_pb2.Move]) -> analysis_pb2.Analysis:
        """See `Synthesizer`."""
        key = digest.digest(_task_key(task), digest.of_moves(moves), *digest.of_hardware(task.hardware))
        with self._lock:
            known = self._analyses.get(key)
        if known is None:
            known = analysis.describe(self.plan(task, moves), with_legal_moves=True)
            with self._lock:
                self._analyses[key] = known
                while len(self._analyses) > 16 * _REMEMBERED:
                    self._analyses.popitem(last=False)
        return known

    def synthesize(
        self, task: task_pb2.Task, hypothesis: hypothesis_pb2.Hypothesis, parent: trial_pb2.Trial | None = None
    ) -> candidate_pb2.Candidate:
        """See `Synthesizer`."""
        del parent
        plan = self.plan(task, hypothesis.moves)
        key = _task_key(task)
        return candidate_pb2.Candidate(
            digest=digest.digest(
                "candidate",
                key,
                digest.of_moves(hypothesis.moves),
                task.target,
                generator.emitter_digest(),
                *digest.of_hardware(task.hardware),
            ),
            task_digest=key,
            moves=hypothesis.moves,
            program=generator.generate(plan),
            analysis=analysis.describe(plan, with_legal_moves=False),
            rewrites=plan.rewrites,
        )

    def repair(
        self, task: task_pb2.Task, failed: trial_pb2.Trial, diagnostics: str
    ) -> tuple[hypothesis_pb2.Hypothesis, candidate_pb2.Candidate]:
        """Takes back the settings that were changed: all of them, for kernels that ask too much of the
        machine."""
        verdict = failed.verdict
        if verdict.state != verdict_pb2.VERDICT_STATE_FAIL:
            raise BadInput("the trial did not fail: there is nothing to repair")
        if verdict.kind not in _BY_DEFAULTS:
            kind = words.failure_kind(verdict.kind)
            raise NotFound(f"no remedy is known for {kind}")
        old = list(failed.hypothesis.moves)
        kept = [move for move in old if move.kind != analysis_pb2.MOVE_KIND_SET]
        if len(kept) == len(old):
            raise NotFound("the schedules are at their defaults already; no smaller setting is known")
        said = diagnostics.strip().splitlines()
        hypothesis = hypothesis_pb2.Hypothesis(
            moves=kept,
            new_move_count=0,
            predicted_speedup=1.0,
            rationale="goes back to the schedules' defaults after "
            + (said[0][:120] if said else "the kernel asked too much of the machine"),
            source="repair",
        )
        return hypothesis, self.synthesize(task, hypothesis)

    def plan(self, task: task_pb2.Task, wanted: Sequence[analysis_pb2.Move]) -> Plan:
        """The plan that moves give.

        Raises:
            BadInput: the module cannot be captured, or no kernels are made for the task's GPU.
            IllegalMove: a move does not apply; says which.
        """
        plan = plan_zero(self._graph(task), task.target, hardware.of(task.hardware), prepared=task.prepared)
        for number, move in enumerate(wanted, 1):
            try:
                plan = moves.apply(plan, move)
            except IllegalMove as error:
                raise IllegalMove(f"move {number} ({words.move(move)}): {error}") from error
        return plan

    def _graph(self, task: task_pb2.Task) -> GraphIndex:
        key = _task_key(task)
        with self._lock:
            gate = self._capturing.setdefault(key, threading.Lock())
        with gate:  # one capture of a task, however many ask at once
            with self._lock:
                found = self._graphs.get(key)
                if found is not None:
                    self._graphs.move_to_end(key)
                    return found
            made = GraphIndex(self._capture(task), allows_tf32=task.precision == task_pb2.PRECISION_TF32)
            with self._lock:
                self._graphs[key] = made
                while len(self._graphs) > _REMEMBERED:
                    gone, _ = self._graphs.popitem(last=False)
                    self._capturing.pop(gone, None)
            return made


# Where the kernel asked too much: of the compiler, of the machine's memory, of its launch limits.
_BY_DEFAULTS: Final = frozenset({
    verdict_pb2.FAILURE_KIND_COMPILE_ERROR, verdict_pb2.FAILURE_KIND_COMPILE_LIMIT,
    verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, verdict_pb2.FAILURE_KIND_RESOURCE,
    verdict_pb2.FAILURE_KIND_TIMEOUT,
})  # fmt: skip


def capture_in_worker(task: task_pb2.Task) -> graph_pb2.Graph:
    """The task's graph, captured in a fresh jailed process.

    Raises:
        BadInput: the module cannot be captured, ends the process or takes too long.
    """
    policy = jail.Policy()
    try:
        with Worker("agent_synthesis.graphs.capture_worker:METHODS", policy) as worker:
            return worker.call("capture", task, graph_pb2.Graph, CAPTURE_DEADLINE_S)
    except WorkerTimeout as error:
        raise BadInput(f"{task.entry_path}: capturing took over {CAPTURE_DEADLINE_S:.0f} s") from error
    except WorkerCrashed as error:
        raise BadInput(f"{task.entry_path}: the process ended while capturing ({error})") from error


def _task_key(task: task_pb2.Task) -> str:
    return digest.of_task(task)
