"""Records landscapes: what the plans of 24 tasks are worth, each verified and timed by the real services.

    python -m benchmarks.search.landscapes --target cpu|cuda --out FILE [--only softmax …] [--plans 40]
                                           [--time-limit 10m]

The tasks are those of `skill_tasks.py`. Plan zero and what the built-in reasoner proposes on it come first; then half
of the plans are drawn as random search draws them (any legal move on any plan that passed), half are neighbours of the
fastest so far, so that the best is found and what surrounds it is known. Every plan is one line as soon as it is
known. The command goes on where it stopped, and a larger --plans makes the file deeper; a task whose emitters have
changed since is begun again. Time is dealt out evenly to the tasks that are left. `skill.py` replays searches on it.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from agent_synthesis.generator import emitter_digest
from agent_synthesis.synthesizer import capture_in_worker
from benchmarks.search.landscape_file import Landscape, Plan, append, digits, plan_line, read, task_line
from benchmarks.search.skill_tasks import modules
from orchestrator.agents import Agents
from orchestrator.commands import budgets
from orchestrator.pipeline import Duplicate, Faulted, Judged, Pipeline, Refused
from orchestrator.prepare import analyze, describe_device
from orchestrator.search import score
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.dialing import agents_of
from orchestrator.serving.local import MODULES, LocalServices
from orchestrator.tasks import intake
from warpsmith.contract import words
from warpsmith.digest import of_moves
from warpsmith.errors import WarpsmithError
from warpsmith.sandbox import jail
from warpsmith.sandbox.worker import Worker
from warpsmith.settings import Settings
from warpsmith.v1 import (
    analysis_pb2,
    graph_pb2,
    hypothesis_pb2,
    reasoning_service_pb2,
    task_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)

PLANS = 40
FIRST_PROPOSALS = 8
"""Of the reasoner on plan zero: chains of moves that one step at a time would reach late."""
AT_ONCE = {task_pb2.TARGET_CPU: (1, 2), task_pb2.TARGET_CUDA: (2, 8)}
"""Tasks at once, and plans of a task at once. A processor that is timed does nothing else."""
LEAST_SECONDS = 5.0
"""A task that gets less time than this is not begun."""

_Move = analysis_pb2.Move


@dataclass
class Frontier:
    """What is known of a task, and which plan to look at next. Knows no service."""

    landscape: Landscape
    draw: random.Random
    paths: dict[str, list[_Move]] = field(default_factory=dict)
    """Moves from plan zero to each plan."""
    legal: dict[str, list[_Move]] = field(default_factory=dict)
    """Legal moves of plans that were asked for."""
    tried: set[str] = field(default_factory=set)
    """Lists of moves that were walked, by digest."""

    def __post_init__(self) -> None:
        for plan in self.landscape.plans.values():
            self.reached(plan)

    def reached(self, plan: Plan) -> None:
        """Remembers the way to a plan, which the landscape holds by now."""
        self.paths[plan.plan] = self.landscape.path(plan.plan)
        self.tried.add(of_moves(self.paths[plan.plan]))

    def parents(self) -> tuple[str, str]:
        """A plan drawn from all that passed, and the fastest one with an untried move as far as is known."""
        passed = [plan for plan in self.landscape.plans.values() if plan.passed]
        fastest = sorted(passed, key=lambda plan: -plan.speedup)
        open_ = [plan.plan for plan in fastest if plan.plan not in self.legal or self.fresh(plan.plan)]
        return self.draw.choice(passed).plan, (open_ or [fastest[0].plan])[0]

    def fresh(self, parent: str) -> list[_Move]:
        """Legal moves of a plan that were not walked yet."""
        path = self.paths[parent]
        return [move for move in self.legal[parent] if of_moves([*path, move]) not in self.tried]

    def step(self, parent: str) -> list[_Move]:
        """One move drawn from a plan's untried ones, taken for tried; empty where there is none."""
        fresh = self.fresh(parent)
        if not fresh:
            return []
        move = self.draw.choice(fresh)
        self.tried.add(of_moves([*self.paths[parent], move]))
        return [move]


