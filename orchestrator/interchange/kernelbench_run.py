"""Writes what our runs found as a run of KernelBench: solutions, its eval_results.json, and times of the references.

The one idea: KernelBench's scripts read what we found as they read their own, so each file has its place, its form and
its units; what that form has no word for (the processor, our judge) stands in the metadata. A task without a faster
kernel has no solution here, and KernelBench counts it as one that was not solved.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warpsmith
from orchestrator.commands import report
from orchestrator.interchange import layout
from orchestrator.interchange.claims import RESULTS_NAME
from orchestrator.interchange.layout import Solution, TaskKey
from warpsmith.contract import words
from warpsmith.errors import BadInput, NotFound
from warpsmith.sandbox import private_files
from warpsmith.v1 import run_pb2, task_pb2, timing_pb2, verdict_pb2

BASELINES: Mapping[timing_pb2.ArmKind.ValueType, str] = {
    timing_pb2.ARM_KIND_EAGER: "baseline_time_torch",
    timing_pb2.ARM_KIND_COMPILE: "baseline_time_torch_compile_inductor_default",
    timing_pb2.ARM_KIND_COMPILE_REDUCE_OVERHEAD: "baseline_time_torch_compile_inductor_reduce-overhead",
    timing_pb2.ARM_KIND_COMPILE_MAX_AUTOTUNE: "baseline_time_torch_compile_inductor_max-autotune",
}
"""KernelBench's names for files of baselines, by what is timed in them."""
Export = Callable[[str, str], str]
"""(run's identifier, flavour) → text of the exported file; raises BadInput where there is none."""


@dataclass(frozen=True)
class Machine:
    """What the runs that are written have in common."""

    name: str
    target: task_pb2.Target.ValueType
    precision: task_pb2.Precision.ValueType

    @property
    def hardware(self) -> str:
        """KernelBench's word for it; a processor is called one, for all of KernelBench's own times are of GPUs."""
        return self.name if self.is_gpu else f"{self.name} (CPU)"

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.target == task_pb2.TARGET_CUDA

    @property
    def flavour(self) -> str:
        """Of the exports: a processor's kernel has none that KernelBench's harness runs."""
        return "kernelbench" if self.is_gpu else "module"


@dataclass(frozen=True)
class Written:
    """What was made of the runs."""

    files: Mapping[Path, str]
    """Path below the output → text."""
    machine: Machine
    levels: Sequence[int]
    left_out: Sequence[str]
    """Why winners have no solution here."""


def latest(runs: Iterable[run_pb2.Run], tasks: Mapping[TaskKey, Path]) -> tuple[Machine, Mapping[TaskKey, run_pb2.Run]]:
    """Of each task the newest run that timed something, among those of the newest one's machine and precision.

    `runs`: newest first. Runs of the prepared track are none of KernelBench's.

    Raises:
        NotFound: there is no run of a task of the checkout, by the text of its file.
    """
    keys = {(path.name, layout.content(path)): key for key, path in tasks.items()}
    found: dict[TaskKey, run_pb2.Run] = {}
    machine = None
    for run in runs:
        entry = next((each.content for each in run.task.sources if each.path == run.task.entry_path), b"")
        key = keys.get((run.task.entry_path, entry))
        if key is None or run.task.prepared or not report.arms_of(run):
            continue
        own = Machine(run.device.name, run.task.target, run.task.precision)
        machine = machine or own
        if own == machine:
            found.setdefault(key, run)
    if machine is None:
        raise NotFound("no run that is kept is of a task of this checkout; make some with `warpsmith bench`")
    return machine, dict(sorted(found.items()))


