"""compute-sanitizer over a program's kernels: out-of-bounds accesses, races, unwritten memory, wrong barriers.

The one idea: the kernels run once, in a jail and a process of their own, on plausible values and without the module,
under each of the four tools at once; what a tool finds is a fault of the program. Where the toolkit is not installed,
or does not work in the jail, that is said and nothing else changes. It imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from warpsmith import jail
from warpsmith.jail import Policy, Rung
from warpsmith.v1 import artifact_pb2, benchmark_service_pb2, candidate_pb2, verdict_pb2

TOOLS: Final = {
    "memcheck": verdict_pb2.FAILURE_KIND_WRONG_OUT_OF_BOUNDS,
    "racecheck": verdict_pb2.FAILURE_KIND_WRONG_RACE,
    "initcheck": verdict_pb2.FAILURE_KIND_WRONG_UNINITIALIZED,
    "synccheck": verdict_pb2.FAILURE_KIND_WRONG_RACE,
}
"""Tool → the kind of failure that it finds."""
DEADLINE_SECONDS = 120.0
_FOUND, _RAN = 77, "the kernels ran"
_LINE = re.compile(r"=+ +(.+)")
_TALK = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Saved host backtrace", "LEAK SUMMARY")


@dataclass(frozen=True)
class Report:
    """What one tool said."""

    tool: str
    finding: str = ""
    """One sentence; empty for nothing found."""
    skipped: str = ""
    """Why it says nothing; empty where it ran."""


def installed() -> Path | None:
    """The sanitizer of the CUDA toolkit; None where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")
    return Path(found) if found else None


def sanitize(
    program: candidate_pb2.Program, artifact: artifact_pb2.Artifact, rung: Rung, tools: Sequence[str] = tuple(TOOLS)
) -> list[Report]:
    """Runs the program's kernels under each tool."""
    sanitizer = installed()
    if sanitizer is None:
        return [Report(tool, skipped="compute-sanitizer is not installed") for tool in tools]
    with tempfile.TemporaryDirectory(prefix="warpsmith-sanitizer-") as place, ThreadPoolExecutor(len(tools)) as pool:
        Path(place, "program").write_bytes(program.SerializeToString())
        Path(place, "artifact").write_bytes(artifact.SerializeToString())
        return list(pool.map(lambda tool: _run(sanitizer, tool, Path(place), rung), tools))


def fault(reports: Sequence[Report]) -> benchmark_service_pb2.ExecutionFault | None:
    """The first finding as a fault of the program."""
    for report in reports:
        if report.finding:
            detail = f"compute-sanitizer {report.tool}: {report.finding}"
            return benchmark_service_pb2.ExecutionFault(kind=TOOLS[report.tool], detail=detail)
    return None


def _run(sanitizer: Path, tool: str, directory: Path, rung: Rung) -> Report:
    # bin/compute-sanitizer is a script that calls the program in a folder beside bin.
    real = sanitizer.resolve()
    roots = [real.parent, *(parent / "compute-sanitizer" for parent in list(real.parents)[:2])]
    places = [Path(root).resolve() for root in sys.path if root]
    packages = [place / name for place in places for name in ("gpu_bench", "warpsmith")]
    policy = Policy(
        readable=tuple(path for path in (directory, *roots, *packages) if path.is_dir()),
        listable=tuple(place for place in places if place.is_dir()),
        gpu=True,
        memory_bytes=None,  # its shadow memory is larger than any bound that would mean something
    )
    command = [str(sanitizer), "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "3"]
    environment = {
        "PYTHONPATH": os.pathsep.join([*map(str, places), *jail.package_paths()]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    ran = jail.run(
        [*command, sys.executable, "-s", "-P", "-m", "gpu_bench.sanitized_run", str(directory)],
        policy,
        rung,
        deadline_s=DEADLINE_SECONDS,
        env=environment,
    )
    said = (ran.stdout + ran.stderr).decode(errors="replace")
    lines = [match.group(1).strip() for match in map(_LINE.match, said.splitlines()) if match]
    findings = [line for line in lines if not line.startswith(_TALK)]
    if ran.exit.code == _FOUND and findings:
        return Report(tool, finding="; ".join(findings[:3])[:300])
    if ran.timed_out:
        return Report(tool, skipped=f"no end within {DEADLINE_SECONDS:.0f} s")
    if _RAN not in said:
        return Report(tool, skipped=f"it does not run here: {said.strip()[-200:]}")
    return Report(tool)