class Survey:
    """Records one task."""

    def __init__(
        self, landscape: Landscape, agents: Agents, gate: DeviceGate, file: Path, lock: threading.Lock
    ) -> None:
        self.landscape, self._agents, self._gate, self._file, self._lock = landscape, agents, gate, file, lock
        self._frontier = Frontier(landscape, random.Random(len(landscape.plans)))
        self._programs = {plan.program for plan in landscape.plans.values()}
        self._pipeline = Pipeline(agents, gate, landscape.task, claim=self._claim, took=self._took)
        self.outcomes: dict[str, int] = {}
        self.stage_seconds: dict[str, float] = {}

    def run(self, plans: int, deadline: float) -> None:
        """Walks until so many plans are known, the time is over, or nothing is left."""
        wave = AT_ONCE[self.landscape.task.target][1]
        with ThreadPoolExecutor(wave, thread_name_prefix=self.landscape.task.name) as pool:
            waiting = self._first() if not self.landscape.plans else []
            barren = 0 if self.landscape.plans else 8 * wave  # plan zero itself did not run
            while len(self.landscape.plans) < plans and time.monotonic() < deadline and barren < 8 * wave:
                if not waiting:
                    waiting = self._more(wave)
                now, waiting = waiting[:wave], waiting[wave:]
                before = len(self.landscape.plans)
                list(pool.map(lambda each: self._walk(*each), now))
                barren = 0 if len(self.landscape.plans) > before else barren + 1

    def _first(self) -> list[tuple[str, list[_Move]]]:
        analysis = analyze(self._agents, self._gate, self.landscape.task, [])
        self._frontier.legal[digits(analysis.plan_digest)] = [legal.move for legal in analysis.legal_moves]
        self._walk("", [])  # first, and alone: the others are compared with it
        eager = timing_pb2.Arm(kind=timing_pb2.ARM_KIND_EAGER, median_ns=self.landscape.eager_ns)
        request = reasoning_service_pb2.ProposeHypothesesRequest(
            task=self.landscape.task,
            analysis=analysis,
            device=self.landscape.device,
            reference=timing_pb2.ReferenceReport(arms=[eager], fastest_arm=timing_pb2.ARM_KIND_EAGER),
            limit=FIRST_PROPOSALS,
        )
        proposed = self._agents.reasoning.ProposeHypotheses(request, timeout=60.0).hypotheses
        zero = digits(analysis.plan_digest)
        return [(zero, list(each.moves)) for each in proposed]

    def _more(self, count: int) -> list[tuple[str, list[_Move]]]:
        """So many steps, in turn from a drawn plan and from the fastest."""
        steps = []
        for place in range(count):
            parent = self._frontier.parents()[place % 2]
            if parent not in self._frontier.legal:
                self._frontier.legal[parent] = self._legal(parent)
            if move := self._frontier.step(parent):
                steps.append((parent, move))
        return steps

    def _legal(self, parent: str) -> list[_Move]:
        try:
            analysis = analyze(self._agents, self._gate, self.landscape.task, self._frontier.paths[parent])
        except WarpsmithError as error:
            print(f"{self.landscape.task.name}: {digits(parent)} has no analysis: {error}", file=sys.stderr)
            return []
        return [legal.move for legal in analysis.legal_moves]

    def _claim(self, program: str) -> bool:
        with self._lock:
            new = digits(program) not in self._programs
            self._programs.add(digits(program))
            return new

    def _took(self, stage: str, seconds: float) -> None:
        with self._lock:
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds

    def _walk(self, parent: str, moves: list[_Move]) -> None:
        path = [*self._frontier.paths.get(parent, []), *moves]
        hypothesis = hypothesis_pb2.Hypothesis(moves=path, new_move_count=len(moves), source="landscape")
        outcome = self._pipeline.walk(trial_pb2.Trial(hypothesis=hypothesis), timing_pb2.TIER_SCREENING)
        candidate = outcome.trial.candidate
        plan_digest, program = digits(candidate.analysis.plan_digest), digits(candidate.program.digest)
        with self._lock:
            name = type(outcome).__name__
            self.outcomes[name] = self.outcomes.get(name, 0) + 1
            match outcome:
                case Judged(trial):
                    self._keep(_judged(trial, plan_digest, program, parent, moves), trial.timing)
                case Duplicate() if plan_digest not in self.landscape.plans:
                    twin = next((p for p in self.landscape.plans.values() if p.program == program), None)
                    if twin is not None:
                        kept = Plan(plan_digest, program, parent, moves, twin.verdict, twin.speedup, twin.candidate_ns)
                        self._keep(kept, timing_pb2.Timing())
                case Refused(_, reason) | Faulted(_, reason):
                    print(f"{self.landscape.task.name}: {name}: {reason[:200]}", file=sys.stderr)
                case _:
                    pass  # known, or interrupted

    def _keep(self, plan: Plan, timing: timing_pb2.Timing) -> None:
        eager = next(
            (arm.median_ns for arm in timing.arms if arm.kind == timing_pb2.ARM_KIND_EAGER), self.landscape.eager_ns
        )
        if not plan.parent and not plan.moves:
            self.landscape.eager_ns, self.landscape.floor_ns = eager, timing.floor_ns
        self.landscape.plans[plan.plan] = plan
        self._frontier.reached(plan)
        append(self._file, plan_line(self.landscape.task.name, plan, eager, timing.floor_ns))


