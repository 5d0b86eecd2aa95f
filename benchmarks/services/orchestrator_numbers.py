"""Measures what the orchestrator itself costs: trials a second, many in flight, with agents that answer at once.

    python -m benchmarks.services.orchestrator_numbers [--branches 64] [--trials 1000]

The agents are the fakes of `orchestrator.testing`; strategy, pipeline, gate, archive (SQLite, every trial durable)
and events are the real ones. Prints a line for each strategy.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.story import Story
from orchestrator.walks import Effort
from warpsmith import plugins
from warpsmith.v1 import run_pb2, task_pb2

OPERATIONS, CHOICES = 10, 8
"""The fake space: each of so many settings once, with one of so many values: nine to the tenth plans."""


def trials_per_second(strategy: str, branches: int, trials: int, directory: Path) -> float:
    """Of one search, archive included."""
    names = [f"m{number}" for number in range(OPERATIONS)]
    world = testing.World(
        gains=dict.fromkeys(names, 1.05),
        choices={name: [f"c{number}" for number in range(CHOICES)] for name in names},
        floor_ns=1.0,
    )
    agents = world.agents(devices=branches)
    budget = run_pb2.Budget(wall_seconds=300, trial_count=trials)
    run = run_pb2.Run(id=strategy, task=testing.task(target=task_pb2.TARGET_CUDA), budget=budget)
    archive = Archive.in_directory(directory / strategy)
    archive.put_run(run)
    effort = Effort(parallel_trials=branches, refill_at=branches // 2, proposal_count=branches)
    search = plugins.load("search", strategy)
    conductor = SearchRun(run, agents, DeviceGate(agents.benchmarks), search, Story(archive, run), effort=effort)
    begin = time.perf_counter()
    ended = conductor.execute()
    seconds = time.perf_counter() - begin
    kept = len(archive.trials(strategy))
    archive.close()
    if kept != trials or ended.trial_count != trials:
        raise SystemExit(f"{strategy}: {ended.trial_count} trials of {trials}, {kept} kept: {ended.message}")
    return trials / seconds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--branches", type=int, default=64, help="trials in flight")
    parser.add_argument("--trials", type=int, default=1000, help="trials of each search")
    chosen = parser.parse_args()
    print(f"{os.cpu_count()} processors, Python {platform.python_version()}, {chosen.branches} branches in flight")
    with tempfile.TemporaryDirectory() as directory:
        for strategy in plugins.names("search"):
            rate = trials_per_second(strategy, chosen.branches, chosen.trials, Path(directory))
            print(f"{strategy:<12} {rate:6.0f} trials/s")


if __name__ == "__main__":
    main()
