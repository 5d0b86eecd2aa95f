"""What the orchestrator tells Prometheus: the funnel of trials and the time of each stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

funnel = Counter(
    "warpsmith_trials_total",
    "Trials by how far they came: refused, duplicate, fault, compile_fail, verify_fail, measure_fail, timed.",
    ["outcome"],
)
runs = Counter("warpsmith_runs_total", "Runs that ended, by final state.", ["state"])
active_runs = Gauge("warpsmith_runs_active", "Runs that are queued or under way.")
best_speedup = Histogram(
    "warpsmith_run_speedup_ratio",
    "Speedup of a run's winner against the fastest baseline.",
    buckets=(1.01, 1.1, 1.3, 1.6, 2, 3, 5, 10, 30),
)
stage_seconds = Histogram(
    "warpsmith_stage_duration_seconds",
    "Time of one stage of the pipeline, waiting for the device left out.",
    ["stage"],
    buckets=(0.01, 0.05, 0.2, 0.5, 1, 2, 5, 15, 60, 300),
)


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Adds the time of the block to a stage."""
    start = time.perf_counter()
    try:
        yield
    finally:
        stage_seconds.labels(stage).observe(time.perf_counter() - start)
