"""What the orchestrator tells Prometheus: the funnel of trials, verdicts, times of stages, the best of each task.

The one idea: every label's values are known beforehand and start at 0, so that a rate sees the first event too; only
tasks come and go, each with its module's name and a run, and the last `TASK_COUNT` of them are kept. Of a module's name
letters, digits and a few signs become a label, and no other text of a user.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from warpsmith import digest
from warpsmith.contract import words
from warpsmith.v1 import run_pb2, timing_pb2, trial_pb2, verdict_pb2

OUTCOMES = ("refused", "duplicate", "fault", "compile_fail", "verify_fail", "measure_fail", "timed")
"""How far a trial came."""
STAGES = ("describe", "analyze", "open", "reference", "propose", "synthesize", "compile", "verify", "measure", "repair")
PROJECT_COUNT = 14
"""Projects that have a label of their own."""
RUN_COUNT = 8
"""Runs here that are shown one by one."""
PURPOSES = ("prepare", "screen", "final")
"""What runs have devices for: baselines and the device's own description; trials; finalists, judged again."""
TASK_COUNT = 20
"""Tasks in runs whose best speedup is shown; those that moved last."""
OF_A_TASK = ("task", "module", "run")
"""Labels of a task in a run: the beginning of its digest, the module's name, the run's identifier."""

funnel = Counter("warpsmith_trials_total", f"Trials by how far they came: {', '.join(OUTCOMES)}.", ["outcome"])
faster = Counter("warpsmith_trials_faster_total", "Trials whose screening beat the fastest baseline beyond noise.")
verdicts = Counter("warpsmith_verdicts_total", "Verdicts on trials, by kind; pass and infra are kinds too.", ["kind"])
runs = Counter("warpsmith_runs_total", "Runs that ended, by final state.", ["state"])
runs_taken_up = Counter("warpsmith_runs_taken_up_total", "Runs that others left and this one goes on with.")
active_runs = Gauge("warpsmith_runs_active", "Runs that are queued or under way.")
run_here = Gauge(
    "warpsmith_run_here", "1 for a run that this orchestrator has; of many, those that came first.", ["id"]
)
waiting_for_model = Gauge(
    "warpsmith_runs_waiting_for_model", "Runs that search without a language model, whose server is away."
)
device_seconds = Counter(
    "warpsmith_device_seconds_total",
    "Seconds in which runs had a device, by project; those of parallel trials add up.",
    ["project"],
)
purpose_seconds = Counter(
    "warpsmith_device_purpose_seconds_total",
    f"The same seconds, by what for: {', '.join(PURPOSES)}.",
    ["purpose"],
)
quota_used = Gauge(
    "warpsmith_project_quota_used_ratio",
    "Of its device time of the day, what a project had used when it last asked.",
    ["project"],
)
best_speedup = Histogram(
    "warpsmith_run_speedup_ratio",
    "Speedup of a run's winner against the fastest baseline.",
    buckets=(1.01, 1.1, 1.3, 1.6, 2, 3, 5, 10, 30),
)
task_speedup = Gauge(
    "warpsmith_task_best_speedup_ratio",
    "Best screened speedup of a task in a run against the fastest baseline; a task by the beginning of its digest.",
    OF_A_TASK,
)
task_floor = Gauge(
    "warpsmith_task_floor_ratio",
    "Floor over the time of that candidate: 1 is as fast as the hardware allows.",
    OF_A_TASK,
)
stage_seconds = Histogram(
    "warpsmith_stage_duration_seconds",
    "Time of one stage of the pipeline, waiting for the device left out.",
    ["stage"],
    buckets=(0.01, 0.05, 0.2, 0.5, 1, 2, 5, 15, 60, 300),
)
silent_seconds = Gauge(
    "warpsmith_run_silent_seconds", "For how long the run under way has told nothing that has been silent for longest."
)
stage_active = Gauge("warpsmith_stage_active", "Stages under way now.", ["stage"])
devices = Gauge("warpsmith_devices", "Devices that can be timed on.")
devices_timing = Gauge("warpsmith_devices_timing", "Devices that something is timed on now.")
devices_aside = Gauge("warpsmith_devices_aside", "Devices whose service said that they cannot be trusted.")
waiting_to_time = Gauge("warpsmith_waiting_to_time", "Measurements that wait for a device, or for a quiet machine.")

_FAIL = verdict_pb2.VERDICT_STATE_FAIL
_kinds = {value: name.removeprefix("FAILURE_KIND_").lower() for name, value in verdict_pb2.FailureKind.items()}
_tasks: OrderedDict[tuple[str, ...], float] = OrderedDict()
_projects: set[str] = set()
_runs: set[str] = set()
_heard: dict[str, float] = {}
"""Run that has a device → when it last told something, by the monotonic clock."""
_lock = threading.Lock()

