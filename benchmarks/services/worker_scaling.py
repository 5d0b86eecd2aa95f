"""Measures how many benchmark workers one orchestrator keeps busy: trials a second with 1, 8 and 64 of them.

    python -m benchmarks.services.worker_scaling [--workers 1 8 64] [--job-seconds 0.5] [--search random] [--seconds 20]
                                          [--least 0.9]

Every worker is a gRPC server of its own on a loopback port that answers a measurement after half a second, as a GPU
would; sixteen share a process, so that two processors are enough for 64. Each of the four agents has two replicas,
which answer at once (`fake_service`). Strategy, pipeline, gate, gRPC and archive (SQLite, every trial durable) are the
real ones. `random` always has something new to try; `beam` holds back while it knows little, which costs it some five
jobs' time at the beginning of a search. A rate is the trials of a run over the seconds of its search, from the first
proposal to the last answer. Ends with code 1 when the largest number reaches less than `least` of linear.
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

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.search_run import SearchRun
from orchestrator.serving import fake_service
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.dialing import agents_at
from orchestrator.serving.story import Story
from warpsmith import plugins
from warpsmith.v1 import run_pb2, task_pb2

SERVERS_A_PROCESS, AGENT_REPLICAS = 16, 2
OPERATIONS = 48
"""Depth of the fake space: more than a search of these lengths comes to the end of."""


def started(role: str, count: int, job_seconds: float, stack: contextlib.ExitStack) -> list[subprocess.Popen[str]]:
    """New processes with so many servers of a role in all, which end with `stack`; each prints its ports."""
    environment = {
        **os.environ,
        "WARPSMITH_PORT": "0",
        "WARPSMITH_LOG": "WARNING",
        "WARPSMITH_PARENT_PID": str(os.getpid()),
        fake_service.SECONDS: str(job_seconds),
        fake_service.SETTINGS: str(OPERATIONS),
    }
    processes = []
    for first in range(0, count, SERVERS_A_PROCESS):
        servers = min(SERVERS_A_PROCESS, count - first)
        command = [sys.executable, "-m", "orchestrator.serving.fake_service", role, str(servers)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        processes.append(process)
    return processes


def addresses(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Where the servers of these processes listen, once they do."""
    lines = [process.stdout.readline() if process.stdout else "" for process in processes]
    if not all(lines):
        raise SystemExit("a worker does not start")
    return [f"127.0.0.1:{port}" for line in lines for port in line.split()]


def processor_seconds(processes: list[subprocess.Popen[str]]) -> float:
    """What these processes have used of a processor so far."""
    ticks = 0
    for process in processes:
        after_name = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])  # in user mode, in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


def searched(
    workers: int, seconds: float, job_seconds: float, strategy: str, directory: Path
) -> tuple[float, float, float]:
    """One search over so many workers: trials a second, and processor seconds a trial of orchestrator and others."""
    trials = max(20, int(seconds * workers / job_seconds))
    agents = [role for role in fake_service.ADD if role != "benchmark"]
    with contextlib.ExitStack() as stack:
        processes = {role: started(role, AGENT_REPLICAS, 0.0, stack) for role in agents}
        found = {role: "ipv4:" + ",".join(addresses(each)) for role, each in processes.items()}
        processes["benchmark"] = started("benchmark", workers, job_seconds, stack)
        found["benchmark"] = ",".join(addresses(processes["benchmark"]))
        dialled = agents_at(lambda role: found[role])
        archive = Archive.in_directory(directory)
        stack.callback(archive.close)
        budget = run_pb2.Budget(wall_seconds=300, trial_count=trials)
        run = run_pb2.Run(id=str(workers), task=testing.task(target=task_pb2.TARGET_CUDA), budget=budget)
        archive.put_run(run)
        search = plugins.load("search", strategy)
        others = [process for each in processes.values() for process in each]
        begin, begin_others = time.process_time(), processor_seconds(others)
        ended = SearchRun(run, dialled, DeviceGate(dialled.benchmarks), search, Story(archive, run)).execute()
        own, theirs = time.process_time() - begin, processor_seconds(others) - begin_others
        if ended.trial_count != trials or ended.pass_count != trials:
            raise SystemExit(f"{ended.pass_count} of {ended.trial_count} trials of {trials} passed: {ended.message}")
    rate = trials / ended.phase_seconds[1]  # preparing, searching, finishing
    return rate, own / trials, theirs / trials


def main() -> int:
    """Prints the table; 1 below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64], help="how many, one search for each")
    parser.add_argument("--job-seconds", type=float, default=0.5, help="what one measurement takes")
    parser.add_argument("--search", default="random", help="strategy")
    parser.add_argument("--seconds", type=float, default=20.0, help="what a search would take, were it linear")
    parser.add_argument("--least", type=float, default=0.9, help="share of linear that the last must reach")
    chosen = parser.parse_args()
    how = f"{chosen.job_seconds} s a measurement, strategy {chosen.search}"
    print(f"{os.cpu_count()} processors, Python {platform.python_version()}, {how}")
    print("Milliseconds of a processor for a trial, of the orchestrator and of all agents and workers together:\n")
    print("| workers | trials/s | of linear | orchestrator | agents and workers |\n|---|---|---|---|---|")
    share = 0.0
    for workers in chosen.workers:
        with tempfile.TemporaryDirectory() as directory:
            rate, own, theirs = searched(workers, chosen.seconds, chosen.job_seconds, chosen.search, Path(directory))
        share = rate * chosen.job_seconds / workers
        print(f"| {workers} | {rate:.1f} | {100 * share:.0f} % | {1000 * own:.1f} | {1000 * theirs:.1f} |", flush=True)
    return 0 if share >= chosen.least else 1


if __name__ == "__main__":
    sys.exit(main())
