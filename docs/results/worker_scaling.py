"""Measures how many benchmark workers one orchestrator keeps busy: trials a second with 1, 8 and 64 of them.

    python docs/results/worker_scaling.py [--workers 1 8 64] [--job-seconds 0.5] [--least 0.9]

Every worker is a process of its own on a loopback port that answers a measurement after half a second, as a GPU would;
the four agents are processes too and answer at once (`orchestrator.fake_service`). Strategy, pipeline, gate, gRPC and
archive (SQLite, every trial durable) are the real ones. A run's rate is its trials over the seconds of its search, from
the first proposal to the last answer. Ends with code 1 when the largest number reaches less than `least` of linear.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from orchestrator import fake_service, testing
from orchestrator.archive import Archive
from orchestrator.device_gate import DeviceGate
from orchestrator.dialing import agents_at
from orchestrator.hosting import Story
from orchestrator.search_run import SearchRun
from warpsmith import plugins
from warpsmith.v1 import run_pb2, task_pb2

SEARCH_SECONDS = 20.0
"""Length of each search, were it linear."""
START_SECONDS = 180.0


def started(roles: list[str], job_seconds: float, directory: Path, stack: contextlib.ExitStack) -> list[str]:
    """Addresses of new processes, one for each role, which end with `stack`."""
    files = []
    for number, role in enumerate(roles):
        file = directory / f"{role}-{number}.port"
        seconds = job_seconds if role == "benchmark" else 0.0
        environment = {
            **os.environ,
            "WARPSMITH_PORT_FILE": str(file),
            "WARPSMITH_METRICS_PORT": "none",
            "WARPSMITH_LOG": "WARNING",
            "WARPSMITH_PARENT_PID": str(os.getpid()),
            fake_service.SECONDS: str(seconds),
        }
        process = subprocess.Popen([sys.executable, "-m", "orchestrator.fake_service", role], env=environment)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        files.append(file)
    deadline = time.monotonic() + START_SECONDS
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            raise SystemExit("the workers do not start")
        time.sleep(0.1)
    return [f"127.0.0.1:{file.read_text().split()[0]}" for file in files]


def searched(workers: int, job_seconds: float, directory: Path) -> tuple[float, float]:
    """One search over so many workers: trials a second, and processor seconds of the orchestrator for a trial."""
    trials = max(20, int(SEARCH_SECONDS * workers / job_seconds))
    others = [role for role in fake_service.ADD if role != "benchmark"]
    with contextlib.ExitStack() as stack:
        addresses = started([*others, *["benchmark"] * workers], job_seconds, directory, stack)
        found = dict(zip(others, addresses, strict=False)) | {"benchmark": ",".join(addresses[len(others) :])}
        agents = agents_at(lambda role: found[role])
        archive = Archive.in_directory(directory)
        stack.callback(archive.close)
        budget = run_pb2.Budget(wall_seconds=300, trial_count=trials)
        run = run_pb2.Run(id=str(workers), task=testing.task(target=task_pb2.TARGET_CUDA), budget=budget)
        archive.put_run(run)
        search = plugins.load("search", "beam")
        begin = time.process_time()
        ended = SearchRun(run, agents, DeviceGate(agents.benchmarks), search, Story(archive, run)).execute()
        processor_seconds = time.process_time() - begin
        if ended.trial_count != trials or ended.pass_count != trials:
            raise SystemExit(f"{ended.pass_count} of {ended.trial_count} trials of {trials} passed: {ended.message}")
    return trials / ended.phase_seconds[1], processor_seconds / trials  # preparing, searching, finishing


def main() -> int:
    """Prints the table; 1 below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64], help="how many, one search for each")
    parser.add_argument("--job-seconds", type=float, default=0.5, help="what one measurement takes")
    parser.add_argument("--least", type=float, default=0.9, help="share of linear that the last must reach")
    chosen = parser.parse_args()
    print(f"{os.cpu_count()} processors, Python {platform.python_version()}, {chosen.job_seconds} s a measurement")
    print("| workers | trials/s | of linear | orchestrator, ms of a processor a trial |\n|---|---|---|---|")
    share = 0.0
    for workers in chosen.workers:
        with tempfile.TemporaryDirectory() as directory:
            rate, cost = searched(workers, chosen.job_seconds, Path(directory))
        share = rate * chosen.job_seconds / workers
        print(f"| {workers} | {rate:.1f} | {100 * share:.0f} % | {1000 * cost:.1f} |", flush=True)
    return 0 if share >= chosen.least else 1


if __name__ == "__main__":
    sys.exit(main())