def written(
    runs: Mapping[TaskKey, run_pb2.Run], machine: Machine, tasks: Mapping[TaskKey, Path], name: str, export: Export
) -> Written:
    """The files of a run for each level, `runs/NAME_levelL`, and of the baselines, as a checkout has them."""
    files: dict[Path, str] = {}
    left_out = []
    levels = sorted({level for level, _ in runs})
    for level in levels:
        folder, results = Path("runs") / f"{name}_level{level}", {}
        for key, run in runs.items():
            if key[0] != level or not run.best.timing.faster:
                continue
            try:
                text = export(run.id, machine.flavour)
            except BadInput as error:
                left_out.append(f"level {key[0]}, task {key[1]}: {error}")
                continue
            files[folder / Solution(*key, 0).file_name] = text
            results[str(key[1])] = [_result(run, machine)]
        files[folder / RESULTS_NAME] = _json(results)
    place = Path("results") / "timing" / private_files.file_name(machine.hardware).strip("_")
    for kind, file in BASELINES.items():
        if times := _baseline(runs, machine, tasks, kind):
            files[place / f"{file}.json"] = _json(times)
    return Written(files, machine, levels, left_out)


def write(output: Path, made: Written) -> None:
    """Writes the files below a folder, none of which may be there.

    Raises:
        BadInput: one is there, or cannot be written.
    """
    for name in made.files:
        if os.path.lexists(output / name):
            raise BadInput(f"{output / name}: is there already; name another folder, or another run with --name")
    for name, text in made.files.items():
        try:
            private_files.make_folder((output / name).parent)
            private_files.replace(output / name, text, mode=0o666)
        except OSError as error:
            raise BadInput(f"{output / name}: cannot be written ({error.strerror})") from error


def _result(run: run_pb2.Run, machine: Machine) -> dict[str, Any]:
    """KernelBench's record of a solution, which is called right where our judge and KernelBench's tolerance do."""
    verdict, timing = run.best.verdict, run.best.timing
    ours = next(arm for arm in timing.arms if arm.kind == report.CANDIDATE)
    stats = _stats(ours, machine)
    is_right = verdict.state == verdict_pb2.VERDICT_STATE_PASS and verdict.kernelbench_pass
    return {
        "sample_id": 0,
        "compiled": True,
        "correctness": is_right,
        "metadata": {
            "hardware": stats["hardware"],
            "device": stats["device"],
            "judged_by": f"warpsmith {warpsmith.__version__}",
            "run": run.id,
            "precision": words.precision(run.task.precision),
            "flavour": machine.flavour,
            "kernelbench_pass": verdict.kernelbench_pass,
            "fastest_baseline": words.arm(timing.fastest_arm),
            "speedup_fastest": report.speedup_json(timing.speedup_fastest),
            "labels": report.labels_of(run),
        },
        "runtime": stats["mean"],
        "runtime_stats": stats,
    }


def _baseline(
    runs: Mapping[TaskKey, run_pb2.Run],
    machine: Machine,
    tasks: Mapping[TaskKey, Path],
    kind: timing_pb2.ArmKind.ValueType,
) -> dict[str, dict[str, Any]]:
    """Times of references by level and file; timed beside the winner where there is one."""
    found: dict[str, dict[str, Any]] = {}
    for key, run in runs.items():
        arm = report.arms_of(run).get(kind)
        if arm is not None and not arm.failure:
            found.setdefault(f"level{key[0]}", {})[tasks[key].name] = _stats(arm, machine)
    return found


def _stats(arm: timing_pb2.Arm, machine: Machine) -> dict[str, Any]:
    """KernelBench's account of times, in ms. Where only the median was kept it stands for all, of no trials."""
    samples_ms = [sample / 1e6 for sample in arm.samples_ns] or [arm.median_ns / 1e6]
    return {
        "mean": _rounded(statistics.fmean(samples_ms)),
        "std": _rounded(statistics.pstdev(samples_ms)),
        "min": _rounded(min(samples_ms)),
        "max": _rounded(max(samples_ms)),
        "num_trials": len(arm.samples_ns),
        "hardware": machine.hardware,
        "device": "cuda:0" if machine.is_gpu else "cpu",
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=4) + "\n"
