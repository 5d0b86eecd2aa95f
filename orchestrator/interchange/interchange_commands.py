"""The commands that meet KernelBench: `judge` over a whole run of somebody's, and `kernelbench`, which writes ours.

The one idea: as in `cli`, a command reads its arguments, asks the services and prints; it decides nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from orchestrator import agents as deadlines
from orchestrator.commands import budgets, client, directory_bench
from orchestrator.commands.options import DEFAULT_RUNS, Runs, Server
from orchestrator.commands.terminal import note, tell, tell_line
from orchestrator.interchange import claims, kernelbench_run, layout, solution_set, tables
from orchestrator.interchange.solution_set import Judging
from orchestrator.tasks import intake
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files
from warpsmith.v1 import benchmark_service_pb2, task_pb2
from warpsmith.v1 import optimization_service_pb2 as messages

EXAMPLE = "Example:\n\n  warpsmith bench KernelBench/KernelBench\n\n  warpsmith kernelbench KernelBench ours"
MOST_RUNS = 10_000
"""Runs that are looked through for those of a checkout's tasks."""
NAMED = 5
"""Files of other names that are told by name, and devices of claims."""

Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="LEVEL[/TASK]", help="Of a run: only this level, 1, or task, 1/23; may be repeated."
    ),
]
Samples = Annotated[
    int, typer.Option("--samples", min=0, help="Of a run: only the first so many samples of a task; 0 for all.")
]
ClaimedRight = Annotated[
    bool, typer.Option("--claimed-right", help="Of a run: only solutions that it claims to be right.")
]
Baseline = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        help="Of a run: KernelBench's times of the references, such as results/timing/GPU/baseline_time_torch.json, "
        "by which its claims of speed are read.",
    ),
]


@dataclass(frozen=True)
class Wanted:
    """What is asked of a run folder."""

    only: list[str]
    samples: int
    claimed_right: bool
    baseline: Path | None
    time_limit: str
    results: Path | None
    target: str
    precision: str
    as_json: bool
    csv: Path | None
    openmetrics: Path | None
    runs: Path


def judge_run(folder: Path, checkout: Path, wanted: Wanted, environment: dict[str, str]) -> int:
    """Judges the solutions of a run against the tasks of a checkout, tells the results, and gives the exit code."""
    intake.choice("--precision", wanted.precision, intake.PRECISIONS)
    target = intake.choice("--target", wanted.target, intake.TARGETS)
    seconds = budgets.seconds(wanted.time_limit, "--time-limit") if wanted.time_limit else float("inf")
    tasks, (named, others) = layout.tasks(checkout), layout.solutions(folder)
    claimed = _claims(folder, named, claims.baseline_times(wanted.baseline, tasks) if wanted.baseline else {})
    chosen = layout.chosen(named, wanted.only, wanted.samples)
    if wanted.claimed_right:
        chosen = [each for each in chosen if (claim := claimed.get(each)) and claim.is_right]
        if not chosen:
            raise BadInput(
                f"--claimed-right: leaves none of the chosen solutions; {folder} claims of none that it is right"
            )
    set_ = solution_set.SolutionSet(folder, tasks, chosen)
    file = wanted.results or wanted.runs / f"judge-{private_files.file_name(folder.resolve().name)}.jsonl"
    directory_bench.read_results(file)  # what cannot be read is said before anything starts
    if others:
        more = ", …" if len(others) > NAMED else ""
        note(f"left out, not called {layout.SOLUTION_NAME}: {', '.join(others[:NAMED])}{more} ({len(others)})")
    with client.judging(wanted.runs, environment) as (correctness, benchmark):
        asked = benchmark_service_pb2.DescribeDeviceRequest(target=target)
        device = benchmark.DescribeDevice(asked, timeout=deadlines.DESCRIBE_SECONDS).device
        claimed_on = sorted({claim.hardware for claim in claimed.values()} - {""})
        note(f"judged on {device.name}" + (f"; claims are of {', '.join(claimed_on[:NAMED])}" if claimed_on else ""))
        if any(claim.is_right for claim in claimed.values()) and not any(claim.speedup for claim in claimed.values()):
            note("what is claimed of speed is not known: name KernelBench's times of the references with --baseline")
        lines = _judged(set_, file, seconds, Judging(correctness, benchmark, set_, device.target, wanted.precision))
    found, chosen_count = solution_set.results(set_, lines, claimed), len(set_.solutions)
    if wanted.as_json:
        print(json.dumps({"tasks": found, "chosen": chosen_count, "claims": solution_set.counts(found)}))
    else:
        tell(*map(solution_set.text, found), "", *solution_set.table(found), *solution_set.summary(found, chosen_count))
    tables.write(found, wanted.csv, wanted.openmetrics)
    return solution_set.exit_code(found)


def _claims(
    folder: Path, solutions: Sequence[layout.Solution], baselines: Mapping[layout.TaskKey, float]
) -> dict[layout.Solution, claims.Claim]:
    """What the run claims. Claims that cannot be read are told, and keep nothing from being judged."""
    try:
        return claims.read(folder, solutions, baselines)
    except BadInput as error:
        note(f"{error}")
        return {}


def _judged(set_: solution_set.SolutionSet, file: Path, seconds: float, judging: Judging) -> list[solution_set.Line]:
    """A line of each solution that was judged, now or before, or that only a GPU can run."""
    end = time.monotonic() + seconds
    on_gpu = set_.needs_gpu() if judging.target == task_pb2.TARGET_CPU else set()
    if on_gpu:
        note(f"{len(on_gpu)} of {len(set_.solutions)} solutions need a GPU, and are not judged on a processor")
    lines = directory_bench.bench(
        [entry for entry in set_.entries() if entry.name not in on_gpu],
        file,
        judging.line,
        options={"target": judging.target_word, "precision": judging.precision},
        seconds_left=lambda: end - time.monotonic(),
        note=note,
        stop=lambda: note("stopping after this solution (Ctrl-C again drops it)"),
        check=judging.check,
    )
    return lines + list(map(solution_set.not_run, sorted(on_gpu)))


def kernelbench_command(
    checkout: Annotated[Path, typer.Argument(metavar="CHECKOUT", help="Of KernelBench; its tasks were optimised.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A folder for runs/ and results/timing/.")],
    name: Annotated[str, typer.Option("--name", help="Of the run: runs/NAME_level1.")] = "warpsmith",
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Writes the newest runs of a checkout's tasks as a run of KernelBench, which its own scripts read."""
    private_files.require_name("--name", name)
    tasks = layout.tasks(checkout)
    with client.reading(server, runs) as orchestrator:
        kept = client.latest(orchestrator, MOST_RUNS)
        machine, of_tasks = kernelbench_run.latest(kept, tasks)

        def export(run_id: str, flavour: str) -> str:
            request = messages.ExportBestRequest(run_id=run_id, flavour=flavour)
            return orchestrator.ExportBest(request, timeout=60.0).text

        made = kernelbench_run.written(of_tasks, machine, tasks, name, export)
    kernelbench_run.write(output, made)
    for why in made.left_out:
        note(f"left out: {why}")
    if not machine.is_gpu:
        note(f"times are of a processor, {machine.hardware}: they compare with none of a GPU")
    tell(*(str(output / file) for file in made.files))
    solved = sum(file.name != claims.RESULTS_NAME and file.parts[0] == "runs" for file in made.files)
    tell_line(f"{solved} of {len(of_tasks)} tasks have a faster kernel")
    raise typer.Exit(0 if solved else 1)