for _outcome in OUTCOMES:
    funnel.labels(_outcome)
for _purpose in PURPOSES:
    purpose_seconds.labels(_purpose)
_stages = {stage: (stage_seconds.labels(stage), stage_active.labels(stage)) for stage in STAGES}
for _kind in ("pass", "infra", *_kinds.values()):
    verdicts.labels(_kind)
for _state in (state for state in run_pb2.RunState.values() if state >= run_pb2.RUN_STATE_FASTER):
    runs.labels(run_pb2.RunState.Name(_state))


@dataclass
class Waited:
    """How long a stage has waited for a device that others had."""

    seconds: float = 0.0


@contextmanager
def timed(stage: str, took: Callable[[str, float], None] = lambda *_: None) -> Iterator[Waited]:
    """Adds the time of the block to a stage, less what it says that it has waited; `took` hears how many seconds."""
    seconds, active = _stages[stage]
    start = time.perf_counter()
    active.inc()
    waited = Waited()
    try:
        yield waited
    finally:
        active.dec()
        spent = max(0.0, time.perf_counter() - start - waited.seconds)
        seconds.observe(spent)
        took(stage, spent)


@contextmanager
def listening(run_id: str) -> Iterator[None]:
    """Notes for as long as it is held whether a run gets on: from when it has a device, since a queue may be long."""
    _heard[run_id] = time.monotonic()
    try:
        yield
    finally:
        _heard.pop(run_id, None)


def heard(run_id: str) -> None:
    """The run has told something."""
    if run_id in _heard:
        _heard[run_id] = time.monotonic()


def _longest_silence() -> float:
    return max((time.monotonic() - last for last in _heard.copy().values()), default=0.0)


silent_seconds.set_function(_longest_silence)


def record_trial(run: run_pb2.Run, trial: trial_pb2.Trial) -> None:
    """Counts a judged trial of a run, and notes the best of its task."""
    is_timed = trial.ended_at == trial_pb2.STAGE_TIMED
    funnel.labels("timed" if is_timed else f"{words.stage(trial.ended_at)}_fail").inc()
    state, kind = trial.verdict.state, trial.verdict.kind
    if state == verdict_pb2.VERDICT_STATE_PASS:
        verdicts.labels("pass").inc()
    elif state == verdict_pb2.VERDICT_STATE_INFRA:
        verdicts.labels("infra").inc()
    elif state == _FAIL:
        verdicts.labels(_kinds.get(kind, "unspecified")).inc()
    if is_timed and state == verdict_pb2.VERDICT_STATE_PASS:
        faster.inc(trial.timing.faster)
        _note((digest.short(run.task.digest), _plain(run.task.name), run.id), trial.timing)


def note_run(run_id: str, *, is_here: bool) -> None:
    """A run is this orchestrator's from now on, or no longer."""
    active_runs.inc(1 if is_here else -1)
    with _lock:
        if is_here and len(_runs) < RUN_COUNT:
            _runs.add(run_id)
            run_here.labels(run_id).set(1)
        elif not is_here and run_id in _runs:
            _runs.discard(run_id)
            run_here.remove(run_id)


def note_cost(project: str, stage: str, seconds: float) -> None:
    """Adds time in which a run had a device, at a stage of `ledger.DEVICE_STAGES`."""
    device_seconds.labels(_project(project)).inc(seconds)
    purpose = "final" if stage.startswith("final ") else "screen" if stage in ("verify", "measure") else "prepare"
    purpose_seconds.labels(purpose).inc(seconds)


def note_quota(project: str, used: float) -> None:
    """What part of its day a project has used; above 1 where runs went on."""
    quota_used.labels(_project(project)).set(used)


def _project(name: str) -> str:
    """A project as a label: the first `PROJECT_COUNT` have their own."""
    shown = _plain(name) or "none"
    with _lock:
        if len(_projects) < PROJECT_COUNT:
            _projects.add(shown)
        return shown if shown in _projects else "other"


def _plain(name: str) -> str:
    """A module's name as a label."""
    return re.sub(r"[^A-Za-z0-9_. -]", "_", name)[:60]


def _note(task: tuple[str, ...], timing: timing_pb2.Timing) -> None:
    speedup = timing.speedup_fastest.median
    with _lock:
        is_best = speedup > _tasks.get(task, 0.0)
        _tasks[task] = max(speedup, _tasks.get(task, 0.0))
        _tasks.move_to_end(task)
        if is_best:
            task_speedup.labels(*task).set(speedup)
            task_floor.labels(*task).set(timing.floor_percent / 100)
        if len(_tasks) > TASK_COUNT:
            oldest, _ = _tasks.popitem(last=False)
            task_speedup.remove(*oldest)
            task_floor.remove(*oldest)
