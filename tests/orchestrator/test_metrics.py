"""What the orchestrator tells Prometheus: counts that start at 0, and series that stay few."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from orchestrator import metrics
from warpsmith.v1 import run_pb2, task_pb2, timing_pb2, trial_pb2, verdict_pb2


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def timed_trial(speedup: float, *, faster: bool = True) -> trial_pb2.Trial:
    timing = timing_pb2.Timing(
        speedup_fastest=timing_pb2.Speedup(median=speedup), floor_percent=10 * speedup, faster=faster
    )
    verdict = verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS)
    return trial_pb2.Trial(verdict=verdict, timing=timing, ended_at=trial_pb2.STAGE_TIMED)


def a_run(digest: str, name: str = "softmax") -> run_pb2.Run:
    return run_pb2.Run(id="20260101-000000-abcdef", task=task_pb2.Task(digest=digest, name=name))


def of_task(digest: str, module: str = "softmax") -> dict[str, str]:
    return {"task": digest[:12], "module": module, "run": "20260101-000000-abcdef"}


def test_series_exist_before_anything_happened() -> None:
    assert sample("warpsmith_trials_total", outcome="refused") is not None
    assert sample("warpsmith_verdicts_total", kind="wrong_value") is not None
    assert sample("warpsmith_runs_total", state="RUN_STATE_FASTER") is not None
    assert sample("warpsmith_stage_active", stage="measure") == 0


def test_a_failed_trial_is_counted_under_its_kind_and_is_no_best() -> None:
    before = sample("warpsmith_verdicts_total", kind="wrong_race") or 0
    failed = trial_pb2.Trial(
        verdict=verdict_pb2.Verdict(
            state=verdict_pb2.VERDICT_STATE_FAIL, kind=verdict_pb2.FAILURE_KIND_WRONG_RACE, detail="a race"
        ),
        ended_at=trial_pb2.STAGE_VERIFY,
    )
    metrics.record_trial(a_run("f" * 64), failed)
    assert sample("warpsmith_verdicts_total", kind="wrong_race") == before + 1
    assert sample("warpsmith_task_best_speedup_ratio", **of_task("f" * 64)) is None


def test_the_best_of_a_task_never_falls() -> None:
    before = sample("warpsmith_trials_faster_total") or 0
    for speedup in (1.5, 2.5, 2.0):
        metrics.record_trial(a_run("a" * 64), timed_trial(speedup))
    metrics.record_trial(a_run("a" * 64), timed_trial(0.5, faster=False))
    assert sample("warpsmith_task_best_speedup_ratio", **of_task("a" * 64)) == 2.5
    assert sample("warpsmith_task_floor_ratio", **of_task("a" * 64)) == pytest.approx(0.25)
    assert sample("warpsmith_trials_faster_total") == before + 3


def test_a_modules_name_is_cut_to_what_a_label_can_hold() -> None:
    name = 'Attn v2.1 (b{job="x"}\n)' + "x" * 100
    metrics.record_trial(a_run("b" * 64, name), timed_trial(1.5))
    label = ("Attn v2.1 _b_job__x____" + "x" * 100)[:60]
    assert sample("warpsmith_task_best_speedup_ratio", **of_task("b" * 64, label)) == 1.5


def test_however_many_tasks_there_are_only_the_last_ones_have_series() -> None:
    for number in range(metrics.TASK_COUNT * 3):
        metrics.record_trial(a_run(f"{number:064x}"[::-1]), timed_trial(1.2))
    series = [
        each
        for family in REGISTRY.collect()
        if family.name == "warpsmith_task_best_speedup_ratio"
        for each in family.samples
    ]
    assert len(series) == metrics.TASK_COUNT


def test_a_stage_is_shown_while_it_lasts_and_timed_when_it_fails() -> None:
    before = sample("warpsmith_stage_duration_seconds_count", stage="repair") or 0
    active = []

    @metrics.timed("repair")
    def fail() -> None:
        active.append(sample("warpsmith_stage_active", stage="repair"))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert active == [1]
    assert sample("warpsmith_stage_active", stage="repair") == 0
    assert sample("warpsmith_stage_duration_seconds_count", stage="repair") == before + 1


def test_the_longest_silence_is_that_of_the_run_that_told_something_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now))
    with metrics.listening("a"), metrics.listening("b"):
        now = 150.0
        metrics.heard("a")
        metrics.heard("queued")
        now = 160.0
        assert sample("warpsmith_run_silent_seconds") == 60.0
        metrics.heard("b")
        assert sample("warpsmith_run_silent_seconds") == 10.0
    assert sample("warpsmith_run_silent_seconds") == 0.0
