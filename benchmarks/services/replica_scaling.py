"""Shows real services in several replicas under one orchestrator, on a processor: trials a second with one and more.

    python -m benchmarks.services.replica_scaling [--replicas 1 2] [--trials 12] [--database postgresql://…]

Each replica is a process of `gpu_bench` with one thread, and one of each agent, on loopback ports of their own; agents
are balanced call by call, benchmark services get one measurement each. Every candidate is compiled, judged and timed.
On a machine with fewer processors than processes the rate says what the processors allow, not what the design does;
that is for `worker_scaling.py`. Timings disturb one another here, so speedups are not printed.
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

from orchestrator.archive import Archive
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.dialing import agents_at
from orchestrator.serving.local import MODULES
from orchestrator.serving.story import Story
from orchestrator.tasks import intake
from orchestrator.walks import Effort
from warpsmith import plugins
from warpsmith.v1 import run_pb2, task_pb2

MODULE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x * 1.5 - 0.25) + 1.0


def get_inputs():
    return [torch.randn(128, 1024)]


def get_init_inputs():
    return []
"""
START_SECONDS = 120.0


def started(role: str, count: int, directory: Path, stack: contextlib.ExitStack, **more: str) -> list[str]:
    """Addresses of so many processes of a role, which end with `stack`."""
    files = [directory / f"{role}-{number}.port" for number in range(count)]
    for file in files:
        environment = {
            **os.environ,
            "WARPSMITH_PORT": "0",
            "WARPSMITH_PORT_FILE": str(file),
            "WARPSMITH_LOG": "WARNING",
            "WARPSMITH_PARENT_PID": str(os.getpid()),
            "OMP_NUM_THREADS": "1",
            **more,
        }
        process = subprocess.Popen([sys.executable, "-m", MODULES[role]], env=environment)
        stack.callback(process.wait)
        stack.callback(process.terminate)
    deadline = time.monotonic() + START_SECONDS
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            raise SystemExit(f"{role} does not start")
        time.sleep(0.1)
    return [f"127.0.0.1:{file.read_text().split()[0]}" for file in files]


def searched(replicas: int, trials: int, task: task_pb2.Task, archive: Archive, directory: Path) -> run_pb2.Run:
    """One run with so many replicas of everything but the orchestrator."""
    with contextlib.ExitStack() as stack:
        benchmarks = started("benchmark", replicas, directory, stack)
        found = {"benchmark": ",".join(benchmarks)}
        for role in ("reasoning", "synthesis", "compile", "correctness"):
            balanced = "ipv4:" + ",".join(benchmarks)
            addresses = started(role, replicas, directory, stack, WARPSMITH_BENCHMARK_ADDRESS=balanced)
            found[role] = "ipv4:" + ",".join(addresses)
        agents = agents_at(lambda role: found[role])
        budget = run_pb2.Budget(wall_seconds=600, trial_count=trials)
        run = run_pb2.Run(id=f"replicas-{replicas}-{os.getpid()}", task=task, budget=budget)
        archive.put_run(run)
        effort = Effort(parallel_trials=2 * replicas, refill_at=replicas, proposal_count=4 * replicas)
        search = plugins.load("search", "beam")
        return SearchRun(
            run, agents, DeviceGate(agents.benchmarks), search, Story(archive, run), effort=effort
        ).execute()


def main() -> int:
    """Prints the table; 1 when a run fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="of everything but the orchestrator")
    parser.add_argument("--trials", type=int, default=12, help="of each run")
    parser.add_argument("--database", default="", help="URL of the archive; SQLite without it")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        module = Path(name, "gelu.py")
        module.write_text(MODULE)
        task = intake.inspect(intake.read(intake.Request(str(module), target="cpu")))
    place = "PostgreSQL" if chosen.database.startswith("postgresql") else "SQLite"
    print(f"{os.cpu_count()} processors, Python {platform.python_version()}, archive in {place}\n")
    print("| replicas | trials | passed | trials/s |\n|---|---|---|---|")
    for replicas in chosen.replicas:
        with tempfile.TemporaryDirectory() as name:
            archive = Archive(chosen.database) if chosen.database else Archive.in_directory(Path(name))
            ended = searched(replicas, chosen.trials, task, archive, Path(name))
            archive.close()
        if ended.state in (run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_BAD_INPUT):
            print(ended.message, file=sys.stderr)
            return 1
        rate = ended.trial_count / ended.phase_seconds[1]
        print(f"| {replicas} | {ended.trial_count} | {ended.pass_count} | {rate:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