def _judged(trial: trial_pb2.Trial, plan: str, program: str, parent: str, moves: Sequence[_Move]) -> Plan:
    if trial.verdict.state != verdict_pb2.VERDICT_STATE_PASS:
        kind = words.failure_kind(trial.verdict.kind)
        return Plan(plan, program, parent, moves, kind)
    candidate_ns = next(arm.median_ns for arm in trial.timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE)
    return Plan(plan, program, parent, moves, "PASS", score(trial), candidate_ns)


# ---- all tasks ---------------------------------------------------------------------------------------------------


def tasks(target: str, only: Sequence[str], directory: Path) -> Iterator[task_pb2.Task]:
    """The tasks by name, or beginnings of names; built and run once in a jail."""
    with Worker(intake.WORKER_ENTRY, jail.Policy(), env={"OMP_NUM_THREADS": "2"}) as worker:
        for name, source in modules().items():
            if only and not any(name.startswith(wanted) for wanted in only):
                continue
            file = directory / f"{name}.py"
            file.write_text(source)
            yield intake.inspect(intake.read(intake.Request(str(file), target=target)), worker)


def record(
    wanted: Sequence[task_pb2.Task], agents: Agents, file: Path, plans: int, seconds: float
) -> list[tuple[str, int, float]]:
    """Records all tasks; returns the name of each with its number of plans and seconds."""
    gate, lock = DeviceGate(agents.benchmarks), threading.Lock()
    known = {landscape.task.name: landscape for landscape in read([file])}
    made = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "emitters": digits(emitter_digest()),
        "torch": version("torch"),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
    }
    device = describe_device(gate, wanted[0].target)
    end, left = time.monotonic() + seconds, len(wanted)
    rows: list[tuple[str, int, float]] = []
    tasks_at_once = AT_ONCE[wanted[0].target][0]

    def one(task: task_pb2.Task, graph: Future[graph_pb2.Graph]) -> None:
        nonlocal left
        begin = time.monotonic()
        share = (end - begin) * tasks_at_once / max(left, tasks_at_once)
        left -= 1
        old = known.get(task.name)
        if old is not None and (old.made.get("emitters") != made["emitters"] or old.task.digest != task.digest):
            old = None
        if (old is not None and len(old.plans) >= plans) or share < LEAST_SECONDS:
            return
        landscape = old or Landscape(task, graph.result(), device, made=made)
        if old is None:
            with lock:
                append(file, task_line(landscape))
        survey = Survey(landscape, agents, gate, file, lock)
        survey.run(plans, begin + share)
        took = time.monotonic() - begin
        rows.append((task.name, len(landscape.plans), took))
        to_come = f"{left} tasks left, about {left * took / tasks_at_once:.0f} s" if left > 0 else "done"
        print(
            f"{task.name}: {len(landscape.plans)} plans, best {landscape.best:.2f}x eager, {_said(survey.outcomes)}, "
            f"{took:.0f} s ({', '.join(f'{stage} {seconds:.1f}' for stage, seconds in survey.stage_seconds.items())}); "
            f"{to_come}",
            flush=True,
        )

    with ThreadPoolExecutor(tasks_at_once) as pool, ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as ahead:
        graphs = [ahead.submit(capture_in_worker, task) for task in wanted]
        for future in [pool.submit(one, task, graph) for task, graph in zip(wanted, graphs, strict=True)]:
            try:
                future.result()
            except WarpsmithError as error:
                print(f"a task was left out: {error}", file=sys.stderr)
    return rows


def _said(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.lower()}" for name, count in sorted(outcomes.items())) or "nothing new"


def main() -> int:
    """Records and prints a line a task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the landscapes, lines of JSON")
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of names, of the tasks wanted")
    parser.add_argument("--plans", type=int, default=PLANS, help="of each task, at most")
    parser.add_argument("--time-limit", default="10m", help="for all tasks together")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    names = [name for name in MODULES if name != "orchestrator"]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as beside:
        coming = beside.submit(lambda: list(tasks(options.target, options.only, Path(directory))))
        with LocalServices(Path(directory), modules={name: MODULES[name] for name in names}) as services:
            agents = agents_of(Settings(addresses={name: services.address(name) for name in names}))
            wanted = coming.result()
            if not wanted:
                parser.error(f"no task begins with {' or '.join(options.only)}")
            left = budgets.seconds(options.time_limit, "--time-limit") - (time.monotonic() - begin)
            rows = record(wanted, agents, options.out, options.plans, left)
    found = sum(plans for _, plans, _ in rows)
    print(f"{len(rows)} tasks, {found} plans in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
