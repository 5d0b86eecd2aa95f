"""Measures what the services themselves cost: one call on loopback, one candidate's synthesis, one compilation.

    python -m benchmarks.services.service_numbers [--target cuda]

starts the services, calls one that only has to look its answer up, then compiles distinct programs of the softmax
example, none of which the cache holds, and prints the medians. Compiling for cuda needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.agents import Agents
from orchestrator.serving.dialing import agents_of
from orchestrator.serving.local import MODULES, LocalServices
from orchestrator.tasks import intake
from warpsmith.settings import Settings
from warpsmith.v1 import (
    analysis_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    compile_service_pb2,
    hypothesis_pb2,
    synthesis_service_pb2,
    task_pb2,
)

CALLS, PROGRAMS = 1000, 40
EXAMPLE = Path(__file__).parents[2] / "examples" / "softmax.py"


def call_seconds(agents: Agents) -> list[float]:
    """Round trips of a call whose answer is remembered."""
    request = benchmark_service_pb2.DescribeDeviceRequest(target=task_pb2.TARGET_CPU)
    agents.benchmarks[0].DescribeDevice(request, timeout=60.0)
    samples = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        agents.benchmarks[0].DescribeDevice(request, timeout=60.0)
        samples.append(time.perf_counter() - begin)
    return samples


def candidate_seconds(agents: Agents, task: task_pb2.Task) -> tuple[list[float], list[float]]:
    """Syntheses of candidates, and compilations of those with a new program, as the caller sees them.

    The first of both, which starts a worker or a compiler, is left out.
    """
    samples: list[float] = []
    synthesized: list[float] = []
    for program in itertools.islice(programs(agents, task, synthesized), PROGRAMS + 1):
        begin = time.perf_counter()
        request = compile_service_pb2.CompileCandidateRequest(program=program)
        answer = agents.compilation.CompileCandidate(request, timeout=60.0)
        samples.append(time.perf_counter() - begin)
        if answer.cached or not answer.HasField("artifact"):
            raise SystemExit(f"not a fresh compilation: {answer.rejection.diagnostics or 'it was in the cache'}")
    return synthesized[1:], samples[1:]


def programs(agents: Agents, task: task_pb2.Task, seconds: list[float]) -> Iterator[candidate_pb2.Program]:
    """Distinct programs of authored kernels: each legal way to author, then each legal setting of it.

    `seconds` gets what each synthesis took.
    """
    seen: set[str] = set()
    plans: list[list[analysis_pb2.Move]] = [[]]
    for moves in plans:
        request = synthesis_service_pb2.AnalyzePlanRequest(task=task, moves=moves)
        legal = agents.synthesis.AnalyzePlan(request, timeout=120.0).analysis.legal_moves
        for option in legal:
            if option.move.kind not in (analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_SET):
                continue
            hypothesis = hypothesis_pb2.Hypothesis(moves=[*moves, option.move], new_move_count=1, source="numbers")
            wanted = synthesis_service_pb2.SynthesizeCandidateRequest(task=task, hypothesis=hypothesis)
            begin = time.perf_counter()
            program = agents.synthesis.SynthesizeCandidate(wanted, timeout=120.0).candidate.program
            seconds.append(time.perf_counter() - begin)
            if program.digest not in seen:
                seen.add(program.digest)
                plans.append(list(hypothesis.moves))
                yield program


def row(what: str, seconds: list[float]) -> dict[str, object]:
    """A line of the table, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "what": what,
        "count": len(ordered),
        "p50_ms": round(1e3 * statistics.median(ordered), 2),
        "p90_ms": round(1e3 * ordered[len(ordered) * 9 // 10], 2),
    }


def main() -> int:
    """Prints one line of JSON for each number, and the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cuda", help="what to compile for")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["WARPSMITH_CACHE_DIR"] = directory  # an empty cache of compiled programs
        names = [name for name in MODULES if name != "orchestrator"]
        with LocalServices(Path(directory), modules={name: MODULES[name] for name in names}) as services:
            agents = agents_of(Settings(addresses={name: services.address(name) for name in names}))
            task = intake.inspect(intake.read(intake.Request(str(EXAMPLE), target=options.target)))
            print(json.dumps(row("one call on loopback", call_seconds(agents))), flush=True)
            synthesized, compiled = candidate_seconds(agents, task)
            print(json.dumps(row(f"synthesizing for {options.target}", synthesized)), flush=True)
            print(json.dumps(row(f"compiling for {options.target}", compiled)), flush=True)
    print(
        json.dumps({"python": platform.python_version(), "processors": os.cpu_count(), "machine": platform.machine()})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
